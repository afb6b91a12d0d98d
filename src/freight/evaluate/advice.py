"""Which setting to take, and why, in plain words: the least error among the smallest caches that
are safe here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from freight.config.fields import JsonObject
from freight.config.skip_layers import FLAG
from freight.evaluate.figures import Evaluation, Figures, Overview
from freight.evaluate.safety import CLIPPED, KL, RATIO, SAME_TOP, Verdict
from freight.evaluate.table import nats

NEAR = 1.05  # of the fewest bytes: a cache within this factor is as small
BOUNDS = (
    f"with 95 % confidence, perplexity within {RATIO - 1:.1%} of 16 bits, up or down, mean KL at most {KL} nats, and "
    f"the same top token for {SAME_TOP:.0%}; at most {CLIPPED:.1%} of the keys and values clipped"
)


@dataclass(frozen=True)
class Advice:
    """`verdict` on all smaller caches together; `chosen` is the one to take, None where none is
    safe.

    `text` is a paragraph for people who have not met FP8. `command` gives the chosen setting, or
    else 16 bits.
    """

    verdict: Verdict
    chosen: Figures | None
    text: str
    command: str

    def as_json(self) -> JsonObject:
        """`recommended` is the name of a run, null where no setting is recommended."""
        name = None if self.chosen is None else self.chosen.name
        return {
            "verdict": self.verdict,
            "recommended": name,
            "text": self.text,
            "command": self.command,
        }

    def __str__(self) -> str:
        return f"{self.text} Command: {self.command}"


def as_json(evaluation: Evaluation) -> JsonObject:
    """Return what `freight evaluate caches --json` prints."""
    return {**evaluation.as_json(), "advice": advice(evaluation).as_json()}


def recommended(evaluation: Evaluation) -> Figures | None:
    """Return the safe setting of least error among the smallest, with the first one's weights; None
    if none is safe.
    """
    return _best(_smaller(evaluation), lambda run: run.bytes_per_token)


def recommended_states(evaluation: Evaluation) -> Figures | None:
    """Do as `recommended` with the settings that differ from the first in their states alone."""
    return _best(_smaller_states(evaluation), lambda run: run.bytes_per_state)


def _best(runs: Sequence[Figures], size: Callable[[Figures], int]) -> Figures | None:
    safe = [run for run in runs if run.verdict is Verdict.SAFE]
    if not safe:
        return None
    fewest = min(map(size, safe))
    return min((run for run in safe if size(run) <= NEAR * fewest), key=lambda run: run.kl_mean)


def _smaller_states(evaluation: Evaluation) -> list[Figures]:
    first, *others = evaluation.runs
    alike = (
        run
        for run in others
        if (run.weights, run.bytes_per_token) == (first.weights, first.bytes_per_token)
    )
    return [run for run in alike if run.bytes_per_state < first.bytes_per_state]


def _smaller(evaluation: Evaluation) -> list[Figures]:
    """Return the caches that could be taken in the place of the first."""
    first, *others = evaluation.runs
    alike = (
        run
        for run in others
        if (run.weights, run.state_dtype) == (first.weights, first.state_dtype)
    )
    return [run for run in alike if run.bytes_per_token < first.bytes_per_token]


def how_to(run: Figures, over: Overview) -> str:
    """Return the command line that gives this setting, with what `freight evaluate` was given for
    it.
    """
    model = shlex.quote(over.model)
    more = f" --quantization {over.quantization}" if over.quantization else ""
    if run.state_dtype is not None:
        more += f" --state-dtype {'fp8' if 'e4m3' in run.state_dtype else run.state_dtype}"
    if run.granularity is None:
        return f"freight serve {model} --kv-cache-dtype {run.kv_cache_dtype}{more}"
    more += f" {FLAG} {','.join(map(str, over.skipped_layers))}" if over.skipped_layers else ""
    # --kv-cache-dtype fp8 would contradict it
    if over.chosen_by_layer and run.scale_source == "checkpoint":
        return f"freight serve {model}{more}"
    if run.scale_source == "calibrated":
        made = f"freight quantize {model} OUT --weights none --kv-cache fp8 --kv-granularity {run.granularity}"
        made += " --center" if run.centered else ""
        made += (
            f" --calibration-data {shlex.quote(over.calibration_data)}"
            if over.calibration_data
            else ""
        )
        return f"{made} && freight serve OUT{more}"
    eight = next(
        (str(one["dtype"]) for one in run.layers or () if one["granularity"]), run.kv_cache_dtype
    )
    dtype = "fp8" if "e4m3" in eight else eight
    dynamic = "group" if run.granularity == "group" else "dynamic"
    named = {"unit": "unit", "dynamic": dynamic} | dict.fromkeys(
        ("file", "given"), shlex.quote(over.kv_scales)
    )
    source = named.get(run.scale_source or "") if dtype != "int8" or dynamic == "group" else None
    return f"freight serve {model} --kv-cache-dtype {dtype}{f' --kv-scales {source}' if source else ''}{more}"


def advice(evaluation: Evaluation) -> Advice:
    """Return the setting to take with the reasons, or why none is."""
    first, chosen, over = evaluation.runs[0], recommended(evaluation), evaluation.overview
    states = recommended_states(evaluation) or first
    command = how_to(replace(chosen or first, state_dtype=states.state_dtype), over)
    found = _of_pages(evaluation, chosen, command)
    return replace(found, text=found.text + _of_states(evaluation, states))


def _of_states(evaluation: Evaluation, chosen: Figures) -> str:
    """Return the format of states to take, in a sentence; "" where no smaller one was measured."""
    first, smaller = evaluation.runs[0], _smaller_states(evaluation)
    if chosen is first and not smaller:
        return ""
    if chosen is first:
        found = ", ".join(f"{run.state_dtype} {run.verdict}" for run in smaller)
        return f" States stay in {first.state_dtype}: {found}."
    share = chosen.bytes_per_state / first.bytes_per_state
    return (
        f" States, measured apart from keys and values: take {chosen.state_dtype}, {share:.2f} of the bytes, mean KL "
        f"{nats(chosen.kl_mean)}."
    )


def _of_pages(evaluation: Evaluation, chosen: Figures | None, command: str) -> Advice:
    first = evaluation.runs[0]
    if chosen is None:
        return _none(evaluation, command)
    assert chosen.perplexity_ratio_interval is not None, "what is safe has intervals"
    low, high = chosen.perplexity_ratio_interval
    sample = evaluation.sample
    times = first.bytes_per_token / chosen.bytes_per_token
    within = (
        f"between {low - 1:+.2%} and {high - 1:+.2%} with 95 % confidence, "
        f"over {sample.num_units:,} {sample.units}"
    )
    text = (
        f"Take “{chosen.name}”: the same memory holds {times:.2f} times as many tokens as with 16 bits, perplexity, "
        f"the model's surprise at each next token, changes by {chosen.perplexity_ratio - 1:+.2%} ({within}), and the "
        f"most likely next token stays the same {chosen.same_top:.1%} of the time. Among the smallest caches that are "
        f"safe on this text it changes the model's answers least. Safe means: {BOUNDS}. {_speed(chosen, first)}"
    )
    return Advice(Verdict.SAFE, chosen, text.rstrip(), command)


def _none(evaluation: Evaluation, command: str) -> Advice:
    """Say that no smaller cache is safe: each with its reasons, those that all of them share once."""
    smaller = _smaller(evaluation)
    if not smaller:
        return Advice(
            Verdict.CANNOT_BE_SAID,
            None,
            "No smaller cache was measured, so none is recommended.",
            command,
        )
    shared = [
        reason for reason in smaller[0].reasons if all(reason in run.reasons for run in smaller)
    ]
    each = []
    for run in smaller:
        why = "; ".join(reason for reason in run.reasons if reason not in shared)
        each.append(f"“{run.name}”: {run.verdict}{f' ({why})' if why else ''}.")
    if evaluation.sample.text_unknown:
        start = "No setting is recommended"
        return Advice(
            Verdict.CANNOT_BE_SAID, None, f"{start}: {'; '.join(evaluation.warnings)}.", command
        )
    unsettled = any(run.verdict is Verdict.CANNOT_BE_SAID for run in smaller)
    start = "No smaller cache that was measured is safe"
    if unsettled:
        start = "It cannot be said that a smaller cache is safe"
    because = f": {'; '.join(shared)}." if shared else "."
    text = f"{start}{because} {' '.join(each)} Safe means: {BOUNDS}. Until then, keep the 16-bit cache."
    return Advice(Verdict.CANNOT_BE_SAID if unsettled else Verdict.NOT_SAFE, None, text, command)


def _speed(chosen: Figures, first: Figures) -> str:
    if chosen.decode is None or first.decode is None:
        return ""
    if chosen.faster_from is None:
        return "On this machine it was not faster on any timed context. "
    return (
        f"On this machine it generates faster from a context of {chosen.faster_from:,} tokens on. "
    )
