"""QuantizationModifier and GPTQModifier of llm-compressor, resolved to weights, activations, KV
scales. Imports no torch.

The modifiers and `QuantizationArgs` have the fields and defaults of llm-compressor's and
compressed-tensors' classes of these names; objects of those classes are read as well. Anything that
Freight does not do is an error that names it: another number format, several schemes in one model,
an observer that clips. A field is ignored only if it changes no weight, such as
`batched_quantization`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from freight.base.fields import JsonObject
from freight.base.patterns import FilePattern
from freight.errors import ConfigError, choices, nearest, shown
from freight.fp8.formats import Granularity
from freight.quantizer.plan import ActivationScheme, QuantizeArgs, WeightScheme
from freight.quantizer.schemes import (
    PRESETS,
    QuantizationArgs,
    Scheme,
    group_scheme,
    kv_scheme,
    order_of,
    plain,
    preset_scheme,
    require_mapping,
    require_observer,
    with_observer,
)

__all__ = [
    "GPTQ",
    "GPTQModifier",
    "QuantizationArgs",
    "QuantizationModifier",
    "Recipe",
    "resolve_modifier",
]

GPTQ = "gptq"


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
class GPTQModifier(QuantizationModifier):
    """A QuantizationModifier whose weights are rounded by GPTQ, with llm-compressor's fields.

    block_size            columns after which the others are corrected; it changes no result, and
                          only the default is taken
    dampening_frac        share of the mean of the Hessian's diagonal that is added to it
    actorder              "static" (or "weight"), "group", or None for the columns as they come.
                          Not given: what the scheme has, else "static"
    batched_quantization  ignored

    Raises ConfigError for what Freight does not do.
    """

    block_size: int = 128
    dampening_frac: float | None = 0.01
    actorder: Any = ...
    batched_quantization: object = "auto"
    sequential_update: bool | None = None  # of older recipes


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. With `kv` None the cache is not quantized; with `weights` NONE only the
    cache is.

    `targets` and `ignore` are in compressed-tensors' syntax; `unquantized` applies them to a
    model's modules.

    The other fields are those of QuantizeArgs.
    """

    weights: WeightScheme
    activations: ActivationScheme
    kv: Granularity | None
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    group_size: int | None = None
    asymmetric: bool = False
    weight_observer: str | None = None
    method: str | None = None
    damping: float | None = None
    act_order: str | None = None
    smoothing: float | None = None
    duo_scaling: str | None = None

    @property
    def needs_data(self) -> bool:
        """True if anything is calibrated."""
        calibrated = self.activations is ActivationScheme.STATIC or self.kv is not None
        return calibrated or self.method not in (None, "rotation")

    def args(self, **options: Any) -> QuantizeArgs:
        """Return the recipe as options of `freight quantize`; `options` are further fields. The
        caller sets `ignore`.
        """
        return QuantizeArgs(
            weights=self.weights,
            activations=self.activations,
            kv_cache="none" if self.kv is None else "fp8",
            kv_granularity=self.kv,
            group_size=self.group_size,
            asymmetric=self.asymmetric,
            weight_observer=self.weight_observer,
            method=self.method,
            damping=self.damping,
            act_order=self.act_order,
            smoothing=self.smoothing,
            duo_scaling=self.duo_scaling,
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
    """Resolve a QuantizationModifier or GPTQModifier. Raises ConfigError for what Freight does not
    do.
    """
    name = type(modifier).__name__
    groups = [_scheme(modifier, *group) for group in _groups(modifier)]
    if len({scheme for scheme, _ in groups}) > 1:
        raise ConfigError(
            "recipe: modules of one model get different schemes; Freight writes one: name it once, and leave other "
            "modules in 16 bits with ignore="
        )
    kv = None
    cache = plain(modifier.kv_cache_scheme)
    if cache is not None:
        kv = kv_scheme(require_mapping("recipe: kv_cache_scheme", cache))
    if not groups and (kv is None or name == "GPTQModifier"):
        raise ConfigError(
            f"recipe: {name} quantizes nothing; add scheme={choices(map(repr, PRESETS))}"
        )
    scheme = groups[0][0] if groups else Scheme(WeightScheme.NONE, ActivationScheme.NONE)
    targets = [target for _, of_group in groups for target in of_group]
    recipe = Recipe(
        _written(scheme.weights),
        scheme.activations,
        kv,
        tuple(dict.fromkeys(targets)),
        _patterns("ignore", modifier.ignore),
        scheme.group_size,
        scheme.asymmetric,
        scheme.observer,
    )
    if name == "GPTQModifier":
        return _with_gptq(modifier, scheme, recipe)
    if scheme.act_order is not None:
        raise ConfigError(
            f"recipe: weights have actorder {scheme.act_order!r}, an order of GPTQ; use GPTQModifier, or omit it"
        )
    return recipe


def _written(weights: str) -> WeightScheme:
    if weights not in set(WeightScheme):
        raise ConfigError(
            f"recipe: weights in {weights} are not implemented; choose W4A16 or MXFP4A16"
        )
    return WeightScheme(weights)


def _with_gptq(modifier: Any, scheme: Scheme, recipe: Recipe) -> Recipe:
    """Return `recipe` with GPTQ. Raises ConfigError for fields that Freight does not take."""
    if modifier.block_size != 128:
        raise ConfigError(
            f"recipe: GPTQModifier has block_size {shown(modifier.block_size)}, which changes no result; omit it"
        )
    if getattr(modifier, "sequential_update", None) is False:
        raise ConfigError(
            "recipe: GPTQModifier has sequential_update: false; a layer is always calibrated with the outputs of the "
            "quantized layers before it, as llm-compressor now does: omit it"
        )
    damping = modifier.dampening_frac
    if damping is None:
        damping = GPTQModifier.dampening_frac
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 < damping <= 1:
        raise ConfigError(
            f"recipe: GPTQModifier has dampening_frac {shown(damping)}; give a number above 0, at most 1"
        )
    order = _act_order(modifier.actorder, scheme.act_order)
    return replace(recipe, method=GPTQ, damping=float(damping), act_order=order)


def _act_order(of_modifier: Any, of_scheme: str | None) -> str:
    """Return the order: the modifier's, or if it has none, the scheme's, or "static"."""
    if of_modifier is ... or type(of_modifier).__name__ == "Sentinel":
        return of_scheme or "static"
    order = order_of("GPTQModifier", of_modifier)
    if of_scheme not in (None, order):
        raise ConfigError(
            f"recipe: GPTQModifier has actorder {order!r}, and its weights {of_scheme!r}; give one of them"
        )
    return order or "none"


def _groups(modifier: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield (name, a preset's name or a mapping of the group, its targets) for each group of the
    modifier.
    """
    scheme = plain(modifier.scheme)
    groups = plain(modifier.config_groups)
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
        group = plain(group)
        if isinstance(group, str | list | tuple):  # a preset's name with its targets
            yield f"scheme {name}", str(name), _patterns(f"targets of {name}", group)
        else:
            of = require_mapping(f"recipe: {name}", group)
            yield str(name), of, _patterns(f"targets of {name}", of.get("targets") or ())


def _scheme(
    modifier: Any, name: str, scheme: Any, targets: tuple[str, ...]
) -> tuple[Scheme, tuple[str, ...]]:
    """Return the scheme of one group, with its targets."""
    observers = _observers(modifier)
    resolved = preset_scheme(scheme) if isinstance(scheme, str) else group_scheme(name, scheme)
    resolved = with_observer(f"{name}: weights", resolved, observers["weights"])
    if resolved.activations is ActivationScheme.STATIC:
        require_observer(f"{name}: input activations", observers["input"])
    if observers["output"] is not None:
        raise ConfigError(
            f"recipe: an observer of outputs, {observers['output']!r}: outputs are not quantized; omit it"
        )
    return resolved, targets


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
