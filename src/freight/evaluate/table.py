"""The grid as Markdown tables, for the terminal and for report.md."""

from __future__ import annotations

from freight.evaluate.figures import Evaluation, Figures
from freight.evaluate.safety import MIN_UNITS, Interval
from freight.tables import markdown


def table(evaluation: Evaluation) -> str:
    """Write a row for each setting. KL in nats."""
    several = len({run.weights for run in evaluation.runs}) > 1
    states = evaluation.runs[0].state_dtype is not None
    headings = ["weights"] if several else []
    headings += ["cache", "format"]
    if states:
        headings.append("states")
    headings += ["verdict", "same top", "mean KL", "clipped", "to zero", "change", "perplexity"]
    headings += ["p99 KL", "bytes/token", "tokens/GiB"]
    if states:
        headings.append("bytes/state")
    rows = [headings]
    for index, run in enumerate(evaluation.runs):
        cells = _row(run, run.verdict if index else "compared with")
        if index == 0:  # it is compared with itself: its intervals say nothing
            cells = [cell.partition(" (")[0] for cell in cells]
        rows.append([run.weights, *cells] if several else cells)
    return markdown(rows, num_left=3 + several + states)


def _row(run: Figures, verdict: str) -> list[str]:
    """Return the cells, those that show a catastrophe first."""
    ratio = run.perplexity_ratio_interval
    change = None if ratio is None else (ratio[0] - 1, ratio[1] - 1)
    return [
        run.name,
        run.kv_cache_dtype,
        *([] if run.state_dtype is None else [run.state_dtype]),
        verdict,
        _with(f"{run.same_top:.2%}", run.same_top_interval, ".2%"),
        _with(nats(run.kl_mean), run.kl_interval, ""),
        f"{run.clipped_share:.3%}",
        f"{run.flushed_share:.3%}",
        _with(f"{run.perplexity_ratio - 1:+.2%}", change, "+.2%"),
        f"{run.perplexity:.3f}",
        nats(run.kl_p99),
        str(run.bytes_per_token),
        f"{run.tokens_per_gib:,}",
        *([] if run.state_dtype is None else [f"{run.bytes_per_state:,}"]),
    ]


def _with(figure: str, interval: Interval | None, form: str) -> str:
    """Return the figure with its interval, a dash where there is none."""
    if interval is None:
        return f"{figure} (—)"
    low, high = (format(end, form) if form else nats(end) for end in interval)
    return f"{figure} ({low} … {high})"


def nats(value: float) -> str:
    """Five digits behind the point, six for what is small, an exponent for what they would make
    nothing of.
    """
    if 0 < abs(value) < 0.00001:
        return f"{value:.1e}"
    return f"{value:.5f}" if abs(value) >= 0.0005 else f"{value:.6f}"


def speed_table(evaluation: Evaluation) -> str:
    """Return tokens per second of prefill, and of decoding by context; empty if nothing was timed."""
    if not evaluation.contexts:
        return ""
    first = evaluation.runs[0]
    contexts = (f"decode at {context:,}" for context in evaluation.contexts)
    rows = [["cache", "prefill", *contexts, "faster from"]]
    for run in evaluation.runs:
        faster = "" if run is first else "never"
        if run is not first and run.faster_from is not None:
            faster = f"{run.faster_from:,}"
        decode = [f"{rate:,.1f}" for rate in run.decode or ()]
        name = setting_name(run, evaluation)
        rows.append([name, f"{run.prefill_tokens_per_second:,.0f}", *decode, faster])
    return markdown(rows, num_left=1)


def setting_name(run: Figures, evaluation: Evaluation) -> str:
    """Return the name of its cache, behind that of its weights where these differ from the first
    ones.
    """
    return run.name if run.weights == evaluation.runs[0].weights else f"{run.weights}, {run.name}"


def legend(evaluation: Evaluation) -> str:
    """Return what the columns mean, in a few lines."""
    over = evaluation.overview
    of = (
        "1 document" if evaluation.num_documents == 1 else f"{evaluation.num_documents:,} documents"
    )
    lines = [
        f"{evaluation.num_tokens:,} tokens of {over.source} ({of}), {over.window:,} judged together.",
        "KL (nats per token), change and same top are against the first row.",
    ]
    sample = evaluation.sample
    if evaluation.runs[0].kl_interval:
        lines.append(f"In brackets: 95 % intervals over {sample.num_units:,} {sample.units}.")
    else:
        lines.append(
            f"(—): no interval over {sample.num_units} {sample.units}; it takes {MIN_UNITS}."
        )
    if sample.num_repeats:
        lines.append(
            f"{sample.num_repeats:,} more of the {sample.units} repeat those, and count as part of them."
        )
    return " ".join([*lines, *over.notes])
