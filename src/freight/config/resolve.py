"""Options, model and device -> a frozen EngineConfig. Takes values only: reads no file, imports no torch.

Every contradiction between settings, or between a setting and the checkpoint, is an error that names both sides and
the way out. `KVCacheConfig.note` records choices that the options left open.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freight.config.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.config.options import choose
from freight.device import DEVICES, check_threads
from freight.errors import CheckpointError, ConfigError, choices, nearest
from freight.fp8.formats import COMPUTE_FORMATS, Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales, Scheme

if TYPE_CHECKING:
    from freight.config.model import ModelConfig
    from freight.device import DeviceFacts

DTYPES = {"half": Format.FLOAT16, "float": Format.FLOAT32} | {str(format): format for format in COMPUTE_FORMATS}
KV_DTYPES = ("auto", *map(str, COMPUTE_FORMATS), "fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "int8")
KV_SCALES = ("auto", "checkpoint", "dynamic", "unit")  # or FILE.json
QUANTIZATIONS = ("fp8",)
KERNELS = ("auto", "reference")
ATTENTION_COMPUTES = ("auto", "fp8")
STEP_TOKENS = {"cpu": 512, "cuda": 8192}  # per step at most: they keep the device busy, and a step short
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
_MAKE_SCALES = (
    "calibrate a checkpoint that has them (freight quantize MODEL OUT --kv-cache fp8), give a file (--kv-scales "
    "FILE.json), or use --kv-scales dynamic"
)


def check(args: EngineArgs) -> None:
    """Everything that is decidable from the settings alone. Raises ConfigError; `resolve` begins with it."""
    choose("--dtype", args.dtype, ("auto", *DTYPES))
    choose("--kv-cache-dtype", args.kv_cache_dtype, KV_DTYPES)
    choose("--device", args.device, DEVICES)
    choose("--kernels", args.kernels, KERNELS)
    choose("--attention-compute", args.attention_compute, ATTENTION_COMPUTES)
    if args.quantization is not None:
        choose("--quantization", args.quantization, QUANTIZATIONS)
    for name, value, least in (
        ("--max-num-seqs", args.max_num_seqs, 1),
        ("--max-num-batched-tokens", args.max_num_batched_tokens, 1),
        ("--max-model-len", args.max_model_len, 1),
        ("--threads", args.threads, 1),
        ("--seed", args.seed, 0),
    ):
        optional = value is None and name not in ("--max-num-seqs", "--seed")
        if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name} {value!r} must be an integer ≥ {least}")
    if isinstance(args.block_size, bool) or args.block_size not in BLOCK_SIZES:
        raise ConfigError(f"--block-size {args.block_size!r}: choose {choices(map(str, BLOCK_SIZES))} tokens")
    parse_memory(args.kv_cache_memory)
    kv_scales_file(args)


def resolve(
    args: EngineArgs, model: ModelConfig, scheme: Scheme, kv_scales: KVScales, device: DeviceFacts
) -> EngineConfig:
    """Resolve all settings before a weight is read.

    `kv_scales` are those of the checkpoint, or of the file when `kv_scales_file` names one. Raises ConfigError, and
    CheckpointError where the checkpoint is at fault.
    """
    check(args)
    if args.device not in ("auto", device.kind):
        raise ConfigError(f"--device {args.device}, but the device found is {device.kind} ({device.name})")
    check_threads(args.threads, device.cores)
    compute = model.checkpoint_format if args.dtype == "auto" else DTYPES[args.dtype]
    kv = resolve_kv_cache(args, compute, scheme, kv_scales, device.native_e4m3)
    if kv.format is Format.INT8 and device.kind != "cpu" and args.kernels != "reference":
        raise ConfigError(
            f"--kv-cache-dtype int8 on {device.name}: the kernels for GPUs have no INT8 cache; "
            "use --kv-cache-dtype fp8, --device cpu, or --kernels reference"
        )
    return EngineConfig(
        compute_format=compute,
        weight_format=device.native_e4m3 if args.quantization == "fp8" or scheme.weight_format else compute,
        kv=kv,
        max_model_len=_max_model_len(args, model),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or STEP_TOKENS[device.kind],
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_cache_memory=parse_memory(args.kv_cache_memory),
        device=str(device.kind),
        kernels=args.kernels,
        fp8_attention=_fp8_attention(args, compute, kv.format, device),
        threads=args.threads,
        seed=args.seed,
    )


def kv_scales_file(args: EngineArgs) -> Path | None:
    """The file of KV scales that was asked for, or None. Raises ConfigError if it cannot be the one to use."""
    named = args.kv_scales not in KV_SCALES
    if named and not str(args.kv_scales).endswith(".json"):
        hint = nearest(str(args.kv_scales), KV_SCALES)
        raise ConfigError(
            f"--kv-scales {args.kv_scales!r} is unknown{hint}: choose {choices((*KV_SCALES, 'FILE.json'))}"
        )
    if args.quantization_param_path is not None and args.kv_scales != "auto":
        twice = "a file of scales is given twice" if named else "two sources of scales are named"
        raise ConfigError(
            f"{twice}: --kv-scales {args.kv_scales} and --quantization-param-path {args.quantization_param_path}; "
            "omit one"
        )
    flag = "--kv-scales" if named else "--quantization-param-path"
    name = args.kv_scales if named else args.quantization_param_path
    if name is None:
        return None
    choose("--kv-cache-dtype", args.kv_cache_dtype, KV_DTYPES)
    if args.kv_cache_dtype in ("fp8_e5m2", "int8", *COMPUTE_FORMATS):
        raise _no_scales_for(args.kv_cache_dtype, f"--kv-cache-dtype {args.kv_cache_dtype}", f"{flag} {name}")
    if not Path(name).is_file():
        raise ConfigError(f"{flag} {name}: there is no such file")
    return Path(name)


def parse_memory(value: int | str | None) -> int | None:
    """Bytes of '4GiB', '512MiB', '4GB', '1e9' or a number; None for None. Raises ConfigError."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:E[+]?[0-9]{1,2})?)\s*([A-Z]*)\s*", str(value).upper())
    if isinstance(value, bool) or match is None or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ConfigError(f"--kv-cache-memory {value!r} is not an amount of memory; write 4GiB, 512MiB, 4GB or bytes")
    amount = float(match[1]) * _UNITS[match[2]]
    if amount >= 2**63:
        raise ConfigError(f"--kv-cache-memory {value!r} is more than any machine has; omit it to use a share of memory")
    size = int(amount)
    if size < 1:
        raise ConfigError(f"--kv-cache-memory {value!r} must be positive; omit it to use a share of the free memory")
    return size


def for_variant(scales: KVScales, format: Format) -> KVScales:
    """Scales made for one E4M3 variant, for a cache in the other: doubled FN -> FNUZ, halved FNUZ -> FN, both exact.

    An FNUZ byte decodes to half its FN value, so with a doubled scale the stored values are the same. Only the ranges
    differ: FNUZ's largest value, 240, is 480 at the FN scale, where FN saturates at 448.
    """
    if scales.format is format:
        return scales
    assert scales.format.is_e4m3
    assert format.is_e4m3
    factor = 2.0 if format is Format.E4M3FNUZ else 0.5

    def converted(layer: LayerScales | None) -> LayerScales | None:
        if layer is None:
            return None
        return replace(layer, k=tuple(x * factor for x in layer.k), v=tuple(x * factor for x in layer.v))

    return KVScales(tuple(map(converted, scales.layers)), format)


def _max_model_len(args: EngineArgs, model: ModelConfig) -> int:
    if args.max_model_len is None:
        return model.max_position_embeddings
    if args.max_model_len > model.position_limit:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} is more than the {model.position_limit} positions of this model; "
            f"use at most {model.position_limit}, or omit it"
        )
    return args.max_model_len


def _fp8_attention(args: EngineArgs, compute: Format, stored: Format, device: DeviceFacts) -> bool:
    """Whether attention multiplies FP8 by FP8. The reference kernels do it anywhere, to measure its accuracy."""
    if args.attention_compute == "auto":
        return False
    if not stored.is_e4m3:
        problem = f"a cache in {stored}: it multiplies E4M3 as it is stored; use --kv-cache-dtype fp8"
    elif compute is Format.FLOAT32:
        problem = "--dtype float32, whose precision it would lose; use --dtype bfloat16 or float16"
    elif args.kernels == "reference":
        return True
    elif device.kind == "cpu":
        problem = "a CPU, which has no FP8 products; --kernels reference computes it, slowly, to measure accuracy"
    elif not device.multiplies_fp8:
        problem = f"{device.name}, which has no FP8 matrix units"
    elif stored is not device.native_e4m3:
        problem = f"a cache in {stored}: {device.name} multiplies {device.native_e4m3}; use --kv-cache-dtype fp8"
    else:
        return True
    raise ConfigError(f"--attention-compute fp8 with {problem}, or omit --attention-compute")


def _no_scales_for(format: str, cache: str, scales: str) -> ConfigError:
    if format == Format.E5M2:
        return ConfigError(
            f"{scales} with {cache}: static scales are made for E4M3; "
            "use --kv-cache-dtype fp8, or --kv-scales dynamic or unit"
        )
    if format == Format.INT8:
        return ConfigError(
            f"{scales} with {cache}: INT8 has one scale per token, measured as it is stored; "
            "use --kv-cache-dtype fp8, or omit the scales"
        )
    return ConfigError(
        f"{scales} with {cache}: a cache in {format} is stored unquantized and has no scales; "
        "use --kv-cache-dtype fp8, or omit the scales"
    )


def _kv_format(args: EngineArgs, compute: Format, scheme: Scheme, native: Format) -> tuple[Format, str]:
    """The cache's format, and where it comes from, for messages."""
    dtype = args.kv_cache_dtype
    if dtype == "auto" and scheme.kv_format is None:
        return compute, f"--kv-cache-dtype auto (the checkpoint declares no FP8 cache, so {compute})"
    if dtype == "auto" and scheme.kv_format is not None:
        format = native if scheme.kv_format.is_e4m3 else scheme.kv_format
        return format, f"--kv-cache-dtype auto (the checkpoint declares {scheme.kv_format})"
    return native if dtype in ("fp8", "fp8_e4m3") else Format(dtype), f"--kv-cache-dtype {dtype}"


def resolve_kv_cache(
    args: EngineArgs, compute: Format, scheme: Scheme, scales: KVScales, native: Format
) -> KVCacheConfig:
    """--kv-cache-dtype selects the format, --kv-scales the source of scales; `auto` depends on the checkpoint.

    Part of `resolve`, which has checked the settings. `compute` is the format of an unquantized cache, `native` the
    E4M3 of the device. Raises ConfigError, and CheckpointError where the checkpoint is at fault.
    """
    format, cache = _kv_format(args, compute, scheme, native)
    file = kv_scales_file(args)
    named = args.kv_scales if args.quantization_param_path is None else args.quantization_param_path
    flag = "--kv-scales" if args.quantization_param_path is None else "--quantization-param-path"
    source = "file" if file else args.kv_scales
    if not format.is_quantized:
        if source != "auto":
            raise _no_scales_for(format, cache, f"{flag} {named}")
        return KVCacheConfig(format, None, None, None, "" if scales.empty else _skipped(args))
    if format is Format.INT8 and source not in ("auto", "dynamic"):
        raise _no_scales_for(format, cache, f"{flag} {named}")
    if format is Format.INT8 and not scales.empty:
        return _dynamic(format, f"measured per token as stored; the checkpoint's, for {scales.format}, are skipped")
    if source == "dynamic" or format is Format.INT8:
        return _dynamic(format, "measured per token as stored")
    if source == "unit":
        return _unit(format, "1.0 as asked for")
    if format is Format.E5M2:
        if source in ("checkpoint", "file"):
            raise _no_scales_for(format, cache, f"{flag} {named}")
        if not scales.empty:
            raise ConfigError(
                f"{cache}, but the checkpoint has KV scales made for {scales.format}: use --kv-cache-dtype fp8, or "
                "name another source with --kv-scales unit or dynamic"
            )
        return _unit(format, "E5M2 needs no scales")
    if source == "file":
        return _static(format, scales, ScaleSource.FILE, str(file))
    return _from_checkpoint(format, source, scheme, scales)


def _from_checkpoint(format: Format, source: str, scheme: Scheme, scales: KVScales) -> KVCacheConfig:
    """E4M3 with `auto` or `checkpoint`: the checkpoint decides; missing scales are never guessed."""
    if not scales.missing:
        return _static(format, scales, ScaleSource.CHECKPOINT)
    layers = (
        f"layers {', '.join(map(str, scales.missing))}" if len(scales.missing) > 1 else f"layer {scales.missing[0]}"
    )
    if not scales.empty:
        raise CheckpointError(
            f"the checkpoint has KV scales, but none for {layers} of {len(scales.layers)}; "
            "use --kv-scales dynamic to measure them all, or unit"
        )
    if source == "checkpoint":
        raise ConfigError(f"--kv-scales checkpoint, but the checkpoint has no KV scales: {_MAKE_SCALES}")
    if scheme.kv_static:
        raise CheckpointError(
            f"the checkpoint declares static KV scales ({scheme.description}), but has none for {layers}; "
            "use --kv-scales dynamic to measure them, or unit"
        )
    if scheme.kv_format is not None and scheme.method == "modelopt":
        return _unit(format, "1.0: modelopt's cast mode declares an FP8 cache and stores no scales")
    if scheme.kv_format is not None:
        return _dynamic(format, "the checkpoint declares dynamic scales: measured per token as stored")
    return _dynamic(format, "no scales in the checkpoint: measured per token as stored")


def _skipped(args: EngineArgs) -> str:
    if args.kv_cache_dtype == "auto":
        return "the checkpoint's KV scales are skipped, as it declares no FP8 cache; --kv-cache-dtype fp8 uses them"
    return "the checkpoint's KV scales are skipped: 16 bits were asked for"


def _static(format: Format, scales: KVScales, source: ScaleSource, note: str = "") -> KVCacheConfig:
    converted = for_variant(scales, format)
    finest = max((layer.granularity for layer in converted.layers if layer is not None), key=list(Granularity).index)
    if scales.format is not format:
        note += f"{', ' if note else ''}converted from {scales.format}"
    count = sum(layer is not None and bool(layer.k_center) for layer in converted.layers)
    if count:
        note += f"{', ' if note else ''}keys centered in {count} of {len(converted.layers)} layers"
    return KVCacheConfig(format, finest, source, converted, note)


def _dynamic(format: Format, note: str) -> KVCacheConfig:
    return KVCacheConfig(format, Granularity.TOKEN, ScaleSource.DYNAMIC, None, note)


def _unit(format: Format, note: str) -> KVCacheConfig:
    return KVCacheConfig(format, Granularity.TENSOR, ScaleSource.UNIT, None, note)
