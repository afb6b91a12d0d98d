"""The grid as Markdown tables, for the terminal and for report.md, and what their words mean."""

from __future__ import annotations

from freight.base.tables import markdown
from freight.lab.columns import plural, row_of
from freight.lab.evaluate.figures import Evaluation, Figures
from freight.lab.evaluate.safety import MIN_UNITS, Interval


def table(evaluation: Evaluation) -> str:
    """Return `tables` below each other."""
    return "\n\n".join(tables(evaluation))


_FURTHER = {
    "clipped": "{0.clipped_share:.3%}",
    "to zero": "{0.flushed_share:.3%}",
    "perplexity": "{0.perplexity:.3f}",
}
_MEMORY = {
    "format": "{0.kv_cache_dtype}",
    "bytes/token": "{0.bytes_per_token}",
    "tokens/GiB": "{0.tokens_per_gib:,}",
}
_STATES = {"states": "{0.state_dtype}", "bytes/state": "{0.bytes_per_state:,}"}


def tables(evaluation: Evaluation) -> list[str]:
    """Write three tables with a row for each setting: what the verdict rests on, further figures,
    and memory. KL in nats. They fit 100 columns.
    """
    first = evaluation.runs[0]
    columns = _MEMORY if first.state_dtype is None else _MEMORY | _STATES
    judged = [["cache", "verdict", "same top", "mean KL", "change"]]
    further = [["cache", *_FURTHER, "p99 KL"]]
    memory = [["cache", *columns]]
    if evaluation.noise is not None:
        further[0].append("KL less noise")
    for run in evaluation.runs:
        name = setting_name(run, evaluation).replace(", states ", " + ")
        judged.append([name, *_judged(run, is_first=run is first)])
        figures = [name, *row_of(_FURTHER, run), nats(run.kl_p99)]
        without_noise = evaluation.without_noise(run)
        if without_noise is not None:
            figures.append(nats(without_noise))
        further.append(figures)
        memory.append([name, *row_of(columns, run)])
    return [markdown(judged, num_left=2), markdown(further, num_left=1), markdown(memory, 2)]


def _judged(run: Figures, is_first: bool) -> list[str]:
    """Return the verdict, and the figures with their bounds: of the first, which is compared with
    itself, without intervals.
    """
    cells = [f"{run.same_top:.2%}", nats(run.kl_mean), f"{run.perplexity_ratio - 1:+.2%}"]
    if is_first:
        return ["compared with", *cells]
    intervals = (run.same_top_interval, run.kl_interval, run.perplexity_ratio_interval)
    texts = [_with(*pair) for pair in zip(cells, intervals, strict=True)]
    return [str(run.verdict), *texts]


def _with(figure: str, interval: Interval | None) -> str:
    """Return the figure with half of its interval, a dash where there is none: 97.57 ± 0.25%."""
    if interval is None:
        return f"{figure} (—)"
    half = (interval[1] - interval[0]) / 2
    if figure.endswith("%"):
        return f"{figure[:-1]} ± {half:.2%}"
    if "e" in figure:
        return f"{figure} ± {half:.1e}"
    return f"{figure} ± {half:.{len(figure.partition('.')[2])}f}"


def nats(value: float) -> str:
    """Five digits behind the point, six for what is small, an exponent for what they would make
    nothing of.
    """
    if 0 < abs(value) < 0.00001:
        return f"{value:.1e}"
    if abs(value) < 0.0005:
        return f"{value:.6f}"
    return f"{value:.5f}"


SPEED = "Tokens per second of one sequence: prefill, and decoding with so many tokens in its cache."


def speed_table(evaluation: Evaluation) -> str:
    """Return tokens per second of prefill, and of decoding by context; empty if nothing was timed."""
    if not evaluation.contexts:
        return ""
    rows = [["cache", "prefill", *map("{:,}".format, evaluation.contexts), "faster from"]]
    for run in evaluation.runs:
        row = [setting_name(run, evaluation), f"{run.prefill_tokens_per_second:,.0f}"]
        for rate in run.decode or ():
            row.append(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}")
        row.append("never" if run.faster_from is None else f"{run.faster_from:,}")
        rows.append(row)
    rows[1][-1] = ""  # the first is compared with itself
    return markdown(rows, num_left=1)


_CACHES = {
    "16 bits": "keys and values as they are computed; the others are compared with it",
    "float32": "keys and values as they are computed; the others are compared with it",
    "unit": "E4M3 without scales, that is with scales of 1.0",
    "tensor": "E4M3 with one calibrated scale for all keys of a layer, and one for all values",
    "head": "E4M3 with a calibrated scale for each KV head",
    "channel": "E4M3 with a calibrated scale for each channel of each KV head; of rotated keys, for each pair",
    "token": "E4M3 with a scale for each token and KV head, measured as it is stored",
    "group": "E4M3 with a scale for every 128 channels of a token's latent",
    "e5m2": "E5M2, which has a wider range and one bit less of precision, without scales",
    "centered": "as channel, with the means of keys subtracted before they are stored",
    "int8": "integers of 8 bits with a scale for each token and KV head",
    "checkpoint": "the scales that the checkpoint has",
}
_FIGURES = (
    ("same top", "how often the most likely next token stays the same"),
    (
        "KL",
        "how far the probabilities of the next token are from those of the first row: 0 is equal (Kullback-Leibler "
        "divergence, in nats, the unit of natural logarithms); p99 is exceeded by one token of a hundred",
    ),
    (
        "perplexity",
        "how many tokens, as it were, the model hesitates between; change is that against the first row",
    ),
    ("clipped", "the share of keys and values beyond the range of their scale"),
    ("to zero", "the share that is too small for its scale, and becomes 0"),
)


def words(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the words of the tables with what they mean, of caches those that were measured."""
    meanings = {}
    for run in evaluation.runs:
        if run.name in _CACHES:
            meanings[run.name] = _CACHES[run.name]
    return [*meanings.items(), *_FIGURES]


def setting_name(run: Figures, evaluation: Evaluation) -> str:
    """Return the name of its cache, behind that of its weights where these differ from the first
    ones.
    """
    if run.weights == evaluation.runs[0].weights:
        return run.name
    return f"{run.weights}, {run.name}"


def legend(evaluation: Evaluation) -> str:
    """Return what the columns mean, in a few lines."""
    over = evaluation.overview
    of = plural(evaluation.num_documents, "document")
    lines = [
        f"{evaluation.sample.num_tokens:,} tokens of {over.source} ({of}), {over.window:,} judged together.",
        "KL (nats per token), change and same top are against the first row.",
    ]
    sample = evaluation.sample
    if evaluation.runs[0].kl_interval:
        uneven = ""
        if sample.num_uneven:
            uneven = f", the weight of {sample.num_uneven:,} of different length"
        lines.append(
            f"±: half of the 95 % interval, over {sample.num_units:,} {sample.units}{uneven}."
        )
    else:
        lines.append(
            f"(—): no interval over {sample.num_units} {sample.units}; it takes {MIN_UNITS}."
        )
    if sample.num_repeats:
        lines.append(
            f"{sample.num_repeats:,} more of the {sample.units} repeat those, and count as part of them."
        )
    if evaluation.noise is not None:
        noise = evaluation.noise
        lines.append(
            f"16-bit noise: {nats(noise.kl)} nats, from a float32 run of the same weights to the first row, over "
            f"{noise.num_tokens:,} tokens; both runs of a comparison have it, so about {nats(2 * noise.kl)} of each KL "
            "is not of the cache (KL less noise)."
        )
    return " ".join([*lines, *over.notes])
