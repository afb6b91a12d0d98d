"""`freight batch`: a file of requests in OpenAI's batch format, answered line by line into another
file.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from freight.cli.options import Values, argument, takes_engine_options
from freight.cli.serve import NEEDED, takes_server_options
from freight.config.engine import EngineArgs
from freight.errors import ConfigError, install
from freight.terminal import bars

_OPTIONS = ("served_model_name", "chat_template", "template_timeout", "unknown_fields")
# What changes how fast an answer comes, and not which: a run may be continued with others.
_SPEED = (
    *(
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_step_seconds",
        "enable_prefix_caching",
        "kv_cache_memory",
    ),
    *("device", "kernels", "threads"),
)


@takes_engine_options
@takes_server_options(_OPTIONS)
def batch(
    args: EngineArgs,
    server: Values,
    source: Annotated[
        Path,
        argument("IN", "A file with a request on each line; - reads stdin."),
    ],
    out: Annotated[
        Path,
        argument("OUT", "The file of answers, continued if there; - is stdout."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was done as one JSON object.")
    ] = False,
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    A run that was killed is continued by the same command: lines that are answered are not computed
    again.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"freight batch needs {', '.join(missing)}: {install('server')}")
    if as_json and str(out) == "-":
        raise ConfigError(
            "--json and OUT - both write standard output: omit --json, or name a file"
        )
    from freight.processes.client import WorkerOptions
    from freight.server.batch import COMPLETIONS, LINES_PER_SEQUENCE, BatchCounts, run_batch
    from freight.server.batch_files import BatchInput, BatchOutput, require_different
    from freight.server.settings import ServerSettings

    folder = Path(args.model).expanduser()
    names = tuple(server.pop("served_model_name")) or (folder.name or args.model,)
    room = (
        LINES_PER_SEQUENCE * COMPLETIONS * args.max_num_seqs
    )  # for all lines at once: the queue is never full
    settings = ServerSettings(names=names, max_queue=room, **server)
    asked = {name: value for name, value in asdict(args).items() if name not in _SPEED}
    asked["model"] = str(folder.resolve()) if folder.is_dir() else args.model
    require_different(source, out)
    lines = BatchInput(
        source, [asked, {name: str(value) for name, value in server.items()}, names], names
    )
    started = time.monotonic()
    with BatchOutput(out, lines.ids) as output, bars() as bar:
        counts = BatchCounts(len(lines.ids), before=output.num_done, failed=output.num_failed)
        status = 0
        if counts.before < counts.lines:
            task = bar.add_task("answering", total=counts.lines, completed=counts.before)
            # Nobody waits for single tokens: steps are as long as their rate is best, and sent
            # once a second.
            offline = asdict(replace(args, max_step_seconds=args.max_step_seconds or 0.0))
            options = WorkerOptions(offline, events_per_second=1.0)
            status = run_batch(
                lines,
                output,
                settings,
                options,
                counts,
                lambda done: bar.update(task, completed=done),
            )
    done = counts.before + counts.answered
    if as_json:
        typer.echo(
            json.dumps(counts.as_object() | {"seconds": round(time.monotonic() - started, 3)})
        )
    typer.echo(
        f"{out}: {done:,} of {counts.lines:,} lines are answered, {counts.before:,} of them by earlier runs; "
        f"{counts.failed:,} with an error"
        + ("" if done == counts.lines else "; the same command goes on"),
        err=True,
    )
    raise typer.Exit(status)
