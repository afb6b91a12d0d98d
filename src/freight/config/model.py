"""ModelConfig: a model's shape and mathematics as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.fp8.formats import Format


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3 or yarn; `parameters` are that kind's numbers."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, float | bool] = field(default_factory=dict)
    rotary_dim: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder, driven by data.

    `windows` has an entry per layer: the sliding window in tokens (a key at distance < window is seen), or None.
    `checkpoint_format` is what config.json says the weights are stored in.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    checkpoint_format: Format
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    raise NotImplementedError
