"""Two configurations: `EngineArgs`, the options as given, and `EngineConfig`, the resolved ones. Imports no torch.

In `EngineArgs`, None and 'auto' mean "not given". `EngineConfig` is immutable, and `config.resolve.resolve` builds it
once, with every choice made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral, Real
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
    max_step_seconds: float | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | str | None = None
    device: str = "auto"
    kernels: str = "auto"
    attention_compute: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Numbers of other types, such as NumPy's, are kept as Python's."""
        for name, value in vars(self).items():
            if isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))

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
class LayerKVFormat:
    """How one layer's keys and values are stored. `granularity` is None for 16 bits."""

    format: Format
    granularity: Granularity | None

    def __str__(self) -> str:
        return f"{self.format}, {self.granularity}" if self.granularity else str(self.format)


MIXED = "mixed"  # for `dtype` or `granularity` in a JSON of a cache whose layers differ


@dataclass(frozen=True)
class KVCacheConfig:
    """The resolved KV cache. `scales` holds static scales; it is None for `token` granularity, `unit` and 16 bits.

    `granularity` and `scale_source` are None for a 16-bit cache. `note` explains the choice in the log at start-up.
    `layers`, if not None, is how each layer is stored where they differ; `format` and `granularity` are then those of
    the quantized layers, the finest of the granularities, and `scales` has None for layers that need no static ones.
    """

    format: Format
    granularity: Granularity | None
    scale_source: ScaleSource | None
    scales: KVScales | None
    note: str = ""
    layers: tuple[LayerKVFormat, ...] | None = None

    def of_layer(self, index: int) -> LayerKVFormat:
        """How layer `index` is stored."""
        return LayerKVFormat(self.format, self.granularity) if self.layers is None else self.layers[index]

    def names(self) -> dict[str, str | None]:
        """`dtype`, `granularity` and `scale_source`, as every JSON has them; `mixed` where layers differ."""
        kinds = self.layers or (self.of_layer(0),)
        dtypes = {str(kind.format) for kind in kinds}
        granularities = {str(kind.granularity) for kind in kinds if kind.granularity is not None}
        return {
            "dtype": dtypes.pop() if len(dtypes) == 1 else MIXED,
            "granularity": (granularities.pop() if len(granularities) == 1 else MIXED) if granularities else None,
            "scale_source": None if self.scale_source is None else str(self.scale_source),
        }


@dataclass(frozen=True)
class EngineConfig:
    """All settings, resolved before a weight is read. `kv_cache_memory` in bytes; None: a share of the free memory.

    `weight_format` is the format of Linear weights; weights (the head included) that a quantized checkpoint leaves
    unquantized have `compute_format`. `fp8_attention`: attention multiplies FP8 by FP8 where the hardware can.
    `max_step_seconds`: prompts leave a step in which a request decodes about so short; 0: as long as they are.
    """

    compute_format: Format
    weight_format: Format
    kv: KVCacheConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_seconds: float
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory: int | None
    device: str
    kernels: str
    fp8_attention: bool
    threads: int | None
    seed: int
