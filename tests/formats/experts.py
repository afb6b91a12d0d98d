"""Tiny mixtures of experts in the forms of FP8 checkpoints, and what they compute, by transformers
and by hand.

As in writers.py nothing here comes from Freight. `Made.logprobs` runs transformers' model in
float32 with the matrices that the checkpoint's bytes and scales stand for; inputs are rounded
before each product as the form declares it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.formats.forms import (
    ARGS,
    BLOCKS,
    FP8,
    INVERSE,
    OPT,
    OUTPUTS,
    SCALES,
    STATIC,
    algo,
    arguments,
    from_autofp8,
    groups,
    kv,
    number,
    quark,
)
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
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

HIDDEN, WIDTH, EXPERTS, VOCAB = 128, 128, 3, 64
TOKENS = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_QWEN,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_QWEN},
}
LAYER = "model.layers.0."


def expert_modules(family: str) -> list[tuple[str, str, str]]:
    """Gate, up and down of each expert."""
    mixtral = family == "mixtral"
    parent, names = (
        ("block_sparse_moe", "w1 w3 w2") if mixtral else ("mlp", "gate_proj up_proj down_proj")
    )
    gate, up, down = names.split()
    return [
        tuple(f"{LAYER}{parent}.experts.{i}.{name}" for name in (gate, up, down))  # type: ignore[misc]
        for i in range(EXPERTS)
    ]


def quantized_modules(family: str) -> dict[str, tuple[int, int]]:
    """The matrices that producers quantize."""
    attention = {"q": (128, HIDDEN), "k": (64, HIDDEN), "v": (64, HIDDEN), "o": (HIDDEN, 128)}
    shapes = {f"{LAYER}self_attn.{name}_proj": shape for name, shape in attention.items()}
    for gate, up, down in expert_modules(family):
        shapes |= {gate: (WIDTH, HIDDEN), up: (WIDTH, HIDDEN), down: (HIDDEN, WIDTH)}
    if family == "qwen2_moe":
        shapes |= {
            f"{LAYER}mlp.shared_expert.{name}": (128, 128)
            for name in ("gate_proj", "up_proj", "down_proj")
        }
    return shapes


def unrounded(family: str) -> Tensors:
    draw = torch.Generator().manual_seed(11)
    shapes = dict(quantized_modules(family)) | {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
    }
    shapes[f"{LAYER}{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.gate"] = (
        EXPERTS,
        HIDDEN,
    )
    if family == "qwen2_moe":
        shapes[f"{LAYER}mlp.shared_expert_gate"] = (1, HIDDEN)
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=draw) / 11 for name, shape in shapes.items()
    }
    norms = [f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "model.norm"]
    tensors |= {f"{name}.weight": 1 + torch.randn(HIDDEN, generator=draw) / 9 for name in norms}
    if family == "qwen2_moe":
        rows = {"q": 128, "k": 64, "v": 64}
        tensors |= {
            f"{LAYER}self_attn.{x}_proj.bias": torch.randn(n, generator=draw) / 9
            for x, n in rows.items()
        }
    if family == "qwen3_moe":
        tensors |= {f"{LAYER}self_attn.{side}_norm.weight": torch.ones(64) for side in "qk"}
    return {name: tensor.to(BF16) for name, tensor in tensors.items()}


def input_scale(module: str) -> float:
    """Another one for every module, those of one layer's experts too."""
    return 0.008 + 0.0001 * (sum(map(ord, module)) % 50)


def static(
    rounded: Rounded, module: str, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()
) -> Rounded:
    return renamed(rounded, {}, {"input_scale": number(input_scale(module), dtype, shape)})


def autofp8_static(module: str, w: Tensor) -> Rounded:
    return static(from_autofp8(module, w), module)


@dataclass(frozen=True)
class ExpertForm:
    """`inputs`: how inputs of products are rounded: 'plain', 'static', 'rows' or 'groups' of 128."""

    families: tuple[str, ...]
    said: dict[str, Any] | None
    linear: Callable[[str, Tensor], Rounded]
    inputs: str
    kv: Callable[[int], Tensors] = lambda layer: {}
    files: dict[str, Any] = field(default_factory=dict)


_NORMS = [f"{LAYER}{name}" for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate")]
FORMS = {
    "qwen's own blocks": ExpertForm(
        ("qwen3_moe",),
        {**BLOCKS, "ignored_layers": None, "modules_to_not_convert": ["lm_head", *_NORMS]},
        lambda m, w: renamed(per_block(w), INVERSE),
        "groups",
        kv=kv(*SCALES),
    ),
    "ct channel token": ExpertForm(
        ("mixtral", "qwen3_moe"),
        groups(arguments("channel"), arguments("token", True), ignore=["lm_head", "re:.*gate$"]),
        lambda m, w: per_row(w, BF16),
        "rows",
    ),
    "ct tensor static, routers not listed": ExpertForm(
        ("qwen2_moe",),
        groups(arguments("tensor"), arguments("tensor"), kv_cache_scheme=arguments("tensor")),
        lambda m, w: static(per_tensor(w, BF16, (1,)), m, BF16, (1,)),
        "static",
        kv=kv(*SCALES, BF16, (1,)),
    ),
    "ct block": ExpertForm(
        ("qwen2_moe",),
        groups(
            arguments("block", block_structure=[128, 128]),
            arguments("group", True, group_size=128),
            ignore=["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        ),
        lambda m, w: per_block(w, dtype=BF16),
        "groups",
    ),
    "modelopt own file": ExpertForm(
        ("qwen3_moe", "mixtral"),
        None,
        lambda m, w: static(per_tensor(w), m),
        "static",
        kv=kv("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        files={
            "hf_quant_config.json": algo(
                "FP8",
                kv_cache_quant_algo="FP8",
                exclude_modules=["lm_head", f"{LAYER}mlp.gate", f"{LAYER}block_sparse_moe.gate"],
            )
        },
    ),
    "modelopt in config": ExpertForm(
        ("qwen2_moe",),
        {
            "config_groups": {
                "group_0": {"input_activations": ARGS, "weights": ARGS, "targets": ["Linear"]}
            },
            "ignore": ["lm_head", "*.mlp.gate", "*.shared_expert_gate"],
            "quant_algo": "FP8",
            "kv_cache_scheme": ARGS,
            **OPT,
            "quant_method": "modelopt",
        },
        lambda m, w: static(per_tensor(w), m),
        "static",
        kv=kv("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", F32, (1,)),
    ),
    "autofp8 static": ExpertForm(
        ("mixtral",),
        {
            **FP8,
            "activation_scheme": "static",
            "kv_cache_scheme": "static",
            "ignored_layers": ["lm_head", f"{LAYER}block_sparse_moe.gate"],
        },
        autofp8_static,
        "static",
        kv=kv(*SCALES),
    ),
    "quark": ExpertForm(
        ("mixtral",),
        quark(
            "per_tensor",
            STATIC,
            layer_quant_config={**OUTPUTS, "*v_proj": OUTPUTS["*k_proj"]},
            exclude=["*lm_head", "*.gate"],
        ),
        lambda m, w: static(per_tensor(w), m),
        "static",
        kv=kv("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ),
    "weights alone, saved by vLLM": ExpertForm(
        ("qwen2_moe", "qwen3_moe"),
        {**FP8, "activation_scheme": None, "kv_cache_scheme": "static"},
        lambda m, w: per_tensor(w),
        "plain",
        kv=kv("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ),
}
CASES = [(name, family) for name, form in FORMS.items() for family in form.families]


@dataclass
class Made:
    form: ExpertForm
    family: str
    config: dict[str, Any]
    tensors: Tensors
    dequantized: Tensors  # by module

    def save(self, folder: Path) -> str:
        return _save(folder, self.tensors, {"config.json": self.config, **self.form.files})

    def logprobs(self, folder: Path) -> Tensor:
        """Of TOKENS[1:], each behind those before it."""
        plain = {f"{module}.weight": matrix.float() for module, matrix in self.dequantized.items()}
        kept = {
            name: self.tensors[name].float()
            for name in unrounded(self.family)
            if name in self.tensors
        }
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        saved = _save(folder, kept | plain, {"config.json": config | {"dtype": "float32"}})
        model = AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, attn_implementation="eager"
        )
        for module in self.dequantized:
            if ".experts." not in module:
                linear = model.get_submodule(module)
                linear.register_forward_pre_hook(
                    lambda _, args, m=module: (self._rounded(args[0], m),)
                )
        layer = model.model.layers[0].mlp
        layer.experts.forward = self._experts
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], -1)
        return rows[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]

    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        experts = expert_modules(self.family)
        gates, downs = (
            [name for gate, up, _ in experts for name in (gate, up)],
            [down for *_, down in experts],
        )
        for expert, (gate, up, down) in enumerate(experts):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            inner = self._rounded(x[rows], *gates)
            hidden = functional.silu(inner @ self.dequantized[gate].float().T) * (
                inner @ self.dequantized[up].float().T
            )
            product = self._rounded(hidden, *downs) @ self.dequantized[down].float().T
            out[rows] += weights[rows, slots][:, None] * product
        return out

    def _rounded(self, x: Tensor, *modules: str) -> Tensor:
        """With a static scale the largest of all `modules`: their input is rounded once."""
        kind = self.form.inputs
        if kind == "plain":
            return x
        if kind == "static":
            scale = torch.stack(
                [self.tensors[f"{m}.input_scale"].float().reshape(()) for m in modules]
            ).amax()
            return saturated(x / scale).float() * scale
        groups = x.unflatten(-1, (-1, 128 if kind == "groups" else x.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        return (saturated(groups / scale).float() * scale).flatten(-2)


def _save(folder: Path, tensors: Tensors, files: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def make(name: str, family: str) -> Made:
    """The family's tiny model in that form; its tensors may be changed before they are saved."""
    form, tensors, dequantized = FORMS[name], unrounded(family), {}
    for module in quantized_modules(family):
        rounded, _ = form.linear(module, tensors.pop(f"{module}.weight"))
        dequantized[module] = _exact(rounded)
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in rounded.items()}
    tensors |= {LAYER + suffix: tensor for suffix, tensor in form.kv(0).items()}
    said = {} if form.said is None else {"quantization_config": form.said}
    config = {**CONFIG, **FAMILIES[family], "model_type": family, **said}
    return Made(form, family, config, tensors, dequantized)


def _exact(rounded: Tensors) -> Tensor:
    """Bytes times scales in float32; writers.py has the products in the dtype of the scales."""
    codes, scale = (
        rounded["weight"],
        next(t.float() for name, t in rounded.items() if name.startswith("weight_scale")),
    )
    by_block = scale.numel() > 1 and scale.shape[1] > 1
    return decoded(codes) * (spread(scale, (128, 128), tuple(codes.shape)) if by_block else scale)


def one_of_each_kind(made: Made) -> list[str]:
    """Scales of weights and inputs of v (norms of q and k undo theirs) and of the feed-forwards,
    and the cache's.
    """
    kinds = {}
    for name in made.tensors:
        if re.search(r"scale(_inv)?$", name) and not re.search(
            r"[qko]_proj\.(weight|input)_scale", name
        ):
            kinds[re.sub(r"\.\d+\.", ".", name.removeprefix(LAYER))] = name
    return list(kinds.values())
