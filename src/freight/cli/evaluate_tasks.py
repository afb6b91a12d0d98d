"""`freight evaluate --tasks`: lm-eval's tasks under the 16-bit cache and another, with the
difference.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from freight.config.engine import EngineArgs


def evaluate_tasks(
    args: EngineArgs,
    tasks: str,
    cache: tuple[str, str],
    include_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    as_json: bool,
) -> None:
    """Run the tasks, whose names are separated by commas, and print a table or one JSON object."""
    from freight.evaluate.report import markdown
    from freight.evaluate.tasks import as_rows, compare_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    folder = None if include_path is None else str(include_path)
    found = compare_tasks(args, cache, names, folder, limit, num_fewshot)
    if as_json:
        caches, scores = (
            [dict(facts) for facts in found.caches],
            [asdict(score) for score in found.scores],
        )
        print(json.dumps({"model": args.model, "caches": caches, "tasks": scores}))
        return
    first, second = (str(facts["dtype"]) for facts in found.caches)
    typer.echo(markdown(as_rows(found.scores, (first, second)), num_left=2))
    scales = found.caches[1]
    typer.echo(f"{second}: scales {scales['granularity']}, {scales['scale_source']}")
    methods = {score.method for score in found.scores}
    if "paired" in methods:
        typer.echo(
            "± is one standard error; the difference's is of the differences by document (paired)."
        )
    if "bootstrap" in methods:
        typer.echo(
            "Where a metric is no mean over documents, ± is of 500 draws of documents, the same for both."
        )
