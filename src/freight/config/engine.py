"""Two configurations: `EngineArgs`, the options as given, and `EngineConfig`, the resolved ones. Imports no torch.

In `EngineArgs`, None and 'auto' mean "not given". `EngineConfig` is immutable, and `config.resolve.resolve` builds it
once, with every choice made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from freight.config.foreign import instead_of
from freight.config.kv_source import written
from freight.config.options import require_known
from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales


@dataclass(frozen=True)
class EngineArgs:
    """Options as given, with the names that other engines use. Sizes in tokens, memory in bytes or as '4GiB'."""

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
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | str | None = None
    device: str = "auto"
    kernels: str = "auto"
    attention_compute: str = "auto"
    threads: int | None = None
    seed: int = 0

    @staticmethod
    def from_options(**options: Any) -> EngineArgs:
        """EngineArgs from keyword options; `kv_scales` may be a number or a pair (K, V) as well.

        Raises ConfigError for an unknown name, with what to use instead.
        """
        known = [f.name for f in fields(EngineArgs)]
        for name in options:
            instead = None if name in known else instead_of(name)
            if instead is not None:
                raise ConfigError(f"unknown option {name!r}: {instead}")
        require_known(options, known, {})
        if "kv_scales" in options:
            options["kv_scales"] = written(options["kv_scales"])
        return EngineArgs(**options)


@dataclass(frozen=True)
class KVCacheConfig:
    """The resolved KV cache. `scales` holds static scales; it is None for `token` granularity, `unit` and 16 bits.

    `granularity` and `scale_source` are None for a 16-bit cache. `note` explains the choice in the log at start-up.
    """

    format: Format
    granularity: Granularity | None
    scale_source: ScaleSource | None
    scales: KVScales | None
    note: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """All settings, resolved before a weight is read. `kv_cache_memory` in bytes; None: a share of the free memory.

    `weight_format` is the format of Linear weights; weights (the head included) that a quantized checkpoint leaves
    unquantized have `compute_format`. `fp8_attention`: attention multiplies FP8 by FP8 where the hardware can.
    """

    compute_format: Format
    weight_format: Format
    kv: KVCacheConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory: int | None
    device: str
    kernels: str
    fp8_attention: bool
    threads: int | None
    seed: int
