"""The report of an evaluation: report.json, report.md with its charts, and report.html, for readers
new to FP8.

report.html needs no other file: its charts are inline SVG. It follows the reader's light or dark
setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from freight.base.files import write_whole
from freight.base.svg import styled
from freight.base.tables import markdown
from freight.fp8.formats import Format
from freight.lab.evaluate.advice import advice, as_json, recommended, why_not
from freight.lab.evaluate.charts import Axis, Point, Series, chart
from freight.lab.evaluate.figures import Evaluation, Figures
from freight.lab.evaluate.magnitudes import sentences
from freight.lab.evaluate.scale_picture import magnitude_picture
from freight.lab.evaluate.table import SPEED, legend, setting_name, speed_table, tables, words

_WHAT = (
    "While a language model writes, it keeps notes on every token so far: keys and values, the KV cache. They fill the "
    "memory. FP8 stores each number in 8 bits instead of 16, so the same memory holds about twice as many tokens; the "
    "numbers are rounded, and a scale moves them into the range where rounding hurts least. This report measures what "
    "the rounding changes on a text, for each way to choose the scales."
)
_PAGE = """
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
max-width:1160px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.15rem;margin:2.2rem 0 .3rem}.soft{color:var(--soft)}
.advice{background:var(--box);border-left:4px solid var(--c1);padding:.8rem 1rem;overflow-wrap:anywhere}
.warning{border-left:4px solid var(--c2);padding:.4rem 1rem}code span{white-space:nowrap}
/* a shadow at an edge beyond which there is more */
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--paper) 50%,transparent) 0/3rem 100% no-repeat local,
linear-gradient(270deg,var(--paper) 50%,transparent) 100%/3rem 100% no-repeat local,
linear-gradient(90deg,var(--line),transparent) 0/.7rem 100% no-repeat,
linear-gradient(270deg,var(--line),transparent) 100%/.7rem 100% no-repeat}
table{border-collapse:collapse;font-size:.8rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .4rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid);white-space:nowrap}
td small{color:var(--soft)}h3{font-size:1rem;margin:1.2rem 0 .3rem}dt{font-weight:600}dd{margin:0 0 .4rem 1rem}
th:first-child,td:first-child{text-align:left}
svg{width:100%;min-width:680px;max-width:920px;height:auto;display:block}
"""
_CHARTS = "svg line,svg polyline{stroke-width:1.8}.full{stroke:none}\n" + "".join(
    f"svg .s{i}{{stroke:var(--c{i})}}svg .s{i}.full{{fill:var(--c{i});stroke:none}}"
    f"svg .s{i}.hollow{{fill:var(--paper);stroke-width:2}}\n"
    for i in range(8)
)


def _style(rules: str) -> str:
    """The style sheet of the page, or of a chart in a file of its own."""
    return f"<style>{styled(':root{color-scheme:light dark}' + rules, root=':root')}</style>"


@dataclass(frozen=True)
class Section:
    """A chart with what it shows, in a sentence or two."""

    title: str
    says: str
    svg: str

    @property
    def drawn(self) -> bool:
        """Whether there is a chart, and not a sentence that there is nothing to show."""
        return self.svg.startswith("<svg")

    @property
    def file(self) -> str:
        return f"{self.title.lower().replace(' ', '-')}.svg"

    @property
    def picture(self) -> str:
        """The chart as a separate file."""
        if "xmlns=" in self.svg:  # it is one
            return self.svg
        look = _style(_CHARTS + "svg{background:var(--paper)}")
        return self.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
            ">", f">{look}", 1
        )


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Write report.json, report.html, and report.md with its charts into `folder`, which is there:
    each file whole or not at all. Raises OSError.
    """
    files = {
        "report.json": json.dumps(as_json(evaluation), indent=1) + "\n",
        "report.md": _markdown(evaluation),
        "report.html": _html(evaluation),
    }
    for section in sections(evaluation):
        if section.drawn:
            files[section.file] = section.picture + "\n"
    for name, content in files.items():
        write_whole(folder / name, content)


def sections(evaluation: Evaluation) -> list[Section]:
    """Draw the charts of what was measured."""
    first = evaluation.runs[0]
    charts = [
        Section(
            "Error against memory",
            "Each mark is one setting: further left takes less memory for a token, further down changes the model's "
            f"answers less. {first.name} takes {first.bytes_per_token:,} bytes and has no error, since the others are "
            "compared with it: it stands at 0, below the logarithmic axis. Best is the lower left. Marks that would "
            "hide each other stand side by side, with a line to where they belong.",
            chart(
                "Mean KL against bytes per token",
                Axis("cache memory (bytes per token)"),
                Axis(f"mean KL from {first.name} (nats per token)", log=True, zero=True),
                _series(
                    evaluation, evaluation.runs, lambda run: [(run.bytes_per_token, run.kl_mean)]
                ),
                lines=False,
            ),
        ),
        _by_layer(evaluation),
        *_magnitudes(evaluation),
        _kl_by_position(evaluation),
        _by_position(evaluation),
    ]
    if evaluation.contexts:
        pair = evaluation.runs[:2]
        chosen = recommended(evaluation)
        if chosen is not None:
            pair = (first, chosen)

        def speeds(run: Figures) -> list[Point]:
            return list(zip(evaluation.contexts, run.decode or (), strict=True))

        charts.append(
            Section(
                "Speed by context",
                "How many tokens a second one conversation gets, with more and more text already in the cache: for 16 "
                "bits and for the setting to take. Higher is faster. It was measured on this machine.",
                chart(
                    "Decode speed by context",
                    Axis("tokens already in the cache", log=True),
                    Axis("speed (tokens per second)", zero=True),
                    _series(evaluation, pair, speeds),
                ),
            )
        )
    return charts


def _series(
    evaluation: Evaluation, runs: Sequence[Figures], points_of: Callable[[Figures], list[Point]]
) -> list[Series]:
    """Return a series for each of `runs`, in the style of its place among all."""
    series = []
    for style, run in enumerate(evaluation.runs):
        if run in runs:
            series.append(Series(setting_name(run, evaluation), points_of(run), style))
    return series


def _measured(values: Sequence[float | None]) -> list[Point]:
    """Return (index, value), without those that were not measured."""
    return [(index, value) for index, value in enumerate(values) if value is not None]


def _by_layer(evaluation: Evaluation) -> Section:
    """KL by layer where it was measured, else the error of attention's output."""
    first = evaluation.runs[0]
    layers = Axis("layer", names=[str(layer) for layer in range(len(first.layer_errors))])
    runs = [run for run in evaluation.runs if run.layer_kl is not None]
    if runs:
        title = "KL by layer"
        error = f"mean KL from {first.name} (nats per token)"
        says = (
            "This is the error if one layer alone were rounded, so a high mark is a layer that would gain most from 16 "
            "bits or finer scales."
        )
        series = _series(evaluation, runs, lambda run: _measured(run.layer_kl or ()))
    else:
        title = "Error of attention by layer"
        error = "relative error of attention (share)"
        says = (
            f"This is how far the output of attention, which reads the cache, is from that with {first.name}, as a "
            "share of its size; it grows as errors of earlier layers add up."
        )
        series = _series(
            evaluation,
            evaluation.runs[1:],
            lambda run: _measured([layer["attention"] for layer in run.layer_errors]),
        )
    return Section(
        "Error by layer",
        f"A model is a stack of layers, each with its own cache. {says}",
        chart(title, layers, Axis(error, log=True), series),
    )


def _magnitudes(evaluation: Evaluation) -> list[Section]:
    """How large keys and values are, by layer and by position; nothing where no layer stores any."""
    layers = evaluation.magnitudes
    if not layers:
        return []
    edges = evaluation.magnitude_edges
    names = [_range(low, high) for low, high in pairwise(edges)]
    series = []
    for style, (side, name) in enumerate((("k", "keys"), ("v", "values")), 1):
        seen = [entry[side]["positions"] for entry in layers if entry[side] is not None]
        if seen:
            largest = [max(values) for values in zip(*seen, strict=True)]
            points = [(index, value) for index, value in enumerate(largest) if value > 0]
            series.append(Series(name, points, style))
    by_layer = Section(
        "Keys and values by layer",
        "What a scale has to cover. A bar reaches from the largest magnitude of a layer's smallest channel to that of "
        "its largest; the dot is the one that a single scale for the layer is made for, and the further a bar "
        f"reaches down, the more a single scale is too coarse for some channels. {' '.join(sentences(layers))}",
        magnitude_picture(Format.E4M3FN, layers),
    )
    by_position = Section(
        "Keys and values by position",
        "The largest magnitude in any layer, by position in a window. Static scales clip where a position has larger "
        "ones than the text that they were measured on.",
        chart(
            "Largest keys and values by position",
            Axis("position in the text (tokens before)", names=names),
            Axis("largest magnitude (before quantization)", log=True),
            series,
        ),
    )
    return [by_layer, by_position]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if high == low + 1 else f"{low:,}–{high - 1:,}"


def _positions(evaluation: Evaluation) -> Axis:
    names = [f"{low:,}–{high - 1:,}" for low, high in pairwise(evaluation.position_edges)]
    return Axis("position in the text (tokens before)", names=names)


def _kl_by_position(evaluation: Evaluation) -> Section:
    series = _series(evaluation, evaluation.runs[1:], lambda run: _measured(run.kl_by_position))
    kl = Axis(f"mean KL from {evaluation.runs[0].name} (nats per token)", log=True)
    return Section(
        "KL by position",
        "KL is how far the probabilities of the next token are from those of the unquantized cache: 0 is equal. A line "
        "that rises to the right would mean that the cache costs more, the longer the text before.",
        chart("Mean KL by position", _positions(evaluation), kl, series),
    )


def _by_position(evaluation: Evaluation) -> Section:
    first = evaluation.runs[0].perplexity_by_position

    def points(run: Figures) -> list[Point]:
        changes = []
        for index, value in _measured(run.perplexity_by_position):
            base = first[int(index)]
            if base is not None:
                changes.append((index, 100 * (value / base - 1)))
        return changes

    absolute = ", ".join(f"{value:.1f}" for _, value in _measured(first))
    return Section(
        "Perplexity by position",
        "Perplexity is how many words, as it were, the model hesitates between. This is by how much it changes against "
        f"{evaluation.runs[0].name}, for tokens early and late in the text: a line that rises to the right would mean "
        f"that long texts suffer. With {evaluation.runs[0].name} it is, from left to right: {absolute}.",
        chart(
            "Change of perplexity by position",
            _positions(evaluation),
            Axis("change of perplexity (%)"),
            _series(evaluation, evaluation.runs[1:], points),
        ),
    )


def _title(evaluation: Evaluation) -> str:
    return f"What FP8 costs and saves: {evaluation.overview.args.model}"


def _markdown(evaluation: Evaluation) -> str:
    recommendation = advice(evaluation)
    parts = [
        f"# {_title(evaluation)}",
        *(f"**Warning:** {warning}." for warning in evaluation.warnings),
    ]
    parts += [
        recommendation.text,
        f"`{recommendation.command}`",
        _WHAT,
        *tables(evaluation),
        legend(evaluation),
    ]
    parts += ["\n".join(f"- {line}" for line in why_not(evaluation))]
    parts += ["\n".join(f"- **{word}**: {meaning}" for word, meaning in words(evaluation))]
    for section in sections(evaluation):
        if section.drawn:
            parts += [f"## {section.title}", section.says, f"![{section.title}]({section.file})"]
    if evaluation.contexts:
        parts += [
            "## Speed",
            SPEED,
            speed_table(evaluation),
        ]
    runs = evaluation.runs[1:]
    layers = [["layer", *(setting_name(run, evaluation) for run in runs)]]
    for index in range(len(evaluation.runs[0].layer_errors)):
        errors = [f"{run.layer_errors[index]['attention']:.4f}" for run in runs]
        layers.append([str(index), *errors])
    parts += [
        "## Error of attention by layer",
        f"Relative error of attention's output, against {evaluation.runs[0].name}.",
        markdown(layers, num_left=0),
    ]
    return "\n\n".join(parts) + "\n"


def _html(evaluation: Evaluation) -> str:
    title = escape(_title(evaluation))
    recommendation = advice(evaluation)
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="warning">Warning: {escape(warning)}.</p>' for warning in evaluation.warnings),
        f'<p class="advice">{escape(recommendation.text)}<br>Command: {_command(recommendation.command)}</p>',
        f"<p>{escape(_WHAT)}</p>",
    ]
    for section in sections(evaluation):
        picture = _wide(section.title, section.svg) if section.drawn else section.svg
        body.append(f"<h2>{escape(section.title)}</h2>\n<p>{escape(section.says)}</p>\n{picture}")
    body.append("<h2>All figures</h2>")
    for name, text in zip(
        ("Verdicts", "Further figures", "Memory"), tables(evaluation), strict=True
    ):
        body.append(f"<h3>{name}</h3>\n{_wide(name, _table(text))}")
    body.append(f'<p class="soft">{escape(legend(evaluation))}</p>')
    sentences = why_not(evaluation)
    if sentences:
        reasons = "".join(f"<li>{escape(line)}</li>" for line in sentences)
        body.append(f"<h2>Why settings are not safe</h2>\n<ul>{reasons}</ul>")
    meanings = [
        f"<dt>{escape(word)}</dt><dd>{escape(means)}</dd>" for word, means in words(evaluation)
    ]
    body.append(f"<h2>Words</h2>\n<dl>{''.join(meanings)}</dl>")
    if evaluation.contexts:
        body.append(
            f"<h2>Speed</h2>\n<p>{escape(SPEED)}</p>"
            + _wide("Speed", _table(speed_table(evaluation)))
        )
    body.append(f'<p class="soft">Weights: {escape(evaluation.overview.weights)}.</p>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    lines = [
        '<!doctype html><html lang="en"><head>',
        head,
        f"{_style(_PAGE + _CHARTS)}</head><body>",
        *body,
    ]
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _wide(name: str, content: str) -> str:
    """Return what may be wider than the screen; it is scrolled by the keyboard as well."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'
    )


def _command(command: str) -> str:
    """Lines break between words alone, never behind the hyphens of an option."""
    words = [f"<span>{escape(word)}</span>" for word in command.split(" ")]
    return f"<code>{' '.join(words)}</code>"


def _cell(text: str) -> str:
    """Put an interval below its figure, so that all columns fit the page."""
    figure, sign, half = text.partition(" ± ")
    if not sign:
        return escape(text)
    if half.endswith("%"):
        figure += "%"
    return f"{escape(figure)}<br><small>± {escape(half)}</small>"


def _table(text: str) -> str:
    """Turn a Markdown table into HTML."""
    names, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    head = "".join(f"<th>{escape(cell.strip())}</th>" for cell in names)
    rows = []
    for line in lines:
        cells = "".join(f"<td>{_cell(cell.strip())}</td>" for cell in line)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
