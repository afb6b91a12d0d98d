"""`freight bench serving`: load on a server that speaks OpenAI's API, and its times, rates and
errors.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from freight.base.fields import JsonObject
from freight.base.tables import markdown
from freight.base.terminal import progress
from freight.cli.options import Json, option
from freight.cli.picture import check_picture, write_picture
from freight.errors import ConfigError, choices
from freight.lab.columns import text_rows

DEFAULT_URL = "http://127.0.0.1:8000"


def serving(
    url: Annotated[
        list[str] | None,
        option("URL", f"A server; repeat it to compare; default: {DEFAULT_URL}."),
    ] = None,
    model: Annotated[
        str | None,
        option("NAME", "Default: the first that the server lists.", "--model", "--model-id"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", envvar="FREIGHT_API_KEY")] = None,
    endpoint: Annotated[str, option("completions|chat", "Which API is called.")] = "completions",
    concurrency: Annotated[
        list[int] | None,
        option("COUNT", "Requests at a time; may be repeated; default: 1.", min=1),
    ] = None,
    rate: Annotated[
        list[float] | None,
        option("NUMBER", "Requests a second, at random times; may be repeated."),
    ] = None,
    num_requests: Annotated[int | None, option("COUNT", "Default: 64.", min=1)] = None,
    duration: Annotated[float | None, option("SECONDS", "No request begins after it.")] = None,
    prompt: Annotated[str, option("text|ids", "Pieces of a text, or random token ids.")] = "text",
    prompts: Annotated[
        Path | None,
        option("FILE.jsonl", "Your own prompts, one a line.", "--prompts", "--prompt-file"),
    ] = None,
    prompt_tokens: Annotated[
        str, option("N|LOW:HIGH", "Length of a prompt.", "--prompt-tokens", "--input-len")
    ] = "128",
    output_tokens: Annotated[
        str, option("N|LOW:HIGH", "Tokens generated for each.", "--output-tokens", "--output-len")
    ] = "64",
    shared_prefix: Annotated[
        int,
        option("TOKENS", "With which every prompt begins, besides its own.", min=0),
    ] = 0,
    vocab_size: Annotated[int | None, option("COUNT", "For --prompt ids.", min=1)] = None,
    warmup: Annotated[int, option("COUNT", "Requests before a run that do not count.", min=0)] = 4,
    rounds: Annotated[
        int | None,
        option(
            "COUNT",
            "Runs of each load; default: 1, for several servers 6.",
            "--rounds",
            "--repeats",
            min=1,
        ),
    ] = None,
    timeout: Annotated[float, option("SECONDS", "For one answer.")] = 600.0,
    seed: Annotated[
        int | None,
        option("NUMBER", "Of prompts, lengths and arrivals; default: a new one."),
    ] = None,
    picture: Annotated[Path | None, option("FILE.svg", "Draw the distributions.")] = None,
    as_json: Json = False,
) -> None:
    """Load on any OpenAI-compatible server: time to first token, between tokens, rates, errors;
    several in turns.
    """
    from freight.lab.bench.prompts import Lengths
    from freight.lab.bench.serving import ServingArgs, measure_serving

    check_picture(picture)
    targets = _targets(url or [DEFAULT_URL], endpoint, api_key, timeout)
    args = ServingArgs(
        targets=targets,
        model=model,
        levels=_levels(concurrency, rate),
        amount=_amount(num_requests, duration),
        prompt_kind=prompt,
        prompt=Lengths.parse("prompt-tokens", prompt_tokens),
        output=Lengths.parse("output-tokens", output_tokens),
        prompts_file=prompts,
        shared_prefix=shared_prefix,
        vocab_size=vocab_size,
        warmup=warmup,
        rounds=rounds or (6 if len(targets) > 1 else 1),
        seed=secrets.randbelow(10**6) if seed is None else seed,
    )
    with progress("requests") as on_progress:
        runs, report = measure_serving(args, on_progress)
    _print(report, as_json)
    sys.stdout.flush()
    if picture is not None:
        _draw(picture, report, runs)


def _targets(urls: list[str], endpoint: str, api_key: str | None, timeout: float) -> list[Any]:
    from freight.lab.bench.http_stream import Address
    from freight.lab.bench.load import ENDPOINTS, Target

    if endpoint not in ENDPOINTS:
        raise ConfigError(f"--endpoint {endpoint!r} is unknown: choose {choices(ENDPOINTS)}")
    positive("--timeout", timeout, "a number of seconds")
    return [Target(Address.parse(url), "", endpoint, api_key, timeout=timeout) for url in urls]


def _levels(concurrency: list[int] | None, rate: list[float] | None) -> list[Any]:
    from freight.lab.bench.load import Level

    if concurrency and rate:
        raise ConfigError("--concurrency and --rate are two kinds of load: give one of the two")
    if rate:
        for number in rate:
            positive("--rate", number, "requests a second")
        return [Level(rate=number) for number in dict.fromkeys(rate)]
    return [Level(concurrency=number) for number in dict.fromkeys(concurrency or [1])]


def _amount(num_requests: int | None, duration: float | None) -> Any:
    from freight.lab.bench.load import Amount

    if duration is not None:
        positive("--duration", duration, "a number of seconds")
    return Amount(num_requests or (None if duration else 64), duration)


def positive(flag: str, value: float, what: str) -> None:
    """Raises ConfigError, also for inf and nan, with which a load would not end or not begin."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} {value:g}: give {what}, above 0 and finite")


def _draw(path: Path, report: JsonObject, runs: Any) -> None:
    from freight.lab.bench.serving import PROMPT_KINDS
    from freight.lab.bench.serving_picture import serving_picture

    row = report["rows"][0]
    what = report["prompts"]
    if what in PROMPT_KINDS:  # a file's lines have lengths of their own
        what = f"prompts of {report['prompt_tokens_wanted']} tokens, {report['output_tokens_wanted']} generated"
    title = f"{row['model']}: {what}"
    write_picture(path, serving_picture(title, runs))


def _print(report: JsonObject, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    print(_rows(report))
    for note in _notes(report):
        print(note)
    if report["ratios"]:
        print(_ratios(report))


def _rows(report: JsonObject) -> str:
    rows = [
        [
            *("load", "first token ms", "p99", "between ms", "p99", "whole s", "p99"),
            *("tokens/s", "requests/s", "errors"),
        ]
    ]
    several = len({row["url"] for row in report["rows"]}) > 1
    if several:
        rows[0].insert(0, "server")
    for row in report["rows"]:
        cells = [row["url"]] if several else []
        load = "{concurrency} at a time" if row["concurrency"] else "{rate:g}/s"
        cells.append(load.format(**row))
        for figure, unit in (("ttft_ms", 1.0), ("itl_ms", 1.0), ("e2e_ms", 1e3)):
            cells += [_text(row[figure][part], unit) for part in ("median", "p99")]
        cells.append("{output_tokens_per_second:,.1f}".format(**row))
        cells.append("{requests_per_second:,.2f}".format(**row))
        failed = sum(row["errors"].values())
        cells.append(f"{failed} of {row['requests']}" if failed else "0")
        rows.append(cells)
    return markdown(rows, num_left=int(several))


def _text(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.2f}"


def _notes(report: JsonObject) -> list[str]:
    """Return what a reader must know of the figures: what a server does not take, what failed and
    how.
    """
    notes = [f"seed {report['seed']}: --seed {report['seed']} sends the same requests again"]
    again = report["prompts"] not in ("text", "ids") and len(report["rows"]) * report["rounds"] > 1
    if again and any(row["cached_tokens"] is None for row in report["rows"]):
        notes.append("every run sends the same prompts: a prefix cache makes the later ones faster")
    for row in report["rows"]:
        where = f"{row['url']}, {row['concurrency'] or row['rate']}"
        if row["itl_unit"] == "event":
            notes.append(
                f"{where}: does not say the tokens of each event, so 'between' is between events"
            )
        if row["cached_tokens"]:
            share = row["cached_tokens"] / row["prompt_tokens"]
            notes.append(
                f"{where}: {share:.0%} of the prompts' tokens came from the server's prefix cache"
            )
        if not row["ignore_eos"]:
            notes.append(f"{where}: does not take ignore_eos")
        if row["short_answers"]:
            notes.append(f"{where}: {row['short_answers']} answers are shorter than was asked for")
        for kind, count in row["errors"].items():
            notes.append(f"{where}: {count} x {kind}: {row['error_messages'][kind]}")
        late = row["late_ms"]["p99"]
        if row["rate"] and late and late > 10:
            notes.append(
                f"{where}: the load itself was late by {late:.0f} ms (p99): its times include that"
            )
    return notes


_RATIOS = {
    "figure": "{0[figure]} over {0[to]}",
    "load": "{0[level]}",
    "ratio": "{0[ratio]:.3f}",
    "interval": "{0[low]:.3f} to {0[high]:.3f} ({0[coverage]:.1%})",
    "better": "{0[better]}",
}


def _ratios(report: JsonObject) -> str:
    rows = []
    for row in report["ratios"]:
        rows.append(row | {"better": "above 1" if row["more_is_better"] else "below 1"})
    url = report["rows"][0]["url"]
    title = f"{url} over the others: medians of the ratios of {report['rounds']} rounds"
    return f"{title}\n{markdown(text_rows(_RATIOS, rows), num_left=2)}"
