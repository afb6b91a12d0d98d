"""Which setting to take, and why, in plain words: the least error among the smallest caches that are safe here."""

from __future__ import annotations

import shlex

from freight.evaluate.figures import Evaluation, Figures, Overview

SAFE = 1.005  # ratio of perplexities up to which a loss is called small
NEAR = 1.05  # of the fewest bytes: a cache within this factor is as small


def recommended(evaluation: Evaluation) -> Figures:
    """Of the settings with the first one's weights; the first one itself where no other is safe and smaller."""
    first, *others = evaluation.runs
    safe = [
        run
        for run in others
        if run.weights == first.weights and run.bytes_per_token < first.bytes_per_token and _upper(run) <= SAFE
    ]
    if not safe:
        return first
    fewest = min(run.bytes_per_token for run in safe)
    return min((run for run in safe if run.bytes_per_token <= NEAR * fewest), key=lambda run: run.kl_mean)


def _upper(run: Figures) -> float:
    """The largest ratio of perplexities that its interval allows."""
    return run.perplexity_ratio_interval[1] if run.perplexity_ratio_interval else run.perplexity_ratio


def how_to(run: Figures, over: Overview) -> str:
    """The command line that gives this setting, with what `freight evaluate` was given for it."""
    model = shlex.quote(over.model)
    weights = f" --quantization {over.quantization}" if over.quantization else ""
    if run.granularity is None:
        return f"freight serve {model} --kv-cache-dtype {run.kv_cache_dtype}{weights}"
    if run.scale_source == "calibrated":
        made = f"freight quantize {model} OUT --weights none --kv-cache fp8 --kv-granularity {run.granularity}"
        made += " --center" if run.centered else ""
        made += f" --calibration-data {shlex.quote(over.calibration_data)}" if over.calibration_data else ""
        return f"{made} && freight serve OUT{weights}"
    dtype = "fp8" if "e4m3" in run.kv_cache_dtype else run.kv_cache_dtype
    named = {"unit": "unit", "dynamic": "dynamic"} | dict.fromkeys(("file", "given"), shlex.quote(over.kv_scales))
    source = named.get(run.scale_source or "") if dtype != "int8" else None
    return f"freight serve {model} --kv-cache-dtype {dtype}{f' --kv-scales {source}' if source else ''}{weights}"


def advice(evaluation: Evaluation) -> str:
    """A paragraph for people who have not met FP8."""
    first, chosen, over = evaluation.runs[0], recommended(evaluation), evaluation.overview
    if chosen is first:
        return (
            f"Keep the 16-bit cache: no smaller cache that was measured is certain to keep the loss within "
            f"{SAFE - 1:.1%} of perplexity on this text. Command: {how_to(first, over)}"
        )
    ratio = first.bytes_per_token / chosen.bytes_per_token
    change = chosen.perplexity_ratio - 1
    loss = f"perplexity, the model's surprise at each next token, changes by {change:+.2%}"
    if chosen.perplexity_ratio_interval:
        low, high = chosen.perplexity_ratio_interval
        loss += f" (between {low - 1:+.2%} and {high - 1:+.2%} with 95 % confidence)"
    return (
        f"Take “{chosen.name}”: the same memory holds {ratio:.2f} times as many tokens as with 16 bits, {loss}, and "
        f"the most likely next token stays the same {chosen.same_top:.1%} of the time. Among the smallest caches whose "
        f"loss is small (at most {SAFE - 1:.1%}) it changes the model's answers least. {_certainty(evaluation)}"
        f"{_speed(chosen, first)}Command: {how_to(chosen, over)}"
    )


def _certainty(evaluation: Evaluation) -> str:
    if evaluation.units is not None:
        return ""
    return (
        f"{evaluation.num_tokens:,} tokens are too few for an interval: measure a longer text before you rely on it. "
    )


def _speed(chosen: Figures, first: Figures) -> str:
    if chosen.decode is None or first.decode is None:
        return ""
    if chosen.faster_from is None:
        return "On this machine it was not faster on any timed context. "
    return f"On this machine it generates faster from a context of {chosen.faster_from:,} tokens on. "
