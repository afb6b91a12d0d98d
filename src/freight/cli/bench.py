"""`freight bench`: how fast this machine runs a model, or one kernel, against the bandwidth of the
memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base.fields import JsonObject
from freight.base.options import choose
from freight.base.start_log import log_to_stderr
from freight.base.tables import markdown
from freight.base.terminal import OnProgress, progress
from freight.cli.bench_serving import positive, serving
from freight.cli.options import (
    Command,
    check_random_weights,
    option,
    takes_options_of_one_rank,
)
from freight.cli.picture import check_picture, write_picture
from freight.errors import ConfigError, choices
from freight.model.config.presets import shape_config
from freight.settings.device import DEVICES, choose_threads
from freight.settings.engine import EngineArgs
from freight.settings.resolve import KERNEL_FORMS, check
from freight.settings.speculation import DEFAULT_DRAFTS

if TYPE_CHECKING:
    from freight.model.open import OpenModel

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure speed, beside the memory's own."
)
app.command()(serving)

_OUTPUT_LEN = ("--output-len", "--output-tokens")  # as `bench serving` calls it, too
RandomWeights = Annotated[
    str | None,
    option("SHAPE", "No checkpoint: a model of this shape, a preset's name or a config.json."),
]
BatchSize = Annotated[
    int,
    option("COUNT", "Sequences that arrive at once.", "--batch-size", "--concurrency", min=1),
]
Requests = Annotated[int, option("COUNT", "Requests in all.", min=1)]
InputLen = Annotated[
    int,
    option("TOKENS", "Length of a prompt.", "--input-len", "--prompt-tokens", min=1),
]
OutputLen = Annotated[
    int,
    option("TOKENS", "Tokens generated for each.", *_OUTPUT_LEN, min=1),
]
Repeats = Annotated[
    int,
    option(
        "COUNT", "Runs that count; one to warm up comes before.", "--repeats", "--rounds", min=1
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
KERNEL_NAMES = (
    "linear",
    "attention",
    "rotate_store",
    "by_head",
    "torch.linear",
    "torch._scaled_mm",
)
TEXTS = ("edit", "code", "random")  # of `bench.drafts.texts_of`
GPU_KERNEL_NAMES = (*KERNEL_NAMES, "torch.sdpa")


@app.command(cls=Command)
@takes_options_of_one_rank
def latency(
    args: EngineArgs,
    random_weights: RandomWeights = None,
    batch_size: BatchSize = 1,
    input_len: InputLen = 128,
    output_len: Annotated[
        int | None,
        option(
            "TOKENS",
            "Tokens generated for each; default: 33, with --text the whole text.",
            *_OUTPUT_LEN,
            min=1,
        ),
    ] = None,
    repeats: Repeats = 3,
    text: Annotated[
        str | None,
        option(
            TEXTS, "Compare drafts (--speculate; 8) with none, over given answers of this kind."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode of one batch, apart, and the share of the memory's bandwidth that decoding
    reaches.
    """
    if text is not None:
        choose("--text", text, TEXTS)
        if not args.asks_for_drafts:
            args = replace(args, speculate=DEFAULT_DRAFTS)
    with _measuring(args, random_weights) as (opened, name, on_progress):
        if text is None:
            from freight.lab.bench.latency import measure_latency

            sizes = (batch_size, input_len, output_len or 33, repeats)
            figures = measure_latency(opened, name, *sizes, on_progress)
        else:
            from freight.lab.bench.drafts import measure_drafts

            drafted = (batch_size, repeats, output_len)
            figures = measure_drafts(opened, name, text, *drafted, on_progress)
    print(json.dumps(figures) if as_json else _table(figures))


@app.command(cls=Command)
@takes_options_of_one_rank
def throughput(
    args: EngineArgs,
    random_weights: RandomWeights = None,
    num_requests: Requests = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    repeats: Repeats = 1,
    compare: Annotated[
        list[str] | None,
        option("DTYPE", "Caches to run in turns; twice or more."),
    ] = None,
    compare_memory: Annotated[
        list[str] | None,
        option("SIZE", "Cache memory for --compare; may be repeated."),
    ] = None,
    picture: Annotated[Path | None, option("FILE.svg", "Draw what --compare found.")] = None,
    as_json: AsJson = False,
) -> None:
    """Many requests of different lengths through the whole engine: rates, and how full batch and
    cache were.
    """
    caches = compare or []
    sizes = (num_requests, input_len, output_len, repeats)
    table: Callable[[JsonObject], str] = _table
    is_compared = bool(caches or compare_memory or picture)
    if is_compared:
        _check_compared(args, caches, compare_memory or [], picture)
    with _measuring(args, random_weights) as (opened, name, on_progress):
        if is_compared:
            from freight.lab.bench.caches import as_table, measure_caches

            table = as_table
            memories = compare_memory or (args.kv_cache_memory,)
            figures = measure_caches(opened, name, caches, memories, *sizes, on_progress)
        else:
            from freight.lab.bench.throughput import measure_throughput

            figures = measure_throughput(opened, name, *sizes, on_progress)
    print(json.dumps(figures) if as_json else table(figures), flush=True)
    if picture is not None:
        from freight.lab.bench.cache_picture import cache_picture

        write_picture(picture, cache_picture(figures))


def _check_compared(
    args: EngineArgs, caches: list[str], memories: list[str], picture: Path | None
) -> None:
    """Raises ConfigError for what cannot be compared, before torch is loaded."""
    if len(caches) < 2 or len(set(caches)) < len(caches) or len(set(memories)) < len(memories):
        raise ConfigError(
            "--compare takes turns between caches: give two or more, each once: --compare auto --compare fp8"
        )
    for flag, is_set, other in (
        ("--kv-cache-dtype", args.kv_cache_dtype != "auto", "--compare"),
        (
            "--kv-cache-memory",
            bool(memories) and args.kv_cache_memory is not None,
            "--compare-memory",
        ),
    ):
        if is_set:
            raise ConfigError(f"{flag} and {other} both choose the cache: give one of the two")
    for cache in caches:
        for memory in memories or (args.kv_cache_memory,):
            check(replace(args.with_cache(cache), kv_cache_memory=memory))
    check_picture(picture)


@app.command()
def kernels(
    random_weights: Annotated[
        str | None,
        option("SHAPE", "Whose shapes are measured: a preset or a config.json; default: llama-1b."),
    ] = None,
    matrix: Annotated[
        str | None,
        option("OUTxIN", "One more weight, output by input; default: 14336x4096."),
    ] = None,
    rows: Annotated[list[int] | None, option("COUNT", "May be repeated; 1, 8, 512.", min=1)] = None,
    context: Annotated[
        int | None,
        option("TOKENS", "Keys that attention reads; default: 16384.", min=1),
    ] = None,
    only: Annotated[list[str] | None, option("KERNEL", "May be repeated; default: all.")] = None,
    seconds: Annotated[float, option("SECONDS", "Time for each row.", min=0)] = 0.3,
    after: Annotated[
        int,
        option("CASE", "On a GPU: begin behind the row of this number.", min=0),
    ] = 0,
    threads: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, envvar="FREIGHT_THREADS")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="|".join(DEVICES), envvar="FREIGHT_DEVICE")
    ] = "auto",
    kernels: Annotated[
        str, typer.Option(metavar="|".join(KERNEL_FORMS), envvar="FREIGHT_KERNELS")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Each operation on its own, beside torch's; on a GPU in the sizes of the table in
    docs/benchmarks.md.
    """
    args = EngineArgs(kernels=kernels, threads=threads, device=device)
    check(args)
    device = args.computes_on
    positive("--seconds", seconds, "a number of seconds for each row")
    size = _matrix(matrix or "14336x4096")
    known = KERNEL_NAMES if device == "cpu" else GPU_KERNEL_NAMES
    for name in only or []:
        if name not in known:
            raise ConfigError(f"--only {name!r} is unknown: choose {choices(known)}")
    shape = shape_config(random_weights or "llama-1b")
    from freight.model.config.parse import parse_model_config

    model = parse_model_config(shape)
    from freight.kernels.select import select_kernels
    from freight.settings.device import probe

    facts = probe(device)
    used = choose_threads(threads, facts.cores)
    kernel_set = select_kernels(kernels, str(facts.kind))
    if facts.kind == "cuda":
        for flag, value in {
            "random-weights": random_weights,
            "matrix": matrix,
            "rows": rows,
            "context": context,
        }.items():
            if value is not None:
                raise ConfigError(
                    f"--{flag} is for --device cpu: the sizes on a GPU are those of docs/benchmarks.md"
                )
        from freight.lab.bench.gpu import Sizes, measure_on_gpu

        _print_rows(measure_on_gpu(kernel_set, only or [], seconds, Sizes(), after), as_json)
        return
    if after:
        raise ConfigError(
            "--after is for --device cuda, where a fault of the GPU may end the command before its last row"
        )
    from freight.lab.bench.kernels import measure_kernels

    with used:
        measured = measure_kernels(
            kernel_set,
            model,
            size,
            rows=rows or [1, 8, 512],
            context=context or 16384,
            seconds=seconds,
            only=only or [],
        )
        _print_rows(measured, as_json)


def _matrix(value: str) -> tuple[int, int]:
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value)
    if shape is None:
        raise ConfigError(f"--matrix {value!r}: write it as 14336x4096, output by input features")
    return int(shape[1]), int(shape[2])


def _print_rows(rows: Iterable[JsonObject], as_json: bool) -> None:
    """Print one kernel a line, as it is measured."""
    if not as_json:
        typer.echo(
            f"{'kernel':18}{'format':34}{'shape':28}{'median us':>12}{'spread':>22}{'of bandwidth':>14}"
        )
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        if "error" in row:
            typer.echo("{kernel:18}failed: {what}: {error}".format(**row))
            continue
        extents = "x".join(map(str, row["shape"]))
        spread = "{low_us:.1f} to {high_us:.1f}".format(**row)
        line = "{kernel:18}{format:34}{extents:28}{median_us:12.1f}{spread:>22}{bandwidth_fraction:14.2f}"
        if row.get("tflops"):
            line += "{tflops:10.1f} TFLOP/s"
        typer.echo(line.format(extents=extents, spread=spread, **row))


@contextmanager
def _measuring(
    args: EngineArgs, random_weights: str | None
) -> Iterator[tuple[OpenModel, str, OnProgress]]:
    """Yield the model to measure, what to call it, and a bar, with the threads that were asked for."""
    log_to_stderr()
    if random_weights is None:
        from freight.model.open import open_model

        opened = open_model(args)
    else:
        check_random_weights(args.model, random_weights)  # before torch is loaded
        from freight.model.open import open_random

        opened = open_random(args, random_weights)
    name = random_weights or args.model
    with choose_threads(args.threads, opened.device.cores), progress("measuring") as on_progress:
        yield opened, name, on_progress


def _table(figures: JsonObject) -> str:
    """Write a line for each figure, and for each part of one, with its spread where it has one."""
    rows: list[Sequence[str]] = [("figure", "value", "from", "to")]
    spreads = figures["spread"]
    for name, value in figures.items():
        if name == "spread":
            continue
        parts = {name: value}
        if isinstance(value, dict):
            parts = {f"{name}.{key}": part for key, part in value.items() if part is not None}
        ends = ["", ""]
        if name in spreads:
            ends = [_text(name, spreads[name][end]) for end in ("low", "high")]
        for label, part in parts.items():
            rows.append((label, _text(label, part), *ends))
    return markdown(rows, num_left=4)


def _text(name: str, value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if "bytes" in name:
        return _size(value) + "/s" * name.endswith("per_second")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


def _size(value: float) -> str:
    if value < 1e6:
        return f"{value:,} B"
    if value < 1e9:
        return f"{value / 1e6:.3g} MB"
    return f"{value / 1e9:.3g} GB"
