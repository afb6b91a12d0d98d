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
LEGEND = "KL (nats) and top token are against the first row."
HELD_OUT = Path(__file__).parent.parent / "demo" / "heldout.txt"


@takes_engine_options
def evaluate(
    args: EngineArgs,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to judge by; for 'demo', its held-out text if not given.")
    ] = None,
    window: Annotated[int | None, typer.Option(metavar="TOKENS", min=2, help="Tokens judged together.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Run these tasks of lm-eval instead, with an FP8 cache and without."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Task files of your own, for --tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="COUNT", min=1, help="Documents of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(metavar="COUNT", min=0, help="Examples before each document.")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Measure retrieval and perplexity by depth in a long context instead.")
    ] = False,
    contexts: Annotated[int, typer.Option(metavar="COUNT", min=2, help="Contexts of --long.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure what FP8 caches cost and save.

    Perplexity, divergence from a 16-bit cache, and memory: of all FP8 caches, or of the one asked for; and the
    memory of the weights.
    """
    chosen = args.quantization_param_path or args.kv_scales != "auto" or args.kv_cache_dtype != "auto"
    caches = [(args.kv_cache_dtype, args.kv_scales)] if chosen else CACHES
    if tasks is not None and long:
        raise ConfigError("--tasks and --long are two measurements: give one of them")
    if tasks is not None:
        from freight.cli.evaluate_tasks import evaluate_tasks

        evaluate_tasks(args, tasks, caches[0], include_path, limit, num_fewshot, as_json)
        return
    for name, value in (("--include-path", include_path), ("--limit", limit), ("--num-fewshot", num_fewshot)):
        if value is not None:
            raise ConfigError(f"{name} {value} belongs to --tasks NAME,…, which is not given")
    if long:
        from freight.cli.evaluate_long import LONG_CACHES, evaluate_long

        told = read_text(args.model, data) if data is not None or args.model == "demo" else None
        evaluate_long(args, caches if chosen else LONG_CACHES, told, window, contexts, as_json)
        return
    _evaluate_caches(args, caches, data, window, as_json)


def _evaluate_caches(
    args: EngineArgs, caches: list[tuple[str, str]], data: Path | None, window: int | None, as_json: bool
) -> None:
    text = read_text(args.model, data)

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
