"""Options, model and device -> a frozen EngineConfig. Takes values only: reads no file of a model,
imports no torch.

Every contradiction between settings, or between a setting and the checkpoint, is an error that
names both sides and the way out. `KVCacheConfig.note` records choices that the options left open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import replace

from freight.base.fields import is_integer, is_number
from freight.base.options import choose
from freight.base.other_engines.values import OTHER_QUANTIZATIONS
from freight.errors import CheckpointError, ConfigError, choices
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.settings.cpu_builds import PREFIX, builds
from freight.settings.device import DEVICES, DeviceFacts, check_threads
from freight.settings.engine import TRITON, EngineArgs, EngineConfig, KVCacheConfig, LayerKVFormat
from freight.settings.hardware import (
    check_hardware,
    check_kernels,
    computing_kind,
    fp8_attention,
    int8_activations,
    interprets,
    no_int8_weights,
    takes_groups,
)
from freight.settings.kv_source import check_groups, check_kv_dtype, kv_source, require_fit
from freight.settings.lora import LoraConfig, lora_config
from freight.settings.nodes import check_nodes
from freight.settings.skip_layers import check_skipped, nothing_left, skipped_layers, unquantized
from freight.settings.speculation import speculation
from freight.settings.stages import check_stages
from freight.settings.states import check_states, with_state
from freight.settings.store import StoreConfig, store_config

DTYPES = {
    "half": Format.FLOAT16,
    "float": Format.FLOAT32,
    "bfloat16": Format.BFLOAT16,
    "float16": Format.FLOAT16,
    "float32": Format.FLOAT32,
}
QUANTIZATIONS = ("fp8", "int8", "int4")
KERNELS = ("auto", "reference", *(PREFIX + build for build in builds()))
KERNEL_FORMS = ("auto", "reference", f"{PREFIX}BUILD")  # for --help
ATTENTION_COMPUTES = ("auto", "fp8")
ACTIVATIONS = ("auto", "int8", "bfloat16")
POOLINGS = ("auto", "last", "mean", "cls", "none")
# most tokens per step: enough to keep the device busy, few enough to keep a step short
STEP_TOKENS = {"cpu": 512, "cuda": 8192}
SERVED_STEP_SECONDS = 0.5  # on a CPU: a pause between two tokens that a reader hardly notices
EXPERT_ROWS = 64  # for mixtures of experts on a CPU (`step_tokens`)
MOST_STEP_TOKENS = 2048
SCHEDULING_POLICIES = ("fcfs", "priority")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_UNITS = {  # of memory, in capitals
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}
MOST_RANK_TIMEOUT = 1_000_000  # seconds: nanoseconds of more than 292 years overflow
_WITHOUT_SCALES = (
    "use --kv-scales dynamic to measure scales as values are stored, or --kv-cache-dtype bfloat16 for a cache "
    "without scales"
)
_MAKE_SCALES = (
    "calibrate a checkpoint that has them (freight quantize MODEL OUT --kv-cache fp8 --calibration-data FILE), give a "
    "file (--kv-scales FILE.json), or use --kv-scales dynamic"
)
# Where the checkpoint is quantized already: what `freight quantize` takes is the model before that
BASE_SCALES = (
    "freight quantize BASE OUT --weights none --kv-cache fp8 --calibration-data FILE, then freight scales export OUT "
    "scales.json"
)
_MAKE_BASE_SCALES = (
    "use --kv-scales dynamic, or write scales into a copy (freight audit MODEL --data FILE --engine vllm --fix OUT; of "
    "GPTQ and AWQ with --engine tgi), or measure them on BASE, the 16-bit model that it was made from "
    f"({BASE_SCALES}), and give --kv-scales scales.json"
)


def check(args: EngineArgs) -> None:
    """Check all that the settings alone decide. Raises ConfigError. `resolve` calls it first."""
    choose("--dtype", args.dtype, ("auto", *DTYPES))
    check_kv_dtype(args.kv_cache_dtype)
    choose("--device", args.device, DEVICES)
    if args.kernels != TRITON or not interprets():
        choose("--kernels", args.kernels, KERNELS)
    choose("--attention-compute", args.attention_compute, ATTENTION_COMPUTES)
    choose("--activations", args.activations, ACTIVATIONS)
    choose("--pooling", args.pooling, POOLINGS)
    choose("--scheduling-policy", args.scheduling_policy, SCHEDULING_POLICIES)
    if args.quantization in OTHER_QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {args.quantization!r}: {OTHER_QUANTIZATIONS[args.quantization]}"
        )
    if args.quantization is not None:
        choose("--quantization", args.quantization, QUANTIZATIONS)
    for name, value, least, optional in (
        ("--max-num-seqs", args.max_num_seqs, 1, False),
        ("--max-num-batched-tokens", args.max_num_batched_tokens, 1, True),
        ("--max-model-len", args.max_model_len, 1, True),
        ("--threads", args.threads, 1, True),
        ("--tensor-parallel-size", args.tensor_parallel_size, 1, False),
        ("--seed", args.seed, 0, False),
    ):
        if value is None and optional:
            continue
        if not is_integer(value) or value < least:
            raise ConfigError(f"{name} {value!r} must be an integer ≥ {least}")
    for name, flag in (
        ("enable_prefix_caching", args.enable_prefix_caching),
        ("skip_tokenizer_init", args.skip_tokenizer_init),
        ("exact_products", args.exact_products),
        ("check_ranks", args.check_ranks),
        ("disable_custom_all_reduce", args.disable_custom_all_reduce),
    ):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} is {flag!r}; it must be True or False")
    _check_step_seconds(args.max_step_seconds)
    if not isinstance(args.block_size, int) or args.block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {args.block_size!r}: choose {choices(map(str, BLOCK_SIZES))} tokens"
        )
    check_states(args.state_every, args.state_dtype, args.block_size)
    parse_memory(args.kv_cache_memory)
    _check_head(args)
    store_config(args, parse_memory)
    lora_config(args)
    check_skipped(args.kv_cache_dtype_skip_layers, args.kv_cache_dtype)
    kv_source(args)
    check_hardware(args, DTYPES.get(args.dtype))
    _check_ranks(args)
    check_stages(args.pipeline_parallel_size, args.pp_layers)
    check_nodes(args)


def _weight_format(
    args: EngineArgs, model: ModelConfig, scheme: Scheme, compute: Format, device: DeviceFacts
) -> Format:
    """Return the format of the weights of Linear modules: that of the checkpoint, or the one they
    are rounded to. Raises ConfigError where it cannot be computed with.
    """
    if args.quantization == "int4":  # `rounds_to_int4` has checked it
        return device.native_e4m3
    kind = args.quantization
    if scheme.weight_format is not None:
        kind = "fp8"
        if scheme.weight_format is Format.INT8:
            kind = "int8"
        if args.quantization not in (None, kind) or (args.quantization and scheme.four_bits):
            raise ConfigError(
                f"--quantization {args.quantization}: the weights of this checkpoint are quantized already "
                f"({scheme.description}); omit it, or name the unquantized model"
            )
    if kind is None:
        return compute
    if kind == "fp8":
        return device.native_e4m3
    check_int8(model, computing_kind(device, args.kernels), device.name, args.kernels)
    return Format.INT8


def check_int8(model: ModelConfig, kind: str, device: str, kernels: str) -> None:
    """Raise ConfigError where weights in INT8 are not computed with: on a GPU, and by transformers.

    kind, device: 'cpu' or 'cuda', and its name; kernels: --kernels
    """
    _require_native(model, "INT8")
    if kind != "cpu" and kernels != "reference":
        raise no_int8_weights(device)


def check_stored_weights(model: ModelConfig, scheme: Scheme) -> None:
    """Raise ConfigError for a checkpoint in INT8 or 4 bits that would run through transformers'
    modules.
    """
    if scheme.four_bits:
        _require_native(model, "4 bits")
    if scheme.weight_format is Format.INT8:
        _require_native(model, "INT8")


def _require_native(model: ModelConfig, weights: str) -> None:
    if model.foreign is not None:
        raise ConfigError(
            f"weights in {weights} are implemented for Freight's own decoder, and model_type {model.model_type!r} runs "
            "through transformers' modules; use FP8 (--quantization fp8 with the unquantized model)"
        )


def _check_head(args: EngineArgs) -> None:
    """Raise ConfigError for drafts that cannot be read, a head beside several stages, and one for
    another number of ranks.
    """
    drafts = speculation(args.speculate, args.speculative_config)
    stages = args.pipeline_parallel_size
    if drafts.head is not None and stages > 1:
        raise ConfigError(
            f"--speculative-config: method {str(drafts.head.kind)!r} drafts in an engine of one stage, and "
            f"--pipeline-parallel-size is {stages}: drafts from the text of requests (--speculate) work there"
        )
    ranks = args.tensor_parallel_size
    if drafts.ranks not in (None, ranks):
        raise ConfigError(
            f"--speculative-config: 'draft_tensor_parallel_size' is {drafts.ranks}, and --tensor-parallel-size is "
            f"{ranks}: what drafts is divided as the model is; omit it"
        )


def _check_ranks(args: EngineArgs) -> None:
    size = args.tensor_parallel_size
    cpus = args.rank_cpus
    if not is_number(args.rank_timeout) or not 0 < args.rank_timeout <= MOST_RANK_TIMEOUT:
        raise ConfigError(
            f"--rank-timeout {args.rank_timeout!r} must be seconds above 0, at most {MOST_RANK_TIMEOUT:,}"
        )
    if cpus is not None and not isinstance(cpus, str):
        raise ConfigError(f"rank_cpus is {cpus!r}; write a text like '0-31|32-63'")
    if size == 1 and cpus is not None:
        raise ConfigError(
            f"--rank-cpus {cpus!r} is for several ranks: add --tensor-parallel-size, or omit it"
        )
    if size > 1 and args.kernels == "reference":
        raise ConfigError(
            f"--tensor-parallel-size {size}: ranks gather in the compiled kernels; omit --kernels "
            "reference"
        )


def resolve(
    args: EngineArgs, model: ModelConfig, scheme: Scheme, kv_scales: KVScales, device: DeviceFacts
) -> EngineConfig:
    """Resolve all settings before a weight is read.

    `kv_scales` are the checkpoint's, or those that `kv_source` names: from a file, or uniform.
    Raises ConfigError, and CheckpointError if the checkpoint is at fault.
    """
    check(args)
    if args.computes_on not in ("auto", device.kind):
        raise ConfigError(
            f"--device {args.computes_on}, but the device found is {device.kind} ({device.name})"
        )
    _check_gpus(args, device)
    check_threads(args.threads, device.cores)
    check_stored_weights(model, scheme)
    compute = model.checkpoint_format if args.dtype == "auto" else DTYPES[args.dtype]
    skipped = skipped_layers(args.kv_cache_dtype_skip_layers, model.paged, model.num_layers)
    kv = resolve_kv_cache(args, compute, scheme, kv_scales, device.native_e4m3, skipped)
    quantized = {index: mixer for index, mixer in model.paged.items() if index not in skipped}
    measured = kv.granularity is Granularity.TOKEN and kv.scale_source is ScaleSource.DYNAMIC
    if measured and args.kv_scales == "auto" and takes_groups(quantized, args, device):
        kv = _by_group(kv)
    if kv.grouped:
        check_groups(quantized, model.model_type)
    check_kernels(kv, device, args.kernels)
    int4 = args.quantization == "int4" and rounds_to_int4(model, scheme)
    weights = _weight_format(args, model, scheme, compute, device)
    length = _max_model_len(args, model)
    in_blocks = bool(scheme.blocks) and args.quantization is None
    drafts = speculation(args.speculate, args.speculative_config)
    return EngineConfig(
        compute_format=compute,
        weight_format=weights,
        int4=int4,
        int8_activations=int8_activations(args, int4 or in_blocks or scheme.has_four_bits, device),
        kv=with_state(kv, args.state_dtype, compute, device.native_e4m3, model),
        max_model_len=length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=_step_tokens(args, model, device, length),
        max_step_seconds=args.max_step_seconds or 0.0,
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching and not model.attends_both_ways,
        kv_cache_memory=parse_memory(args.kv_cache_memory),
        device=str(device.kind),
        kernels=args.kernels,
        fp8_attention=fp8_attention(args, compute, kv.format, device),
        threads=args.threads,
        seed=args.seed,
        exact_products=args.exact_products,
        state_every=args.state_every,
        most_drafts=drafts.most,
        drafts=drafts,
        store=_store(args, device),
        lora=_lora(args, model),
    )


def _check_gpus(args: EngineArgs, device: DeviceFacts) -> None:
    """Raise ConfigError for more ranks and stages of a machine than it has GPUs."""
    size = args.tensor_parallel_size
    stages = args.pipeline_parallel_size
    nodes = args.nnodes
    here = size // nodes * stages
    if here == 1 or device.kind == "cpu":
        return
    options = f"--tensor-parallel-size {size}: each rank"
    if stages > 1:
        options = f"--pipeline-parallel-size {stages}: each stage"
        if size > 1:
            options += f" of each of --tensor-parallel-size {size}"
    if nodes > 1:
        options += f", {here} of them on each of --nnodes {nodes},"
    if here > device.count:
        plural = "" if device.count == 1 else "s"
        raise ConfigError(
            f"{options} has a GPU of its own, and this process sees {device.count} GPU{plural}; choose at most "
            f"{device.count * nodes}, let it see more (CUDA_VISIBLE_DEVICES), or use --device cpu"
        )


def rounds_to_int4(model: ModelConfig, scheme: Scheme) -> bool:
    """Return whether `--quantization int4` rounds weights: a checkpoint in INT4 keeps its own.

    Raises ConfigError for a model whose weights are in another form, or that runs through
    transformers.
    """
    _require_native(model, "4 bits")
    if scheme.weight_format is not None and scheme.weight_formats != "int4":
        raise ConfigError(
            f"--quantization int4: the weights are quantized already ({scheme.description}); omit it, or give the "
            "16-bit model"
        )
    return scheme.weight_format is None


def _lora(args: EngineArgs, model: ModelConfig) -> LoraConfig | None:
    lora = lora_config(args)
    if lora is not None and model.foreign is not None:
        raise ConfigError(
            f"--enable-lora: adapters are implemented for Freight's own decoder, and model_type {model.model_type!r} "
            "runs through transformers' modules; merge the adapter (freight merge BASE ADAPTER OUT)"
        )
    return lora


def _store(args: EngineArgs, device: DeviceFacts) -> StoreConfig | None:
    store = store_config(args, parse_memory)
    if store is not None and str(device.kind) != "cpu":
        raise ConfigError(
            f"--kv-store {args.kv_store}: blocks are moved to and from the memory of the host, and this cache lies "
            f"on a {device.kind} device; omit --kv-store, or use --device cpu"
        )
    return store


def _step_tokens(
    args: EngineArgs, model: ModelConfig, device: DeviceFacts, max_model_len: int
) -> int:
    """Return the most tokens of a step. Raises ConfigError for fewer than a prompt has, where a prompt
    is one chunk.
    """
    given = args.max_num_batched_tokens
    tokens = given or step_tokens(str(device.kind), model)
    if not model.attends_both_ways or tokens >= max_model_len:
        return tokens
    if given is not None:
        raise ConfigError(
            f"--max-num-batched-tokens {given}: tokens of this model see those after them, so a prompt of up to "
            f"{max_model_len} tokens is computed in one step; raise it, or lower --max-model-len"
        )
    return max_model_len


def step_tokens(device: str, model: ModelConfig) -> int:
    """Return the default of --max-num-batched-tokens, the most tokens of a step.

    On a CPU a step of a mixture reads all experts, for few rows each. The default is then a multiple
    of 512, up to 2,048, with which an expert has 64 rows on average: with as many rows, products
    take longer than reading their weights.
    """
    least = STEP_TOKENS[device]
    if device != "cpu":
        return least
    tokens = 0
    for layer in model.layers:
        if isinstance(layer.feed_forward, MoEConfig):
            routing = layer.feed_forward.routing
            tokens = max(tokens, EXPERT_ROWS * routing.num_experts // routing.top_k)
    return min(max(least, -(-tokens // least) * least), MOST_STEP_TOKENS)


def for_serving(args: EngineArgs, device: str) -> EngineArgs:
    """Return `args` for a server on 'cpu' or 'cuda', with a default for --max-step-seconds.

    On a CPU a step of prompts takes seconds, during which no other request gets a token. Offline no
    client waits for single tokens, and longer steps have a higher throughput.
    """
    if args.max_step_seconds is not None or device != "cpu":
        return args
    return replace(args, max_step_seconds=SERVED_STEP_SECONDS)


def _check_step_seconds(value: object) -> None:
    if value is not None and not (is_number(value) and 0 <= value < math.inf):
        raise ConfigError(
            f"--max-step-seconds {value!r} must be a number of seconds, or 0 for steps of any length"
        )


def parse_memory(
    value: int | str | None,
    flag: str = "--kv-cache-memory",
    otherwise: str = "; omit it to use a share of the free memory",
) -> int | None:
    """Return the bytes of '4GiB', '512MiB', '4GB', '1e9' or a number; None for None. Raises
    ConfigError.

    flag        the option, for messages
    otherwise   the alternative, for messages
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:E[+]?[0-9]{1,2})?)\s*([A-Z]*)\s*", str(value).upper())
    if (
        isinstance(value, bool)
        or match is None
        or match[2] not in _UNITS
        or match[1].count(".") > 1
        or match[1] == "."
    ):
        raise ConfigError(
            f"{flag} {value!r} is not an amount of memory; write 4GiB, 512MiB, 4GB or bytes"
        )
    amount = float(match[1]) * _UNITS[match[2]]
    if amount >= 2**63:
        raise ConfigError(f"{flag} {value!r} is more than any machine has{otherwise}")
    size = int(amount)
    if size < 1:
        raise ConfigError(f"{flag} {value!r} must be positive{otherwise}")
    return size


def for_variant(scales: KVScales, format: Format) -> KVScales:
    """Convert scales made for one E4M3 variant for a cache in the other: doubled FN -> FNUZ, halved
    FNUZ -> FN, both exact.

    An FNUZ byte decodes to half its FN value, so the doubled scale gives the same stored values.
    Only the ranges differ: FNUZ's largest value, 240, is 480 at the FN scale, where FN saturates at
    448.
    """
    if scales.format is format:
        return scales
    assert scales.format.is_e4m3
    assert format.is_e4m3
    factor = 0.5
    if format is Format.E4M3FNUZ:
        factor = 2.0
    layers = []
    for layer in scales.layers:
        if layer is not None:
            k = tuple(scale * factor for scale in layer.k)
            v = tuple(scale * factor for scale in layer.v)
            layer = replace(layer, k=k, v=v)
        layers.append(layer)
    return replace(scales, layers=tuple(layers), format=format, format_assumed=False)


def _max_model_len(args: EngineArgs, model: ModelConfig) -> int:
    if args.max_model_len is None:
        longest = model.max_position_embeddings
        if model.pooling is not None and model.pooling.max_length is not None:
            longest = min(longest, model.pooling.max_length)
        return longest
    if args.max_model_len > model.position_limit:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} is more than {model.limit_words}; use at most "
            f"{model.position_limit}, or omit it"
        )
    return args.max_model_len


def _kv_format(
    args: EngineArgs, compute: Format, scheme: Scheme, native: Format
) -> tuple[Format, str]:
    """Return the cache's format, and its origin for messages."""
    dtype = args.kv_cache_dtype
    if dtype == "auto" and scheme.kv_format is None:
        return (
            compute,
            f"--kv-cache-dtype auto (the checkpoint declares no FP8 cache, so {compute})",
        )
    if dtype == "auto" and scheme.kv_format is not None:
        format = scheme.kv_format
        if format.is_e4m3:
            format = native
        return format, f"--kv-cache-dtype auto (the checkpoint declares {scheme.kv_format})"
    if dtype in ("fp8", "fp8_e4m3"):
        return native, f"--kv-cache-dtype {dtype}"
    return Format(dtype), f"--kv-cache-dtype {dtype}"


def resolve_kv_cache(
    args: EngineArgs,
    compute: Format,
    scheme: Scheme,
    scales: KVScales,
    native: Format,
    skipped: Set[int],
) -> KVCacheConfig:
    """Resolve the cache: --kv-cache-dtype selects the format, --kv-scales the source of scales;
    `auto` follows the checkpoint.

    Part of `resolve`, which has checked the settings. `compute` is the format of an unquantized
    cache, `native` the E4M3 of the device; the layers of `skipped` stay in `compute` and need no
    scales. Raises ConfigError, and CheckpointError where the checkpoint is at fault.
    """
    if not skipped:
        return _cache(args, compute, scheme, scales, native)
    kv = _cache(args, compute, scheme, scales.without(skipped), native)
    if kv.format.is_quantized:
        return kv.skipping(skipped, len(scales.layers), compute)
    names = args.kv_cache_dtype_skip_layers
    if any(scales.mixed):
        raise nothing_left(names)
    raise unquantized(names, _kv_format(args, compute, scheme, native)[1])


def _cache(
    args: EngineArgs, compute: Format, scheme: Scheme, scales: KVScales, native: Format
) -> KVCacheConfig:
    """Resolve the cache of all layers; `scales` already marks skipped layers as unneeded."""
    source = kv_source(args)
    follows = source.word in ("auto", "checkpoint")
    _require_choice(args, follows, scales)
    by_layer = scales.mixed and follows  # the checkpoint's choice
    if by_layer and args.kv_cache_dtype == "auto":
        return mixed_cache(scales, compute, native, ScaleSource.CHECKPOINT)
    format, cache = _kv_format(args, compute, scheme, native)
    if by_layer and format.is_e4m3:
        raise ConfigError(
            f"{cache}, but the checkpoint chooses the cache of each layer ({scales.by_granularity}): use "
            "--kv-cache-dtype auto for that, or --kv-scales dynamic for FP8 in every layer"
        )
    require_fit(format, cache, source)
    if not format.is_quantized:
        note = _skipped(args, scales)
        return KVCacheConfig(format, granularity=None, scale_source=None, scales=None, note=note)
    if source.word == "group":
        note = "measured per group as stored"
        return KVCacheConfig(format, Granularity.GROUP, ScaleSource.DYNAMIC, None, note)
    if format is Format.INT8 and not scales.empty:
        return _dynamic(
            format,
            f"measured per token as stored; the checkpoint's, for {scales.format}, are skipped",
        )
    if source.word == "dynamic" or format is Format.INT8:
        return _dynamic(format, "measured per token as stored")
    if source.word == "unit":
        return _unit(format, "1.0 as requested")
    if format is Format.E5M2:
        if not scales.empty:
            raise ConfigError(
                f"{cache}, but the checkpoint has KV scales made for {scales.format}: use --kv-cache-dtype fp8, or "
                "name another source with --kv-scales unit or dynamic"
            )
        return _unit(format, "E5M2 needs no scales")
    if source.file is not None:
        return _static(format, scales, ScaleSource.FILE, str(source.file))
    if source.values is not None:
        k, v = source.values
        return _static(format, scales, ScaleSource.GIVEN, f"K {k:.6g}, V {v:.6g} in every layer")
    return _from_checkpoint(format, source.word, scheme, scales)


def _require_choice(args: EngineArgs, follows: bool, scales: KVScales) -> None:
    """Raise CheckpointError where the checkpoint is to choose the cache, and the file that may have
    a choice for each layer cannot be used.
    """
    of_file = any(fault.layer is None for fault in scales.faults)
    if follows and args.kv_cache_dtype == "auto" and of_file:
        scales.require_valid(_WITHOUT_SCALES)


def _from_checkpoint(
    format: Format, source: str, scheme: Scheme, scales: KVScales
) -> KVCacheConfig:
    """Resolve an E4M3 cache with `auto` or `checkpoint`: the checkpoint decides; missing scales are
    never guessed.

    A scale of K alone is used for V as well, as in vLLM and SGLang. A scale of V alone is an error:
    it says nothing about keys.
    """
    scales.require_valid(_WITHOUT_SCALES)
    if scales.alone("v"):
        raise CheckpointError(
            f"the checkpoint has a KV scale of V, but none of K, for {_layers(scales.alone('v'))} of "
            f"{len(scales.layers)}; use --kv-scales dynamic to measure them all, or unit"
        )
    if not scales.missing and not scales.empty:
        alone = scales.alone("k")
        note = ""
        if alone:
            note = f"K's scale for V too in {_layers(alone)}, where V has none"
        return _static(format, scales, ScaleSource.CHECKPOINT, note)
    layers = _layers(scales.missing)
    if not scales.empty:
        raise CheckpointError(
            f"the checkpoint has KV scales, but none for {layers} of {len(scales.layers)}; "
            "use --kv-scales dynamic to measure them all, or unit"
        )
    if source == "checkpoint" and scales.missing:
        way_out = _MAKE_SCALES
        if scheme.is_final:
            way_out = _MAKE_BASE_SCALES
        raise ConfigError(f"--kv-scales checkpoint, but the checkpoint has no KV scales: {way_out}")
    if scheme.kv_static and scales.missing:
        raise CheckpointError(
            f"the checkpoint declares static KV scales ({scheme.description}), but has none for {layers}; "
            "use --kv-scales dynamic to measure them, or unit"
        )
    if scheme.kv_format is not None and scheme.method == "modelopt":
        return _unit(format, "1.0: modelopt's cast mode declares an FP8 cache and stores no scales")
    if scheme.kv_format is not None:
        return _dynamic(
            format, "the checkpoint declares dynamic scales: measured per token as stored"
        )
    return _dynamic(format, "no scales in the checkpoint: measured per token as stored")


def _skipped(args: EngineArgs, scales: KVScales) -> str:
    """Say why the checkpoint's scales are not used; '' if it has none."""
    if scales.empty:
        return ""
    if scales.faults:
        return (
            f"the checkpoint's KV scales are skipped, and cannot be used: {scales.faults[0].what}"
        )
    if args.kv_cache_dtype == "auto":
        return "the checkpoint's KV scales are skipped, as it declares no FP8 cache; --kv-cache-dtype fp8 uses them"
    return "the checkpoint's KV scales are skipped: 16 bits were requested"


def mixed_cache(
    scales: KVScales, compute: Format, native: Format, source: ScaleSource
) -> KVCacheConfig:
    """Build the cache of `scales.mixed`; layers of 16 bits are stored in `compute`."""
    kinds = []
    for granularity in scales.mixed:
        if granularity is None:
            kinds.append(LayerKVFormat(compute, None))
        else:
            kinds.append(LayerKVFormat(native, granularity))
    chosen = {granularity for granularity in scales.mixed if granularity is not None}
    if not chosen:
        note = "the checkpoint's choice for every layer"
        return KVCacheConfig(compute, granularity=None, scale_source=None, scales=None, note=note)
    finest = max(chosen, key=list(Granularity).index)
    if chosen == {Granularity.TOKEN}:
        source = ScaleSource.DYNAMIC
    native_scales = for_variant(scales, native)
    return KVCacheConfig(native, finest, source, native_scales, scales.by_granularity, tuple(kinds))


def _layers(indices: Sequence[int]) -> str:
    noun = "layer"
    if len(indices) > 1:
        noun = "layers"
    return f"{noun} {', '.join(map(str, indices))}"


def _static(format: Format, scales: KVScales, source: ScaleSource, note: str = "") -> KVCacheConfig:
    converted = for_variant(scales, format)
    granularities = []
    num_centered = 0
    for layer in converted.layers:
        if layer is not None:
            granularities.append(layer.granularity)
            num_centered += bool(layer.k_center)
    finest = max(granularities, key=list(Granularity).index)
    notes = []
    if note:
        notes.append(note)
    if scales.format is not format:
        notes.append(f"converted from {scales.format}")
    if scales.format_assumed:
        notes.append(
            f"{scales.format} assumed: config.json has no kv_cache_torch_dtype to declare it"
        )
    if num_centered:
        notes.append(f"keys centered in {num_centered} of {len(converted.layers)} layers")
    return KVCacheConfig(format, finest, source, converted, ", ".join(notes))


def _dynamic(format: Format, note: str) -> KVCacheConfig:
    return KVCacheConfig(format, Granularity.TOKEN, ScaleSource.DYNAMIC, None, note)


def _by_group(kv: KVCacheConfig) -> KVCacheConfig:
    """Return `kv`, a cache of latents with scales per token, with scales per group instead.

    On a trained model they have a quarter of the KL of scales per token in E4M3, and a sixth in
    INT8, for an eighth more bytes (docs/numerics.md).
    """
    note = kv.note.replace("per token", "per group")
    grouped = replace(kv, granularity=Granularity.GROUP, note=note)
    if kv.layers is None:
        return grouped
    layers = []
    for layer in kv.layers:
        if layer.granularity is not None:
            layer = replace(layer, granularity=Granularity.GROUP)
        layers.append(layer)
    return replace(grouped, layers=tuple(layers))


def _unit(format: Format, note: str) -> KVCacheConfig:
    return KVCacheConfig(format, Granularity.TENSOR, ScaleSource.UNIT, None, note)
