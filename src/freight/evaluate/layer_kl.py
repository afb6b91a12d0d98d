"""The KL that each layer's cache costs alone: one layer as the setting stores it, all others as the
first one does.

Layers that read the keys and values of another have no cache: what they lose is in the KL of that
one, and theirs is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freight.evaluate.documents import Part
from freight.evaluate.measure import SettingRun, measure
from freight.evaluate.perplexity import Window
from freight.terminal import unseen

# of the text, at least: every layer of every setting is another forward pass over them
TOKENS = 1024


def layer_kl(runs: Sequence[SettingRun], parts: Sequence[Part]) -> list[list[float] | None]:
    """Mean KL in nats by layer over the first `TOKENS`, for each of `runs`; None for the first, and
    for other weights.

    Both caches of a pair are for one sequence of the same length, so their block tables agree.
    Pairs share the memory of layers that are alike in both, so each goes through a window in one
    step: a later step would read what another pair wrote.
    """
    first = runs[0]
    found: list[list[float] | None] = []
    windows: list[Window] = []
    for part in parts:
        if sum(len(window.targets) for window in windows) < TOKENS:
            windows.append(part.window)
    for run in runs:
        if run.probe is not None:
            run.probe.rows = None
        if run is first or run.runner.model is not first.runner.model:
            found.append(None)
            continue
        pool, length = run.runner.pool, max(len(window.token_ids) for window in windows)
        plain = first.runner.pool.spec.layers
        changed = [
            i for i, kept in pool.spec.kept.items() if kept.source is None and kept != plain[i]
        ]
        alone = {layer: _only(first, run, layer, length) for layer in changed}
        measure(
            [_only(first, first, next(iter(alone)), length), *alone.values()],
            windows,
            unseen,
        )
        by_layer = {layer: float(one.token_kl.double().mean()) for layer, one in alone.items()}
        found.append([by_layer.get(layer, 0.0) for layer in range(len(pool.layers))])
    return found


def _only(first: SettingRun, run: SettingRun, layer: int, length: int) -> SettingRun:
    """Make the first setting's run with one layer of `run`'s cache, and with those that read it, in
    steps of `length`.
    """
    pool, other = first.runner.pool, run.runner.pool
    readers = {i for i, kept in pool.spec.kept.items() if layer in (i, kept.source)}
    layers = {i: one for i, one in enumerate(other.layers) if i in readers and one is not None}
    config = replace(first.config, max_num_batched_tokens=length)
    return SettingRun(config, replace(first.runner, pool=pool.with_layers(layers)))
