"""A model type that lives in tests alone: Llama's attention with the mixture of experts of
transformers' Nemotron-H.

Its experts have no gate, and may work in a smaller space (`MoEConfig.latent_size`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.parity.variants import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from freight.model import architectures
from freight.model.config.family import words
from freight.model.config.moe import MoEFamily
from freight.model.config.registry import FAMILIES
from freight.model.config.tensor_names import TensorNames
from freight.operands.routing import Scoring

NAME, ARCHITECTURE = "latent_experts", "LatentExpertsForCausalLM"
LATENT, EXPERTS = 48, 8
MOE: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 72,
    "moe_latent_size": LATENT,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "mlp_hidden_act": "relu2",
}
TENSORS = TensorNames(
    gate_up=("mlp.up_proj",),
    expert_gate_up=("up_proj",),
    stacked=("mlp.experts.up_proj", "mlp.experts.down_proj"),
    shared="mlp.shared_experts.",
)
ROW = replace(
    FAMILIES["llama"],
    architecture=ARCHITECTURE,
    defaults={**FAMILIES["llama"].defaults, "mlp_hidden_act": "relu2"},
    keys=words("attention_bias layer_types mlp_hidden_act"),
    bias_keys=("attention_bias", "attention_bias", ""),
    lacks=words("hidden_act hidden_activation intermediate_size"),
    gated=False,
    activation_key="mlp_hidden_act",
    moe=MoEFamily(
        scoring=Scoring.SIGMOID,
        factor_key="routed_scaling_factor",
        group_keys=("n_group", "topk_group"),
        choice_bias=True,
        shared_width_key="moe_shared_expert_intermediate_size",
        latent_key="moe_latent_size",
    ),
    tensors=TENSORS,
)


class Nothing(torch.nn.Module):
    """Shared experts of a model that has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, NAME, ROW)  # type: ignore[arg-type]
    monkeypatch.setitem(architectures.ARCHITECTURES, ARCHITECTURE, TENSORS)


def config_of(shape: dict[str, Any] = SHAPE, **changes: Any) -> dict[str, Any]:
    """The config.json of such a model; a value of None is left out."""
    said = (
        LlamaConfig(**shape).to_dict()
        | MOE
        | changes
        | {"model_type": NAME, "architectures": [ARCHITECTURE]}
    )
    others = ("hidden_act", "intermediate_size", "mlp_bias")
    return {key: value for key, value in said.items() if value is not None and key not in others}


def save(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shape: dict[str, Any] = SHAPE,
    stacked: bool = False,
    **changes: Any,
) -> Any:
    """transformers' model, every parameter random; saved with a matrix for each expert, or
    `stacked` in 3-D tensors.
    """
    said = config_of(shape, **changes)
    own = {key: said[key] for key in (*MOE, "hidden_size") if key in said}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    for layer in model.model.layers:
        config = NemotronHConfig(**own, layers_block_type=["moe"])
        config._experts_implementation = "eager"
        layer.mlp = NemotronHMoE(config)
        if "moe_shared_expert_intermediate_size" not in said:
            layer.mlp.shared_experts = Nothing()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape)
            small = 0.1 if tensor.ndim == 1 else 0.12
            tensor.copy_((1 + 0.1 * noise if "norm" in name else noise * small).to(dtype))
    stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name in [name for name in stored if ".experts." in name and not stacked]:
        prefix, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(stored.pop(name)):
            stored[f"{prefix}.{expert}.{part}.weight"] = matrix.clone()
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps({**said, "dtype": str(dtype).removeprefix("torch.")})
    )
    return model
