"""The sections of docs/quality.md about other results than the tables of caches and weights: tasks, the
ladder of caches, the oracle, retrieval, methods of quantizing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from published import (
    FOLDER,
    Interval,
    Ladder,
    LongCache,
    Machine,
    Methods,
    Oracle,
    Retrieval,
    Tasks,
    read_all,
)

from freight.base.tables import markdown

NAMES = {  # of caches, as paired_questions.py calls them
    "fp8": "E4M3 per token",
    "int8": "INT8 per token",
    "e5m2": "E5M2",
    "unit": "E4M3 without scales",
    "f32": "float32 (control)",
}
SETS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "both": "both together"}


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def half(interval: Interval | None, form: str) -> str:
    """' ± half of the interval', empty without one."""
    return "" if interval is None else f" ± {format((interval[1] - interval[0]) / 2, form)}"


def where(machine: Machine, date: str) -> str:
    return (
        f"Measured {date} on {machine.processor}, kernels {machine.kernels}, Freight {machine.freight}, "
        f"torch {machine.torch}."
    )


def shell(*commands: str) -> str:
    return "\n".join(["```sh", *commands, "```"])


def tasks_section(result: Tasks) -> Iterator[str]:
    yield f"## Answers to questions: {result.model.title}"
    yield (
        "Greedy answers under each cache, compared question by question with those under a 16-bit cache. A cache is "
        "called equivalent if the 90 % interval of the difference of right answers lies within "
        f"{100 * result.margin:g} points (two one-sided tests at 5 %; Tango's score interval). Margin and levels "
        "were set before anything was measured. The control is a cache in float32: it changes answers too, by rounding."
    )
    yield shell(result.command)
    lines = [["questions", "cache", "n", "right, 16 bits", "right", "difference, points (90 %)"]]
    lines[0] += ["only 16 bits right", "only this right", "McNemar's p", "texts that differ"]
    verdicts = []
    for task in result.tasks:
        for score in task.scores:
            count = score.num_questions
            low, high = score.interval_90
            line = [
                SETS.get(task.name, task.name),
                NAMES.get(score.cache, score.cache),
                f"{count:,}",
            ]
            line += [f"{score.reference_right / count:.1%}", f"{score.right / count:.1%}"]
            line.append(f"{points(score.difference)} ({points(low)} to {points(high)})")
            line += [str(score.only_reference), str(score.only_cache), f"{score.mcnemar_p:.2f}"]
            lines.append([*line, f"{score.differing_answers:,}"])
            verdicts.append(f"- {SETS.get(task.name, task.name)}: {score.verdict}.")
    yield markdown(lines, num_left=2)
    yield "\n".join(verdicts)
    yield where(result.machine, result.date)


def ladder_section(result: Ladder) -> Iterator[str]:
    yield f"## From 8 bits to 3: {result.model.title}"
    yield (
        f"{result.num_solutions:,} published solutions of {result.questions}, each after its question, of which "
        f"{result.num_tokens:,} tokens are judged: by how much their log-probability changes against a 16-bit cache. "
        "Caches below 8 bits are simulated: integers with a scale for each token and KV head, or for each 32 channels "
        "(-32). *Of a solution* is the change of the whole, in nats."
    )
    yield shell(result.command)
    lines = [["cache", "mean KL", "log-probability of a token", "of a solution", "same top"]]
    for step in result.steps:
        lines.append(
            [
                step.cache,
                f"{step.kl:.5f}{half(step.kl_interval, '.5f')}",
                f"{step.change:+.5f}{half(step.change_interval, '.5f')}",
                f"{step.solution_change:+.3f}",
                f"{step.same_top:.2%}",
            ]
        )
    yield markdown(lines, num_left=1)
    yield where(result.machine, result.date)


def oracle_section(results: Sequence[Oracle]) -> Iterator[str]:
    yield "## The same figures by other code"
    yield (
        "`benchmarks/peers/cache_oracle.py` imports nothing of Freight: the model, its tokenizer and its attention are "
        "transformers', the formats ml_dtypes', and all is computed in float32. Freight computed the same in float32. "
        "*Apart* is by how much Freight's KL differs."
    )
    lines = [
        ["model", "cache", "mean KL, transformers", "Freight", "apart", "perplexity, transformers"]
    ]
    lines[0] += ["Freight"]
    for result in results:
        for row in result.rows:
            apart = f"{row.kl / row.oracle_kl - 1:+.1%}" if row.oracle_kl else ""
            line = [result.model.title, row.cache, f"{row.oracle_kl:.5f}", f"{row.kl:.5f}", apart]
            lines.append([*line, f"{row.oracle_perplexity:.4f}", f"{row.perplexity:.4f}"])
    yield markdown(lines, num_left=2)
    for result in results:
        yield (
            f"{result.model.title}: {result.num_tokens:,} tokens of {result.text} in windows of {result.window}; "
            f"transformers {result.transformers}, ml_dtypes {result.ml_dtypes}. "
            f"{where(result.machine, result.date)}"
        )
        yield shell(*result.commands)


def retrieval_section(result: Retrieval) -> Iterator[str]:
    yield f"## Retrieval over {result.context:,} tokens: {result.model.title}"
    yield (
        f"{result.num_contexts} contexts of {result.context:,} tokens full of records, each a key and a value of "
        "random words. A key is asked again at the end: the share of values whose tokens are all the most likely ones, "
        "by how far back the record is, and in brackets the change of what the record adds to the log-probability of a "
        "value's token, in nats, against 16 bits."
    )
    yield shell(*result.commands)
    first = result.caches[0]
    lines = [["cache", *(f"{row.depth:,} back" for row in first.depths)]]
    for cache in result.caches:
        lines.append([cache.cache, *_cells(cache, cache is first)])
    yield markdown(lines, num_left=1)
    yield where(result.machine, result.date)


def _cells(cache: LongCache, is_first: bool) -> Iterator[str]:
    for row in cache.depths:
        if is_first:
            yield f"{row.found:.1%}"
        else:
            yield f"{row.found:.1%} ({row.gain_change:+.4f}{half(row.gain_change_interval, '.4f')})"


def methods_section(result: Methods) -> Iterator[str]:
    groups = f" in groups of {result.group_size}" if result.group_size else ""
    yield f"## Methods of {result.weights}{groups}: {result.model.title}"
    yield (
        f"`freight quantize --method`, on {result.num_samples} samples of up to {result.max_seq_len} tokens of "
        f"{result.calibration}; judged by {result.num_tokens:,} tokens of {result.text} in windows of "
        f"{result.window}, inputs of products as the kernels round them. Perplexity without quantization: "
        f"{result.perplexity:.3f}. The model in 16 bits is itself decoded from the publisher's file in 4 bits. "
        "*With token*: the same weights with an E4M3 cache per token. Seconds and peak memory are those of "
        "making the checkpoint."
    )
    yield shell(result.command)
    lines = [["method", "mean KL", "with token", "perplexity", "change", "same top"]]
    lines[0] += ["MiB", "seconds", "peak MiB"]
    for row in result.rows:
        lines.append(
            [
                row.method,
                f"{row.kl:.4f}{half(row.kl_interval, '.4f')}",
                f"{row.kl_token:.4f}",
                f"{row.perplexity:.3f}",
                f"{row.perplexity_ratio - 1:+.1%}{half(row.perplexity_ratio_interval, '.1%')}",
                f"{row.same_top:.1%}",
                f"{row.bytes_after / 2**20:.1f}",
                f"{row.seconds:.0f}",
                f"{row.peak_bytes / 2**20:,.0f}",
            ]
        )
    yield markdown(lines, num_left=1)
    yield where(result.machine, result.date)


def other_sections(folder: Path = FOLDER) -> list[str]:
    """Return the sections of all results but Quality. Raises ConfigError for a file that is no result."""
    parts: list[Iterator[str]] = []
    parts += map(tasks_section, read_all(Tasks, folder))
    parts += map(ladder_section, read_all(Ladder, folder))
    parts += map(retrieval_section, read_all(Retrieval, folder))
    parts += map(methods_section, read_all(Methods, folder))
    oracles = read_all(Oracle, folder)
    if oracles:
        parts.append(oracle_section(oracles))
    return ["\n\n".join(part) for part in parts]
