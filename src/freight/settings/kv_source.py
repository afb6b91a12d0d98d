"""The source of KV scales, from --kv-scales and --quantization-param-path. Reads no file, imports
no torch.

A source of scales that cannot belong to the named cache is refused here, from the options alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freight.base.options import choose
from freight.base.other_engines.values import OTHER_KV_CACHES, PER_TOKEN_HEAD
from freight.errors import ConfigError, choices, nearest
from freight.fp8.formats import COMPUTE_FORMATS, SCALE_GROUP, Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.mixers.spec import PagedMixer
from freight.settings.engine import KV_SCALES, KV_SCALES_FORMS, EngineArgs

KV_DTYPES = (
    "auto",
    *map(str, COMPUTE_FORMATS),
    "fp8",
    "fp8_e4m3",
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
    "fp8_e5m2",
    "int8",
)
# for --help: the names above, and vLLM's, which `EngineArgs` writes as the two options they stand for
KV_DTYPE_NAMES = (*KV_DTYPES, *PER_TOKEN_HEAD)
_GROUPS = f"scales per group of {SCALE_GROUP} channels are for latents (MLA)"
# words of --kv-scales that a format accepts; E4M3 accepts all
_FITTING = {
    Format.INT8: ("auto", "dynamic", "group"),
    Format.E5M2: ("auto", "dynamic", "unit"),
}


@dataclass(frozen=True)
class KVSource:
    """A source of scales. `flag` and `named` are the option and its value, for messages.

    At most one of `word` (not 'auto'), `file` and `values` (K, V) is given; without any of them
    `word` is 'auto'.
    """

    flag: str
    named: str
    word: str = "auto"
    file: Path | None = None
    values: tuple[float, float] | None = None


def kv_source(args: EngineArgs) -> KVSource:
    """Return the source that `args` name. Raises ConfigError for an unknown source, for two of
    them, and for a missing file.

    Also raises it for a source that the named cache cannot use; `settings.resolve.resolve` decides
    that for an `auto` cache.
    """
    if args.quantization_param_path is None:
        source = _parse(args.kv_scales)
    elif args.kv_scales == "auto":
        path = args.quantization_param_path
        source = KVSource("--quantization-param-path", path, file=Path(path))
    else:
        named = _parse(args.kv_scales)
        twice = "two sources of scales are named"
        if named.file:
            twice = "a file of scales is given twice"
        raise ConfigError(
            f"{twice}: --kv-scales {args.kv_scales} and --quantization-param-path {args.quantization_param_path}; "
            "omit one"
        )
    check_kv_dtype(args.kv_cache_dtype)
    if args.kv_cache_dtype in map(str, Format):
        require_fit(Format(args.kv_cache_dtype), f"--kv-cache-dtype {args.kv_cache_dtype}", source)
    if source.file is not None and not source.file.is_file():
        raise ConfigError(f"{source.flag} {source.named}: there is no such file")
    return source


def check_kv_dtype(name: object) -> None:
    """Raise ConfigError for a format of the cache that is not ours, with what to use in place of
    another engine's.
    """
    if name in tuple(OTHER_KV_CACHES):
        raise ConfigError(f"--kv-cache-dtype {name!r}: {OTHER_KV_CACHES[str(name)]}")
    if name not in KV_DTYPES:
        choose("--kv-cache-dtype", name, KV_DTYPE_NAMES)


def require_fit(format: Format, cache: str, source: KVSource) -> None:
    """Raise ConfigError if a cache in `format`, described by `cache`, cannot have scales from
    `source`.
    """
    fitting: tuple[str, ...] = _FITTING.get(format, KV_SCALES)
    if not format.is_quantized:
        fitting = ("auto",)
    static = source.file is not None or source.values is not None
    if not (source.word not in fitting or (static and not format.is_e4m3)):
        return
    scales = f"{source.flag} {source.named}"
    if format is Format.E5M2 and source.word == "group":
        raise ConfigError(
            f"{scales} with {cache}: scales per group are for E4M3 and INT8; use --kv-cache-dtype fp8 or int8"
        )
    if format is Format.E5M2:
        raise ConfigError(
            f"{scales} with {cache}: static scales are made for E4M3; "
            "use --kv-cache-dtype fp8, or --kv-scales dynamic or unit"
        )
    if format is Format.INT8:
        raise ConfigError(
            f"{scales} with {cache}: INT8 scales are measured as values are stored, by token or by group; "
            "use --kv-cache-dtype fp8, or omit the scales"
        )
    raise ConfigError(
        f"{scales} with {cache}: a cache in {format} is stored unquantized and has no scales; "
        "use --kv-cache-dtype fp8, or omit the scales"
    )


def check_groups(layers: Mapping[int, PagedMixer], model_type: str) -> None:
    """Raise ConfigError for `--kv-scales group` unless `layers`, those that store quantized keys
    and values, are latents that consist of full groups.
    """
    for index, mixer in layers.items():
        if not mixer.v_in_k:
            raise ConfigError(
                f"--kv-scales group: {_GROUPS}, and layer {index} of this model "
                f"({model_type}) has keys and values; use --kv-scales dynamic, one scale per token and head"
            )
        if mixer.v_dim % SCALE_GROUP:
            raise ConfigError(
                f"--kv-scales group: a scale is for {SCALE_GROUP} channels of a latent, and that of layer {index} has "
                f"{mixer.v_dim} (kv_lora_rank), no multiple of that; use --kv-scales dynamic, one scale per token"
            )
    if not layers:
        raise ConfigError(
            f"--kv-scales group: {_GROUPS}, and no layer of this model ({model_type}) stores "
            "keys and values; omit --kv-scales"
        )


def groups_fit(layers: Mapping[int, PagedMixer]) -> bool:
    """Return whether `check_groups` would pass."""
    for mixer in layers.values():
        if not mixer.v_in_k or mixer.v_dim % SCALE_GROUP:
            return False
    return bool(layers)


def uniform_scales(values: tuple[float, float], num_layers: int) -> KVScales:
    """Build the same two scales, of K and of V, for every layer: one per tensor, for E4M3FN."""
    k, v = values
    return KVScales((LayerScales((k,), (v,), Granularity.TENSOR, ("--kv-scales",)),) * num_layers)


def _parse(text: str) -> KVSource:
    """Parse `--kv-scales TEXT`."""
    if text in KV_SCALES:
        return KVSource("--kv-scales", text, text)
    if text.endswith(".json"):
        return KVSource("--kv-scales", text, file=Path(text))
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        hint = nearest(text, KV_SCALES)
        raise ConfigError(
            f"--kv-scales {text!r} is unknown{hint}: choose {choices(KV_SCALES_FORMS)}"
        )
    k = numbers[0]
    v = numbers[-1]
    return KVSource("--kv-scales", text, values=(_float32(text, k), _float32(text, v)))


def nearest_float32(number: float) -> float:
    """Round `number` to float32; infinite beyond its range."""
    try:
        stored: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.inf
    return stored


def _float32(text: str, number: float) -> float:
    """Round a scale to float32, its stored dtype. Raises ConfigError unless it is positive and
    finite.
    """
    stored = nearest_float32(number)
    if not (math.isfinite(stored) and stored > 0):
        raise ConfigError(
            f"--kv-scales {text}: a scale has to be finite and above 0 in float32; {number:g} is not"
        )
    return stored
