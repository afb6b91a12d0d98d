"""EngineArgs -> Engine, in the order that refuses early: names, headers, configuration, tokenizer;
then weights.

Nothing of the weights is read before every setting has been decided and every scale checked.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.base.json_schema import Json
from freight.base.version import version
from freight.cache.arena import Arena
from freight.cache.events import CacheEvents
from freight.cache.manager import CacheManager
from freight.cache.pool import KVPool, allocate_pool
from freight.cache.sizing import (
    MEMORY_SHARE,
    bytes_of_request,
    bytes_over,
    longest_request,
    memory_over,
    split_memory,
    useful_memory,
)
from freight.cache.spec import KVCacheSpec
from freight.checkpoint.adapter import adapter_folder, has_folder
from freight.checkpoint.lora import AdapterModules, LoraAdapter
from freight.engine.adapters import AdapterSlots
from freight.engine.decode_steps import Capture, DecodeSteps
from freight.engine.drafting import Drafting
from freight.engine.engine import CLOSE_SECONDS, Engine
from freight.engine.fingerprint import fingerprint, is_reproducible
from freight.engine.graphs import CudaGraphs
from freight.engine.heads import (
    OpenHead,
    drafting,
    head_runner,
    kv_with_head,
    open_head,
    with_head,
)
from freight.engine.intake import Intake
from freight.engine.leader import Leader, opened_as
from freight.engine.least_bytes import least_weight_bytes
from freight.engine.pace import Pace
from freight.engine.rank_check import rank_check
from freight.engine.recordings import CpuRecordings
from freight.engine.runner import ModelRunner
from freight.engine.scheduler import Scheduler
from freight.engine.step import Mode
from freight.engine.store import Weights, open_store, prepare_store
from freight.engine.transports import log_transport, obstacle_to_pushing, slot_bytes
from freight.errors import CapacityError, CheckpointError, ConfigError, shown
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.model.adapted import adapter_bytes
from freight.model.adapter_modules import adapter_modules
from freight.model.adapters import AdapterBanks
from freight.model.decoder import Decoder, LanguageModel
from freight.model.draft_head import DraftHead
from freight.model.open import OpenModel
from freight.model.shares import share_of
from freight.operands.tiles import STATE_TILE
from freight.parallel.join import Meeting
from freight.parallel.places import Place, places
from freight.parallel.push import Pushed
from freight.parallel.ranks import Ranks
from freight.parallel.stages import layers_by_device
from freight.settings.device import DeviceFacts, free_bytes, numa_nodes, probe
from freight.settings.engine import TRITON, EngineArgs, EngineConfig, listed_layers
from freight.settings.lora import named_adapters
from freight.settings.sparse import KERNELS as SPARSE_KERNELS
from freight.settings.speculation import obstacle_to_drafts
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")

_FEWER_ADAPTERS = "free memory first, or lower --max-loras or --max-lora-rank"

BeforeWeights = Callable[[Intake], object]  # refuses, by raising, what the model could not serve


def start_engine(
    opened: OpenModel,
    before_weights: BeforeWeights | None = None,
    decoder: LanguageModel | None = None,
    tells_cache: bool = False,
) -> tuple[Engine, EngineConfig]:
    """Make an opened model ready to serve.

    `before_weights` is called once all is known but the weights. `decoder` are weights that are
    loaded already, of this model with options that differ in the cache alone. `tells_cache`: collect
    what the cache gains and loses.

    Raises what `before_weights` raises, and ConfigError, CheckpointError or CapacityError, before
    weights are read wherever that is decidable.
    """
    _warn_of_stages(opened)
    if opened.args.tensor_parallel_size == 1:
        return _start(opened, before_weights, decoder, None, tells_cache)
    assert decoder is None
    opened, leader, where = _lead(opened)
    try:
        return _start(opened, before_weights, None, _Led(leader, where), tells_cache)
    except BaseException:
        leader.close("rank 0 could not start; its log says why")
        raise


def _warn_of_stages(opened: OpenModel) -> None:
    """Say where stages gain nothing."""
    size = opened.args.pipeline_parallel_size
    if size > 1 and opened.device.kind == "cpu":
        logger.warning(
            "%d stages: on a CPU all of them are in one memory, where stages gain nothing; one does the same work",
            size,
        )


def planned(opened: OpenModel) -> EngineConfig:
    """Return the settings of an engine whose memory for the cache is given, as they are known before
    weights are read. Raises ConfigError and CapacityError.
    """
    return _plan(opened).config


@dataclass(frozen=True)
class _Led:
    """The other ranks while they start, and the places of all."""

    leader: Leader
    places: Sequence[Place]

    def load(
        self, opened: OpenModel, config: EngineConfig, positions: int, head: OpenHead | None
    ) -> None:
        """Start them, and have them read their weights. `config`: as rank 0 loads it. head: what drafts."""
        as_opened = opened.resolve(opened.args)
        kernels = opened.kernels(as_opened)
        if not isinstance(kernels, CpuKernels) and kernels.name != "triton":
            raise ConfigError(
                f"--tensor-parallel-size {opened.ranks.size}: ranks compute with compiled kernels, which cannot run "
                f"here: {kernels.note}"
            )
        of_model = fingerprint(opened, as_opened, kernels, version())
        identity = opened_as(of_model, kernels.name, head)
        self.leader.start(opened.args, opened.random_shape, self.places, identity)
        self.leader.load(config.max_model_len, positions)


def _lead(opened: OpenModel) -> tuple[OpenModel, Leader, Sequence[Place]]:
    """Return the model as rank 0 has it, the other ranks, which are not started yet, and the places
    of all. Raises ConfigError for a model that cannot be divided so.
    """
    args = opened.args
    nodes = numa_nodes()
    size = args.tensor_parallel_size
    nodes_of_all = args.nnodes
    if args.node_rank:
        raise ConfigError(
            f"--node-rank {args.node_rank}: an engine is on machine 0; run freight serve with this option instead"
        )
    config = opened.resolve(args)  # refuses before a process is bound
    share_of(opened.model, 0, size)
    backend = _backend(config)
    if config.device != "cpu":
        nodes = ()  # which of them is near a GPU is not known here
        torch.cuda.set_device(0)
        several = "" if nodes_of_all == 1 else ", nor on GPUs of several machines"
        logger.warning(
            "%d ranks, each on a GPU of its own: Freight has not been run on two GPUs yet%s; compare with one before "
            "you rely on it",
            size,
            several,
        )
    where = places(size // nodes_of_all, args.rank_cpus, nodes, opened.device.cores)
    if backend is None and len(nodes) < 2 and size > nodes_of_all:
        logger.warning(
            "%d ranks: this machine has one memory node, on which ranks gain nothing; one rank with all threads does "
            "the same work and never waits",
            size,
        )
    meeting = None
    if nodes_of_all > 1:
        logger.warning(
            "ranks of %d machines talk without encryption and without a password: keep %s within a network of your own",
            nodes_of_all,
            args.master_addr,
        )
        meeting = Meeting(args)
    maps_pages = args.kv_store is not None
    pushed = 0
    if not obstacle_to_pushing(args, config):
        pushed = slot_bytes(opened.model, config, size)
    leader = Leader(size, args.rank_timeout, maps_pages, meeting, nodes_of_all, backend, pushed)
    leader.take(where[0])
    return opened.as_rank(Ranks(0, size, leader.memory), where[0].cores), leader, where


def _backend(config: EngineConfig) -> str | None:
    """Return the backend of torch.distributed over which ranks gather; None: the compiled kernels for
    CPUs do without.
    """
    if config.device != "cpu":
        return "nccl"  # RCCL as well
    if config.kernels == TRITON:
        return "gloo"
    return None


@dataclass(frozen=True)
class _Plan:
    """What is decided before weights are read.

    config     of this rank; where memory for the cache is given, its context fits into that
    spec       of the cache
    free       bytes that there are for the cache of this rank, less what weights take where they are
               not known
    positions  tokens of the longest context that fits into `free`
    asked      tokens of the context that the settings give
    head       what drafts; None: nothing but the text of requests
    """

    opened: OpenModel
    config: EngineConfig
    spec: KVCacheSpec
    free: int
    positions: int
    asked: int
    head: OpenHead | None


@dataclass(frozen=True)
class _Ready:
    """What is known once weights are read, from which all parts of an engine are made.

    config      as the engine has it: with the context that fits, and the drafts that it makes
    num_blocks  of the cache, by group
    weights     the files that `model` was read from, if a store needs them
    head        what drafts, opened and loaded; None: nothing but the text of requests
    """

    opened: OpenModel
    config: EngineConfig
    spec: KVCacheSpec
    num_blocks: tuple[int, ...]
    model: LanguageModel
    kernels: KernelSet
    weights: Weights | None
    head: tuple[OpenHead, DraftHead] | None


def _start(
    opened: OpenModel,
    before_weights: BeforeWeights | None,
    decoder: LanguageModel | None,
    led: _Led | None,
    tells_cache: bool,
) -> tuple[Engine, EngineConfig]:
    """`start_engine` of rank 0, or of one rank alone (`led` None)."""
    plan = _plan(opened)
    if tells_cache:
        _check_tells_cache(plan)
    tokenizer = opened.load_tokenizer()
    opened.log_stops()
    if before_weights is not None:
        before_weights(_intake(opened, tokenizer, plan.config.max_model_len))
    _check_adapters(opened, plan.config)
    of_head = None
    if plan.head is not None:
        of_head = plan.head.checkpoint
    weights = prepare_store(opened, plan.config, of_head)  # before any rank reads weights
    if led is not None:
        led.load(opened, plan.config, plan.positions, plan.head)
    model = decoder
    if model is None:
        model = opened.load(plan.config, plan.positions)
    head = None
    if plan.head is not None:
        head = plan.head, plan.head.load(model)
    elsewhere = None
    if led is not None:
        elsewhere = led.leader.wait_loaded()
    ready = _ready(plan, model, weights, elsewhere, head)
    pool, memories = _allocate(ready, led)
    logger.info("%s", describe_cache(pool, ready.config, opened.ranks.size))
    less_bias = _of_model(pool, ready).less_bias(ready.config.kv)
    if less_bias:
        logger.info(
            "keys are stored without the bias of their projection, which is large, in %s",
            listed_layers(less_bias, opened.model.num_layers),
        )
    if ready.config.fp8_attention:
        logger.info("attention: products in FP8")
    intake = _intake(opened, tokenizer, ready.config.max_model_len)
    engine = _assemble(ready, intake, pool, memories, led)
    if tells_cache:
        engine.cache.collect_events(CacheEvents())
    return engine, ready.config


def _check_tells_cache(plan: _Plan) -> None:
    """Raise ConfigError for a model of whose cache nothing could be told."""
    if not plan.config.enable_prefix_caching:
        raise ConfigError(
            "--kv-events-config tells which prefixes are cached, and this engine caches none; leave it out"
        )
    if not any(group.keeps_all for group in plan.spec.groups):
        raise ConfigError(
            "--kv-events-config tells of the layers that keep all blocks of a sequence, and this model has none; leave "
            "it out"
        )


def _intake(opened: OpenModel, tokenizer: Tokenizer | None, max_model_len: int) -> Intake:
    model = opened.model
    return Intake(
        tokenizer,
        model.vocab_size,
        max_model_len,
        model.pooling,
        model.generates,
        priorities=opened.args.has_priorities,
    )


def _plan(opened: OpenModel) -> _Plan:
    """Decide all that can be decided without weights. Raises CapacityError for what cannot fit."""
    args = opened.args
    size = opened.ranks.size
    resolved = opened.resolve(args)
    asked = resolved.max_model_len
    dense = opened.model.dense_limit
    if args.max_model_len is None and asked == dense:
        logger.info(
            "context limited to the %d tokens of index_topk, up to which attention is not sparse; for longer ones give "
            "--max-model-len and --kernels reference, which is slow",
            dense,
        )
    if opened.model.is_sparse:
        assert resolved.kernels == SPARSE_KERNELS, "refused by name in settings.sparse"
        logger.info(
            "attention is sparse in contexts of more than index_topk tokens, with slow kernels"
        )
    spec = opened.cache_spec(resolved)
    head = opened_head(opened, resolved, spec)
    spec = with_head(spec, head, resolved.compute_format, size)
    _check_stages(opened, resolved)
    if resolved.kv_cache_memory is None:
        free = share_for_cache(opened, resolved, spec)
        # the weights will leave room for no more
        positions = _fitting_context(spec, free, resolved, args)
        return _Plan(opened, resolved, spec, free, positions, asked, head)
    memory = resolved.kv_cache_memory // size  # that is of all ranks together
    weight_bytes = least_weight_bytes(opened, resolved) // size
    if head is not None:
        weight_bytes += head.least_bytes // size
    _check_memory(memory, weight_bytes, _adapter_bytes(opened, resolved), opened.device, size)
    context = _fitting_context(spec, memory, resolved, args)
    _check_stages(opened, resolved, spec, memory)
    config = replace(resolved, kv_cache_memory=memory, max_model_len=context)
    return _Plan(opened, config, spec, memory, context, asked, head)


def opened_head(opened: OpenModel, config: EngineConfig, spec: KVCacheSpec) -> OpenHead | None:
    """Open what drafts besides the text of requests; None for nothing. Raises ConfigError where something
    else is asked for and cannot.
    """
    drafts = config.drafts
    if config.most_drafts == 0 or not (drafts.head or drafts.finds_head):
        return None
    if not opened.model.generates:
        return None
    is_foreign = opened.model.foreign is not None
    obstacle = _obstacle_to_drafts(config, is_foreign, exact=True)
    if obstacle and drafts.head is not None:
        raise ConfigError(f"--speculative-config: there are no drafts here: {obstacle}; omit it")
    if obstacle:
        return None
    return open_head(opened, config, spec)


def _ready(
    plan: _Plan,
    model: LanguageModel,
    weights: Weights | None,
    elsewhere: int | None,
    head: tuple[OpenHead, DraftHead] | None,
) -> _Ready:
    """Divide the memory that is left now, and decide what depends on `model`. elsewhere: bytes that
    every other rank has, if that is memory of its own.
    """
    opened = plan.opened
    config = plan.config
    spec = plan.spec
    memory = plan.free
    context = config.max_model_len
    max_num_seqs = config.max_num_seqs
    step_tokens = config.max_num_batched_tokens
    if config.kv_cache_memory is None:
        useful = useful_memory(spec, context, max_num_seqs, step_tokens)
        memory = min(share_for_cache(opened, config, spec), plan.free, useful)
        if elsewhere is not None:
            memory = min(memory, elsewhere)
        context = _fitting_context(spec, memory, config, opened.args)
    if context < plan.asked:
        logger.info("context limited to the %d tokens that the KV cache holds", context)
    kernels = opened.kernels(config)
    exact = opened.args.asks_for_drafts or is_reproducible(opened, kernels)
    most_drafts = _most_drafts(config, model, exact)
    return _Ready(
        opened=opened,
        config=replace(config, max_model_len=context, most_drafts=most_drafts),
        spec=spec,
        num_blocks=split_memory(spec, memory, context, max_num_seqs, step_tokens),
        model=model,
        kernels=kernels,
        weights=weights,
        head=head if most_drafts else None,
    )


def _allocate(ready: _Ready, led: _Led | None) -> tuple[KVPool, tuple[Tensor, ...]]:
    """Return the cache of this rank, and the memory of the others' if a store has to reach it."""
    config = ready.config
    rotaries = ready.model.rotaries
    if ready.head is not None:
        rotaries += ready.head[1].rotaries
    empty = None
    num_bytes = Arena.bytes_for(ready.spec, ready.num_blocks)
    if led is not None and config.store is not None:  # it finds the others' pages as these lie
        empty = Arena(torch.empty(num_bytes, dtype=torch.uint8, device="cpu")).empty
    pool = allocate_pool(
        spec=ready.spec,
        kv=kv_with_head(ready.opened.with_rank_scales(config).kv, len(ready.spec.layers)),
        num_blocks=ready.num_blocks,
        kernels=ready.kernels,
        device=config.device,
        rotaries=rotaries,
        empty=empty,
        stages=ready.model.stages,
    )
    memories: tuple[Tensor, ...] = ()
    if led is not None:
        check = rank_check(ready.opened, config)
        memories = led.leader.allocate(config.max_model_len, ready.num_blocks, num_bytes, check)
        if config.device != "cpu":
            log_transport(led.leader.memory, obstacle_to_pushing(ready.opened.args, config))
    return pool, memories


def _of_model(pool: KVPool, ready: _Ready) -> KVPool:
    """Return the pool with the layers of the model alone, without a head's."""
    return pool.of_layers(range(ready.opened.model.num_layers))


def _assemble(
    ready: _Ready, intake: Intake, pool: KVPool, memories: tuple[Tensor, ...], led: _Led | None
) -> Engine:
    """Make the engine of its parts; `memories` are the caches of the other ranks."""
    opened = ready.opened
    config = ready.config
    step_tokens = config.max_num_batched_tokens
    cache = CacheManager(
        groups=ready.spec.groups,
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        step_tokens=step_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    store = None
    if ready.weights is not None:
        store = open_store(
            opened,
            config,
            ready.kernels,
            version(),
            ready.weights,
            cache,
            pool,
            memories,
            () if ready.head is None else ready.head[0].mixers,
        )
    scheduler = Scheduler(
        cache=cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=config.max_model_len,
        most_drafts=config.most_drafts,
        store=store,
        whole_prompts=opened.model.attends_both_ways,
        num_microbatches=_num_microbatches(config, ready),
        draft_tile=None if ready.spec.repeatable else STATE_TILE,
    )
    own_pool = _of_model(pool, ready).counting_drafts(config.most_drafts)
    feature_layers = None
    if ready.head is not None:
        feature_layers = ready.head[1].feature_layers
    captured = captured_steps(ready.model, own_pool, ready.kernels, config, feature_layers)
    leader = None
    if led is not None:
        leader = led.leader
    runner = ModelRunner(ready.model, own_pool, config.device, captured, leader, feature_layers)
    pace = None
    if config.max_step_seconds:
        pace = Pace(config.max_step_seconds, step_tokens)
    slots = None
    if config.lora is not None:
        slots = adapter_slots(ready.model, opened, leader)
    engine = Engine(
        runner=runner,
        cache=cache,
        scheduler=scheduler,
        intake=intake,
        stop_token_ids=opened.stop_token_ids(),
        seed=config.seed,
        threads=opened.threads(config),
        mode=_mode(config, ready.spec),
        pace=pace,
        store=store,
        reproducible=is_reproducible(opened, ready.kernels),
        adapter_slots=slots,
        drafting=_drafting(ready, pool, leader),
        drafts_from_text=config.drafts.from_text,
    )
    for adapter in named_adapters(opened.args.lora_modules):
        engine.adapters.load(adapter.name, adapter.path)
    if store is not None:  # for callers that never close it; a second time does nothing
        weakref.finalize(engine, store.close, CLOSE_SECONDS)
    return engine


def _drafting(ready: _Ready, pool: KVPool, leader: Leader | None) -> Drafting | None:
    """Return what drafts besides the text of requests; None for nothing."""
    if ready.head is None:
        return None
    opened, head = ready.head
    layers = range(ready.opened.model.num_layers, len(pool.layers))
    own = pool.of_layers(layers)
    runner = head_runner(head, own, ready.kernels, ready.config, leader)
    return drafting(runner, opened, ready.model, ready.kernels, ready.config)


@dataclass(frozen=True)
class _Slots:
    """The banks of a model on all ranks, as an `AdapterSlots`."""

    banks: AdapterBanks
    modules: AdapterModules
    leader: Leader | None

    @property
    def num_slots(self) -> int:
        return self.banks.num_slots

    def is_here(self, path: str) -> bool:
        return has_folder(path)

    def fetch(self, path: str) -> str:
        return str(adapter_folder(path))

    def open(self, path: str) -> _Opened:
        banks = self.banks
        return _Opened(self, _checked_adapter(path, self.modules, banks.max_rank, banks.dtype))


@dataclass(frozen=True)
class _Opened:
    """An adapter that `slots` have room for, as an `OpenedAdapter`."""

    slots: _Slots
    adapter: LoraAdapter

    @property
    def digest(self) -> str:
        return self.adapter.digest

    def load(self, slot: int) -> None:
        leader = self.slots.leader
        if leader is not None:
            leader.load_adapter(slot, self.adapter)
        self.slots.banks.load(slot, self.adapter)


def _checked_adapter(
    path: str, modules: AdapterModules, max_rank: int, dtype: torch.dtype
) -> LoraAdapter:
    """Open an adapter for a model that has `modules`, and check its values in `dtype`. Raises CheckpointError and
    ConfigError.
    """
    try:
        adapter = LoraAdapter.open(path, modules, max_rank)
        adapter.check_values(dtype)
    except OSError as error:  # a path that is too long, a disk that fails
        why = error.strerror or type(error).__name__
        raise CheckpointError(f"adapter {shown(path)} cannot be read: {why}") from error
    return adapter


def _check_adapters(opened: OpenModel, config: EngineConfig) -> None:
    """Refuse adapters that are loaded at start, before weights are read."""
    if config.lora is None:
        return
    modules = adapter_modules(opened.model)
    for named in named_adapters(opened.args.lora_modules):
        _checked_adapter(
            named.path, modules, config.lora.max_rank, torch_dtype(config.compute_format)
        )


def adapter_slots(model: LanguageModel, opened: OpenModel, leader: Leader | None) -> AdapterSlots:
    """Return where adapters of `model` are loaded, which was built with memory for them."""
    assert isinstance(model, Decoder)
    assert model.banks is not None
    return _Slots(model.banks, adapter_modules(opened.model), leader)


def captured_steps(
    decoder: LanguageModel,
    pool: KVPool,
    kernels: KernelSet,
    config: EngineConfig,
    feature_layers: tuple[int, ...] | None = None,
) -> DecodeSteps | None:
    """Return the decode steps of `decoder` over `pool`, to be captured as they are needed; None
    where kernels cannot be. Ranks have met.
    """
    # the reference asks lengths of the device while it runs, and cannot be captured
    capture: Capture | None = None
    if not isinstance(decoder, Decoder):
        logger.info("steps are not captured: the modules of transformers run as they are")
    elif kernels.name == "triton" and config.device != "cpu":
        transport = kernels.ranks.transport
        ranks = transport if isinstance(transport, Pushed) and transport.pushes else None
        if transport is not None and ranks is None:
            logger.info("steps are not captured: NCCL gathers")
            return None
        capture = CudaGraphs(decoder, pool, config.max_num_seqs, ranks)
    elif isinstance(kernels, CpuKernels):
        # each draft is a row of its own
        most_rows = max(config.max_num_seqs, 1 + config.most_drafts)
        capture = CpuRecordings(decoder, pool, kernels, most_rows, feature_layers)
    if capture is None:
        return None
    # sparse attention asks the device for the longest context of a step
    assert isinstance(decoder, Decoder)
    assert not decoder.config.is_sparse
    return DecodeSteps(capture, pool, config.max_model_len, config.device)


def _num_microbatches(config: EngineConfig, ready: _Ready) -> int:
    """Return how many steps are under way at once: one for each stage, where the host does not wait
    for a step.
    """
    if _mode(config, ready.spec) is not Mode.OVERLAPPED:
        return 1
    return max(1, len(ready.model.stages))


def _mode(config: EngineConfig, spec: KVCacheSpec) -> Mode:
    """Return the mode of an engine with this cache."""
    if not spec.repeatable:
        return Mode.ONCE
    if config.launches_ahead:
        return Mode.OVERLAPPED
    return Mode.REPEATABLE


def _most_drafts(config: EngineConfig, decoder: LanguageModel, exact: bool) -> int:
    """Return the most drafts of a step, and say so; 0 where drafts would not be exact, or gain
    nothing.

    exact: whether a row's bits depend on its own history alone, or the drafts were asked for
    """
    if not config.most_drafts:
        return 0
    if isinstance(decoder, Decoder) and not decoder.config.generates:
        return 0
    obstacle = _obstacle_to_drafts(config, not isinstance(decoder, Decoder), exact)
    if obstacle:
        logger.info("drafts: none, because %s", obstacle)
        return 0
    if config.drafts.from_text:
        logger.info("drafts: up to %d a step, from each request's own text", config.most_drafts)
    return config.most_drafts


def _obstacle_to_drafts(config: EngineConfig, is_foreign: bool, exact: bool) -> str:
    """Return why drafts would not be exact, or gain nothing; '' where they are."""
    obstacle = obstacle_to_drafts(is_foreign, config.launches_ahead)
    if not obstacle and not exact:
        return "the reference kernels may round a row differently beside others"
    return obstacle


def memory_for_cache(device: str) -> int:
    """Bytes that a cache would be given now on 'cpu' or 'cuda', if it could use them."""
    return int(probe(device).memory_free * MEMORY_SHARE[device])


def share_for_cache(opened: OpenModel, config: EngineConfig, spec: KVCacheSpec) -> int:
    """Bytes that the cache of this rank would be given now: of several GPUs, so many that each has
    memory for its layers.
    """
    stages = opened.stages(config)
    if stages and config.device != "cpu":
        layers = layers_by_device(stages)
        shares = {}
        for device, free in free_bytes(layers).items():
            shares[device] = int(free * MEMORY_SHARE[config.device])
        return memory_over(spec, layers, shares)
    share = memory_for_cache(config.device)
    if config.device == "cpu":  # one memory for all ranks of a machine
        share //= opened.ranks.size // opened.args.nnodes
    if config.device != "cpu":  # there the memory for adapters is not free any more
        return share
    adapters = int(_adapter_bytes(opened, config) * MEMORY_SHARE[config.device])
    if adapters and adapters >= share:
        free = int(share / MEMORY_SHARE[config.device])
        raise CapacityError(
            f"--max-loras and --max-lora-rank ask for {_adapter_bytes(opened, config):,} bytes, and {free:,} are free: "
            f"{_FEWER_ADAPTERS}"
        )
    return share - adapters


def _adapter_bytes(opened: OpenModel, config: EngineConfig) -> int:
    """Bytes of this rank's memory for adapters, which a CPU's system gives when it is first written."""
    width = config.compute_format.bytes
    return adapter_bytes(opened.model, config.lora, width, opened.ranks.size)


def _fitting_context(spec: KVCacheSpec, memory: int, config: EngineConfig, args: EngineArgs) -> int:
    """Return the longest context that fits into the cache: the model's own limit is lowered. Raises
    CapacityError for one that was asked for and does not fit.
    """
    step_tokens = config.max_num_batched_tokens
    tokens = longest_request(spec, memory, config.max_model_len, step_tokens)
    if tokens >= config.max_model_len:
        return config.max_model_len
    if args.max_model_len is not None or tokens == 0:
        ranks = args.tensor_parallel_size  # the option is for all of them together
        memory = memory * ranks
        of_token = spec.bytes_per_token * ranks
        needed = bytes_of_request(spec, config.max_model_len, step_tokens) * ranks
        plural = ""
        if memory != 1:
            plural = "s"
        raise CapacityError(
            f"a KV cache of {memory:,} byte{plural} holds {tokens} tokens of "
            f"{of_token} bytes, in blocks of {spec.block_size}; a context of {config.max_model_len} tokens "
            f"(--max-model-len) does not fit. "
            f"Raise --kv-cache-memory to {-(-needed // 2**20)}MiB, or shorten it"
        )
    return tokens


def _check_memory(asked: int, weights: int, adapters: int, device: DeviceFacts, ranks: int) -> None:
    """Pages are touched when they are first written, so a cache that is too large would end the
    process much later. Bytes are those of a rank, and in the error those of all.
    """
    if asked + weights + adapters <= device.memory_free:
        return
    asked *= ranks
    weights *= ranks
    adapters *= ranks
    free = device.memory_free * ranks
    left = (free - weights - adapters) // 2**20
    way_out = "free memory first"
    if left > 0:
        way_out = f"use at most {left}MiB, or omit it for a share of that"
    adapters_asked = ""
    if adapters:
        adapters_asked = f", adapters {adapters:,}"
        if left <= 0:
            way_out = _FEWER_ADAPTERS
    raise CapacityError(
        f"--kv-cache-memory asks for {asked:,} bytes and the weights need {weights:,}{adapters_asked}, but of the "
        f"{device.kind}'s memory {free:,} bytes are free; {way_out}"
    )


def _check_stages(
    opened: OpenModel, config: EngineConfig, spec: KVCacheSpec | None = None, memory: int = 0
) -> None:
    """Raise CapacityError where a GPU with a part of the layers lacks memory for their weights and
    adapters, and their part of a cache of `memory` bytes.
    """
    stages = opened.stages(config)
    if not stages or config.device == "cpu":
        return
    layers = layers_by_device(stages)
    weights = opened.stage_bytes(config)
    cache = dict.fromkeys(layers, 0)
    if spec is None:
        weights[stages[0].device] += opened.passing_bytes(config)
    else:
        cache = bytes_over(spec, layers, memory)
    width = config.compute_format.bytes
    for device, free in free_bytes(layers).items():
        adapters = adapter_bytes(
            opened.model, config.lora, width, opened.ranks.size, layers[device]
        )
        needed = weights[device] + adapters
        if needed + cache[device] > free:
            raise CapacityError(
                f"{device}: {len(layers[device])} layers need {needed:,} bytes for weights and adapters, and "
                f"{cache[device]:,} for their cache, and {free:,} are free; give it fewer layers (--pp-layers), more "
                "GPUs (--pipeline-parallel-size), or lower --kv-cache-memory"
            )


def _size(count: int) -> str:
    if count >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def describe_cache(pool: KVPool, config: EngineConfig, ranks: int = 1) -> str:
    """Return the line at start: format, granularity, source of the scales, what fits, and what
    another choice would take. Of several `ranks`, sizes are those of one.

    That is 16 bits where every group keeps all blocks, else groups that give no block back.
    """
    kv = config.kv
    spec = pool.spec
    scales = "none"
    if kv.granularity:
        scales = f"{kv.names()['granularity']}, {kv.scale_source}"
    note = ""
    if kv.note:
        note = f" ({kv.note})"
    of_rank = ""
    if ranks > 1:
        of_rank = f" of each of {ranks} ranks"
    line = f"KV cache{of_rank}: {kv.describe()}; scales: {scales}{note}; "
    if not all(group.keeps_all for group in spec.groups):
        return line + _describe_groups(pool, config)
    line += f"{pool.capacity_tokens:,} tokens fit in {_size(pool.num_bytes)}"
    if kv.format.is_quantized:
        line += f", {_tokens_at_16_bits(pool, config):,} would in {_sixteen_bits(config)}"
    return line


def cache_facts(pool: KVPool, config: EngineConfig, ranks: int = 1) -> dict[str, Json]:
    """Describe the cache in use, by the names every JSON of Freight uses.

    bytes_per_token and bytes_per_state are those of all `ranks`; `token` scales are included.
    tokens_at_16_bits is the capacity of a 16-bit cache in the same memory, with the same share of
    its blocks for windows. A cache whose layers differ also has `layers`, a list of {dtype,
    granularity}; where they differ in one of these, that is 'mixed' for the whole. One with
    recurrent states has their `state_dtype` and `bytes_per_state`, those of a sequence in all
    layers.
    """
    layers = config.kv.layer_names()
    facts: dict[str, Json] = {
        **config.kv.names(),
        "bytes_per_token": ranks * pool.spec.bytes_per_token,
        "num_blocks": pool.capacity_blocks,
        "block_size": pool.spec.block_size,
        "capacity_tokens": pool.capacity_tokens,
        "tokens_at_16_bits": _tokens_at_16_bits(pool, config),
    }
    if layers is not None:
        facts["layers"] = layers
    if pool.spec.state_format is not None:
        facts["state_dtype"] = pool.spec.state_format
        facts["bytes_per_state"] = ranks * pool.spec.bytes_per_state
    return facts


def _tokens_at_16_bits(pool: KVPool, config: EngineConfig) -> int:
    num_bytes = pool.spec.unquantized(_sixteen_bits(config)).bytes_of(pool.num_blocks)
    return pool.capacity_blocks * pool.num_bytes // num_bytes * pool.spec.block_size


def _sixteen_bits(config: EngineConfig) -> Format:
    if config.compute_format.bytes == 2:
        return config.compute_format
    return Format.BFLOAT16


def _layers(count: int) -> str:
    if count == 1:
        return "1 layer"
    return f"{count} layers"


def _describe_states(spec: KVCacheSpec) -> str:
    """'states: int8, rounded every 16 tokens; a sequence has 50.1 MiB, in float32 151.0 MiB; ', ''
    without any.
    """
    if spec.state_format is None:
        return ""
    line = f"states: {spec.state_format}"
    if spec.state_format is not Format.FLOAT32:
        line += f", rounded every {STATE_TILE} tokens"
    line += f"; a sequence has {_size(spec.bytes_per_state)}"
    if spec.bytes_per_state < spec.float32_bytes_per_state:
        line += f", in float32 {_size(spec.float32_bytes_per_state)}"
    return line + "; "


def _describe_groups(pool: KVPool, config: EngineConfig) -> str:
    spec = pool.spec
    length = config.max_model_len
    groups = []
    for group, count in zip(spec.groups, pool.num_blocks, strict=True):
        layers = _layers(len(group.layers))
        tokens = count * group.tokens_per_block
        size = _size(count * group.bytes_per_block)
        groups.append(f"{layers} {group.kind}: {count:,} blocks, {tokens:,} tokens, {size}")
    takes = bytes_of_request(spec, length, config.max_num_batched_tokens)
    line = f"{_size(pool.num_bytes)}; {'; '.join(groups)}; "
    line += f"{_describe_states(spec)}a request of {length:,} tokens takes {_size(takes)}"
    if not any(group.has_slots and not group.keeps_all for group in spec.groups):
        return line
    blocks = list(spec.blocks_of(length))
    for index, group in enumerate(spec.groups):
        if not group.has_slots:
            blocks[index] = group.most_blocks(length, config.max_num_batched_tokens)
    return f"{line}, and would take {_size(spec.bytes_of(tuple(blocks)))} if windows gave no blocks back"
