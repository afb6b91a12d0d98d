"""QuantizationModifier of llm-compressor, resolved to weights, activations, KV scales. Imports no
torch.

`QuantizationModifier` and `QuantizationArgs` have the fields and defaults of llm-compressor's and
compressed-tensors' classes of these names; objects of those classes are read as well. Anything that
Freight does not do is an error that names it: another number format, several schemes in one model,
an observer that clips. No field is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from freight.base.fields import JsonObject
from freight.base.patterns import FilePattern
from freight.errors import ConfigError, choices, nearest, shown
from freight.fp8.formats import Granularity
from freight.quantizer.plan import ActivationScheme, QuantizeArgs, WeightScheme

_PRESETS = {  # names of schemes -> weights, activations
    "FP8": (WeightScheme.TENSOR, ActivationScheme.STATIC),
    "FP8_DYNAMIC": (WeightScheme.CHANNEL, ActivationScheme.DYNAMIC),
    "FP8_BLOCK": (WeightScheme.BLOCK, ActivationScheme.DYNAMIC),
}
_NOT_WRITTEN = frozenset(  # compressed-tensors' other preset schemes, which Freight does not write
    (
        "UNQUANTIZED",
        "W8A16",
        "W4A16",
        "W4A16_ASYM",
        "W8A8",
        "INT8",
        "W4A8",
        "W4AFP8",
        "NVFP4A16",
        "NVFP4",
        "MXFP4A16",
        "MXFP4",
        "MXFP8A16",
        "MXFP8",
    )
)
_BLOCKS = (None, [128, 128], (128, 128), "128x128")
_WEIGHTS = {
    "tensor": WeightScheme.TENSOR,
    "channel": WeightScheme.CHANNEL,
    "block": WeightScheme.BLOCK,
}
_KV = {"tensor": Granularity.TENSOR, "attn_head": Granularity.HEAD}


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
class QuantizationModifier:
    """A choice of modules and schemes, with llm-compressor's fields.

    targets          "Linear", names of Linear modules, or `re:` and an expression that a name
                     begins with
    scheme           "FP8", "FP8_DYNAMIC" or "FP8_BLOCK"; or {name: targets}
    config_groups    instead of `scheme`: {name: {targets, weights, input_activations}}
    ignore           Linear modules that stay in 16 bits, by name or `re:`; `lm_head` is quantized
                     unless it is here
    kv_cache_scheme  QuantizationArgs, or a mapping: FP8, strategy "tensor" or "attn_head"

    Raises ConfigError for what Freight does not do.
    """

    targets: str | Sequence[str] = ("Linear",)
    scheme: str | JsonObject | None = None
    ignore: Sequence[str] = ()
    kv_cache_scheme: Any = None
    config_groups: JsonObject | None = None
    weight_observer: str | None = None
    input_observer: str | None = None
    output_observer: str | None = None
    observer: Mapping[str, str] | None = None
    bypass_divisibility_checks: bool = False

    def __post_init__(self) -> None:
        resolve_modifier(self)


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. With `kv` None the cache is not quantized; with `weights` NONE only the
    cache is.

    `targets` and `ignore` are in compressed-tensors' syntax; `unquantized` applies them to a
    model's modules.
    """

    weights: WeightScheme
    activations: ActivationScheme
    kv: Granularity | None
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def args(self, **options: Any) -> QuantizeArgs:
        """Return the recipe as options of `freight quantize`; `options` are further fields. The
        caller sets `ignore`.
        """
        return QuantizeArgs(
            weights=self.weights,
            activations=self.activations,
            kv_cache="none" if self.kv is None else "fp8",
            kv_granularity=self.kv,
            **options,
        )

    def unquantized(self, linear: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return (modules of `linear` that stay in 16 bits, patterns of `ignore` that match none of
        them).

        Raises ConfigError for a target that matches no Linear module.
        """
        if self.weights is WeightScheme.NONE:
            return list(linear), []
        quantized: set[str] = set()
        for target in self.targets:
            matched = _matched(linear, target)
            if not matched:
                raise ConfigError(
                    f"recipe: the target {target!r} is no Linear module of the model{nearest(target, linear)}; Freight "
                    "quantizes Linear modules only: give 'Linear', a full name, or re: and an expression for names"
                )
            quantized |= matched
        unused = []
        for pattern in self.ignore:
            matched = _matched(linear, pattern)
            quantized -= matched
            if not matched:
                unused.append(pattern)
        return [name for name in linear if name not in quantized], unused


def _matched(linear: Sequence[str], pattern: str) -> set[str]:
    """Return the Linear modules that `pattern` selects: by class, by name, or by an expression that
    the name begins with.
    """
    if pattern == "Linear":
        return set(linear)
    if not pattern.startswith("re:"):
        return {pattern}.intersection(linear)
    return set(filter(FilePattern(pattern[3:], "recipe", ConfigError).match, linear))


def resolve_modifier(modifier: Any) -> Recipe:
    """Resolve a QuantizationModifier. Raises ConfigError for what Freight does not do."""
    groups = [_scheme(modifier, *group) for group in _groups(modifier)]
    if len({scheme for scheme, _ in groups}) > 1:
        raise ConfigError(
            "recipe: modules of one model get different schemes; Freight writes one: name it once, and leave other "
            "modules in 16 bits with ignore="
        )
    weights = WeightScheme.NONE
    activations = ActivationScheme.NONE
    targets: list[str] = []
    for scheme, of_group in groups:
        weights, activations = scheme
        targets += of_group
    kv = None
    cache = _plain(modifier.kv_cache_scheme)
    if cache is not None:
        kv = _kv_scheme(require_mapping("recipe: kv_cache_scheme", cache))
    if not groups and kv is None:
        raise ConfigError(
            f"recipe: QuantizationModifier quantizes nothing; add scheme={choices(map(repr, _PRESETS))}"
        )
    return Recipe(
        weights,
        activations,
        kv,
        tuple(dict.fromkeys(targets)),
        _patterns("ignore", modifier.ignore),
    )


def _groups(modifier: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield (name, a preset's name or a mapping of the group, its targets) for each group of the
    modifier.
    """
    scheme = _plain(modifier.scheme)
    groups = _plain(modifier.config_groups)
    if scheme is not None and groups:
        raise ConfigError(
            "recipe: QuantizationModifier has both scheme and config_groups; give one of them"
        )
    if isinstance(scheme, str):
        yield "scheme", scheme, _patterns("targets", modifier.targets)
        return
    for name, group in require_mapping(
        "recipe: scheme or config_groups", scheme or groups or {}
    ).items():
        group = _plain(group)
        if isinstance(group, str | list | tuple):  # a preset's name with its targets
            yield f"scheme {name}", str(name), _patterns(f"targets of {name}", group)
        else:
            of = require_mapping(f"recipe: {name}", group)
            yield str(name), of, _patterns(f"targets of {name}", of.get("targets") or ())


def _scheme(
    modifier: Any, name: str, scheme: Any, targets: tuple[str, ...]
) -> tuple[tuple[WeightScheme, ActivationScheme], tuple[str, ...]]:
    """Return the scheme of one group, with its targets."""
    observers = _observers(modifier)
    if isinstance(scheme, str):
        preset = scheme.upper()
        if preset not in _PRESETS:
            fault = f"is unknown{nearest(preset, _PRESETS)}"
            if preset in _NOT_WRITTEN:
                fault = "is not implemented"
            raise ConfigError(
                f"recipe: the scheme {scheme!r} {fault}; Freight writes {choices(_PRESETS)}; `freight quantize "
                "--weights int4` or `int8` rounds to nearest, and llm-compressor writes others"
            )
        weights, activations = _PRESETS[preset]
    else:
        weights, activations = _group_scheme(name, scheme)
    _require_observer(f"{name}: weights", observers["weights"], exact=True)
    if activations is ActivationScheme.STATIC:
        _require_observer(f"{name}: input activations", observers["input"])
    if observers["output"] is not None:
        raise ConfigError(
            f"recipe: an observer of outputs, {observers['output']!r}: outputs are not quantized; omit it"
        )
    return (weights, activations), targets


def _group_scheme(name: str, group: JsonObject) -> tuple[WeightScheme, ActivationScheme]:
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
            f"recipe: {name} has no weights; Freight rounds activations for FP8 weights only. For the cache alone, "
            "give kv_cache_scheme without config_groups"
        )
    where = f"{name}: weights"
    args = _fp8_args(where, group["weights"])
    strategy = args.strategy
    if not strategy and args.group_size == -1:
        strategy = "channel"
    elif not strategy:
        strategy = "block" if args.block_structure else "tensor"
    if strategy not in _WEIGHTS or args.dynamic is not False or args.block_structure not in _BLOCKS:
        raise ConfigError(
            f"recipe: {where} have {_says(args)}; Freight writes static scales with strategy tensor, channel, or block "
            "of [128, 128]"
        )
    _require_observer(where, args.observer, exact=True)
    weights = _WEIGHTS[strategy]
    return weights, _activations(
        f"{name}: input_activations", group.get("input_activations"), weights
    )


def _activations(where: str, scheme: object, weights: WeightScheme) -> ActivationScheme:
    if scheme is None:
        return ActivationScheme.NONE
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
        _require_observer(where, args.observer)
        return ActivationScheme.STATIC
    raise ConfigError(f"recipe: {where} have {_says(args)}; with {weights} weights choose {known}")


def _kv_scheme(scheme: JsonObject) -> Granularity:
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
    _require_observer("kv_cache_scheme", args.observer)
    return _KV[strategy]


def _fp8_args(where: str, scheme: object) -> QuantizationArgs:
    """Return QuantizationArgs for E4M3 numbers. Raises ConfigError for other numbers and unknown
    fields.
    """
    known = [field.name for field in fields(QuantizationArgs)]
    content = {}
    for key, stored in require_mapping(f"recipe: {where}", _plain(scheme)).items():
        if key not in known:
            raise ConfigError(f"recipe: {where} has no field {key!r}{nearest(str(key), known)}")
        value = getattr(stored, "value", stored)  # of a member of an enumeration, its string
        if value is not None:
            content[key] = value
    args = QuantizationArgs(**content)
    if (args.num_bits, args.type) != (8, "float"):
        raise ConfigError(
            f"recipe: {where} has num_bits: {args.num_bits}, type: {args.type}; Freight writes FP8 only, num_bits: 8 "
            "and type: float. Use llm-compressor for other formats"
        )
    if args.symmetric is not True:
        raise ConfigError(
            f"recipe: {where} has symmetric: {args.symmetric}; FP8 has no zero point: symmetric: true"
        )
    if args.actorder is not None or args.scale_dtype is not None:
        raise ConfigError(
            f"recipe: {where} has actorder or scale_dtype, which FP8 scales do not have here; omit them"
        )
    if args.observer_kwargs:
        raise ConfigError(f"recipe: {where} has observer_kwargs; static_minmax has none: omit them")
    return args


def _observers(modifier: Any) -> dict[str, str | None]:
    """Return the observers that the modifier sets for all its groups."""
    observers = {
        "weights": modifier.weight_observer,
        "input": modifier.input_observer,
        "output": modifier.output_observer,
    }
    for key, observer in require_mapping("recipe: observer", modifier.observer or {}).items():
        if key not in observers:
            raise ConfigError(
                f"recipe: observer has no key {key!r}; choose weights, input or output"
            )
        observers[key] = observer
    return observers


def _require_observer(where: str, observer: str | None, exact: bool = False) -> None:
    """Raise ConfigError unless `observer` takes the largest magnitude. With `exact`, for values
    observed once, minmax observers are accepted as well: they agree there.
    """
    known = [None, "static_minmax"]
    if exact:
        known += ["minmax", "memoryless_minmax"]
    if observer not in known:
        raise ConfigError(
            f"recipe: {where} has observer {observer!r}; Freight takes the largest magnitude of all samples: choose "
            "static_minmax, or omit it. `freight quantize --observer percentile` or `mse` clip outliers"
        )


def _patterns(what: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(name, str) for name in patterns):
        raise ConfigError(
            f"recipe: {what} is {shown(value)}; give names or re: and an expression, in a list"
        )
    patterns = tuple(patterns)
    for pattern in patterns:
        if pattern.startswith("re:"):
            FilePattern(pattern[3:], f"recipe: {what}", ConfigError)
    if not patterns and what != "ignore":
        raise ConfigError(f"recipe: {what} is empty; give 'Linear'")
    return patterns


def _says(args: QuantizationArgs) -> str:
    dynamic = str(args.dynamic).lower()
    extra = f", group_size: {args.group_size}" if args.group_size is not None else ""
    return f"strategy: {args.strategy}, dynamic: {dynamic}{extra}"


def require_mapping(what: str, value: object) -> JsonObject:
    """Return `value`, called `what` in errors. Raises ConfigError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {shown(value)}, not a mapping")
    return value


def _plain(value: Any) -> Any:
    """Return `value` as a mapping if it is an object of llm-compressor's kind."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
