"""Two configurations: `EngineArgs` is what was said, `EngineConfig` what was decided. Imports no torch.

In `EngineArgs`, None and 'auto' mean "not said". `EngineConfig` has neither; `config.resolve.resolve` builds it once,
and nobody changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales


@dataclass(frozen=True)
class EngineArgs:
    """What the user said, by the names the ecosystem uses. Sizes in tokens, memory in bytes or as '4GiB'."""

    model: str = "demo"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_scales: str = "auto"
    quantization_param_path: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | str | None = None
    device: str = "auto"
    kernels: str = "auto"
    threads: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class KVCacheConfig:
    """The decided KV cache. `scales` holds static scales; it is None for `token` granularity, `unit` and 16 bits.

    `granularity` and `scale_source` are None for a 16-bit cache. `note` is what start-up says about the choice.
    """

    format: Format
    granularity: Granularity | None
    scale_source: ScaleSource | None
    scales: KVScales | None
    note: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """Everything decided before a weight is read. `kv_cache_memory` in bytes; None: a share of what is free then."""

    compute_format: Format
    kv: KVCacheConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory: int | None
    device: str
    kernels: str
    threads: int | None
    seed: int
