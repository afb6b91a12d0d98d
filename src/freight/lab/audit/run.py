"""Audit a checkpoint: what each engine does with it, what that costs here, and what repairs it.

What the rules say needs config.json, tensor names and the scales alone. Measuring needs a family
that Freight runs and a text; where either lacks, the report says so and the rest of it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from freight.base.fields import JsonObject
from freight.base.terminal import OnStage, unseen
from freight.checkpoint.reader import resolve_model
from freight.checkpoint.writer import require_new, require_own_files
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.audit.effects import EngineView, Facts, Side, view
from freight.lab.audit.facts import read_facts
from freight.lab.audit.measure import (
    LayerCost,
    engine_scales,
    measure,
    measured_scales,
    worst_layers,
)
from freight.lab.audit.repair import Form, choose_form, write_repaired
from freight.lab.audit.rules import Engine
from freight.lab.audit.verdict import Cost, sentence
from freight.lab.audit.weights import WeightFacts, read_weights
from freight.lab.columns import as_object
from freight.model.open import open_folder
from freight.settings.engine import EngineArgs


@dataclass(frozen=True)
class EngineReport:
    """One engine: what it does, what that costs (None where not measured), its worst layers, and
    the verdict.

    `cost` rounds to nearest, as GPU kernels do; `cpu_cost` as the engine's CPU kernels do, None
    where that is the same.
    """

    view: EngineView
    cost: Cost | None
    cpu_cost: Cost | None
    worst: tuple[LayerCost, ...]
    verdict: str


@dataclass(frozen=True)
class AuditReport:
    """The report. `plain`, `dynamic` and `stored` are costs of a 16-bit cache, of one with a
    scale per token, and of the stored scales; None where not measured or not there. `unmeasured`
    says why nothing was measured. `weights` is None where no matrix is quantized, and where Freight
    does not load them.
    """

    facts: Facts
    engines: tuple[EngineReport, ...]
    plain: Cost | None
    dynamic: Cost | None
    stored: Cost | None
    num_tokens: int
    unmeasured: str
    fixed: Form | None
    weights: WeightFacts | None = None


@dataclass(frozen=True)
class _Costs:
    """What was measured, by the scales of a cache; empty where nothing was."""

    plain: Cost | None = None
    dynamic: Cost | None = None
    of: Mapping[KVScales | None, Cost] = field(default_factory=dict)
    truncated: Mapping[KVScales | None, Cost] = field(default_factory=dict)
    num_tokens: int = 0


def audit(
    args: EngineArgs,
    engines: Sequence[tuple[Engine, str]],
    text: str | None,
    window: int | None = None,
    max_tokens: int = 8192,
    layer_tokens: int = 1024,
    fix: Path | None = None,
    calibration: str | None = None,
    on_progress: OnStage = unseen,
) -> AuditReport:
    """Audit `args.model` for `engines`, and write a repaired checkpoint into `fix` if it is given.

    At most `max_tokens` of `text` are measured, `layer_tokens` for the ranking of layers.
    `calibration` is what missing scales are measured on for `fix`; default: `text`. Raises
    ConfigError and CheckpointError.
    """
    if fix is not None:
        require_new(fix)
    path = resolve_model(args.model, args.revision)
    if fix is not None:
        require_own_files(path)
    checkpoint, facts = read_facts(path)
    views = [view(engine, version, facts) for engine, version in engines]
    stored, weights, unmeasured = _stored(path, args)
    if not unmeasured and text is None:
        unmeasured = "no text was given (--data FILE)"
    measured = None if unmeasured else text
    repaired = stored
    form = None
    if repaired is None and measured is not None:
        repaired = measured_scales(args, calibration or measured, window)
    if fix is not None:
        if repaired is None:
            raise ConfigError(f"--fix has to measure the scales that are missing, but {unmeasured}")
        one_each = _per_tensor(repaired)
        form = choose_form(facts, one_each, engines)
        write_repaired(checkpoint, one_each, form, fix)
    scales = list(map(engine_scales, views))
    cpu: list[KVScales | None] = []
    for engine_view, of_engine in zip(views, scales, strict=True):
        cpu.append(of_engine if engine_view.truncates_on_cpus else None)
    costs = _Costs()
    if measured is not None:
        costs = _measure(args, (*scales, stored), cpu, measured, window, max_tokens, on_progress)
    reports = []
    ranking = partial(on_progress, "layers")
    for engine_view, of_engine, truncated in zip(views, scales, cpu, strict=True):
        worst: tuple[LayerCost, ...] = ()
        if measured is not None and repaired is not None and of_engine is not None:
            worst = worst_layers(args, of_engine, repaired, measured, window, layer_tokens, ranking)
        cost = costs.of.get(of_engine)
        reports.append(
            EngineReport(
                view=engine_view,
                cost=cost,
                cpu_cost=costs.truncated.get(truncated),
                worst=worst,
                verdict=sentence(engine_view, cost, costs.plain, costs.dynamic),
            )
        )
    return AuditReport(
        facts=facts,
        engines=tuple(reports),
        plain=costs.plain,
        dynamic=costs.dynamic,
        stored=costs.of.get(stored),
        num_tokens=costs.num_tokens,
        unmeasured=unmeasured,
        fixed=form,
        weights=weights,
    )


def _measure(
    args: EngineArgs,
    scales: Sequence[KVScales | None],
    cpu: Sequence[KVScales | None],
    text: str,
    window: int | None,
    max_tokens: int,
    on_progress: OnStage,
) -> _Costs:
    """Measure each of `scales`, and each of `cpu` as vLLM's CPU kernels round; equal ones once."""
    nearest = _distinct(scales)
    towards_zero = _distinct(cpu)
    progress = partial(on_progress, "measuring")
    scored = measure(args, nearest, text, window, max_tokens, progress, towards_zero)
    costs = [Cost(score.perplexity, score.mean_kl, score.same_top_share) for score in scored]
    plain, dynamic, *costs = costs
    return _Costs(
        plain=plain,
        dynamic=dynamic,
        of=dict(zip(nearest, costs, strict=False)),
        truncated=dict(zip(towards_zero, costs[len(nearest) :], strict=True)),
        num_tokens=scored[0].num_tokens,
    )


def _distinct(scales: Sequence[KVScales | None]) -> list[KVScales]:
    return list(dict.fromkeys(layers for layers in scales if layers is not None))


def _per_tensor(scales: KVScales) -> KVScales:
    """Return the largest scale of each layer and side."""
    layers = tuple(
        x and LayerScales((max(x.k),), (max(x.v),), Granularity.TENSOR) for x in scales.layers
    )
    return KVScales(layers, scales.format, unneeded=scales.unneeded)


def _stored(path: Path, args: EngineArgs) -> tuple[KVScales | None, WeightFacts | None, str]:
    """Return the checkpoint's KV scales, if K and V of every layer have them, per tensor or head;
    what its quantized weights are; why it cannot be measured.
    """
    says = "Freight does not run this checkpoint: {}"
    weights = None
    try:
        opened = open_folder(path, args.model, args.ignore_config_keys)
        scales = opened.uncentered_scales()
    except (ConfigError, CheckpointError) as error:
        return None, None, says.format(error)
    try:
        weights = read_weights(opened)
        unmeasured = ""
    except CheckpointError as error:  # KV scales may be repaired all the same
        unmeasured = says.format(error)
    granularities = {layer.granularity for layer in scales.layers if layer is not None}
    fine = Granularity.CHANNEL in granularities
    if scales.faults or scales.missing or scales.alone("k") or scales.alone("v") or fine:
        return None, weights, unmeasured
    # The names of the tensors are no part of what is compared.
    layers = tuple(x and LayerScales(x.k, x.v, x.granularity) for x in scales.layers)
    return KVScales(layers, scales.format, unneeded=scales.unneeded), weights, unmeasured


_REPORT = {
    "model_type": "facts.model_type",
    "quant_method": "facts.method",
    "weights": "weights",
    "num_layers": "facts.num_layers",
}
_ENGINE = {
    "engine": "view.engine",
    "version": "view.version",
    "rules_of": "view.rules_of",
    "verdict": "verdict",
    "family": "view.family",
    "refusal": "view.refusal",
    "caveat": "view.caveat",
    "notes": "view.notes",
    "fp8_by_default": "view.auto_fp8",
    "doubles_for_fnuz": "view.doubled",
    "scales": "view.counts",
}


def as_json(model: str, report: AuditReport) -> JsonObject:
    """Return the JSON object of `freight audit --json`; docs/audit.md lists its keys."""
    stored = []
    for scale in report.facts.stored:
        stored.append({"name": scale.name, "values": list(map(_number, scale.values))})
    caches = {"16_bits": report.plain, "dynamic": report.dynamic, "stored": report.stored}
    return {
        "model": model,
        **as_object(report, _REPORT),
        "weights": report.weights and report.weights.as_json(),
        "stored_scales": stored,
        "engines": list(map(_engine, report.engines)),
        "caches": {name: _figures(cost) for name, cost in caches.items()},
        "num_tokens": report.num_tokens,
        "unmeasured": report.unmeasured or None,
        "fixed": report.fixed and report.fixed.as_json(),
    }


def _number(value: float) -> float | str:
    """Return a number that JSON has: NaN and infinities as words."""
    return value if math.isfinite(value) else str(value)


def _figures(cost: Cost | None) -> JsonObject | None:
    return None if cost is None else asdict(cost)


def _engine(report: EngineReport) -> JsonObject:
    inputs = []
    for name, count, effect in report.view.input_scales:
        inputs.append({"name": name, "count": count, "effect": effect})
    layers = []
    for layer in report.view.layers:
        layers.append({"layer": layer.layer, "k": _side(layer.k), "v": _side(layer.v)})
    return {
        **as_object(report, _ENGINE),
        "refusal": report.view.refusal or None,
        "caveat": report.view.caveat or None,
        "input_scales": inputs,
        "cost": _figures(report.cost),
        "cost_on_cpus": _figures(report.cpu_cost),
        "worst_layers": list(map(asdict, report.worst)),
        "layers": layers,
    }


def _side(side: Side) -> JsonObject:
    return {
        "effect": side.effect,
        "values": side.values,
        "granularity": {0: None, 1: "tensor"}.get(len(side.values), "head"),
        "name": side.name or None,
        "why": side.why or None,
        "source": side.source or None,
    }
