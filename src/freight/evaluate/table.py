"""The grid as Markdown tables, for the terminal and for report.md."""

from __future__ import annotations

from freight.evaluate.figures import Evaluation, Figures
from freight.evaluate.report import markdown


def table(evaluation: Evaluation) -> str:
    """A row a setting. KL in nats."""
    several = len({run.weights for run in evaluation.runs}) > 1
    headings = [
        *(["weights"] if several else []),
        *("cache", "format", "perplexity", "change", "mean KL", "p99 KL", "same top", "bytes/token", "tokens/GiB"),
        *("clipped", "to zero"),
    ]
    rows = [headings]
    for run in evaluation.runs:
        rows.append([*([run.weights] if several else []), *_row(run)])
    return markdown(rows, num_left=3 if several else 2)


def _row(run: Figures) -> list[str]:
    change = f"{run.perplexity_ratio - 1:+.2%}"
    if run.perplexity_ratio_interval:
        low, high = run.perplexity_ratio_interval
        change += f" ({low - 1:+.2%} … {high - 1:+.2%})"
    kl = f"{run.kl_mean:.5f}"
    if run.kl_interval:
        kl += f" ({run.kl_interval[0]:.5f} … {run.kl_interval[1]:.5f})"
    return [
        run.name,
        run.kv_cache_dtype,
        f"{run.perplexity:.3f}",
        change,
        kl,
        f"{run.kl_p99:.5f}",
        f"{run.same_top:.2%}",
        str(run.bytes_per_token),
        f"{run.tokens_per_gib:,}",
        f"{run.clipped_share:.3%}",
        f"{run.flushed_share:.3%}",
    ]


def speed_table(evaluation: Evaluation) -> str:
    """Tokens per second of prefill, and of decoding by context; empty if nothing was timed."""
    if not evaluation.contexts:
        return ""
    rows = [["cache", "prefill", *(f"decode at {context:,}" for context in evaluation.contexts), "faster from"]]
    for run in evaluation.runs:
        faster = "" if run is evaluation.runs[0] else f"{run.faster_from:,}" if run.faster_from is not None else "never"
        name = run.name if run.weights == evaluation.runs[0].weights else f"{run.weights}, {run.name}"
        decode = [f"{rate:,.1f}" for rate in run.decode or ()]
        rows.append([name, f"{run.prefill_tokens_per_second:,.0f}", *decode, faster])
    return markdown(rows, num_left=1)


def legend(evaluation: Evaluation) -> str:
    """What the columns mean, in a few lines."""
    over = evaluation.overview
    of = "1 document" if evaluation.num_documents == 1 else f"{evaluation.num_documents:,} documents"
    lines = [
        f"{evaluation.num_tokens:,} tokens of {over.source} ({of}), {over.window:,} judged together.",
        "KL (nats per token), change and same top are against the first row.",
    ]
    if evaluation.units:
        lines.append(f"In brackets: 95 % intervals over {evaluation.units}.")
    return " ".join([*lines, *over.notes])
