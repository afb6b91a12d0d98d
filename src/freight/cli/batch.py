"""`freight batch`: a file of requests in OpenAI's batch format, answered line by line into another
file.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from freight.base import terminal
from freight.base.terminal import bars
from freight.cli.options import Values, argument, takes_engine_options
from freight.cli.serve import require_packages, takes_server_options
from freight.errors import ConfigError
from freight.settings.engine import EngineArgs
from freight.settings.lora import named_adapters

# The options of `freight serve` that this command has as well.
_OPTIONS = (
    "served_model_name",
    "chat_template",
    "template_timeout",
    "unknown_fields",
    "reasoning_budget",
)
# Options that influence the speed and not the answers: a run may be continued with other values.
SPEED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_step_seconds",
    "enable_prefix_caching",
    "kv_cache_memory",
    "speculate",
    "speculative_config",
    "max_loras",
    "max_lora_rank",
    "device",
    "kernels",
    "threads",
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
        argument("OUT", "The file of answers, continued if it exists; - is stdout."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary of the run as one JSON object.")
    ] = False,
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    A run that was killed is continued by the same command: lines that are answered are not computed
    again.
    """
    require_packages("batch")
    if as_json and str(out) == "-":
        raise ConfigError(
            "--json and OUT - both write standard output: omit --json, or name a file"
        )
    from freight.serve.offline.batch import COMPLETIONS, LINES_PER_SEQUENCE, BatchCounts, run_batch
    from freight.serve.offline.batch_files import BatchInput, BatchOutput, require_different
    from freight.serve.processes.client import WorkerOptions
    from freight.serve.settings import ServerSettings

    folder = Path(args.model).expanduser()
    names = tuple(server.pop("served_model_name"))
    if not names:
        names = (folder.name or args.model,)
    # The queue has room for every completion of the lines in the engine, so it is never full.
    room = LINES_PER_SEQUENCE * COMPLETIONS * args.max_num_seqs
    settings = ServerSettings(names=names, max_queue=room, **server)
    # The options that influence the answers: BatchInput hashes them into the ids of the answers.
    engine_options = {name: value for name, value in asdict(args).items() if name not in SPEED}
    engine_options["model"] = args.model
    if folder.is_dir():
        engine_options["model"] = str(folder.resolve())
    server_options = {name: str(value) for name, value in server.items()}
    require_different(source, out)
    models = [*names, *(adapter.name for adapter in named_adapters(args.lora_modules))]
    lines = BatchInput(source, [engine_options, server_options, names], models)
    started = time.monotonic()
    with BatchOutput(out, lines.ids) as output, bars() as bar:
        counts = BatchCounts(len(lines.ids), before=output.num_done, failed=output.num_failed)
        status = 0
        if counts.before < counts.lines:
            task = bar.add_task("answering", total=counts.lines, completed=counts.before)

            def show_progress(num_answered: int) -> None:
                bar.update(task, completed=num_answered)

            # Nobody waits for single tokens. So steps have no target duration unless one was given
            # (0.0: none), and the engine sends new tokens once a second.
            engine_args = asdict(replace(args, max_step_seconds=args.max_step_seconds or 0.0))
            options = WorkerOptions(engine_args, events_per_second=1.0)
            status = run_batch(lines, output, settings, options, counts, show_progress)
    done = counts.before + counts.answered
    if as_json:
        terminal.say(
            json.dumps(counts.as_object() | {"seconds": round(time.monotonic() - started, 3)})
        )
    summary = (
        f"{out}: {done:,} of {counts.lines:,} lines are answered, {counts.before:,} of them by earlier runs; "
        f"{counts.failed:,} with an error"
    )
    if done < counts.lines:
        summary += "; run the same command again to continue"
    terminal.say(summary, err=True)
    raise typer.Exit(status)
