"""Which setting to take, and why, in plain words: the least error among the smallest caches that
are safe here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from freight.base.fields import JsonObject
from freight.base.other_engines.instead import as_flag
from freight.lab.evaluate.figures import Evaluation, Figures, Overview
from freight.lab.evaluate.safety import CLIPPED, KL, RATIO, SAME_TOP, Verdict
from freight.lab.evaluate.table import (
    SPEED,
    legend,
    nats,
    setting_name,
    speed_table,
    table,
    words,
)
from freight.settings.engine import EngineArgs
from freight.settings.skip_layers import FLAG

NEAR = 1.05  # of the fewest bytes: a cache within this factor is as small
Size = Callable[[Figures], int]
_PAGES: Size = attrgetter("bytes_per_token")
_STATE: Size = attrgetter("bytes_per_state")
BOUNDS = (
    f"with 95 % confidence, perplexity within {RATIO - 1:.1%} of the unquantized cache's, up or down, "
    f"mean KL at most {KL} nats, and the same top token for {SAME_TOP:.0%};"
    f" at most {CLIPPED:.1%} of the keys and values clipped"
)


@dataclass(frozen=True)
class Advice:
    """`verdict` on all smaller caches together; `chosen` is the one to take, None where none is
    safe.

    `text` is a paragraph for people who have not met FP8. `command` gives the chosen setting, or
    else the first one.
    """

    verdict: Verdict
    chosen: Figures | None
    text: str
    command: str

    def as_json(self) -> JsonObject:
        """`recommended` is the name of a run, null where no setting is recommended."""
        return {
            "verdict": self.verdict,
            "recommended": self.chosen and self.chosen.name,
            "text": self.text,
            "command": self.command,
        }

    def __str__(self) -> str:
        return f"{self.text} Command: {self.command}"


def as_json(evaluation: Evaluation) -> JsonObject:
    """Return what `freight evaluate caches --json` prints."""
    return {**evaluation.as_json(), "advice": advice(evaluation).as_json()}


def recommended(evaluation: Evaluation) -> Figures | None:
    """Return the safe setting of least error among the smallest that a command gives, with the first
    one's weights; None if none is safe.
    """
    runs = _smaller_caches(evaluation)
    if evaluation.overview.quantized:  # `freight quantize` takes unquantized models alone
        runs = [run for run in runs if run.scale_source != "calibrated"]
    return _best(runs, _PAGES)


def recommended_states(evaluation: Evaluation) -> Figures | None:
    """Do as `recommended` with the settings that differ from the first in their states alone."""
    return _best(_smaller_states(evaluation), _STATE)


def _best(runs: Sequence[Figures], size: Size) -> Figures | None:
    safe = [run for run in runs if run.verdict is Verdict.SAFE]
    fewest = min(map(size, safe), default=0)
    small = [run for run in safe if size(run) <= NEAR * fewest]
    return min(small, key=lambda run: run.kl_mean, default=None)


def _smaller(
    evaluation: Evaluation, size: Size, alike: Callable[[Figures], object]
) -> list[Figures]:
    """Return the settings of smaller `size` than the first, with its weights and `alike`."""
    first = evaluation.runs[0]
    smaller = []
    for run in evaluation.runs[1:]:
        if (run.weights, alike(run)) == (first.weights, alike(first)) and size(run) < size(first):
            smaller.append(run)
    return smaller


def _smaller_states(evaluation: Evaluation) -> list[Figures]:
    """Return the settings whose states alone are smaller than the first one's."""
    return _smaller(evaluation, _STATE, _PAGES)


def _smaller_caches(evaluation: Evaluation) -> list[Figures]:
    """Return the caches that could be taken in the place of the first."""
    return _smaller(evaluation, _PAGES, attrgetter("state_dtype"))


def how_to(run: Figures, over: Overview) -> str:
    """Return the command line that gives this setting, with what `freight evaluate` was given for
    it. It runs as it is.

    Of calibrated scales it is that of `freight quantize` and of serving what this writes, so the
    weights may not be `over.quantized`.
    """
    args = over.args
    in_fp8 = run.granularity is not None
    more: list[str] = []
    if run.state_dtype is not None:
        more += ["--state-dtype", "fp8" if "e4m3" in run.state_dtype else run.state_dtype]
    if in_fp8 and args.kv_cache_dtype_skip_layers:
        more += [FLAG, ",".join(map(str, args.kv_cache_dtype_skip_layers))]
    dtype = _cache_dtype(run)
    if not in_fp8 or dtype == "int8":
        args = replace(args, attention_compute="auto")
    if not in_fp8:
        return _serve(args, ["--kv-cache-dtype", dtype], more)
    # --kv-cache-dtype fp8 would contradict it
    if over.chosen_by_layer and run.scale_source == "checkpoint":
        return _serve(args, [], more)
    if run.scale_source == "calibrated":
        assert not over.quantized, "`recommended` leaves it out"
        made = replace(args, model="OUT", revision=None, ignore_config_keys=())
        return f"{_quantize(run, over)} && {_serve(made, [], more)}"
    dynamic = "group" if run.granularity == "group" else "dynamic"
    file = args.quantization_param_path or args.kv_scales
    options = {"unit": "unit", "dynamic": dynamic, "file": file, "given": file}
    source = options.get(run.scale_source or "")
    cache = ["--kv-cache-dtype", dtype]
    if source and (dtype != "int8" or dynamic == "group"):
        cache += ["--kv-scales", source]
    return _serve(args, cache, more)


def _cache_dtype(run: Figures) -> str:
    """Return the cache's dtype as --kv-cache-dtype has it: of layers that differ, that of the 8-bit
    ones.
    """
    eight = [str(layer["dtype"]) for layer in run.layers or () if layer["granularity"]]
    dtype = eight[0] if eight else run.kv_cache_dtype
    return "fp8" if "e4m3" in dtype else dtype


# Not the options of caches and states, which the setting decides and not what was given
_SERVED = {field.name for field in fields(EngineArgs)}.difference(
    ("model", "kv_cache_dtype", "kv_scales", "quantization_param_path"),
    ("kv_cache_dtype_skip_layers", "state_dtype"),
)


def _serve(args: EngineArgs, cache: Sequence[str], more: Sequence[str]) -> str:
    """Return `freight serve` with the options of `args` that are not at their defaults."""
    return shlex.join(["freight", "serve", args.model, *cache, *_options(args, _SERVED), *more])


def _options(args: EngineArgs, names: Collection[str]) -> list[str]:
    """Write those of the options `names` that are not at their defaults."""
    words = []
    for field in fields(EngineArgs):
        value = getattr(args, field.name)
        flag = as_flag(field.name)
        if field.name not in names or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words


def _quantize(run: Figures, over: Overview) -> str:
    """Return the command that writes these scales into a checkpoint, measured as they were here."""
    args = over.args
    text = over.calibration
    assert text is not None, "scales were calibrated"
    words = ["freight", "quantize", args.model, "OUT", "--weights", "none", "--kv-cache", "fp8"]
    words += ["--kv-granularity", str(run.granularity)]
    if run.centered:
        words.append("--center")
    if text.data:
        words += ["--calibration-data", text.data]
    words += ["--num-samples", str(text.num_samples), "--max-seq-len", str(text.max_seq_len)]
    words += _options(args, ("revision", "ignore_config_keys", "device"))
    return shlex.join(words)


def advice(evaluation: Evaluation) -> Advice:
    """Return the setting to take with the reasons, or why none is."""
    first = evaluation.runs[0]
    chosen = recommended(evaluation)
    over = evaluation.overview
    states = recommended_states(evaluation) or first
    command = how_to(replace(chosen or first, state_dtype=states.state_dtype), over)
    pages = _of_pages(evaluation, chosen, command)
    return replace(pages, text=pages.text + _of_states(evaluation, states))


def _of_states(evaluation: Evaluation, chosen: Figures) -> str:
    """Return the format of states to take, in a sentence; "" where no smaller one was measured."""
    first = evaluation.runs[0]
    smaller = _smaller_states(evaluation)
    if chosen is first and not smaller:
        return ""
    if chosen is first:
        verdicts = ", ".join(f"{run.state_dtype} {run.verdict}" for run in smaller)
        return f" States stay in {first.state_dtype}: {verdicts}."
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
        f"Take “{chosen.name}”: the same memory holds {times:.2f} times as many tokens as with {first.name}, "
        f"perplexity, the model's surprise at each next token, changes by {chosen.perplexity_ratio - 1:+.2%} "
        f"({within}), and the most likely next token stays the same {chosen.same_top:.1%} of the time. Among the "
        f"smallest caches that are safe on this text it changes the model's answers least. "
        f"Safe means: {BOUNDS}. {_speed(chosen)}"
    )
    return Advice(Verdict.SAFE, chosen, text.rstrip(), command)


def _none(evaluation: Evaluation, command: str) -> Advice:
    """Say that no smaller cache is safe, with the reasons that all of them share; each one's own are
    in `why_not`.
    """
    smaller = _smaller_caches(evaluation)
    if not smaller:
        text = "No smaller cache was measured, so none is recommended."
        return Advice(Verdict.CANNOT_BE_SAID, None, text, command)
    if evaluation.sample.text_unknown:
        text = f"No setting is recommended: {'; '.join(evaluation.warnings)}."
        return Advice(Verdict.CANNOT_BE_SAID, None, text, command)
    verdict = Verdict.NOT_SAFE
    text = "No smaller cache that was measured is safe"
    if any(run.verdict is Verdict.CANNOT_BE_SAID for run in smaller):
        verdict = Verdict.CANNOT_BE_SAID
        text = "It cannot be said that a smaller cache is safe"
    shared = [
        reason for reason in smaller[0].reasons if all(reason in run.reasons for run in smaller)
    ]
    if shared:
        text += f": {'; '.join(shared)}"
    text += f". Safe means: {BOUNDS}. Until then, keep the cache in {evaluation.runs[0].name}."
    return Advice(verdict, None, text, command)


def why_not(evaluation: Evaluation) -> list[str]:
    """Return a sentence for each setting that is not safe: what fails, or what is missing. Settings
    with the same reasons share one.
    """
    names: dict[tuple[Verdict, tuple[str, ...]], list[str]] = {}
    for run in evaluation.runs[1:]:
        if run.verdict is not Verdict.SAFE:
            name = f"“{setting_name(run, evaluation)}”"
            names.setdefault((run.verdict, run.reasons), []).append(name)
    return [
        f"{', '.join(of)}: {verdict}: {'; '.join(reasons) or 'no bound fails'}."
        for (verdict, reasons), of in names.items()
    ]


def summary(evaluation: Evaluation) -> Iterator[str]:
    """Yield what `freight evaluate caches` prints at a terminal."""
    for warning in evaluation.warnings:
        yield f"warning: {warning}"
    yield table(evaluation)
    if evaluation.contexts:
        yield f"\n{SPEED}\n\n{speed_table(evaluation)}\n"
    yield f"weights: {evaluation.overview.weights}"
    yield legend(evaluation)
    for word, meaning in words(evaluation):
        yield f"  {word}: {meaning}"
    yield from why_not(evaluation)
    yield str(advice(evaluation))


def _speed(chosen: Figures) -> str:
    if chosen.decode is None:
        return ""
    if chosen.faster_from is None:
        return "On this machine it was not faster on any timed context. "
    return (
        f"On this machine it generates faster from a context of {chosen.faster_from:,} tokens on. "
    )
