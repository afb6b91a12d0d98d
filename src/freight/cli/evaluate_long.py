"""`freight evaluate --long`: what FP8 caches cost far back in a long context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer

from freight.config.engine import EngineArgs
from freight.terminal import progress

LONG_CACHES = [
    ("fp8_e4m3", "auto"),
    ("fp8_e4m3", "unit"),
    ("fp8_e5m2", "unit"),
]  # unless one is asked for


def evaluate_long(
    args: EngineArgs,
    caches: Sequence[tuple[str, str]],
    text: str | None,
    window: int | None,
    contexts: int,
    as_json: bool,
) -> None:
    """Measure and print two tables, or one JSON object. Without `text` there is no perplexity."""
    from freight.evaluate.long import compare_long
    from freight.evaluate.long_table import (
        CHANGES,
        POSITIONS,
        RETRIEVAL,
        position_rows,
        retrieval_rows,
    )
    from freight.evaluate.report import markdown

    with progress("evaluating") as on_progress:
        scores = compare_long(args, caches, text, window, contexts, on_progress=on_progress)
    if as_json:
        runs = [asdict(score) for score in scores]
        print(
            json.dumps({"model": args.model, "seed": args.seed, "contexts": contexts, "runs": runs})
        )
        return
    typer.echo(f"{RETRIEVAL}\n{CHANGES}\n\n{markdown(retrieval_rows(scores), num_left=2)}\n")
    if scores[0].positions:
        typer.echo(f"{POSITIONS} {CHANGES}\n\n{markdown(position_rows(scores), num_left=2)}")
    elif text is None:
        typer.echo("No perplexity by position: --data FILE gives a text to measure it on.")
    else:
        typer.echo("No perplexity by position: the text is shorter than the context.")
