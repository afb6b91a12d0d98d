"""Schemes of compressed-tensors, resolved to the formats that Freight writes. Imports no torch.

A scheme is a preset's name (`W4A16`) or a group of a recipe: `weights` and `input_activations` with
the fields of QuantizationArgs. What Freight does not write is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from freight.base.fields import JsonObject
from freight.errors import ConfigError, choices, nearest, shown
from freight.fp8.formats import Granularity
from freight.fp8.scheme import INT4_GROUP, INT4_GROUPS
from freight.quantizer.plan import ActivationScheme, WeightScheme


@dataclass(frozen=True)
class QuantizationArgs:
    """The quantization of one tensor, with compressed-tensors' fields. The default of `type` is
    compressed-tensors', "int".
    """

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: Sequence[int] | str | None = None
    dynamic: bool | str = False
    actorder: object = None
    observer: str | None = None
    observer_kwargs: JsonObject = field(default_factory=dict)
    scale_dtype: object = None
    zp_dtype: object = None


@dataclass(frozen=True)
class Scheme:
    """The formats that the Linear modules of a recipe get.

    weights      a WeightScheme, as a string: a format may be known here before it is written
    group_size   inputs that share a scale; only with int4
    asymmetric   whether the groups have zero points
    observer     the rule of the weights' scales: "minmax" or "mse"; None for FP8, which has one rule
    act_order    GPTQ's order as the scheme has it; None if it has none
    """

    weights: str
    activations: ActivationScheme
    group_size: int | None = None
    asymmetric: bool = False
    observer: str | None = None
    act_order: str | None = None


_NVFP4 = "nvfp4"
PRESETS = {  # names of schemes -> the scheme
    "FP8": Scheme(WeightScheme.TENSOR, ActivationScheme.STATIC),
    "FP8_DYNAMIC": Scheme(WeightScheme.CHANNEL, ActivationScheme.DYNAMIC),
    "FP8_BLOCK": Scheme(WeightScheme.BLOCK, ActivationScheme.DYNAMIC),
    "W8A8": Scheme(WeightScheme.INT8, ActivationScheme.DYNAMIC),
    "INT8": Scheme(WeightScheme.INT8, ActivationScheme.DYNAMIC),
    "W4A16": Scheme(WeightScheme.INT4, ActivationScheme.NONE, INT4_GROUP),
    "W4A16_ASYM": Scheme(WeightScheme.INT4, ActivationScheme.NONE, INT4_GROUP, asymmetric=True),
    "NVFP4A16": Scheme(_NVFP4, ActivationScheme.NONE),
    "MXFP4A16": Scheme(WeightScheme.MXFP4, ActivationScheme.NONE),
}
_NOT_WRITTEN = {  # compressed-tensors' other preset schemes -> what to do instead
    "UNQUANTIZED": "leave modules in 16 bits with ignore=",
    "W8A16": "choose W8A8 or FP8_DYNAMIC",
    "W4A8": "inputs stay in 16 bits beside weights in 4 bits: choose W4A16",
    "W4AFP8": "inputs stay in 16 bits beside weights in 4 bits: choose W4A16",
    "NVFP4": "inputs stay in 16 bits beside weights in 4 bits: choose NVFP4A16",
    "MXFP4": "inputs stay in 16 bits beside weights in 4 bits: choose MXFP4A16",
    "MXFP8A16": "choose FP8_DYNAMIC or FP8_BLOCK",
    "MXFP8": "choose FP8_DYNAMIC or FP8_BLOCK",
}
_FP8 = frozenset((WeightScheme.TENSOR, WeightScheme.CHANNEL, WeightScheme.BLOCK))
_EXACT = (None, "static_minmax", "minmax", "memoryless_minmax")  # they agree for weights
_OBSERVERS = dict.fromkeys(_EXACT, "minmax") | {"mse": "mse", "memoryless_mse": "mse"}
_ORDERS = {  # llm-compressor's names -> ours
    None: None,
    False: None,
    True: "group",
    "weight": "static",
    "static": "static",
    "group": "group",
    "dynamic": "group",
}
_BLOCKS = (None, [128, 128], (128, 128), "128x128")
_WEIGHTS = {
    "tensor": WeightScheme.TENSOR,
    "channel": WeightScheme.CHANNEL,
    "block": WeightScheme.BLOCK,
}
_KV = {"tensor": Granularity.TENSOR, "attn_head": Granularity.HEAD}


def preset_scheme(name: str) -> Scheme:
    preset = name.upper()
    if preset in PRESETS:
        return PRESETS[preset]
    if preset in _NOT_WRITTEN:
        raise ConfigError(f"recipe: the scheme {name!r} is not implemented; {_NOT_WRITTEN[preset]}")
    raise ConfigError(
        f"recipe: the scheme {name!r} is unknown{nearest(preset, PRESETS)}; Freight writes {choices(PRESETS)}"
    )


def with_observer(where: str, scheme: Scheme, observer: str | None) -> Scheme:
    """Return `scheme` with the observer of its modifier, which goes before that of a group."""
    if scheme.weights in _FP8:
        require_observer(where, observer, exact=True)
        return scheme
    if observer is None:
        return replace(scheme, observer=scheme.observer or "minmax")
    return replace(scheme, observer=_weight_observer(where, observer))


def _weight_observer(where: str, observer: str | None) -> str:
    if observer not in _OBSERVERS:
        raise ConfigError(f"recipe: {where} has observer {observer!r}; choose minmax or mse")
    return _OBSERVERS[observer]


def group_scheme(name: str, group: JsonObject) -> Scheme:
    known = ("targets", "weights", "input_activations", "output_activations", "format")
    for key in group:
        if key not in known:
            raise ConfigError(
                f"recipe: {name} has no field {key!r}{nearest(str(key), known)}; known are {', '.join(known)}"
            )
    if group.get("output_activations") is not None:
        raise ConfigError(
            f"recipe: {name} quantizes output_activations; Freight does not, except for the KV cache: omit it"
        )
    if group.get("weights") is None:
        raise ConfigError(
            f"recipe: {name} has no weights; Freight rounds activations beside weights in 8 bits only. For the cache "
            "alone, give kv_cache_scheme without config_groups"
        )
    where = f"{name}: weights"
    args = _args(where, group["weights"])
    if args.dynamic is not False:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}; their scales are static: omit dynamic"
        )
    formats = {
        (8, "float"): _fp8_weights,
        (8, "int"): _int8_weights,
        (4, "int"): _int4_weights,
        (4, "float"): _fp4_weights,
    }
    resolve = formats.get((args.num_bits, args.type))
    if resolve is None:
        raise ConfigError(
            f"recipe: {where} has num_bits: {args.num_bits}, type: {args.type}; Freight writes 8 and 4 bits, "
            "int or float"
        )
    scheme = resolve(where, args)
    inputs = _activations(
        f"{name}: input_activations", group.get("input_activations"), scheme.weights
    )
    return replace(scheme, activations=inputs, act_order=order_of(where, args.actorder))


def _fp8_weights(where: str, args: QuantizationArgs) -> Scheme:
    _require_fp8(where, args)
    strategy = args.strategy
    if not strategy and args.group_size == -1:
        strategy = "channel"
    elif not strategy:
        strategy = "block" if args.block_structure else "tensor"
    if strategy not in _WEIGHTS or args.block_structure not in _BLOCKS:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}; Freight writes static scales with strategy tensor, channel, or block "
            "of [128, 128]"
        )
    require_observer(where, args.observer, exact=True)
    return Scheme(_WEIGHTS[strategy], ActivationScheme.NONE)


def _int8_weights(where: str, args: QuantizationArgs) -> Scheme:
    if _strategy(args) != "channel" or args.symmetric is not True:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}, symmetric: {args.symmetric}; Freight writes INT8 with strategy "
            "channel, symmetric: true"
        )
    observer = _weight_observer(where, args.observer)
    return Scheme(WeightScheme.INT8, ActivationScheme.NONE, observer=observer)


def _int4_weights(where: str, args: QuantizationArgs) -> Scheme:
    if _strategy(args) != "group" or args.group_size not in INT4_GROUPS:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}; Freight writes INT4 with strategy group and a group_size of "
            f"{choices(map(str, INT4_GROUPS))}"
        )
    return Scheme(
        WeightScheme.INT4,
        ActivationScheme.NONE,
        args.group_size,
        asymmetric=not args.symmetric,
        observer=_weight_observer(where, args.observer),
    )


def _fp4_weights(where: str, args: QuantizationArgs) -> Scheme:
    dtype = str(args.scale_dtype).removeprefix("torch.")
    layout = (_strategy(args), args.group_size)
    weights = ""
    if layout == ("tensor_group", 16) and dtype in ("float8_e4m3fn", "None"):
        weights = _NVFP4
    elif layout == ("group", 32) and dtype == "uint8":
        weights = WeightScheme.MXFP4
    if not weights or args.symmetric is not True:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}, scale_dtype: {dtype}; FP4 has strategy tensor_group with group_size "
            "16 and scales in float8_e4m3fn (NVFP4A16), or group with group_size 32 and scales in uint8 (MXFP4A16)"
        )
    observer = _weight_observer(where, args.observer)
    return Scheme(weights, ActivationScheme.NONE, observer=observer)


def _strategy(args: QuantizationArgs) -> str:
    """Return the strategy; the default is compressed-tensors', from the size of groups."""
    if args.strategy:
        return args.strategy
    if args.group_size is None:
        return "tensor"
    return "channel" if args.group_size == -1 else "group"


def _activations(where: str, scheme: object, weights: str) -> ActivationScheme:
    if weights == WeightScheme.INT8:
        return _int8_activations(where, scheme)
    if scheme is None:
        return ActivationScheme.NONE
    if weights not in _FP8:
        raise ConfigError(
            f"recipe: {where} are given, but beside weights in 4 bits inputs stay in 16 bits; omit them"
        )
    args = _fp8_args(where, scheme)
    if weights is WeightScheme.BLOCK:
        dynamic: tuple[str, int | None] = ("group", 128)
        known = "dynamic: true with strategy group with group_size 128"
        static = False
    else:
        dynamic = ("token", None)
        known = "dynamic: true with strategy token, or dynamic: false with strategy tensor"
        static = args.dynamic is False and args.strategy in ("tensor", None)
    if args.dynamic is True and (args.strategy or dynamic[0], args.group_size) == dynamic:
        return ActivationScheme.DYNAMIC
    if static:
        require_observer(where, args.observer)
        return ActivationScheme.STATIC
    raise ConfigError(f"recipe: {where} have {_says(args)}; with {weights} weights choose {known}")


def _int8_activations(where: str, scheme: object) -> ActivationScheme:
    args = None if scheme is None else _args(where, scheme)
    expected = QuantizationArgs(8, "int", dynamic=True, strategy="token")
    if args is not None:
        args = replace(args, strategy=args.strategy or "token", observer=None, zp_dtype=None)
    if args != expected:
        says = "none" if args is None else f"{_says(args)}, symmetric: {args.symmetric}"
        raise ConfigError(
            f"recipe: {where} have {says}; beside weights in INT8 choose num_bits: 8, type: int, symmetric: true, "
            "dynamic: true with strategy token"
        )
    return ActivationScheme.DYNAMIC


def kv_scheme(scheme: JsonObject) -> Granularity:
    args = _fp8_args("kv_cache_scheme", scheme)
    if args.dynamic is not False:
        raise ConfigError(
            "recipe: kv_cache_scheme is dynamic; scales per token need no recipe: omit it, and serve with "
            "--kv-cache-dtype fp8"
        )
    strategy = args.strategy or "tensor"
    if strategy not in _KV:
        raise ConfigError(
            f"recipe: kv_cache_scheme has strategy {strategy!r}; choose {choices(_KV)}"
        )
    require_observer("kv_cache_scheme", args.observer)
    return _KV[strategy]


def _args(where: str, scheme: object) -> QuantizationArgs:
    """Return QuantizationArgs. Raises ConfigError for unknown fields and any observer_kwargs."""
    known = [field.name for field in fields(QuantizationArgs)]
    content = {}
    for key, stored in require_mapping(f"recipe: {where}", plain(scheme)).items():
        if key not in known:
            raise ConfigError(f"recipe: {where} has no field {key!r}{nearest(str(key), known)}")
        value = getattr(stored, "value", stored)  # of a member of an enumeration, its string
        if value is not None:
            content[key] = value
    args = QuantizationArgs(**content)
    if args.observer_kwargs:
        raise ConfigError(
            f"recipe: {where} has observer_kwargs; observers have no settings here: omit them"
        )
    return args


def _fp8_args(where: str, scheme: object) -> QuantizationArgs:
    """Return QuantizationArgs for E4M3 numbers. Raises ConfigError for other numbers."""
    args = _args(where, scheme)
    if (args.num_bits, args.type) != (8, "float"):
        raise ConfigError(
            f"recipe: {where} has num_bits: {args.num_bits}, type: {args.type}; Freight writes FP8 only, num_bits: 8 "
            "and type: float. Use llm-compressor for other formats"
        )
    if args.actorder not in (None, False):
        raise ConfigError(f"recipe: {where} has actorder, which is of weights; omit it")
    _require_fp8(where, args)
    return args


def _require_fp8(where: str, args: QuantizationArgs) -> None:
    if args.symmetric is not True:
        raise ConfigError(
            f"recipe: {where} has symmetric: {args.symmetric}; FP8 has no zero point: symmetric: true"
        )
    if args.scale_dtype is not None:
        raise ConfigError(
            f"recipe: {where} has scale_dtype, which FP8 scales do not have here; omit it"
        )


def order_of(where: str, value: Any) -> str | None:
    value = getattr(value, "value", value)  # of a member of an enumeration, its string
    if not isinstance(value, str | bool | None) or value not in _ORDERS:
        raise ConfigError(
            f"recipe: {where} has actorder {shown(value)}; choose static, group or None"
        )
    return _ORDERS[value]


def require_observer(where: str, observer: str | None, exact: bool = False) -> None:
    """Raise ConfigError unless `observer` takes the largest magnitude. With `exact`, for values
    observed once, minmax observers are accepted as well: they agree there.
    """
    if observer not in (_EXACT if exact else _EXACT[:2]):
        raise ConfigError(
            f"recipe: {where} has observer {observer!r}; Freight takes the largest magnitude of all samples: choose "
            "static_minmax, or omit it. `freight quantize --observer percentile` or `mse` clip outliers"
        )


def _says(args: QuantizationArgs) -> str:
    dynamic = str(args.dynamic).lower()
    extra = f", group_size: {args.group_size}" if args.group_size is not None else ""
    return f"strategy: {args.strategy}, dynamic: {dynamic}{extra}"


def require_mapping(what: str, value: object) -> JsonObject:
    """Return `value`, called `what` in errors. Raises ConfigError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {shown(value)}, not a mapping")
    return value


def plain(value: Any) -> Any:
    """Return `value` as a mapping if it is an object of llm-compressor's kind."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
