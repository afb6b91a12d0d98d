"""`freight evaluate`: what an FP8 cache costs in quality and saves in memory, on a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from freight.cli.options import takes_engine_options
from freight.config.engine import EngineArgs
from freight.errors import ConfigError

# Measured unless one is asked for. E5M2 needs no scales, and cannot use those that a checkpoint has for E4M3.
CACHES = [("fp8_e4m3", "auto"), ("fp8_e5m2", "unit")]
LAYER_TOKENS = 16384  # of the text, for --per-layer, which runs the model (layers + 1) / 2 times
LEGEND = "KL (nats) and top token are against the first row."
HELD_OUT = Path(__file__).parent.parent / "demo" / "heldout.txt"


@takes_engine_options
def evaluate(
    args: EngineArgs,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to judge by; for 'demo', its held-out text if not given.")
    ] = None,
    window: Annotated[int | None, typer.Option(metavar="TOKENS", min=2, help="Tokens judged together.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Each layer's share of what the cache costs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure what FP8 caches cost and save.

    Perplexity, divergence from a 16-bit cache, and memory: of all FP8 caches, or of the one asked for; and the
    memory of the weights.
    """
    text = read_text(args.model, data)
    if per_layer:
        show_layers(args, text, window, as_json)
        return
    chosen = args.quantization_param_path or args.kv_scales != "auto" or args.kv_cache_dtype != "auto"
    caches = [(args.kv_cache_dtype, args.kv_scales)] if chosen else CACHES

    from freight.evaluate.report import as_json as rows
    from freight.evaluate.report import as_table, run_caches, weight_bytes

    with progress("evaluating") as on_progress:
        runs = run_caches(args, caches, text, window, on_progress=on_progress)
    scores = [run.score() for run in runs]
    size, format = weight_bytes(runs[0].runner.model), runs[0].config.weight_format
    if as_json:
        weights = {"dtype": format, "bytes": size.layers, "embedding_bytes": size.embeddings}
        print(json.dumps({"model": args.model, "weights": weights, "caches": rows(scores)}))
    else:
        typer.echo(as_table(scores))
        typer.echo(f"weights: {size.layers:,} bytes in {format}, embedding and head {size.embeddings:,} bytes")
        typer.echo(f"{scores[0].num_tokens:,} tokens of {data or HELD_OUT.name}. {LEGEND}")


def show_layers(args: EngineArgs, text: str, window: int | None, as_json: bool) -> None:
    """`--per-layer`: each layer quantized alone, as a table or as JSON."""
    from freight.evaluate import sensitivity
    from freight.evaluate.report import text_windows

    with progress("measuring layers") as on_progress:
        found = sensitivity.per_layer(
            args,
            lambda opened, longest: text_windows(opened, text, min(window or 1024, longest), LAYER_TOKENS),
            on_progress,
        )
    if as_json:
        print(json.dumps({"model": args.model, **sensitivity.as_json(found)}))
        return
    typer.echo(sensitivity.as_table(found))
    typer.echo(f"KL in nats against a 16-bit cache, over the first {found.num_tokens:,} tokens; one layer at a time")


def read_text(model: str, data: Path | None) -> str:
    """The text to judge by. Raises ConfigError where there is none."""
    if data is None and model != "demo":
        raise ConfigError("--data FILE is needed: a text the model was not trained on")
    try:
        return (data or HELD_OUT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data} cannot be read as text: {error}") from None


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; gives a function (done, total) that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
