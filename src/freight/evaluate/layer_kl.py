"""The KL that each layer's cache costs alone: one layer in the setting's format, all others in 16 bits.

Layers that read the keys and values of another have no cache: what they lose is in the KL of that one, and theirs is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freight.evaluate.documents import Part
from freight.evaluate.measure import SettingRun, measure
from freight.evaluate.perplexity import Window

TOKENS = 1024  # of the text, at least: every layer of every setting is another forward pass over them


def layer_kl(runs: Sequence[SettingRun], parts: Sequence[Part], tokens: int = TOKENS) -> list[list[float] | None]:
    """Mean KL in nats by layer over the first `tokens`, for each of `runs`; None for the first, and for other weights.

    Both caches of a pair are for one sequence of the same length, so their block tables agree.
    """
    first = runs[0]
    found: list[list[float] | None] = []
    windows: list[Window] = []
    for part in parts:
        if sum(len(window.targets) for window in windows) < tokens:
            windows.append(part.window)
    for run in runs:
        if run.probe is not None:
            run.probe.rows = None
        if run is first or run.runner.model is not first.runner.model:
            found.append(None)
            continue
        pool = run.runner.pool
        alone = {layer: _only(first, run, layer) for layer, kv in enumerate(pool.layers) if not kv.shared}
        measure([_only(first, first, 0), *alone.values()], windows, lambda done, total: None)
        by_layer = {layer: float(one.token_kl.double().mean()) for layer, one in alone.items()}
        found.append([by_layer.get(layer, 0.0) for layer in range(len(pool.layers))])
    return found


def _only(first: SettingRun, run: SettingRun, layer: int) -> SettingRun:
    """The first setting's run with one layer of `run`'s cache, and with those that read it."""
    pool, other = first.runner.pool, run.runner.pool
    layers = tuple(
        other.layers[i] if layer in (i, pool.spec.layers[i].source) else kv for i, kv in enumerate(pool.layers)
    )
    return SettingRun(first.config, replace(first.runner, pool=replace(pool, layers=layers)))
