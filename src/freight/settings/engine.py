"""Two configurations: `EngineArgs`, the options as given, and `EngineConfig`, the resolved ones.
Imports no torch.

In `EngineArgs`, None and 'auto' mean "not given". `EngineConfig` is immutable, and
`settings.resolve.resolve` builds it once, with every choice made.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

from freight.base.options import listed_names, require_known
from freight.base.other_engines.instead import instead_of
from freight.base.other_engines.values import PER_TOKEN_HEAD
from freight.errors import ConfigError, choices
from freight.fp8.formats import COMPUTE_FORMATS, Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales
from freight.settings.cpu_builds import build_in
from freight.settings.lora import LoraConfig, listed_adapters
from freight.settings.skip_layers import layer_names
from freight.settings.speculation import NO_DRAFTS, Speculation
from freight.settings.speculation import written as written_config
from freight.settings.store import StoreConfig

TRITON = "triton"  # a value of --kernels where Triton interprets its kernels, on a CPU
KV_SCALES = ("auto", "checkpoint", "dynamic", "group", "unit")
# choices for messages: the last two values have no fixed name, so they are described
KV_SCALES_FORMS = (*KV_SCALES, "FILE.json", "a number, or two for K and V as in 0.03,0.02")


@dataclass(frozen=True)
class EngineArgs:
    """Options as given, under the names that other engines use. Sizes are in tokens, memory in bytes
    or as '4GiB'.
    """

    model: str = "demo"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    ignore_config_keys: Sequence[str] = ()
    pooling: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    activations: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: Sequence[str | int] = ()
    kv_scales: str = "auto"
    quantization_param_path: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_step_seconds: float | None = None
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    state_every: int | None = None
    state_dtype: str = "auto"
    enable_prefix_caching: bool = True
    kv_cache_memory: int | str | None = None
    speculate: int | str | None = None
    speculative_config: str | None = None
    kv_store: str | None = None
    kv_store_size: int | str | None = None
    kv_store_memory: int | str | None = None
    kv_store_salted: bool = False
    enable_lora: bool = False
    lora_modules: Sequence[str] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    device: str = "auto"
    kernels: str = "auto"
    attention_compute: str = "auto"
    exact_products: bool = False
    threads: int | None = None
    tensor_parallel_size: int = 1
    rank_cpus: str | None = None
    rank_timeout: float = 60.0
    pipeline_parallel_size: int = 1
    pp_layers: str | None = None
    check_ranks: bool = True
    disable_custom_all_reduce: bool = False
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29501
    join_timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Convert numbers of other types, such as NumPy's, to Python's, lists of names to tuples,
        and vLLM's names of caches to ours. Raises ConfigError for scales that such a cache has not.
        """
        _name_cache(self)
        object.__setattr__(self, "ignore_config_keys", names_of(self.ignore_config_keys))
        object.__setattr__(
            self, "kv_cache_dtype_skip_layers", layer_names(self.kv_cache_dtype_skip_layers)
        )
        object.__setattr__(self, "lora_modules", listed_adapters(self.lora_modules))
        for name, value in vars(self).items():
            if isinstance(value, bool):
                continue
            if isinstance(value, Integral):
                object.__setattr__(self, name, int(value))
            elif isinstance(value, Real):
                object.__setattr__(self, name, float(value))

    @staticmethod
    def from_options(**options: Any) -> EngineArgs:
        """Build EngineArgs from keyword options; `kv_scales` may also be a number or a pair (K, V),
        and `speculative_config` a dictionary.

        Raises ConfigError for an unknown name, with what to use instead.
        """
        known = [f.name for f in fields(EngineArgs)]
        for name in options:
            if name in known:
                continue
            instead = instead_of(name)
            if instead is not None:
                raise ConfigError(f"unknown option {name!r}: {instead}")
        require_known(options, known, {})
        if "kv_scales" in options:
            options["kv_scales"] = _written(options["kv_scales"])
        if "speculative_config" in options:
            options["speculative_config"] = written_config(options["speculative_config"])
        return EngineArgs(**options)

    @property
    def has_priorities(self) -> bool:
        """Whether requests may have a priority."""
        return self.scheduling_policy == "priority"

    @property
    def asks_for_drafts(self) -> bool:
        """Whether the number of drafts is given, and not the default."""
        return self.speculate is not None or self.speculative_config is not None

    @property
    def names_cache(self) -> bool:
        """Whether the format of keys and values, or their scales, are given, and not the default."""
        scales = self.quantization_param_path or self.kv_scales != "auto"
        return bool(scales) or self.kv_cache_dtype != "auto"

    @property
    def computes_on(self) -> str:
        """The value of --device that is meant: a build of the CPU kernels computes on the CPU."""
        if self.device == "auto" and build_in(self.kernels):
            return "cpu"
        return self.device

    def without_drafts(self) -> EngineArgs:
        """Return the same options, without drafts unless they ask for them."""
        if self.asks_for_drafts:
            return self
        return replace(self, speculate=0)

    def with_cache(self, kv_cache_dtype: str) -> EngineArgs:
        """Return the same options for another cache. An unquantized cache has no layers to skip."""
        skipped = self.kv_cache_dtype_skip_layers
        if kv_cache_dtype in map(str, COMPUTE_FORMATS):
            skipped = ()
        return replace(self, kv_cache_dtype=kv_cache_dtype, kv_cache_dtype_skip_layers=skipped)

    def with_plain_cache(self, kv_cache_dtype: str = "float32") -> EngineArgs:
        """Return the same options for an unquantized cache and states, without the options that
        only a quantized cache has.
        """
        state = self.state_dtype
        if state not in map(str, COMPUTE_FORMATS):
            state = "auto"
        plain = replace(
            self,
            kv_scales="auto",
            quantization_param_path=None,
            attention_compute="auto",
            state_dtype=state,
        )
        return plain.with_cache(kv_cache_dtype)


def _name_cache(args: EngineArgs) -> None:
    """Write vLLM's name of a cache with scales per token and head as the two options that it stands
    for. Raises ConfigError for another source of scales beside it.
    """
    if args.kv_cache_dtype not in tuple(PER_TOKEN_HEAD):  # it may be a list
        return
    name = args.kv_cache_dtype
    dtype, scales = PER_TOKEN_HEAD[name]
    given = None
    if args.kv_scales not in ("auto", scales):
        given = f"--kv-scales {args.kv_scales}"
    elif args.quantization_param_path is not None:
        given = f"--quantization-param-path {args.quantization_param_path}"
    if given is not None:
        takes = dtype != Format.INT8 or args.kv_scales == "group"
        other = f"use --kv-cache-dtype {dtype} with {given}, or " if takes else ""
        raise ConfigError(
            f"--kv-cache-dtype {name} with {given}: the name says that each token has a scale per head, measured as "
            f"it is stored; {other}omit the scales"
        )
    object.__setattr__(args, "kv_cache_dtype", dtype)
    object.__setattr__(args, "kv_scales", scales)


def _written(value: object) -> str:
    """Write `kv_scales` as on the command line: a number or a pair (K, V) becomes '0.03' or
    '0.03,0.02'.

    Raises ConfigError for anything that is neither text, a number nor one or two numbers.
    """
    if isinstance(value, str):
        return value
    listed: Sequence[object] = [value]
    if isinstance(value, Sequence):
        listed = value
    numbers = []
    for number in listed:
        if isinstance(number, Real) and not isinstance(number, bool):
            numbers.append(repr(float(number)))
    if not 1 <= len(listed) <= 2 or len(numbers) != len(listed):
        raise ConfigError(f"kv_scales {value!r} is unknown: choose {choices(KV_SCALES_FORMS)}")
    return ",".join(numbers)


def names_of(value: object) -> tuple[str, ...]:
    """Return the names in a text, separated by commas or spaces, or in a list of such texts. Raises
    ConfigError for anything else.
    """
    wrong = ConfigError(
        f"ignore_config_keys is {value!r}; give names of keys, as in ['alibi', 'scale_emb']"
    )
    return listed_names(value, (str,), wrong)


@dataclass(frozen=True)
class LayerKVFormat:
    """The stored format of one layer's keys and values. `granularity` is None for 16 bits."""

    format: Format
    granularity: Granularity | None

    def __str__(self) -> str:
        if self.granularity:
            return f"{self.format}, {self.granularity}"
        return str(self.format)


def listed_layers(layers: Sequence[int], num_layers: int) -> str:
    """Describe layers: 'layers 0 and 2', or '40 of 48 layers' for more than 8."""
    if len(layers) > _LISTED:
        return f"{len(layers)} of {num_layers} layers"
    *most, last = map(str, layers)
    if not most:
        return f"layer {last}"
    return f"layers {', '.join(most)} and {last}"


_LISTED = 8  # layers that `listed_layers` writes out
MIXED = "mixed"  # for `dtype` or `granularity` in a JSON of a cache whose layers differ


class PageLayout(StrEnum):
    """The order of a layer's pages in memory. Results are the same bit for bit in every layout."""

    TOKENS = "tokens"  # K and V separate; in a block token by token, the heads of a token adjacent
    HEADS = "heads"  # K and V separate; in a block head by head, the tokens of a head adjacent
    BLOCKS = "blocks"  # K, V and token scales of a block are contiguous


@dataclass(frozen=True)
class KVCacheConfig:
    """The resolved KV cache. `scales` holds static scales; it is None for measured ones, `unit` and
    16 bits.

    `granularity` and `scale_source` are None for a 16-bit cache. `note` explains the choice in the
    log at start-up. `layers` is the stored format of each layer if they differ. `format` is then
    that of the quantized layers, `granularity` the finest of theirs, and `scales` has None for
    layers without static scales. `state` is the format of recurrent states; None:
    `states.default_state`.
    """

    format: Format
    granularity: Granularity | None
    scale_source: ScaleSource | None
    scales: KVScales | None
    note: str = ""
    layers: tuple[LayerKVFormat, ...] | None = None
    layout: PageLayout = PageLayout.TOKENS
    state: Format | None = None

    @property
    def grouped(self) -> bool:
        """True if layers have `group` scales."""
        return self.granularity is Granularity.GROUP

    @property
    def stores(self) -> tuple[Format, Format | None]:
        """The formats of pages and of states."""
        return self.format, self.state

    def of_layer(self, index: int) -> LayerKVFormat:
        """Return the stored format of layer `index`."""
        if self.layers is None:
            return LayerKVFormat(self.format, self.granularity)
        return self.layers[index]

    def skipping(self, skipped: Set[int], num_layers: int, compute: Format) -> KVCacheConfig:
        """Return this quantized cache with the layers of `skipped` stored in `compute`. `skipped`
        must not be all of the `num_layers` layers.
        """
        if not skipped:
            return self
        layers = []
        granularities = []
        for index in range(num_layers):
            layer = self.of_layer(index)
            if index in skipped:
                layer = LayerKVFormat(compute, None)
            if layer.granularity is not None:
                granularities.append(layer.granularity)
            layers.append(layer)
        finest = max(granularities, key=list(Granularity).index)
        kv = replace(self, granularity=finest, layers=tuple(layers))
        if self.scales is None:
            return kv
        return replace(kv, scales=self.scales.without(skipped))

    def describe(self) -> str:
        """Describe the formats: 'fp8_e4m3fn, layers 0 and 2 in bfloat16'; 'mixed' if quantized
        layers differ.
        """
        if self.layers is None:
            return str(self.format)
        plain = []
        quantized = set()
        for index, layer in enumerate(self.layers):
            if layer.granularity is None:
                plain.append(index)
            else:
                quantized.add(layer)
        if len(quantized) > 1 or not plain:
            return MIXED
        return f"{self.format}, {listed_layers(plain, len(self.layers))} in {self.layers[plain[0]].format}"

    def layer_names(self) -> list[dict[str, str | None]] | None:
        """Return `dtype` and `granularity` of each layer, for every JSON; None if all layers are
        alike.
        """
        if not self.layers:
            return None
        return [
            {
                "dtype": str(layer.format),
                "granularity": layer.granularity and str(layer.granularity),
            }
            for layer in self.layers
        ]

    def names(self) -> dict[str, str | None]:
        """Return `dtype`, `granularity` and `scale_source`, for every JSON; `mixed` if layers
        differ.
        """
        kinds = self.layers or (self.of_layer(0),)
        dtypes = {str(kind.format) for kind in kinds}
        granularities = {str(kind.granularity) for kind in kinds if kind.granularity is not None}
        return {
            "dtype": _common(dtypes),
            "granularity": _common(granularities),
            "scale_source": self.scale_source and str(self.scale_source),
        }


def _common(names: set[str]) -> str | None:
    """Return the one name, `mixed` for several, None for none."""
    if len(names) > 1:
        return MIXED
    return next(iter(names), None)


@dataclass(frozen=True)
class EngineConfig:
    """All settings, resolved before a weight is read.

    weight_format      of Linear weights. Weights that a quantized checkpoint leaves unquantized,
                       the head included, have `compute_format`; those in 4 bits count as E4M3
    max_step_seconds   target duration of a step in which a request decodes: prompts are cut into
                       chunks for it; 0: no target
    kv_cache_memory    bytes; None: a share of the free memory
    fp8_attention      whether attention multiplies FP8 by FP8
    most_drafts        drafted tokens of a step, all requests together; 0: none. Decides no result
    drafts             what drafts
    state_every        tokens between kept states, in models whose layers have states; None:
                       `cache.spec.default_every`
    store              the store below the cache; None for none
    int4               whether weights are rounded to INT4 as they load, in groups
    lora               memory for adapters; None: the engine takes none
    int8_activations   whether products with weights in 4 bits round their inputs to INT8 in groups
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
    state_every: int | None = None
    most_drafts: int = 0
    drafts: Speculation = NO_DRAFTS
    store: StoreConfig | None = None
    int4: bool = False
    int8_activations: bool = False
    lora: LoraConfig | None = None
    exact_products: bool = False

    @property
    def launches_ahead(self) -> bool:
        """Whether the next step is launched before the tokens of the last are known: on a GPU, where a step
        runs while the host goes on, and as there where its kernels are interpreted.
        """
        return self.device != "cpu" or self.kernels == TRITON
