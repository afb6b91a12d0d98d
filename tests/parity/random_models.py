"""A model of a config with random parameters, saved by transformers; prompts for it, and what
Freight makes of them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.parity.variants import SHAPE
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from freight.cache.pool import allocate_pool
from freight.engine.runner import ModelRunner
from freight.kernels.select import select_kernels
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

DELTA_NETS = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "minicpmv4_6",
)
# the end of a name -> mean and spread. With these of A_log some heads remember a few tokens, and
# some a hundred
OWN: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("sinks", "conv.conv.weight", "mamba.conv1d.weight", "mixer.conv1d.weight"), (0, 1)
    ),
    **dict.fromkeys(("mamba.A_log", "mixer.A_log", "forget_gate.A_log"), (-3, 1)),
    "self_attn.conv1d.weight": (0, 0.5),
    "router.scale": (4, 1),
    "per_expert_scale": (1, 0.3),
}
# of Ling, whose decays are bounded: -5 sigmoid(exp(A_log) (f + dt_bias))
OF_LING = {"forget_gate.A_log": (0.5, 0.3), "forget_gate.dt_bias": (-2, 1)}


def save_random(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> Any:
    """A model with every parameter random, biases and norms too, saved as its users save theirs."""
    torch.manual_seed(0)
    beside = (
        hasattr(config, "vision_config") or config.model_type == "mistral4"
    )  # transformers lists it there alone
    auto = AutoModelForImageTextToText if beside else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    frequencies = {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")
    }
    model = model.to(dtype)
    for name, buffer in frequencies.items():  # from_pretrained keeps them in float32
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("e_score_correction_bias"):
                continue
            one = 1  # of norms, or 0 where these store the difference from 1
            if config.model_type in ("gemma2", "gemma3_text", "step3p7"):
                one = 0
            if config.model_type in DELTA_NETS and not name.endswith("linear_attn.norm.weight"):
                one = 0
            if config.model_type == "muse_glimmer" and "layernorm" in name:
                one = 0
            if config.model_type.startswith("gemma4") and name.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):
                one = 0.4  # nothing else keeps scores small: the softmax has no scale
            small = 0.1 if parameter.ndim == 1 else 0.12
            known = {**OWN, **OF_LING} if config.model_type == "bailing_hybrid" else OWN
            own = [(mean, spread) for end, (mean, spread) in known.items() if name.endswith(end)]
            mean, spread = own[0] if own else (one, 0.1) if "norm" in name else (0, small)
            parameter.copy_(mean + spread * noise)
        for name, bias in model.state_dict().items():  # buffers in most families
            if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
                bias.copy_(0.1 * torch.randn(bias.shape))
            if name.endswith("layer_scalar"):
                bias.copy_(0.5 + torch.rand(bias.shape))
    model.save_pretrained(folder)
    return model


def digest_of_weights(folder: Path) -> str:
    """SHA-256 of the tensors of a folder by their names, whatever files hold them."""
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tokens(count: int = 150) -> list[int]:
    return torch.randint(
        0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()


def freight_logits(
    folder: Path, token_ids: list[int], dtype: str, kernel_set: str = "auto", **options: Any
) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]"""
    args = EngineArgs(
        model=str(folder),
        dtype=dtype,
        kernels=kernel_set,
        skip_tokenizer_init=True,
        # compared with products of values unless the caller says otherwise
        **{"activations": "bfloat16", **options},
    )
    opened = open_model(args)
    config = opened.resolve(opened.args)
    kernels = select_kernels(kernel_set)
    decoder, num_blocks = opened.load(config), -(-len(token_ids) // config.block_size)
    spec = opened.cache_spec(config)
    pool = allocate_pool(
        spec, config.kv, [num_blocks] * len(spec.groups), kernels, rotaries=decoder.rotaries
    )
    runner = ModelRunner(decoder, pool, "cpu")
    return runner.logits(token_ids, 0, pool.whole)
