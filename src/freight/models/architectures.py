"""Tensor names of each architecture. Differences between models are data: their hyperparameters are in ModelConfig.

A new family of the same block is a row here and one in `config/model.py` (docs/add-a-model.md); a new file is only
for a new block.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names; `{}` is the layer's index."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"


ARCHITECTURES = {
    "LlamaForCausalLM": TensorNames(),
    "MistralForCausalLM": TensorNames(),
    "Qwen2ForCausalLM": TensorNames(),
    "Qwen3ForCausalLM": TensorNames(),
}
