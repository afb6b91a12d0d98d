"""The KL that each layer's cache costs alone: one layer as the setting stores it, all others as the
first one does.

Layers that read the keys and values of another have no cache: what they lose is in the KL of that
one, and theirs is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freight.base.terminal import OnProgress, unseen
from freight.lab.evaluate.documents import Part
from freight.lab.evaluate.measure import SettingRun, measure
from freight.lab.evaluate.perplexity import Window

# of the text, at most: every layer of every setting is another forward pass over them
TOKENS = 1024


def first_windows(parts: Sequence[Part], most: int = TOKENS) -> list[Window]:
    """Return the first windows, of `most` tokens together; the last is cut, and one of which less
    than half would stay is left out. A window that begins with context stays whole: what is scored
    is at its end.
    """
    windows: list[Window] = []
    for part in parts:
        size = len(part.window.token_ids)
        if windows and 2 * most < size:
            break
        window = part.window
        if not window.first_scored:
            window = Window(window.token_ids[:most], window.targets[:most])
        windows.append(window)
        most -= size
        if most <= 0:
            break
    return windows


def layer_kl(
    runs: Sequence[SettingRun], parts: Sequence[Part], on_progress: OnProgress = unseen
) -> list[list[float] | None]:
    """Mean KL in nats by layer over `first_windows`, for each of `runs`; None for the first, and
    for other weights. `on_progress(done, total)` counts the tokens of all passes.

    Both caches of a pair are for one sequence of the same length, so their block tables agree.
    Pairs share the memory of layers that are alike in both, so each goes through a window in one
    step: a later step would read what another pair wrote.
    """
    first = runs[0]
    by_run: list[list[float] | None] = []
    windows = first_windows(parts)
    length = max(len(window.token_ids) for window in windows)
    num_tokens = sum(len(window.token_ids) for window in windows)
    changed = [_changed(first, run) for run in runs]
    total = num_tokens * sum(1 + len(layers) for layers in changed if layers)
    before = 0

    def within(done: int, _: int) -> None:
        """Report a pass as a part of all."""
        on_progress(before + done, total)

    for run, layers in zip(runs, changed, strict=True):
        if run.probe is not None:
            run.probe.rows = None
        if not layers:
            by_run.append(None)
            continue
        alone = {layer: _only(first, run, layer, length) for layer in layers}
        measure([_only(first, first, layers[0], length), *alone.values()], windows, within)
        before += num_tokens * (1 + len(layers))
        kl = [0.0] * len(run.runner.pool.layers)
        for layer, pair in alone.items():
            kl[layer] = pair.mean_kl
        by_run.append(kl)
    return by_run


def _changed(first: SettingRun, run: SettingRun) -> list[int]:
    """Return the layers that `run` stores otherwise than `first` does; none for other weights."""
    if run.runner.model is not first.runner.model:
        return []
    plain = first.runner.pool.spec.layers
    stored = run.runner.pool.spec.kept
    return [i for i, layer in stored.items() if layer.source is None and layer != plain[i]]


def _only(first: SettingRun, run: SettingRun, layer: int, length: int) -> SettingRun:
    """Make the first setting's run with one layer of `run`'s cache, and with those that read it, in
    steps of `length`.
    """
    pool = first.runner.pool
    layers = {}
    for index, entry in pool.spec.kept.items():
        kv = run.runner.pool.layers[index]
        if layer in (index, entry.source) and kv is not None:
            layers[index] = kv
    config = replace(first.config, max_num_batched_tokens=length)
    return SettingRun(config, replace(first.runner, pool=pool.with_layers(layers)))
