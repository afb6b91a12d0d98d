"""Tensor names of each architecture. Differences between models are data: their hyperparameters are in ModelConfig.

A new family of the same block is a row here and one in `config/families.py` (docs/add-a-model.md); a new file is only
for a new block.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.config.model import ModelConfig


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names; `{}` is the layer's index. Projections of one field may also be stored as one tensor, in the
    order of their names: then the field has that name alone.

    attention_post, mlp_post   norms of the outputs, in layers that have them (`NormPlacement.SANDWICH`)
    """

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    attention_post: str = ""
    mlp_post: str = ""


_SANDWICH = TensorNames(
    mlp_norm="pre_feedforward_layernorm.weight",
    attention_post="post_attention_layernorm.weight",
    mlp_post="post_feedforward_layernorm.weight",
)

ARCHITECTURES = {
    "LlamaForCausalLM": TensorNames(),
    "MistralForCausalLM": TensorNames(),
    "Qwen2ForCausalLM": TensorNames(),
    "Qwen3ForCausalLM": TensorNames(),
    "Gemma2ForCausalLM": _SANDWICH,
}


def tensor_names(config: ModelConfig) -> TensorNames:
    """The names of this model's tensors."""
    return ARCHITECTURES[config.architecture]
