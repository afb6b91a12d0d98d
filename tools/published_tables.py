"""Write docs/quality.md, and a short table of README.md, from the results in benchmarks/published/.

    python tools/published_tables.py            prints the document
    python tools/published_tables.py --write    writes docs/quality.md, and README's table

`make real OPTIONS='--publish benchmarks/published'` adds results. README.md is written only where
both markers stand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from published import FOLDER, Interval, Machine, Quality, Row, read_all, slug
from published_others import other_sections

from freight.base.fields import JsonObject
from freight.base.files import write_whole
from freight.base.tables import markdown
from freight.errors import FreightError
from freight.fp8.formats import Format
from freight.lab.evaluate.magnitudes import sentences
from freight.lab.evaluate.scale_picture import magnitude_picture
from freight.lab.evaluate.table import nats

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/quality.md"
README = ROOT / "README.md"
MARKERS = ("<!-- quality:begin -->\n", "<!-- quality:end -->")

MISSING = "—"
CACHES = {  # names of `freight evaluate caches` -> what they are
    "16 bits": "keys and values in 16 bits",
    "float32": "keys and values in 32 bits",
    "token": "E4M3, a scale for each token and KV head, measured as it is stored",
    "tensor": "E4M3, calibrated: a scale for the keys of a layer, and one for its values",
    "head": "E4M3, calibrated: a scale for each KV head",
    "channel": "E4M3, calibrated: a scale for each channel, of rotated keys for each rotary pair",
    "unit": "E4M3 without scales, that is with scales of 1.0",
    "e5m2": "E5M2 without scales",
    "int8": "INT8, a scale for each token and KV head",
    "centered": "as channel, with the means of keys subtracted; only where a layer gains from it",
    "checkpoint": "E4M3, the scales that the checkpoint has",
    "group": "E4M3, a scale for every 128 channels of a token's latent",
}
WEIGHTS = {
    "as stored": "the weights in 16 bits; those of a GGUF file are decoded to them",
    "fp8": "E4M3, a scale for each matrix; inputs of products in E4M3 too",
    "fp8-channel": "E4M3, a scale for each row; inputs of products in E4M3 too (W8A8)",
    "fp8-channel-a16": "E4M3, a scale for each row; inputs of products in 16 bits",
    "fp8-block": "E4M3, a scale for each block of 128 × 128; inputs of products in E4M3 too",
    "int8": "INT8, a scale for each row; inputs of products in INT8 too (W8A8)",
    "int4": "INT4 by rounding, a scale for each 128 inputs; inputs of products in INT8 on a CPU",
    "int4-64": "INT4 by rounding, a scale for each 64 inputs; inputs of products in INT8 on a CPU",
    "int4-32": "INT4 by rounding, a scale for each 32 inputs; inputs of products in INT8 on a CPU",
    "int4-32-a16": "INT4 by rounding, a scale for each 32 inputs; inputs of products in 16 bits",
    "mxfp4": "E2M1, a power of two as scale for each 32 inputs",
}
COLUMNS = (
    "Mean KL is in nats a token, against the first row. *Less noise* is without what computing in 16 bits costs",
    "by itself. *Change* is that of perplexity. *Same top*: how often the most likely token stays. *Clipped*: keys",
    "and values beyond the range of their scale. ± is half of a 95 % interval over windows.",
)
SHORT = {  # README's columns -> the cache, with the weights as stored
    "E4M3 per token": "token",
    "INT8": "int8",
    "E5M2": "e5m2",
    "E4M3 without scales": "unit",
}
DEMO = "demo"  # trained for minutes: last on the page, and not in README
# What is set against what: (weights, cache) of both
RATIOS = (
    ("cache INT8 : E4M3 per token", ("as stored", "int8"), ("as stored", "token")),
    ("cache E4M3 without scales : per token", ("as stored", "unit"), ("as stored", "token")),
    ("cache E4M3 per channel : per tensor", ("as stored", "channel"), ("as stored", "tensor")),
    ("cache E4M3 centered : per token", ("as stored", "centered"), ("as stored", "token")),
    ("cache E5M2 : E4M3 per token", ("as stored", "e5m2"), ("as stored", "token")),
    ("weights FP8 W8A8 : cache E4M3 per token", ("fp8-channel", "16 bits"), ("as stored", "token")),
    ("weights FP8 alone : FP8 W8A8", ("fp8-channel-a16", "16 bits"), ("fp8-channel", "16 bits")),
    ("weights INT8 W8A8 : FP8 W8A8", ("int8", "16 bits"), ("fp8-channel", "16 bits")),
    ("weights INT4 by 32 : FP8 W8A8", ("int4-32", "16 bits"), ("fp8-channel", "16 bits")),
    ("weights MXFP4 : INT4 by 32", ("mxfp4", "16 bits"), ("int4-32", "16 bits")),
)
TEXT = """\
# What FP8 costs on published models

`python tools/published_tables.py --write` writes this page from the files in `benchmarks/published/`, which have all
figures. `make real` measures them anew ([benchmarks.md](benchmarks.md#the-tables-of-another-model)).

{columns}

{sections}
"""
FROM_MODEL = """\
By what factor one setting costs more than another, in each model: where a row has figures on both sides of 1, the order
depends on the model. Figures are of the tables below."""
NONE_YET = "No results are published yet."


def with_half(figure: str, interval: Interval | None, form: str) -> str:
    """Return 'figure ± half of the interval', the latter in `form`; without an interval the figure
    alone.
    """
    if interval is None:
        return figure
    low, high = interval
    return f"{figure} ± {format((high - low) / 2, form)}"


def kl_cell(row: Row) -> str:
    figure = nats(row.kl)
    decimals = len(figure.partition(".")[2])
    return with_half(figure, row.kl_interval, ".1e" if "e" in figure else f".{decimals}f")


def change_cell(row: Row) -> str:
    return with_half(f"{row.perplexity_ratio - 1:+.2%}", row.perplexity_ratio_interval, ".2%")


def table(results: Sequence[Quality]) -> str:
    """Return the table of one model: all figures of one result, or KL and perplexity of several
    processors side by side.
    """
    if len(results) == 1:
        return _full_table(results[0])
    names = machine_names([result.machine for result in results])
    head = ["weights", "cache"]
    for name in names:
        head += [f"mean KL, {name}", f"perplexity, {name}", f"change, {name}"]
    lines = [[*head, "tokens in 1 GiB"]]
    for weights, cache in _settings(results):
        rows = [_row(result, weights, cache) for result in results]
        line = [weights, cache]
        for row in rows:
            line += _side_by_side(row, is_first=len(lines) == 1)
        line.append(next(f"{row.tokens_per_gib:,}" for row in rows if row is not None))
        lines.append(line)
    return markdown(lines, num_left=2)


def _full_table(result: Quality) -> str:
    head = ["weights", "cache", "mean KL", "less noise", "perplexity", "change", "same top"]
    lines = [[*head, "clipped", "tokens in 1 GiB"]]
    first = result.rows[0]
    for row in result.rows:
        line = [row.weights, row.cache, *_compared(row, row is first)]
        lines.append([*line, f"{row.clipped_share:.3%}", f"{row.tokens_per_gib:,}"])
    return markdown(lines, num_left=2)


def _compared(row: Row, is_first: bool) -> list[str]:
    """Return KL, KL without noise, perplexity, its change, and same top; the first row is what the
    others are compared with.
    """
    perplexity = f"{row.perplexity:.3f}"
    if is_first:
        return [MISSING, MISSING, perplexity, MISSING, MISSING]
    less = MISSING
    if row.kl_without_noise is not None:
        less = nats(row.kl_without_noise) if row.kl_without_noise else "0"
    same = with_half(f"{row.same_top:.2%}", row.same_top_interval, ".2%")
    return [kl_cell(row), less, perplexity, change_cell(row), same]


def _side_by_side(row: Row | None, is_first: bool) -> list[str]:
    """Return KL, perplexity and its change."""
    if row is None:
        return [MISSING] * 3
    kl, _, perplexity, change, _ = _compared(row, is_first)
    return [kl, perplexity, change]


def _row(result: Quality, weights: str, cache: str) -> Row | None:
    for row in result.rows:
        if (row.weights, row.cache) == (weights, cache):
            return row
    return None


def _settings(results: Sequence[Quality]) -> list[tuple[str, str]]:
    """Return (weights, cache) of all rows, each once, in the order of the first result."""
    rows = [row for result in results for row in result.rows]
    return list(dict.fromkeys((row.weights, row.cache) for row in rows))


def machine_names(machines: Sequence[Machine]) -> list[str]:
    """Return the shortest names that tell the machines apart: their kernels, or the processors
    with them.
    """
    kernels = [machine.kernels.removeprefix("cpu-") for machine in machines]
    if len(set(kernels)) == len(kernels):
        return kernels
    return [f"{machine.processor}, {name}" for machine, name in zip(machines, kernels, strict=True)]


def legend(results: Sequence[Quality]) -> Iterator[str]:
    """Yield a line of a list for each cache and format of weights in the table."""
    settings = _settings(results)
    for weights in dict.fromkeys(weights for weights, _ in settings):
        yield f"- weights *{weights}*: {WEIGHTS.get(weights, 'as the option names it')}"
    for cache in dict.fromkeys(cache for _, cache in settings):
        yield f"- cache *{cache}*: {CACHES.get(cache, 'as the option names it')}"


def facts(result: Quality) -> Iterator[str]:
    """Yield sentences about what was measured, on what, and where."""
    text = result.text
    yield (
        f"Text: {text.name}, {text.num_tokens:,} tokens in windows of at most {text.window}; intervals are over "
        f"{text.num_units} windows."
    )
    if text.calibration is not None:
        yield f"Calibration: {text.calibration}."
    yield f"{machine_sentence(result)} {noise_sentence(result)}"


def noise_sentence(result: Quality) -> str:
    if result.noise is None:
        return "Noise of computing in 16 bits: not measured."
    noise = result.noise
    return (
        f"Noise of computing in 16 bits: mean KL {nats(noise.kl)} to a float32 run of the same weights, over "
        f"{noise.num_tokens:,} tokens."
    )


def machine_sentence(result: Quality) -> str:
    machine = result.machine
    return (
        f"Measured {result.date} on {machine.processor} with the kernels {machine.kernels}, Freight {machine.freight}, "
        f"torch {machine.torch}, Python {machine.python}."
    )


def section(results: Sequence[Quality]) -> str:
    """Return the section of one model, of results on different processors."""
    first = results[0]
    model = first.model
    licence = "" if model.licence is None else f", licence {model.licence}"
    digest = "" if model.sha256 is None else f", SHA-256 `{model.sha256}`"
    lines = [f"## {model.title}", "", f"From {model.origin}{licence}{digest}.", ""]
    lines += ["```sh", first.command, "```", "", table(results), ""]
    sentences: list[str] = []
    for result in results:
        sentences += facts(result)
    lines += [f"- {sentence}" for sentence in dict.fromkeys(sentences)]
    lines += ["", *legend(results), *magnitudes_part(first)]
    return "\n".join(lines)


def listed_magnitudes(result: Quality) -> list[JsonObject]:
    """As `freight evaluate caches --json` lists them, with two buckets of positions: the first token
    and all later ones.
    """
    layers: list[JsonObject] = []
    for layer in result.magnitudes:
        sides: dict[str, JsonObject | None] = {}
        for name, side in (("k", layer.k), ("v", layer.v)):
            sides[name] = None
            if side is not None:
                sides[name] = {**asdict(side), "positions": [side.first, side.later]}
        layers.append({"layer": layer.layer, **sides})
    return layers


def clipping_sentences(result: Quality) -> Iterator[str]:
    """Yield which static scales clip what the text has."""
    for row in result.rows:
        clipping = row.clipping
        if clipping is None or row.weights != "as stored":
            continue
        if not clipping.layers:
            yield f"*{row.cache}*: none"
        else:
            yield (
                f"*{row.cache}*: {clipping.channels:,} channels in {clipping.layers} layers, by a factor of "
                f"{clipping.times:.2f} at most"
            )


def magnitudes_part(result: Quality) -> list[str]:
    """What keys and values look like: the picture, what stands out, and what static scales clip."""
    if not result.magnitudes:
        return []
    says = " ".join(sentences(listed_magnitudes(result)))
    return [
        "",
        f"![Keys and values of {result.model.title} by layer]({picture_name(result)})",
        "",
        says,
        "",
        f"Channels that static scales clip: {'; '.join(clipping_sentences(result))}.",
    ]


def picture_name(result: Quality) -> str:
    return f"keys-and-values-{slug(result.model.name)}.svg"


def pictures(folder: Path = FOLDER) -> dict[str, str]:
    """Return the pictures of docs/, by the names of their files: how large keys and values are."""
    drawn = {}
    for results in by_model(read_all(Quality, folder)):
        layers = listed_magnitudes(results[0])
        if layers:
            drawn[picture_name(results[0])] = magnitude_picture(Format.E4M3FN, layers)
    return drawn


def ratio_table(results: Sequence[Quality]) -> str:
    """Return how many times the KL of one setting is that of another, a column for each model."""
    lines = [["mean KL, less noise", *(result.model.title for result in results)]]
    for name, above, below in RATIOS:
        cells = []
        for result in results:
            rows = (_row(result, *above), _row(result, *below))
            cells.append(_ratio(*rows))
        lines.append([name, *cells])
    return markdown(lines, num_left=1)


def _ratio(above: Row | None, below: Row | None) -> str:
    if above is None or below is None:
        return MISSING
    numbers = []
    for row in (above, below):
        numbers.append(row.kl if row.kl_without_noise is None else row.kl_without_noise)
    return f"{numbers[0] / numbers[1]:.2f}" if numbers[1] else MISSING


def by_model(results: Sequence[Quality]) -> list[list[Quality]]:
    """Group results by model, in the order of the files' names; the demo is last."""
    groups: dict[str, list[Quality]] = {}
    for result in results:
        groups.setdefault(result.model.name, []).append(result)
    return sorted(groups.values(), key=lambda group: group[0].model.name == DEMO)


def document(folder: Path = FOLDER) -> str:
    """Return docs/quality.md. Raises ConfigError for a file that is no result."""
    models = by_model(read_all(Quality, folder))
    sections = []
    if len(models) > 1:
        first = [results[0] for results in models]
        sections.append("\n\n".join(["## From model to model", FROM_MODEL, ratio_table(first)]))
    sections += [section(results) for results in models]
    sections += other_sections(folder)
    return TEXT.format(columns="\n".join(COLUMNS), sections="\n\n".join(sections) or NONE_YET)


def short_table(folder: Path = FOLDER) -> str:
    """Return README's table: a row for each model, of its first result."""
    lines = [["model", *SHORT]]
    for results in by_model(read_all(Quality, folder)):
        first = results[0]
        if first.model.name == DEMO:
            continue
        line = [first.model.title]
        for cache in SHORT.values():
            row = _row(first, "as stored", cache)
            cell = MISSING
            if row is not None:
                cell = f"{nats(row.kl)}, {row.perplexity_ratio - 1:+.2%}"
            line.append(cell)
        lines.append(line)
    return markdown(lines, num_left=1)


def readme(content: str, folder: Path = FOLDER) -> str:
    """Return `content` with the short table between the markers; unchanged without both."""
    begin, end = MARKERS
    before, opened, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        return content
    return f"{before}{begin}\n{short_table(folder)}\n\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write docs/quality.md and README's table instead"
    )
    args = parser.parse_args(argv)
    try:
        text = document()
        if args.write:
            write_whole(DOCUMENT, text)
            for name, picture in pictures().items():
                write_whole(DOCUMENT.with_name(name), picture)
            write_whole(README, readme(README.read_text(encoding="utf-8")))
    except (FreightError, OSError) as error:
        raise SystemExit(f"published_tables.py: {error}") from None
    if not args.write:
        print(text, end="")


if __name__ == "__main__":
    main()
