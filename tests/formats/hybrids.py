"""Tiny models whose layers keep a state, in the FP8 forms in which their producers publish them.

transformers makes each model and stores it under the hub's names; the matrices that a form
quantizes are rounded here, one by one, from the formats' descriptions. Nothing comes from Freight.
`Hybrid.logprobs` runs transformers' model in float32 with the matrices that bytes and scales stand
for; inputs are rounded before each product as the form says.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.formats.forms import BLOCKS, OPT, algo, arguments, groups, number
from tests.formats.mixtures import by_row, dequantized, in_own_blocks
from tests.formats.writers import (
    BF16,
    F32,
    Rounded,
    Tensors,
    per_tensor,
    renamed,
    saturated,
)
from tests.parity.random_models import save_random
from tests.parity.shapes import GRANITE_H, NEMOTRON, NEMOTRON_MOE, QWEN3_5_VISION
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteMoeHybridConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3NextConfig,
)

# short ones: an input that is rounded to another code changes the rows behind it in its prompt
# alone
PROMPTS = torch.randint(3, 64, (6, 5), generator=torch.Generator().manual_seed(1)).tolist()
LONG = torch.randint(
    3, 64, (2, 19), generator=torch.Generator().manual_seed(2)
).tolist()  # past a tile of states
# blocks of 128 x 128 hold whole heads, as in every published model
QWEN: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
QWEN_MOE = {**QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128}  # fmt: skip
VISION = {**QWEN3_5_VISION, "out_hidden_size": 256}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_5": Qwen3_5Config(text_config=QWEN, vision_config=VISION),
    "qwen3_5_moe": Qwen3_5MoeConfig(text_config=QWEN_MOE, vision_config=VISION),
    "qwen3_next": Qwen3NextConfig(**QWEN_MOE),
    "nemotron_h": NemotronHConfig(**NEMOTRON),
    "nemotron_h_moe": NemotronHConfig(**NEMOTRON_MOE),
    "nemotron_h_latent": NemotronHConfig(**NEMOTRON_MOE, moe_latent_size=24),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **GRANITE_H, num_local_experts=4, num_experts_per_tok=2
    ),
}
# what no producer quantizes
ALWAYS_PLAIN = (
    r"lm_head|embed|norm|visual|router|\.gate\.|shared_expert_gate|conv1d|in_proj_(a|b|ba)\.|"
    r"A_log|dt_bias|\.D$"
)
# what a layer that predicts further tokens is like
BEHIND = {
    "qwen3_5": "model.language_model.layers.1.",
    "qwen3_next": "model.layers.1.",
    "nemotron_h": "backbone.layers.2.",
}


@dataclass(frozen=True)
class HybridForm:
    """`inputs`: how inputs of products are rounded: 'plain', 'static', 'rows' or 'groups' of 128.

    said      `quantization_config`, with names of modules that are left out
    plain     modules, as an expression, that the form leaves in 16 bits beside `ALWAYS_PLAIN`
    kv        names of the KV scales of a layer with attention, behind its mixer's name
    stacked   whether the experts of a layer are one 3-D tensor; None: as transformers stores them
    """

    families: tuple[str, ...]
    said: dict[str, Any] | None
    linear: Callable[[str, Tensor], Rounded]
    inputs: str
    plain: str = "nothing"
    kv: tuple[str, ...] = ()
    stacked: bool = False
    files: dict[str, Any] = field(default_factory=dict)

    def of_weights_alone(self) -> HybridForm:
        """The same with inputs as they are."""

        def linear(module: str, w: Tensor) -> Rounded:
            tensors, exact = self.linear(module, w)
            return {name: one for name, one in tensors.items() if name != "input_scale"}, exact

        if self.said is None or "config_groups" not in self.said:
            said = (self.said or {}) | {"activation_scheme": None}
        else:
            group = self.said["config_groups"]["group_0"] | {"input_activations": None}
            said = self.said | {
                "config_groups": {"group_0": group},
                "format": "naive-quantized",
                "quant_algo": None,
            }
        return replace(self, said=said, linear=linear, inputs="plain")


def input_scale(module: str) -> float:
    """Another one for each module, but for those that share their input."""
    return 0.02 + 0.0005 * (
        sum(map(ord, re.sub(r"(qkv|z|[qkv]_proj|gate_proj|up_proj)$", "", module))) % 37
    )


def _static(
    module: str, w: Tensor, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()
) -> Rounded:
    return renamed(
        per_tensor(w, dtype, shape), {}, {"input_scale": number(input_scale(module), dtype, shape)}
    )


def _own(prefix: str, *names: str) -> dict[str, Any]:
    """Qwen's list: every module of its own name, those of the vision model and of further tokens as
    well.
    """
    inner = [f"{prefix}layers.{layer}.{name}" for layer in range(3) for name in names]
    outer = [
        "lm_head",
        f"{prefix}embed_tokens",
        "model.visual.blocks.0.attn.qkv",
        "mtp.fc",
        "mtp.layers.0.mlp.gate",
    ]
    return {**BLOCKS, "modules_to_not_convert": [*outer, *inner]}


_GATES = (
    "mlp.gate",
    "mlp.shared_expert_gate",
    "input_layernorm",
    "post_attention_layernorm",
    "linear_attn.conv1d",
)
_NET = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
_CACHE = ("k_scale", "v_scale")
_IGNORED = [
    "lm_head",
    "re:.*visual.*",
    "re:.*mlp.gate$",
    "re:.*shared_expert_gate$",
    "re:.*linear_attn.in_proj_[ab]$",
]
_NVIDIA = [
    *(
        "lm_head",
        "backbone.embeddings",
        "backbone.layers.0.mixer.conv1d",
        "backbone.layers.*.mixer.gate",
    ),
    *(
        "backbone.layers.0.mixer.in_proj",
        "backbone.layers.2.mixer.o_proj",
        "mtp.layers.0.mixer.o_proj",
    ),
]
_PER_TENSOR = {"dynamic": False, "num_bits": 8, "type": "float"}
_ROUTERS = ["lm_head", "re:.*block_sparse_moe.router"]


def _ct_rows(*ignored: str, **more: Any) -> dict[str, Any]:
    return groups(arguments("channel"), arguments("token", True), ignore=list(ignored), **more)


def _of_classes(said: dict[str, Any]) -> dict[str, Any]:
    """llm-compressor's own class for the experts of a layer is a target, too."""
    group = said["config_groups"]["group_0"] | {
        "targets": ["Linear", "GraniteMoeHybridParallelExpertsLinear"]
    }
    return said | {"config_groups": {"group_0": group}}


FORMS = {
    "qwen3.5's own blocks": HybridForm(
        ("qwen3_5", "qwen3_5_moe"),
        _own("model.language_model.", *_GATES, *_NET),
        in_own_blocks,
        "groups",
    ),
    "qwen3-next's own blocks": HybridForm(
        ("qwen3_next",), _own("model.", *_GATES, "linear_attn.in_proj_ba"), in_own_blocks, "groups"
    ),
    "qwen3.5's own blocks, experts stacked": HybridForm(
        ("qwen3_5_moe",),
        _own("model.language_model.", *_GATES, *_NET),
        in_own_blocks,
        "groups",
        stacked=True,
    ),
    "ct channel token": HybridForm(
        ("qwen3_5", "qwen3_5_moe"),
        _ct_rows(*_IGNORED, kv_cache_scheme=arguments("tensor")),
        by_row,
        "rows",
        kv=_CACHE,
    ),
    "ct tensor static": HybridForm(
        ("qwen3_5",),
        groups(
            arguments("tensor"),
            arguments("tensor"),
            ignore=_IGNORED,
            kv_cache_scheme=arguments("tensor"),
        ),
        lambda m, w: _static(m, w, BF16, (1,)),
        "static",
        kv=_CACHE,
    ),
    "ct, delta nets ignored": HybridForm(
        ("qwen3_5",), _ct_rows(*_IGNORED, "re:.*linear_attn.*"), by_row, "rows", plain="linear_attn"
    ),
    "ct, z ignored": HybridForm(
        ("qwen3_5",), _ct_rows(*_IGNORED, "re:.*in_proj_z$"), by_row, "rows", plain="in_proj_z"
    ),
    "modelopt": HybridForm(
        ("nemotron_h", "nemotron_h_moe"),
        None,
        _static,
        "static",
        plain=r"layers\.0\.mixer\.in_proj|layers\.2\.mixer\.o_proj",
        kv=("k_proj.k_scale", "v_proj.v_scale"),
        files={
            "hf_quant_config.json": algo("FP8", kv_cache_quant_algo="FP8", exclude_modules=_NVIDIA)
        },
    ),
    "modelopt in config": HybridForm(
        ("nemotron_h", "nemotron_h_latent"),
        {
            "config_groups": {
                "group_0": {
                    "input_activations": _PER_TENSOR,
                    "weights": _PER_TENSOR,
                    "targets": ["Linear"],
                }
            },
            "ignore": _NVIDIA,
            "quant_algo": "FP8",
            "kv_cache_scheme": _PER_TENSOR,
            **OPT,
            "quant_method": "modelopt",
        },
        _static,
        "static",
        plain=r"layers\.0\.mixer\.in_proj|layers\.2\.mixer\.o_proj",
        kv=("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "ct channel token, as granite's": HybridForm(
        ("granitemoehybrid",),
        _ct_rows(*_ROUTERS, kv_cache_scheme=arguments("tensor")),
        by_row,
        "rows",
        kv=_CACHE,
    ),
    "ct channel token, as granite's, experts stacked": HybridForm(
        ("granitemoehybrid",), _of_classes(_ct_rows(*_ROUTERS)), by_row, "rows", stacked=True
    ),
}
CASES = [(name, family) for name, form in FORMS.items() for family in form.families]


@dataclass
class Hybrid:
    form: HybridForm
    family: str
    config: dict[str, Any]
    tensors: Tensors
    exact: Tensors  # of the whole model, under the names of transformers' file
    quantized: frozenset[str]  # modules of one matrix

    def save(self, folder: Path) -> str:
        return _save(folder, self.tensors, {"config.json": self.config, **self.form.files})

    def logprobs(self, folder: Path, prompts: list[list[int]]) -> Tensor:
        """[prompts, tokens - 1], of each token behind those before it."""
        plain = {key: value for key, value in self.config.items() if key != "quantization_config"}
        saved = _save(folder, self.exact, {"config.json": plain})
        auto = (
            AutoModelForImageTextToText if "vision_config" in self.config else AutoModelForCausalLM
        )
        model: Any = auto.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
        for name, module in model.named_modules():
            stored = re.sub(r"^model\.(?=layers.*\.mixer)", "backbone.", name)
            if stored in self.quantized:
                module.register_forward_pre_hook(
                    lambda _, args, m=stored: (self._rounded(args[0], m), *args[1:])
                )
            elif name.endswith(".experts"):
                module.forward = functools.partial(
                    self._experts, module, self._inputs_of_experts(stored)
                )
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor(prompts)).logits, -1)
        return rows[:, :-1].gather(-1, torch.tensor(prompts)[:, 1:, None])[..., 0]

    def _inputs_of_experts(self, name: str) -> tuple[list[str], list[str]]:
        """Modules of gate and up of a layer's experts, and those of down."""
        own = [m for m in sorted(self.quantized) if m.startswith(f"{name}.")]
        downs = [m for m in own if m.endswith("down_proj")]
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
        gated = hasattr(module, "gate_up_proj")
        for expert, (first, down) in enumerate(
            zip(module.gate_up_proj if gated else module.up_proj, module.down_proj, strict=True)
        ):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            both = self._rounded(x[rows], *names[0]) @ first.T
            gate, up = both.chunk(2, -1) if gated else (both, torch.ones(()))
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
        if kind == "plain":
            return x
        parts = x.unflatten(-1, (-1, 128 if kind == "groups" else x.shape[-1]))
        scale = parts.abs().amax(-1, keepdim=True) / 448
        return (saturated(parts / scale).float() * scale).flatten(-2)

    def one_of_each_kind(self) -> list[str]:
        """Of the scales that are used: norms of q and k undo theirs, and further tokens do not run."""
        kinds = {}
        for name in self.tensors:
            if re.search(r"scale(_inv)?$", name) and not re.search(
                r"[qk]_proj\.(w|i)|mtp|\.[gz]\w*_proj\.in", name
            ):
                kinds[re.sub(r"\.\d+\.", ".", name)] = name
        return list(kinds.values())


def _save(folder: Path, tensors: Tensors, files: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
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


def save_unrounded(family: str, folder: Path) -> Path:
    tensors, config = _unrounded(family)
    return Path(_save(folder, tensors, {"config.json": config}))


def make(form: HybridForm, family: str) -> Hybrid:
    """The family's tiny model in that form; its tensors may be changed before they are saved."""
    stored_tensors, config = _unrounded(family)
    tensors: Tensors = {}
    exact: Tensors = {}
    quantized: set[str] = set()
    for stored, tensor in stored_tensors.items():
        if tensor.ndim < 2 or re.search(f"{ALWAYS_PLAIN}|{form.plain}", stored):
            tensors[stored], exact[stored] = tensor, tensor.float()
            continue
        matrices, exact[stored] = _rounded_matrices(form, stored, tensor)
        quantized |= set(matrices)
        for module, one in matrices.items():
            tensors |= {f"{module}.{suffix}": x for suffix, x in one.items()}
    for mixer in sorted({n.rpartition(".k_proj")[0] for n in tensors if ".k_proj.weight" in n}):
        tensors |= {f"{mixer}.{suffix}": number(0.01 * i) for i, suffix in enumerate(form.kv, 1)}
    like = BEHIND.get(config["model_type"].removesuffix("_moe"), "none")
    tensors |= {
        f"mtp.layers.0.{name.removeprefix(like)}": 3 * one if "scale" in name else one.clone()
        for name, one in tensors.items()
        if name.startswith(like)
    }
    if form.stacked:
        tensors = _stacked(tensors, set(stored_tensors))
    said = {} if form.said is None else {"quantization_config": form.said}
    return Hybrid(form, family, {**config, **said}, tensors, exact, frozenset(quantized))


def _rounded_matrices(
    form: HybridForm, stored: str, tensor: Tensor
) -> tuple[dict[str, Tensors], Tensor]:
    """What becomes of a matrix, or of gate and up or down of each expert, by module; and the whole,
    dequantized.
    """
    if tensor.ndim == 2:
        module = stored.removesuffix(".weight")
        rounded, _ = form.linear(module, tensor)
        return {module: rounded}, dequantized(rounded)
    parent = (
        stored.replace("put_linear.weight", "").removesuffix("in").removesuffix("out") + "experts"
    )
    matrices, exact = {}, []
    for expert, matrix in enumerate(tensor):
        parts = {"down_proj": matrix}
        if "input_linear" in stored:
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
        made = {
            f"{parent}.{expert}.{p}": form.linear(f"{parent}.{expert}.{p}", w)[0]
            for p, w in parts.items()
        }
        matrices |= made
        exact.append(torch.cat([dequantized(one) for one in made.values()]))
    return matrices, torch.stack(exact)


def _stacked(tensors: Tensors, hub: set[str]) -> Tensors:
    """Experts as one 3-D tensor of gate and up and one of down, weights and scales alike: with the
    names that the hub's 16-bit file has, or with transformers' own."""
    found: dict[str, dict[tuple[int, str], Tensor]] = {}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)", name)
        if match is None:
            rest[name] = tensor
            continue
        first = match[3] != "down"
        if f"{match[1]}.input_linear.weight" in hub:
            whole = f"{match[1]}.{'in' if first else 'out'}put_linear.{match[4]}"
        else:
            whole = f"{match[1]}.experts.{'gate_up' if first else 'down'}_proj{match[4].removeprefix('weight')}"
        found.setdefault(whole, {})[int(match[2]), match[3]] = tensor
    for whole, parts in found.items():
        count = 1 + max(expert for expert, _ in parts)
        rest[whole] = torch.cat([parts[key] for key in sorted(parts)]).unflatten(0, (count, -1))
    return rest
