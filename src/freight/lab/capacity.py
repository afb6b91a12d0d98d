"""What fits into a given memory, by format of cache and weights, from a config.json alone. Imports
no torch.

Blocks are those that the engine allocates for the same options (`cache/sizing.py`), and weights
those that it loads (`model/sizes.py`). The cache gets the share of what the weights leave that the
engine takes by itself; the rest is for what is computed, which is not counted: activations, logits,
and what the kernels and torch need.
"""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from freight.base.fields import JsonObject
from freight.base.options import choose
from freight.cache.sizing import (
    MEMORY_SHARE,
    bytes_over,
    held_memory,
    longest_request,
    memory_over,
    split_memory,
)
from freight.cache.spec import KVCacheSpec, cache_spec
from freight.cache.store.entries import ENTRY_BYTES, TOKEN_BYTES
from freight.checkpoint.layouts import read_scheme
from freight.errors import CapacityError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import Packing, Scheme
from freight.lab.columns import as_object, plural
from freight.lab.planned_head import Beside, Matrices, PlannedHead, planned_head
from freight.model.adapted import adapter_bytes
from freight.model.config.dtype import DtypeSource
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES
from freight.model.sizes import (
    Layout,
    LinearOf,
    LoadedBytes,
    int4_online,
    loaded_bytes,
    online,
    stage_costs,
    table_bytes,
)
from freight.parallel.shards import require_divisible
from freight.parallel.shared import MAX_RANKS
from freight.parallel.stages import require_stages, stage_counts, stages_of
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.hardware import no_four_bit_weights
from freight.settings.kv_source import groups_fit
from freight.settings.lora import LoraConfig
from freight.settings.resolve import (
    BASE_SCALES,
    DTYPES,
    check,
    check_int8,
    check_stored_weights,
    parse_memory,
    step_tokens,
)
from freight.settings.skip_layers import FLAG, check_skipped, skipped_layers
from freight.settings.speculation import Speculation, speculation
from freight.settings.stages import check_stages
from freight.settings.states import check_states, with_state

GIB = 2**30
_LEAST = 2**20  # bytes: a smaller number is one whose unit was forgotten


@dataclass(frozen=True)
class Wish:
    """What is asked for. Memory in bytes, of all devices together, of which weights are a part;
    `context` in tokens, None: the model's own.

    concurrency    requests of `context` tokens that are to be in the cache at once
    device         'cpu' or 'cuda'
    layout         how the device's kernels hold matrices
    dtype          what is computed in; 'auto': the checkpoint's (`ModelConfig.checkpoint_format`)
    skip_layers    layers that stay unquantized in every 8-bit cache, as
                   `EngineArgs.kv_cache_dtype_skip_layers`
    state_every    tokens between states that stay behind, as `EngineArgs.state_every`
    state_dtype    how recurrent states are stored, as `EngineArgs.state_dtype`
    ranks          processes that compute the model together, each with an even part of the memory
    stages         devices of each rank that divide the layers, each with an even part of its memory;
                   on a CPU they have its memory together
    pp_layers      layers of each stage, as `EngineArgs.pp_layers`
    lora           memory for adapters; None for none
    speculate, speculative_config  what drafts, as in `EngineArgs`; a head is counted
    """

    memory: int
    context: int | None = None
    concurrency: int | None = None
    device: str = "cuda"
    layout: Layout = Layout.PLAIN
    dtype: str = "auto"
    skip_layers: tuple[str, ...] = ()
    state_every: int | None = None
    state_dtype: str = "auto"
    ranks: int = 1
    stages: int = 1
    pp_layers: str | None = None
    lora: LoraConfig | None = None
    speculate: int | str | None = None
    speculative_config: str | None = None

    @property
    def devices(self) -> int:
        """How many of them each rank has, with a memory of their own."""
        return self.stages if self.device != "cpu" else 1

    @property
    def device_memory(self) -> int:
        """Bytes of each device."""
        return self.memory // (self.ranks * self.devices)

    @property
    def drafts(self) -> Speculation:
        """What drafts. Raises ConfigError as `speculation`."""
        return speculation(self.speculate, self.speculative_config)

    @property
    def asks_for_head(self) -> bool:
        """Whether more may draft than the text of requests."""
        return self.drafts.head is not None or self.drafts.finds_head

    @property
    def num_requests(self) -> int:
        return self.concurrency or 1

    @property
    def max_num_seqs(self) -> int:
        return self.concurrency or EngineArgs.max_num_seqs


@dataclass(frozen=True)
class DevicePart:
    """What one of several devices has of a model: its layers, the bytes of their weights, with tables
    and memory for adapters, and the most bytes of the cache.
    """

    layers: int
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class Setting:
    """One choice of formats, and what fits with it. Sizes in bytes, those of each rank.

    in_four_bits       whether some weights are
    kv                 the cache; static scales have no values here
    options            what `freight serve` is given for it, apart from context, concurrency and memory
    loaded             the weights, with their scales, the rotary tables, memory for adapters and what
                       drafts
    cache_bytes        the share of what the weights leave; of several devices so much that each has
                       room for its layers' part
    devices            what each of the devices has that divide the layers; () without any
    rest_bytes         what is left for activations and logits, which are not counted
    spec               the cache by layer
    stored_tokens      `stored_tokens` of the cache of all ranks
    num_blocks         by group of layers, as the engine allocates them; () where not even one token
                       fits
    capacity_tokens    tokens of full sequences
    longest            tokens of the longest request, up to the wished context
    step_tokens        tokens of a step at most
    requests           of the wished context, at once
    needed_bytes       memory of all ranks that the wish needs with this setting
    head_bytes_per_token  bytes of a token in the layers of what drafts
    """

    weights: str
    in_four_bits: bool
    kv: KVCacheConfig
    options: tuple[str, ...]
    loaded: LoadedBytes
    cache_bytes: int
    devices: tuple[DevicePart, ...]
    rest_bytes: int
    spec: KVCacheSpec
    stored_tokens: int
    num_blocks: tuple[int, ...]
    capacity_tokens: int
    longest: int
    step_tokens: int
    requests: int
    needed_bytes: int
    head_bytes_per_token: int = 0

    @property
    def cache_name(self) -> str:
        """'fp8_e4m3fn, token': with what its scales are; static ones are of a tensor, head or
        channel.
        """
        if self.kv.scale_source is None:
            return str(self.kv.format)
        kinds = {
            ScaleSource.DYNAMIC: str(self.kv.granularity),
            ScaleSource.UNIT: "unit",
        }
        return f"{self.kv.format}, {kinds.get(self.kv.scale_source, 'static')}"


@dataclass(frozen=True)
class Plan:
    """Every setting in order of preference, and the first that serves the wish: its index, None if
    none does.

    dtype                   what is computed in
    dtype_source            where that was found
    through_transformers    whether it runs through transformers' modules, which hold all weights in
                            16 bits at load
    head                    what drafts besides the text of requests; None: nothing
    """

    wish: Wish
    context: int
    dtype: Format
    dtype_source: DtypeSource
    settings: tuple[Setting, ...]
    choice: int | None
    through_transformers: bool = False
    head: PlannedHead | None = None


def read_memory(value: str) -> int:
    """Return bytes of '24GiB'. Raises ConfigError, also for a number that is too small to be meant
    in bytes.
    """
    size = parse_memory(value, "--memory", "; give the memory of the device, as in 24GiB")
    assert size is not None
    if size < _LEAST:
        hint = f"; write {value.strip()}GiB" if value.strip().isdecimal() else ""
        raise ConfigError(f"--memory {value!r} is {size:,} bytes, which holds no model{hint}")
    return size


def make_plan(
    config: JsonObject,
    wish: Wish,
    hf_quant_config: JsonObject | None = None,
    stored: Format | None = None,
    ignore_keys: Collection[str] = (),
    scheme: Scheme | None = None,
    tensors: Mapping[str, str] | None = None,
    name: str = "the model",
) -> Plan:
    """Return what fits of the model that `config`, the content of a config.json, describes.
    `stored` is the dtype of its tensors, where that is known; `ignore_keys` of config.json are read
    over; `scheme` is that of a GGUF file, in the place of what `config` declares; `tensors` are those
    of its files, with their dtypes, where they are known; `name` is for messages.

    Raises CheckpointError for a model that Freight does not run, ConfigError for a wish that no
    memory serves and for ranks that cannot divide the model, and CapacityError if the weights do not fit in any format.
    """
    model = _read(config, stored, ignore_keys)
    if scheme is None:
        scheme = read_scheme(config, hf_quant_config)
    context = _check(wish, model)
    compute = model.checkpoint_format
    source = model.dtype_source
    if wish.dtype != "auto":
        compute = DTYPES[wish.dtype]
        source = DtypeSource.OPTION
    beside = Beside(
        name=name,
        # whose prefixes the names of tensors show
        model=_read(config, stored, ignore_keys, tensors) if tensors else model,
        compute=compute,
        device=wish.device,
        layout=wish.layout,
        context=context,
        ranks=wish.ranks,
        read=lambda described: _read(described, None, ()),
        tensors=tensors,
    )
    plain = _caches(compute, scheme, wish, model)[0]
    head = planned_head(
        wish.drafts, beside, cache_spec(plain.kv, model, EngineArgs.block_size, compute)
    )
    settings = tuple(_settings(model, scheme, compute, wish, context, head))
    if all(setting.cache_bytes == 0 for setting in settings):
        raise _too_little(wish, context, settings)
    serving = (i for i, setting in enumerate(settings) if setting.requests >= wish.num_requests)
    return Plan(
        wish=wish,
        context=context,
        dtype=compute,
        dtype_source=source,
        settings=settings,
        choice=next(serving, None),
        through_transformers=model.foreign is not None,
        head=head,
    )


def _too_little(wish: Wish, context: int, settings: Sequence[Setting]) -> CapacityError:
    least = min(settings, key=lambda setting: setting.loaded.total)
    needed = size(min(setting.needed_bytes for setting in settings), up=True)
    loaded = size(least.loaded.total * wish.ranks, up=True)
    loads = f"the weights alone need {loaded} in {least.weights}"
    way_out = "take a smaller model"
    if least.loaded.head:
        of_head = size(least.loaded.head * wish.ranks, up=True)
        loads = f"the weights in {least.weights} and what drafts need {loaded}, of which the head has {of_head}"
        way_out = "omit --speculative-config and --speculate"
    if wish.lora is not None:
        adapters = size(least.loaded.adapters * wish.ranks, up=True)
        loads = f"the weights in {least.weights} and adapters need {loaded}, of which {adapters} are for adapters"
        way_out = "lower --max-loras or --max-lora-rank"
    if least.devices:
        most = size(max(part.weight_bytes for part in least.devices), up=True)
        loads += f", {most} on the fullest of devices with {size(wish.device_memory)}"
        if wish.pp_layers is not None:
            way_out = "omit --pp-layers"
    return CapacityError(
        f"--memory is {size(wish.memory)}, and {loads}: give at least {needed}, which serves "
        f"{asked(wish, context)}, or {way_out}"
    )


def _read(
    config: JsonObject,
    stored: Format | None,
    ignore_keys: Collection[str],
    tensors: Collection[str] = (),
) -> ModelConfig:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES:
        return parse_model_config(config, tensors, stored, ignore_keys)
    from freight.model.open import read_model_config  # takes seconds, and torch

    return read_model_config(config, (), stored, ignore_keys)


def _check(wish: Wish, model: ModelConfig) -> int:
    """Return the wished context. Raises ConfigError."""
    choose("--dtype", wish.dtype, ("auto", *DTYPES))
    choose("--device", wish.device, tuple(MEMORY_SHARE))
    check_states(wish.state_every, wish.state_dtype, EngineArgs.block_size)
    if not 1 <= wish.ranks <= MAX_RANKS:
        raise ConfigError(
            f"--tensor-parallel-size {wish.ranks} must be an integer from 1 to {MAX_RANKS}"
        )
    require_divisible(model, wish.ranks)
    check_stages(wish.stages, wish.pp_layers)
    _check_drafts(wish)
    require_stages(model, wish.stages)
    for flag, value in (("--context", wish.context), ("--concurrency", wish.concurrency)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be an integer ≥ 1")
    if wish.context is not None and wish.context > model.position_limit:
        raise ConfigError(
            f"--context {wish.context} is more than {model.limit_words}; use at most {model.position_limit}, or omit it"
        )
    return wish.context or model.max_position_embeddings


def _check_drafts(wish: Wish) -> None:
    """Raise ConfigError where an engine refuses what drafts by its settings alone."""
    check(
        EngineArgs(
            speculate=wish.speculate,
            speculative_config=wish.speculative_config,
            tensor_parallel_size=wish.ranks,
            pipeline_parallel_size=wish.stages,
        )
    )


def _settings(
    model: ModelConfig,
    scheme: Scheme,
    compute: Format,
    wish: Wish,
    context: int,
    head: PlannedHead | None,
) -> Iterator[Setting]:
    """Weights before caches: FP8 weights change more than an FP8 cache does (docs/numerics.md). None
    with weights that an engine refuses beside the head.
    """
    facts = (model, EngineArgs.block_size, compute, wish.state_every, context)
    drafts = 0
    if wish.device == "cpu" and model.generates:
        drafts = wish.drafts.most
    step = step_tokens(wish.device, model)
    caches = _caches(compute, scheme, wish, model)
    for form in _forms(model, scheme, compute, wish.device):
        head_bytes = _head_bytes(form, head)
        if head_bytes is None:
            continue
        rooms = _rooms(model, compute, form, wish, context)
        if head is not None:
            rooms = rooms.with_head(head_bytes, len(head.mixers))
        for cache in caches:
            alone = cache_spec(cache.kv, *facts, wish.ranks, drafts)
            spec = alone
            whole = cache_spec(cache.kv, *facts, drafts=drafts)
            if head is not None:
                spec = head.beside(alone, cache.kv, compute, wish.ranks)
                whole = head.beside(whole, cache.kv, compute)
            setting = _setting(form, cache, rooms, spec, stored_tokens(whole), wish, context, step)
            of_head = spec.bytes_per_token - alone.bytes_per_token
            yield replace(setting, head_bytes_per_token=of_head)


def _head_bytes(form: Form, head: PlannedHead | None) -> int | None:
    """Return what a head takes beside such weights; None where an engine refuses it."""
    if head is None:
        return 0
    quantization = form.options[1] if form.options else None
    return head.num_bytes(Matrices(form.format, form.linear_of, quantization))


@dataclass(frozen=True)
class Rooms:
    """The devices of a rank, by name: the layers of each and its weights; `memory` of each, in bytes,
    and the `share` of what the weights leave that the cache gets.
    """

    layers: Mapping[str, Collection[int]]
    loaded: Mapping[str, LoadedBytes]
    memory: int
    share: float

    @property
    def weights(self) -> LoadedBytes:
        """Those of all devices."""
        total = LoadedBytes(0, 0, 0)
        for part in self.loaded.values():
            total += part
        return total

    @property
    def left(self) -> dict[str, int]:
        """Bytes that the weights of each device leave."""
        return {device: max(0, self.memory - part.total) for device, part in self.loaded.items()}

    def for_cache(self, spec: KVCacheSpec) -> int:
        """Bytes of the cache, as the engine takes them; 0 where the weights of a device do not fit."""
        if any(part.total > self.memory for part in self.loaded.values()):
            return 0
        shares = {device: int(left * self.share) for device, left in self.left.items()}
        return memory_over(spec, self.layers, shares)

    def needed(self, spec: KVCacheSpec, cache: int) -> int:
        """Return the least memory of all devices, each with as much, that has room for a cache of so many
        bytes.
        """
        parts = bytes_over(spec, self.layers, cache)
        of_each = [
            self.loaded[device].total + needed_for(part, self.share)
            for device, part in parts.items()
        ]
        return len(of_each) * max(of_each)

    def with_head(self, num_bytes: int, num_layers: int) -> Rooms:
        """Return the one device with what drafts, of so many bytes and layers in the cache."""
        ((device, layers),) = self.layers.items()
        loaded = replace(self.loaded[device], head=num_bytes)
        return replace(
            self, layers={device: range(len(layers) + num_layers)}, loaded={device: loaded}
        )

    def parts(self, spec: KVCacheSpec, cache: int) -> tuple[DevicePart, ...]:
        """Return what each of several devices has; () of one."""
        if len(self.layers) == 1:
            return ()
        parts = []
        for device, of_cache in bytes_over(spec, self.layers, cache).items():
            weights = self.loaded[device].total
            parts.append(DevicePart(len(self.layers[device]), weights, of_cache))
        return tuple(parts)


def _rooms(model: ModelConfig, compute: Format, form: Form, wish: Wish, context: int) -> Rooms:
    """Return the devices of a rank with these weights, divided as the engine divides them. Raises
    ConfigError as `stage_counts`.
    """
    sizing = (model, compute, form.format, form.linear_of, wish.layout)
    facts = (wish.device_memory, MEMORY_SHARE[wish.device])
    stages = {wish.device: range(model.num_layers)}
    if wish.stages > 1:
        counts = stage_counts(model, stage_costs(*sizing), wish.stages, wish.pp_layers)
        names = [f"{wish.device}:{index}" for index in range(wish.stages)]
        stages = {stage.device: stage.layers for stage in stages_of(counts, names)}
    if wish.devices == 1:
        whole = loaded_bytes(*sizing, context, wish.ranks)
        adapters = adapter_bytes(model, wish.lora, compute.bytes, wish.ranks)
        loaded = replace(whole, adapters=adapters)
        return Rooms({wish.device: range(model.num_layers)}, {wish.device: loaded}, *facts)
    costs = stage_costs(*sizing, wish.ranks)
    of_stage = {}
    for device, layers in stages.items():
        own = sum(costs.layers[layers.start : layers.stop])
        of_stage[device] = LoadedBytes(
            layers=own,
            embeddings=costs.of(layers) - own,
            tables=table_bytes(model, layers, context),
            adapters=adapter_bytes(model, wish.lora, compute.bytes, wish.ranks, layers),
        )
    return Rooms(stages, of_stage, *facts)


@dataclass(frozen=True)
class Form:
    """Weights: their name, what those in 8 bits are in, the scheme of each matrix, and the options."""

    name: str
    format: Format
    linear_of: LinearOf
    options: tuple[str, ...] = ()
    in_four_bits: bool = False  # some are


def _forms(model: ModelConfig, scheme: Scheme, compute: Format, device: str) -> Iterator[Form]:
    """Yield those of the checkpoint, or what the engine makes of 16 bits, the fewest bytes last but
    for INT8: with a number more for each row than FP8, it is there to be seen and never the choice.
    Raises ConfigError for weights that the device does not compute with.
    """
    fp8 = Format.E4M3FN
    flag = f"--device {device}"
    check_stored_weights(model, scheme)
    if device != "cpu" and scheme.four_bits - {Packing.MXFP4}:
        raise no_four_bit_weights(flag)
    if scheme.weight_format is Format.INT8:
        check_int8(model, device, flag, "auto")
        yield Form(scheme.weight_formats, Format.INT8, scheme.linear)
        return
    if scheme.weight_format is not None:
        yield Form(scheme.weight_formats, fp8, scheme.linear, in_four_bits=scheme.has_four_bits)
        return
    if scheme.blocks and device == "cpu":
        yield Form(scheme.block_formats, compute, scheme.linear, in_four_bits=True)
        return
    yield Form(compute, compute, lambda _: None)
    if model.foreign is None or model.foreign.rounded:
        yield Form(fp8, fp8, online(model), ("--quantization", "fp8"))
    if model.foreign is None and device == "cpu":
        yield Form(Format.INT8, Format.INT8, online(model), ("--quantization", "int8"))
        yield Form("int4", fp8, int4_online, ("--quantization", "int4"), in_four_bits=True)


@dataclass(frozen=True)
class Cache:
    """A cache, and the options that give it."""

    kv: KVCacheConfig
    options: tuple[str, ...]


def _caches(compute: Format, scheme: Scheme, wish: Wish, model: ModelConfig) -> list[Cache]:
    """In order of preference, with the layers that stay unquantized in those of 8 bits. Raises
    ConfigError.
    """
    check_skipped(wish.skip_layers, "auto")
    skipped = skipped_layers(wish.skip_layers, model.paged, model.num_layers)
    stored = {index: mixer for index, mixer in model.paged.items() if index not in skipped}
    caches = []
    for cache in _formats(compute, scheme, wish.device, groups_fit(stored)):
        kv = cache.kv
        options = cache.options
        if skipped and kv.format is not compute:
            kv = kv.skipping(skipped, model.num_layers, compute)
            options += (FLAG, ",".join(wish.skip_layers))
        kv = with_state(kv, wish.state_dtype, compute, Format.E4M3FN, model)
        caches.append(Cache(kv, options))
    return caches


def _formats(compute: Format, scheme: Scheme, device: str, groups: bool) -> Iterator[Cache]:
    """16 bits, then FP8, scales that are measured per group of a latent (`groups`) or token before
    static ones.

    INT8 and E5M2 take the bytes of what stands before them, so they are there to be seen and are
    never the choice.
    """

    def cache(
        kv: tuple[Format, Granularity | None, ScaleSource | None], dtype: str, scales: str = ""
    ) -> Cache:
        options = ("--kv-scales", scales) if scales else ()
        return Cache(KVCacheConfig(*kv, None), ("--kv-cache-dtype", dtype, *options))

    e4m3 = Format.E4M3FN
    static = Granularity.TENSOR  # scales per head or channel take no more memory that grows
    finest = Granularity.TOKEN
    yield cache((compute, None, None), str(compute))
    if groups and device == "cpu":
        finest = Granularity.GROUP
        yield cache((e4m3, finest, ScaleSource.DYNAMIC), "fp8", "group")
    yield cache((e4m3, Granularity.TOKEN, ScaleSource.DYNAMIC), "fp8", "dynamic")
    if device == "cpu":
        yield cache((Format.INT8, finest, ScaleSource.DYNAMIC), "int8")
    source = ScaleSource.CALIBRATED
    scales = "checkpoint"
    if scheme.kv_static:
        source = ScaleSource.CHECKPOINT
    elif scheme.is_final:  # `freight quantize` does not take it
        source = ScaleSource.FILE
        scales = "scales.json"
    yield cache((e4m3, static, source), "fp8", scales)
    yield cache((Format.E5M2, static, ScaleSource.UNIT), "fp8_e5m2", "unit")


def _setting(
    form: Form,
    cache: Cache,
    rooms: Rooms,
    spec: KVCacheSpec,
    stored: int,
    wish: Wish,
    context: int,
    step: int,
) -> Setting:
    size = rooms.for_cache(spec)
    longest = min(context, longest_request(spec, size, context, step))
    requests = 0
    tokens = longest
    num_blocks: tuple[int, ...] = ()
    if longest == context:
        requests = requests_in(spec, size, context, step)
    # the model's own context is lowered to fit
    if longest == context or (wish.context is None and longest > 0):
        num_blocks = split_memory(spec, size, longest, wish.max_num_seqs, step)
        tokens = spec.capacity_tokens(num_blocks)
    needed = rooms.needed(spec, held_memory(spec, context, wish.num_requests, step))
    return Setting(
        weights=form.name,
        in_four_bits=form.in_four_bits,
        kv=cache.kv,
        options=form.options + cache.options,
        loaded=rooms.weights,
        cache_bytes=size,
        devices=rooms.parts(spec, size),
        rest_bytes=sum(rooms.left.values()) - size,
        spec=spec,
        stored_tokens=stored,
        num_blocks=num_blocks,
        capacity_tokens=tokens,
        longest=longest,
        step_tokens=step,
        requests=requests,
        needed_bytes=needed * wish.ranks,
    )


def requests_in(spec: KVCacheSpec, memory: int, context: int, step_tokens: int) -> int:
    """Count how many requests of `context` tokens `memory` bytes hold at once, if the cache is
    split for so many.
    """
    least = spec.bytes_of(tuple(group.most_blocks(context, 1) for group in spec.groups))
    counts = range(1, memory // least + 1)
    return bisect_right(
        counts, memory, key=lambda count: held_memory(spec, context, count, step_tokens)
    )


def longest_of(plan: Plan, setting: Setting) -> int:
    """Return tokens of the longest context of which the wished number of requests fits at once, in
    whole blocks.
    """
    spec = setting.spec
    limit = plan.context - spec.block_size + 1  # whose next multiple is within the context
    requests = plan.wish.num_requests
    return longest_request(spec, setting.cache_bytes, limit, setting.step_tokens, requests)


def needed_for(cache: int, share: float) -> int:
    """Return the least memory without the weights of which `share` is `cache` bytes or more."""
    needed = max(0, int(cache / share) - 2)  # a division may round either way
    while int(needed * share) < cache:
        needed += 1
    return needed


def size(count: int, up: bool = False) -> str:
    """'24.0 GiB', rounded up if `up`, so that it is enough."""
    units = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    unit, name = next((pair for pair in units if count >= pair[0]), units[-1])
    tenths = -(-count * 10 // unit) if up else round(count * 10 / unit)
    return f"{tenths / 10:,.1f} {name}"


def asked(wish: Wish, context: int) -> str:
    return f"{plural(wish.num_requests, 'request')} of {context:,} tokens"


def verdict(plan: Plan) -> str:
    """Write one sentence: which setting to take, or what would serve the wish."""
    wish = plan.wish
    if plan.choice is None:
        return _without_choice(plan)
    setting = plan.settings[plan.choice]
    options = list(setting.options)
    if wish.lora is not None:
        options.append(
            f"--enable-lora --max-loras {wish.lora.num_slots} --max-lora-rank {wish.lora.max_rank}"
        )
    for flag, value, default in (
        ("--speculate", wish.speculate, None),
        ("--speculative-config", _quoted(wish.speculative_config), None),
        ("--max-model-len", plan.context, None),
        ("--kv-cache-memory", setting.cache_bytes * wish.ranks, None),
        ("--tensor-parallel-size", wish.ranks, 1),
        ("--pipeline-parallel-size", wish.stages, 1),
        ("--pp-layers", wish.pp_layers, None),
        ("--max-num-seqs", wish.concurrency, None),
        ("--state-every", wish.state_every, None),
        ("--state-dtype", wish.state_dtype, "auto"),
    ):
        if value != default:
            options.append(f"{flag} {value}")
    line = (
        f"Take {setting.weights} weights and a cache in {setting.cache_name}{_scales(plan, setting)} "
        f"({' '.join(options)}): {plural(setting.requests, 'request')} of {plan.context:,} tokens fit at once"
    )
    if plan.choice:
        return f"{line}, and no setting listed before it serves {wish.num_requests:,}."
    return f"{line}."


def _quoted(config: str | None) -> str | None:
    return None if config is None else shlex.quote(config)


def _scales(plan: Plan, setting: Setting) -> str:
    """Say how static scales are made, where they are not there yet."""
    if setting.kv.scale_source is ScaleSource.FILE:
        return f", whose scales are measured on BASE, the 16-bit model of these weights ({BASE_SCALES}),"
    if setting.kv.scale_source is not ScaleSource.CALIBRATED:
        return ""
    weights = ""
    # what it writes has FP8 weights unless told otherwise, and those become nothing else
    if setting.weights == plan.dtype or setting.options[1:2] in (("int8",), ("int4",)):
        weights = " --weights none"
    return f", whose scales freight quantize{weights} --kv-cache fp8 measures,"


def named_setting(plan: Plan) -> Setting:
    """Return the setting that the verdict names: the choice, or else the one that needs the least."""
    if plan.choice is not None:
        return plan.settings[plan.choice]
    return min(plan.settings, key=lambda setting: setting.needed_bytes)


def _without_choice(plan: Plan) -> str:
    memory = size(plan.wish.memory)
    setting = named_setting(plan)
    line = (
        f"No setting serves {asked(plan.wish, plan.context)} in {memory}: {setting.weights} weights and a cache in "
        f"{setting.cache_name} need the least, {size(setting.needed_bytes, up=True)}"
    )
    length = longest_of(plan, setting)
    instead = []
    if setting.requests:
        instead.append(f"{plural(setting.requests, 'request')} of that context")
    if length:
        instead.append(f"{plural(plan.wish.num_requests, 'request')} of {length:,} tokens")
    if instead:
        line += f"; in {memory} they serve {' or '.join(instead)}"
    return f"{line}."


def stored_tokens(spec: KVCacheSpec) -> int:
    """Return the tokens of which a GiB of --kv-store holds all blocks, with their token ids and
    entries of the index.
    """
    per_token = 0.0
    for group in spec.groups:
        per_token += (group.bytes_per_block + ENTRY_BYTES) / group.tokens_per_block + TOKEN_BYTES
    return int(GIB / per_token)


def as_json(plan: Plan) -> JsonObject:
    """Return the object of `freight plan --json`, without the model's name."""
    ranks = {"ranks": plan.wish.ranks} if plan.wish.ranks > 1 else {}
    stages = {"stages": plan.wish.stages} if plan.wish.stages > 1 else {}
    return {
        "runs": "through transformers" if plan.through_transformers else "natively",
        "device": plan.wish.device,
        "memory": plan.wish.memory,
        **ranks,
        **stages,
        **as_object(plan, _PLAN),
        **({} if plan.head is None else {"head": plan.head.as_json()}),
        "settings": list(map(_setting_json, plan.settings)),
        "choice": plan.choice,
        "verdict": verdict(plan),
    }


_PLAN = {
    "context": "context",
    "dtype": "dtype",
    "dtype_source": "dtype_source",
    "concurrency": "wish.concurrency",
}
_SETTING = {
    "options": "options",
    "weight_bytes": "loaded.layers",
    "embedding_bytes": "loaded.embeddings",
    "rotary_table_bytes": "loaded.tables",
    "adapter_bytes": "loaded.adapters",
    "head_bytes": "loaded.head",
    "kv_cache_bytes": "cache_bytes",
    "rest_bytes": "rest_bytes",
    "needed_bytes": "needed_bytes",
    "bytes_per_token": "spec.bytes_per_token",
    "head_bytes_per_token": "head_bytes_per_token",
    "bytes_per_state": "spec.bytes_per_state",
    "state_dtype": "spec.state_format",
    "block_size": "spec.block_size",
    "stored_tokens_per_gib": "stored_tokens",
}
_DEVICE = {
    "layers": "layers",
    "weight_bytes": "weight_bytes",
    "kv_cache_bytes": "cache_bytes",
}
_FITS = {
    "capacity_tokens": "capacity_tokens",
    "longest_request": "longest",
    "requests": "requests",
}


def _setting_json(setting: Setting) -> JsonObject:
    names = setting.kv.names()
    layers = setting.kv.layer_names()
    groups = []
    for index, group in enumerate(setting.spec.groups):
        blocks = setting.num_blocks[index] if setting.num_blocks else 0
        size = {"bytes_per_block": group.bytes_per_block, "blocks": blocks}
        groups.append({"layers": len(group.layers), **group.facts(), **size})
    devices = [as_object(part, _DEVICE) for part in setting.devices]
    return {
        "weight_dtype": setting.weights,
        "kv_cache_dtype": names["dtype"],
        "granularity": names["granularity"],
        "scale_source": names["scale_source"],
        **({"layers": layers} if layers else {}),
        **as_object(setting, _SETTING),
        **({"devices": devices} if devices else {}),
        "groups": groups,
        **as_object(setting, _FITS),
    }
