"""Tiny models of the families of experts that `experts.py` lacks, in the FP8 forms in which these
are published.

transformers makes each model and stores it under the hub's names; the matrices that a form
quantizes are rounded here, one by one, from the formats' descriptions. Nothing comes from Freight.
`Made.logprobs` runs transformers' model in float32 with the matrices that bytes and scales stand
for; inputs are rounded before each product as the form says.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.formats.forms import BLOCKS, FP8, INVERSE, SCALES, arguments, groups, kv, number
from tests.formats.mixture_models import EXPERTS, HIDDEN, MODELS, VOCAB
from tests.formats.writers import (
    BF16,
    F32,
    Rounded,
    Tensors,
    decoded,
    per_block,
    per_row,
    per_tensor,
    renamed,
    saturated,
    spread,
)
from tests.parity.random_models import save_random
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

# short ones: an input that is rounded to another code changes the rows behind it in its prompt
# alone
PROMPTS = torch.randint(3, VOCAB, (6, 5), generator=torch.Generator().manual_seed(1)).tolist()
# modules of Linear that transformers names otherwise than it stores them
_SHARED = {"hy_v3": "shared_mlp", "laguna": "shared_expert"}
# what no form quantizes
ALWAYS_PLAIN = r"lm_head|embed|norm|visual|router|moe\.gate\.|mlp\.gate\.|bias$|scal|moe_statics"


def input_scale(module: str) -> float:
    """Another one for each module, but the same under both names of shared experts."""
    name = re.sub(
        r"^.*layers\.|shared_\w+", lambda match: "s" if "shared" in match[0] else "", module
    )
    return 0.02 + 0.0005 * (sum(map(ord, name)) % 37)


@dataclass(frozen=True)
class MixtureForm:
    """`inputs`: how inputs of products are rounded: 'plain', 'static', 'rows' or 'groups' of 128.

    plain     modules, as an expression, that the form leaves in 16 bits beside `ALWAYS_PLAIN`
    stacked   whether the experts of a layer stay one 3-D tensor where the hub has one; else each is
              stored by itself
    behind    whether a layer that predicts further tokens lies behind the decoder's own, quantized
              as they are
    """

    families: tuple[str, ...]
    said: dict[str, Any]
    linear: Callable[[str, Tensor], Rounded]
    inputs: str
    plain: str = "nothing"
    kv: Callable[[int], Tensors] = lambda layer: {}
    stacked: bool = False
    behind: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # keys of config.json


def _static(
    module: str, w: Tensor, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()
) -> Rounded:
    return renamed(
        per_tensor(w, dtype, shape), {}, {"input_scale": number(input_scale(module), dtype, shape)}
    )


def _ct_rows(*ignored: str) -> dict[str, Any]:
    return groups(arguments("channel"), arguments("token", True), ignore=["lm_head", *ignored],
                  kv_cache_scheme=arguments("tensor"))  # fmt: skip


def _ct_blocks(*ignored: str) -> dict[str, Any]:
    return groups(
        arguments("block", block_structure=[128, 128]),
        arguments("group", True, group_size=128),
        ignore=["lm_head", *ignored],
        kv_cache_scheme=arguments("tensor"),
    )


def by_row(module: str, w: Tensor) -> Rounded:
    return per_row(w, BF16)


def _blocks(module: str, w: Tensor) -> Rounded:
    return per_block(w, dtype=BF16)


def in_own_blocks(module: str, w: Tensor) -> Rounded:
    return renamed(per_block(w), INVERSE)


def _hy3_scales(layer: int) -> Tensors:
    names = ("self_attn.q.scale", "self_attn.k_cache.scale", "self_attn.v_cache.scale")
    return {name: number(0.01 * (layer + i)) for i, name in enumerate(names, 1)}


_CT_SCALES = kv(*SCALES, BF16, (1,))
_ROUTERS = [f"model.layers.{layer}.mlp.router.gate" for layer in range(3)]
FORMS = {
    "ct channel token, as GLM-4.5-FP8": MixtureForm(
        ("glm4_moe",),
        _ct_rows("model.layers.1.mlp.gate", "model.layers.2.mlp.gate", "re:.*layers.0.self_attn", "re:.*eh_proj"),
        by_row,
        "rows",
        plain=r"layers\.0\.self_attn",
        kv=_CT_SCALES,
        behind=True,
        more={"num_nextn_predict_layers": 1},
    ),
    "ct channel token, vision ignored": MixtureForm(
        ("glm4v_moe",), _ct_rows("re:.*visual.*", "re:.*mlp.gate$"), by_row, "rows", kv=_CT_SCALES
    ),
    "minimax's own blocks": MixtureForm(
        ("minimax_m2", "mimo_v2_flash"),
        {**BLOCKS, "fmt": "float8_e4m3fn", "ignored_layers": None,
         "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        in_own_blocks,
        "groups",
        kv=kv(*SCALES),
    ),
    "deepseek's own blocks": MixtureForm(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
        {**BLOCKS, "fmt": "e4m3"},
        in_own_blocks,
        "groups",
        kv=kv(SCALES[0]),
        behind=True,
        more={"num_nextn_predict_layers": 1},
    ),
    "ct channel token, latents": MixtureForm(
        ("glm4_moe_lite",), _ct_rows("re:.*mlp.gate$", "re:.*kv_b_proj"), by_row, "rows", plain="kv_b_proj",
        kv=kv(SCALES[0], "", BF16, (1,)),
    ),
    "tencent's static tensors": MixtureForm(
        ("hy_v3",),
        {**FP8, "activation_scheme": "static", "kv_cache_scheme": "static",
         "ignored_layers": ["lm_head", "model.embed_tokens", *_ROUTERS]},
        _static,
        "static",
        kv=_hy3_scales,
        behind=True,
        more={"num_nextn_predict_layers": 1},
    ),
    "ct tensor static": MixtureForm(
        ("ernie4_5_moe", "mellum"),
        groups(arguments("tensor"), arguments("tensor"), ignore=["lm_head", "re:.*mlp.gate$"],
               kv_cache_scheme=arguments("tensor")),
        lambda m, w: _static(m, w, BF16, (1,)),
        "static",
        kv=_CT_SCALES,
    ),
    "ct channel token, experts stacked": MixtureForm(
        ("granitemoe",), _ct_rows("re:.*block_sparse_moe.router"), by_row, "rows", kv=_CT_SCALES, stacked=True
    ),
    "ct channel token, experts by themselves": MixtureForm(
        ("granitemoe", "gemma4_text", "ernie4_5_moe", "hunyuan_v1_moe"),
        _ct_rows("re:.*router.*", "re:.*mlp.gate$", "re:.*mlp.gate.wg$"),
        by_row,
        "rows",
        kv=_CT_SCALES,
    ),
    "ct block with cache": MixtureForm(
        ("laguna", "afmoe", "mellum"),
        _ct_blocks("re:.*mlp.gate$", "re:.*router.*", "re:.*g_proj"),
        _blocks,
        "groups",
        plain="g_proj",
        kv=_CT_SCALES,
    ),
    "blocks of stacked experts": MixtureForm(
        ("qwen3_vl_moe",),
        {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.visual", "mlp.gate"]},
        in_own_blocks,
        "groups",
        kv=kv(*SCALES),
        stacked=True,
    ),
}  # fmt: skip
CASES = [(name, family) for name, form in FORMS.items() for family in form.families]


@dataclass
class Made:
    form: MixtureForm
    family: str
    config: dict[str, Any]
    tensors: Tensors
    exact: Tensors  # of the whole model, under the names of transformers' file
    quantized: frozenset[str]  # modules of one matrix

    def save(self, folder: Path) -> str:
        return _save(folder, self.tensors, self.config)

    def logprobs(self, folder: Path) -> Tensor:
        """[prompts, tokens - 1], of each token behind those before it."""
        saved = _save(folder, self.exact, MODELS[self.family].to_dict())
        auto = (
            AutoModelForImageTextToText if "vision_config" in self.config else AutoModelForCausalLM
        )
        model: Any = auto.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
        for name, module in model.named_modules():
            stored = name.replace("shared_experts", _SHARED.get(self.family, "shared_experts"))
            if (
                stored in self.quantized and "kv_b" not in stored
            ):  # absorbed into the products beside it
                module.register_forward_pre_hook(
                    lambda _, args, m=stored: (self._rounded(args[0], m), *args[1:])
                )
            elif name.endswith(".experts"):
                module.forward = functools.partial(
                    self._experts, module, self._inputs_of_experts(name)
                )
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor(PROMPTS)).logits, -1)
        return rows[:, :-1].gather(-1, torch.tensor(PROMPTS)[:, 1:, None])[..., 0]

    def _inputs_of_experts(self, name: str) -> tuple[list[str], list[str]]:
        """Modules of gate and up of a layer's experts, and those of down."""
        layer = re.search(r"layers\.\d+\.", name)
        assert layer is not None
        own = [m for m in sorted(self.quantized) if layer[0] in m and ".experts." in m]
        downs = [m for m in own if m.endswith(("down_proj", "w2"))]
        return [m for m in own if m not in downs], downs

    def _experts(
        self,
        module: Any,
        names: tuple[list[str], list[str]],
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
    ) -> Tensor:
        out = torch.zeros_like(x)
        for expert, (both, down) in enumerate(
            zip(module.gate_up_proj, module.down_proj, strict=True)
        ):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = (self._rounded(x[rows], *names[0]) @ both.T).chunk(2, -1)
            product = self._rounded(module.act_fn(gate) * up, *names[1]) @ down.T
            out[rows] += weights[rows, slots][:, None] * product
        return out

    def _rounded(self, x: Tensor, *modules: str) -> Tensor:
        """With a static scale the largest of all `modules`: their input is rounded once."""
        kind = self.form.inputs
        if kind == "static":
            scale = torch.stack(
                [self.tensors[f"{m}.input_scale"].float().reshape(()) for m in modules]
            ).amax()
            return saturated(x / scale).float() * scale
        parts = x.unflatten(-1, (-1, 128 if kind == "groups" else x.shape[-1]))
        scale = parts.abs().amax(-1, keepdim=True) / 448
        return (saturated(parts / scale).float() * scale).flatten(-2)

    def one_of_each_kind(self) -> list[str]:
        """Scales of experts, shared experts and v, of weights and inputs, and the cache's.

        Norms of q and k undo theirs, q's own is for engines that quantize it; other matrices are as
        in dense models.
        """
        kinds = {}
        for name in self.tensors:
            ours = re.search(
                r"expert|shared|block_sparse|v_proj|kv_[ab]_proj|[kv]_(cache\.)?scale", name
            )
            if (
                ours
                and re.search(r"scale(_inv)?$", name)
                and not re.search(r"[qk]_proj|router|layers\.2|shared\w*\.[gu]\w+\.in", name)
            ):
                kinds[re.sub(r"\.\d+\.", ".", name)] = name
        return list(kinds.values())


def _save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@functools.cache
def _unrounded(family: str) -> tuple[Tensors, dict[str, Any]]:
    """What transformers stores of the family's tiny model in 16 bits, and its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        save_random(MODELS[family], Path(folder), BF16)
        tensors = {
            name: one.clone() for name, one in load_file(Path(folder) / "model.safetensors").items()
        }
        return tensors, json.loads((Path(folder) / "config.json").read_text())


def make(name: str, family: str) -> Made:
    """The family's tiny model in that form; its tensors may be changed before they are saved."""
    form, (stored_tensors, config) = FORMS[name], _unrounded(family)
    tensors: Tensors = {}
    exact: Tensors = {}
    quantized: set[str] = set()
    for stored, tensor in stored_tensors.items():
        if tensor.ndim < 2 or re.search(f"{ALWAYS_PLAIN}|{form.plain}", stored):
            tensors[stored] = tensor
            exact[stored] = tensor.float()
            continue
        matrices, exact[stored] = _rounded_matrices(form, stored, tensor)
        quantized |= set(matrices)
        if form.stacked and tensor.ndim == 3:
            tensors |= _stacked(stored, matrices, tensor)
        else:
            tensors |= {
                f"{module}.{suffix}": x
                for module, one in matrices.items()
                for suffix, x in one.items()
            }
    for layer in range(2):
        prefix = next(n for n in tensors if f"layers.{layer}." in n).partition(f"layers.{layer}.")[
            0
        ]
        tensors |= {
            f"{prefix}layers.{layer}.{suffix}": one for suffix, one in form.kv(layer).items()
        }
    if form.behind:
        last = {
            n.replace("layers.1.", "layers.2."): t.clone()
            for n, t in tensors.items()
            if "layers.1." in n
        }
        tensors |= last | {
            "model.layers.2.eh_proj.weight": torch.ones(HIDDEN, 2 * HIDDEN, dtype=BF16)
        }
    config = {**config, "quantization_config": form.said, **form.more}
    return Made(form, family, config, tensors, exact, frozenset(quantized))


def _rounded_matrices(
    form: MixtureForm, stored: str, tensor: Tensor
) -> tuple[dict[str, Tensors], Tensor]:
    """What becomes of a matrix, or of gate and up or down of each expert, by module; and the whole,
    dequantized.
    """
    if tensor.ndim == 2:
        module = stored.removesuffix(".weight")
        rounded, _ = form.linear(module, tensor)
        return {module: rounded}, dequantized(rounded)
    first = re.search(r"gate_up|input_linear", stored) is not None
    turned = tensor.shape[1 if first else 2] == HIDDEN and tensor.shape[2 if first else 1] != HIDDEN
    whole = tensor.mT if turned else tensor
    parent = re.sub(
        r"(\.experts)?\.(gate_up_proj|down_proj|(in|out)put_linear\.weight)$", ".experts", stored
    )
    matrices, exact = {}, []
    for expert, matrix in enumerate(whole):
        parts = (
            dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            if first
            else {"down_proj": matrix}
        )
        made = {
            f"{parent}.{expert}.{part}": form.linear(f"{parent}.{expert}.{part}", w)[0]
            for part, w in parts.items()
        }
        matrices |= made
        exact.append(torch.cat([dequantized(one) for one in made.values()]))
    return matrices, torch.stack(exact).mT if turned else torch.stack(exact)


def _stacked(stored: str, matrices: dict[str, Tensors], like: Tensor) -> Tensors:
    """One tensor of each kind, in the order of the hub's: inputs and outputs of scales are
    exchanged as those of weights are."""
    found, module = {}, stored.removesuffix(".weight")
    for suffix in next(iter(matrices.values())):
        beside = (
            f"{module}.{suffix}"
            if module != stored
            else f"{stored}_{suffix.removeprefix('weight_')}"
        )
        whole = torch.cat([one[suffix] for one in matrices.values()]).unflatten(0, (EXPERTS, -1))
        found[stored if suffix == "weight" else beside] = whole
    return (
        found
        if found[stored].shape == like.shape
        else {name: one.mT for name, one in found.items()}
    )


def dequantized(rounded: Tensors) -> Tensor:
    """Bytes times scales in float32; writers.py has the products in the dtype of the scales."""
    codes, scale = (
        rounded["weight"],
        next(t.float() for name, t in rounded.items() if name.startswith("weight_scale")),
    )
    by_block = scale.ndim == 2 and len(scale) != len(codes)
    return decoded(codes) * (spread(scale, (128, 128), tuple(codes.shape)) if by_block else scale)
