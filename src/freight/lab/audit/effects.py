"""A checkpoint's facts and the rules -> what each engine does, layer by layer. Pure: reads no file,
imports no torch.

`view(engine, version, facts)` is all of it. Its scales are those that the engine divides by, so
they can be measured.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from freight.errors import ConfigError, choices
from freight.lab.audit.families import family_of, known
from freight.lab.audit.rules import (
    ASSEMBLIES,
    AUTO_RULES,
    CT,
    INPUT_RULES,
    NAME_RULES,
    READ,
    VLLM_NOTES,
    Assembly,
    Effect,
    Engine,
    NameRule,
)
from freight.lab.audit.schemes import KVScheme, vllm_refusal

_AFTER_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.*)$")
_NAMES = {Engine.VLLM: "vLLM", Engine.SGLANG: "SGLang", Engine.TGI: "TGI"}


@dataclass(frozen=True)
class StoredScale:
    """One KV scale's tensor. `side` is 'k', 'v' or 'kv'; `values` are one number, or one per KV
    head or channel.
    """

    name: str
    layer: int
    side: str
    values: tuple[float, ...]


Ruled = tuple[StoredScale, NameRule]  # a tensor, and the rule that matches it


@dataclass(frozen=True)
class Facts:
    """What decides an engine's behaviour. `strategy` is that of a declared kv_cache_scheme, 'none'
    without one.

    `input_scales` counts the scales of static activations by the last part of their names.
    `rounded` maps the names of `kv_scale` tensors to their values in the model's dtype.
    `architecture` is the first of config.json's `architectures`. `scheme` is a kv_cache_scheme that
    is an object. `query_scales` counts the scales of queries. `without_keys` are the layers that
    store no keys and values, and need no scale.
    """

    method: str
    strategy: str
    declares_kv: bool
    model_type: str
    num_layers: int
    stored: tuple[StoredScale, ...]
    input_scales: tuple[tuple[str, int], ...] = ()
    rounded: tuple[tuple[str, float], ...] = ()
    architecture: str = ""
    scheme: KVScheme | None = None
    query_scales: int = 0
    without_keys: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Side:
    """K's or V's scale of one layer in one engine. `values` has one number, or one per KV head;
    none if unknown.
    """

    effect: Effect
    values: tuple[float, ...]
    name: str = ""
    why: str = ""
    source: str = ""


@dataclass(frozen=True)
class LayerEffect:
    layer: int
    k: Side
    v: Side


@dataclass(frozen=True)
class EngineView:
    """One engine and this checkpoint. `layers` are those of its `num_layers` that store keys and
    values.

    `refusal` says why the engine does not load it; '' if it does.

    `auto_fp8`: whether the engine stores FP8 without being asked. `doubled`: whether scales are
    doubled for E4M3FNUZ. `input_scales`: (last part of the name, how many, effect) of the scales of
    static activations. `family` is what the engine chooses the model's class by. `caveat` is what
    no figure here contains, '' if there is nothing; `notes` are further conditions.
    """

    engine: Engine
    version: str
    rules_of: str
    num_layers: int
    layers: tuple[LayerEffect, ...]
    auto_fp8: bool
    doubled: bool
    refusal: str
    input_scales: tuple[tuple[str, int, Effect], ...] = ()
    family: str = ""
    caveat: str = ""
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{_NAMES[self.engine]} {self.version}"

    @property
    def truncates_on_cpus(self) -> bool:
        """Whether its CPU kernels round towards zero (`vllm_cpu`); older ones have no cache in
        E4M3.
        """
        return self.engine is Engine.VLLM and _number(self.version) >= (0, 32)

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(side for layer in self.layers for side in (layer.k, layer.v))

    @property
    def counts(self) -> dict[str, int]:
        """{effect: scales}, two scales a layer."""
        return dict(Counter(str(side.effect) for side in self.sides))

    @property
    def unknown(self) -> tuple[Side, ...]:
        """The sides of which it is not known what the engine does."""
        return tuple(side for side in self.sides if side.effect is Effect.UNKNOWN)

    @property
    def lost(self) -> tuple[int, ...]:
        """The layers in which a stored scale is not used."""
        return self._layers_with(Effect.IGNORED)

    @property
    def unit(self) -> tuple[int, ...]:
        """The layers in which K or V is divided by 1.0 for want of a loaded scale."""
        return self._layers_with(Effect.IGNORED, Effect.ONE)

    def _layers_with(self, *effects: Effect) -> tuple[int, ...]:
        """Return the layers with one of `effects` on either side."""
        layers = []
        for layer in self.layers:
            if layer.k.effect in effects or layer.v.effect in effects:
                layers.append(layer.layer)
        return tuple(layers)


def parse_engine(text: str) -> tuple[Engine, str]:
    """'vllm' or 'vllm=0.33' -> engine and version, the newest that was read by default. Raises
    ConfigError.
    """
    name, _, version = text.lower().partition("=")
    if name not in list(Engine):
        raise ConfigError(
            f"--engine {text!r}: choose {choices(map(str, Engine))}, with =VERSION if not the newest"
        )
    engine = Engine(name)
    version = version or READ[engine][-1]
    if not re.fullmatch(r"\d+(\.\d+){0,3}", version):
        raise ConfigError(
            f"--engine {text!r}: {version!r} is not a version; write {name}={READ[engine][-1]}"
        )
    if _rules_of(engine, version) is None:
        raise ConfigError(
            f"--engine {text!r}: the sources of {_NAMES[engine]} {version} were not read, and engines change; "
            f"read were {', '.join(READ[engine])} (and their patch releases)"
        )
    return engine, version


def _rules_of(engine: Engine, version: str) -> str | None:
    """Return the version that was read and is this one, or whose patch release it is."""
    for release in READ[engine]:
        if version == release or version.startswith(f"{release}."):
            return release
    return None


def view(engine: Engine, version: str, facts: Facts) -> EngineView:
    """Return what `engine` at `version` does with a checkpoint of these facts."""
    rules_of = _rules_of(engine, version)
    assert rules_of is not None, "parse_engine accepts versions that were read"
    assembly = _assembly(engine, rules_of, facts.method)
    by_layer: list[list[StoredScale]] = [[] for _ in range(facts.num_layers)]
    for stored in facts.stored:
        if stored.layer < facts.num_layers:
            by_layer[stored.layer].append(stored)
    layers = []
    for index, scales in enumerate(by_layer):
        if index not in facts.without_keys:
            ruled = [(stored, _rule(engine, rules_of, stored, facts)) for stored in scales]
            layers.append(_layer(index, ruled, assembly, facts))
    refusal = _refusal(layers)
    recent = engine is Engine.VLLM and rules_of != READ[engine][0]
    if engine is Engine.VLLM and facts.method in CT and facts.scheme is not None:
        refusal = vllm_refusal(facts.scheme, recent) or refusal
    by_default = any(rule.engine is engine and facts.method in rule.methods for rule in AUTO_RULES)
    engine_view = EngineView(
        engine=engine,
        version=version,
        rules_of=rules_of,
        num_layers=facts.num_layers,
        layers=tuple(layers),
        auto_fp8=by_default and facts.declares_kv,
        doubled=assembly.doubled,
        refusal=refusal,
        input_scales=_input_effects(engine, facts),
        family=family_of(engine, facts.architecture, facts.model_type),
    )
    if not recent:
        return engine_view
    caveat, notes = _conditions(facts)
    return replace(engine_view, caveat=caveat, notes=notes)


def _assembly(engine: Engine, version: str, method: str) -> Assembly:
    for rule in ASSEMBLIES:
        of_method = not rule.methods or method in rule.methods
        if rule.engine is engine and of_method and _holds(rule, version):
            return rule
    raise AssertionError("there is a rule for each engine, version and method")


def _refusal(layers: Sequence[LayerEffect]) -> str:
    """Say why the engine does not load a scale; '' if it loads all."""
    for layer in layers:
        for side in (layer.k, layer.v):
            if side.effect is Effect.REFUSED:
                return f"{side.name}: {side.why} ({side.source})"
    return ""


def _input_effects(engine: Engine, facts: Facts) -> tuple[tuple[str, int, Effect], ...]:
    effects = {}
    for of, suffix, effect, _ in INPUT_RULES:
        if of is engine:
            effects[suffix] = effect
    inputs = []
    for name, count in facts.input_scales:
        inputs.append((name, count, effects.get(name, Effect.IGNORED)))
    return tuple(inputs)


def _conditions(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return what vLLM's backends and options change: (what no figure contains, further
    conditions).
    """
    q_scale = "the checkpoint's q_scale" if facts.query_scales else "q_scale = 1.0"
    caveat = (
        "on GPUs its FlashAttention 3 (H100), Triton, and FlashInfer (Blackwell) round queries to FP8 too, with "
        f"{q_scale}, which is not measured here"
    )
    if facts.method in CT and facts.scheme is not None and facts.scheme.strategy == "attn_head":
        return caveat, VLLM_NOTES
    return caveat, VLLM_NOTES[1:]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _holds(rule: NameRule | Assembly, version: str) -> bool:
    return not rule.until or _number(version) <= _number(rule.until)


def _rule(engine: Engine, version: str, stored: StoredScale, facts: Facts) -> NameRule:
    match = _AFTER_LAYER.search(stored.name)
    tail = match[1] if match else stored.name
    for rule in NAME_RULES:
        if (
            rule.engine is not engine
            or not _holds(rule, version)
            or not re.fullmatch(rule.names, tail)
        ):
            continue
        pairs = ((rule.methods, facts.method), (rule.model_types, facts.model_type))
        if all(not allowed or value in allowed for allowed, value in pairs):
            return rule
    family = family_of(engine, facts.architecture, facts.model_type)
    rule_of_family = known(engine, version, family, tail, facts.method, facts.strategy)
    if rule_of_family is not None:
        return rule_of_family
    why = f"no rule was read for {tail} of {family} with quant_method {facts.method} in {_NAMES[engine]} {version}"
    return NameRule(
        engine=engine,
        names=".*",
        effect=Effect.UNKNOWN,
        why=why,
        source="src/freight/lab/audit/engine_families.json",
    )


def _layer(index: int, ruled: list[Ruled], assembly: Assembly, facts: Facts) -> LayerEffect:
    """Return a layer's sides, from its tensors and the rules that match them."""
    loaded: dict[str, Ruled] = {}
    for stored, rule in ruled:
        bad = next((value for value in stored.values if not 0 < value < math.inf), None)
        if bad is not None and rule.effect in (Effect.USED, Effect.CONVERTED):
            why = f"the stored scale is {bad}, and a scale has to be finite and above 0"
            side = Side(Effect.UNKNOWN, (), name=stored.name, why=why, source=rule.source)
            return LayerEffect(index, side, side)
        if rule.effect in (Effect.REFUSED, Effect.UNKNOWN):
            values = (1.0,) if rule.effect is Effect.REFUSED else ()
            side = Side(rule.effect, values, name=stored.name, why=rule.why, source=rule.source)
            return LayerEffect(index, side, side)
        if rule.effect in (Effect.USED, Effect.CONVERTED):
            for letter in rule.sides or stored.side:
                loaded.setdefault(letter, (stored, rule))
    several = [stored for stored, _ in loaded.values() if len(stored.values) > 1]
    if several and (assembly.heads is Effect.REFUSED or facts.strategy != "attn_head"):
        why = f"it takes one number per layer, and this tensor has {len(several[0].values)}"
        side = Side(Effect.REFUSED, (1.0,), name=several[0].name, why=why, source=assembly.source)
        return LayerEffect(index, side, side)
    if set(loaded) in ({"k"}, {"v"}):
        alone = _alone(loaded, assembly)
        if alone is not None:
            return LayerEffect(index, *alone)
    rounded = dict(facts.rounded)
    sides = [_side(letter, ruled, loaded.get(letter), rounded) for letter in "kv"]
    return LayerEffect(index, sides[0], sides[1])


def _alone(loaded: dict[str, Ruled], assembly: Assembly) -> tuple[Side, Side] | None:
    """Both sides of a layer of which one tensor was loaded; None if the other side simply stays at
    1.0.
    """
    letter, (stored, _) = next(iter(loaded.items()))
    effect = assembly.only_k if letter == "k" else assembly.only_v
    if effect is Effect.USED:
        return None
    if effect is Effect.IGNORED:
        why = "it reads a pair of scales, or neither"
        loaded_side = Side(effect, (1.0,), name=stored.name, why=why, source=assembly.source)
        other = Side(Effect.ONE, (1.0,), why="no scale is stored", source=assembly.source)
        return (loaded_side, other) if letter == "k" else (other, loaded_side)
    values = stored.values
    why = "one scale serves K and V"
    if effect is Effect.REFUSED:
        values = (1.0,)
        why = f"{letter.upper()}'s scale came without the other"
    side = Side(effect, values, name=stored.name, why=why, source=assembly.source)
    return side, side


def _side(
    letter: str,
    ruled: list[Ruled],
    loaded: Ruled | None,
    rounded: dict[str, float],
) -> Side:
    if loaded is not None:
        stored, rule = loaded
        values = stored.values
        if rule.effect is Effect.CONVERTED and stored.name in rounded:
            values = (rounded[stored.name],)
        effect = Effect.USED if values == stored.values else rule.effect
        return Side(effect, values, name=stored.name, why=rule.why, source=rule.source)
    for stored, rule in ruled:
        if letter in stored.side:
            return Side(Effect.IGNORED, (1.0,), name=stored.name, why=rule.why, source=rule.source)
    return Side(Effect.ONE, (1.0,), why="no scale is stored")
