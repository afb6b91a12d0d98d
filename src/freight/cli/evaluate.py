"""`freight evaluate`: what FP8 caches and weights cost in quality and save in memory, on a text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from freight import files
from freight.cli.options import takes_engine_options
from freight.config.engine import EngineArgs
from freight.errors import ConfigError
from freight.files import DATA_LIMIT, open_regular
from freight.start_log import log_to_stderr
from freight.terminal import progress

# What `freight demo` shows. E5M2 needs no scales, and cannot use those that a checkpoint has for
# E4M3.
CACHES = [("fp8_e4m3", "auto"), ("fp8_e5m2", "unit")]
LAYER_TOKENS = 16384  # of the text, for --per-layer, which runs the model (layers + 1) / 2 times
LEGEND = "KL (nats) and top token are against the first row."
HELD_OUT = Path(__file__).parent.parent / "demo" / "heldout.txt"


Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text or JSONL to judge by; for 'demo', its held-out text."),
]
Field = Annotated[
    str, typer.Option(metavar="NAME", help="The field of a JSONL line that has its text.")
]
Tokens = Annotated[
    int | None, typer.Option(metavar="TOKENS", min=2, help="Tokens judged together.")
]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="COUNT", min=2, help="Judge the first tokens only.")
]
Caches = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Of unit,tensor,head,channel,token,group,e5m2,centered,int8."
    ),
]
States = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Formats of recurrent states to measure: float32,bfloat16,int8,fp8."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Weights to measure as well: fp8,fp8-channel,fp8-block."),
]
CalibrationData = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Text for static scales that the checkpoint does not have."),
]
Speed = Annotated[bool, typer.Option(help="Time prefill and decoding.")]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write report.html, report.md with its charts, and report.json."
    ),
]
PerLayer = Annotated[
    bool, typer.Option("--per-layer", help="Each layer's share of what the cache costs, instead.")
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…", help="Run these tasks of lm-eval instead, with an FP8 cache and without."
    ),
]
IncludePath = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Task files of your own, for --tasks.")
]
Limit = Annotated[int | None, typer.Option(metavar="COUNT", min=1, help="Documents of each task.")]
NumFewshot = Annotated[
    int | None, typer.Option(metavar="COUNT", min=0, help="Examples before each document.")
]
Long = Annotated[
    bool,
    typer.Option(
        "--long", help="Measure retrieval and perplexity by depth in a long context instead."
    ),
]
Contexts = Annotated[int, typer.Option(metavar="COUNT", min=2, help="Contexts of --long.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@takes_engine_options
def evaluate(
    args: EngineArgs,
    data: Data = None,
    field: Field = "text",
    window: Tokens = None,
    max_tokens: MaxTokens = None,
    caches: Caches = None,
    states: States = None,
    weights: Weights = None,
    calibration_data: CalibrationData = None,
    speed: Speed = True,
    report: Report = None,
    per_layer: PerLayer = False,
    tasks: Tasks = None,
    include_path: IncludePath = None,
    limit: Limit = None,
    num_fewshot: NumFewshot = None,
    long: Long = False,
    contexts: Contexts = 16,
    as_json: Json = False,
) -> None:
    """Measure what FP8 costs and saves, and say which setting to take.

    Perplexity, divergence from a 16-bit cache, memory and speed, of all FP8 caches or of the one
    asked for.
    """
    _refuse_unused(
        {"--tasks": tasks, "--long": long, "--per-layer": per_layer},
        {
            "--data": data,
            "--field": field,
            "--window": window,
            "--max-tokens": max_tokens,
            "--caches": caches,
        }
        | {"--states": states, "--weights": weights, "--calibration-data": calibration_data}
        | {"--no-speed": not speed, "--report": report}
        | {
            "--include-path": include_path,
            "--limit": limit,
            "--num-fewshot": num_fewshot,
            "--contexts": contexts,
        },
    )
    named = (
        args.quantization_param_path or args.kv_scales != "auto" or args.kv_cache_dtype != "auto"
    )
    asked = (args.kv_cache_dtype, args.kv_scales) if named else None
    if tasks is not None:
        from freight.cli.evaluate_tasks import evaluate_tasks

        evaluate_tasks(args, tasks, asked or CACHES[0], include_path, limit, num_fewshot, as_json)
        return
    if long:
        from freight.cli.evaluate_long import LONG_CACHES, evaluate_long
        from freight.evaluate.documents import read_documents

        told = None
        if data is not None or args.model == "demo":
            told = "\n\n".join(read_documents(data_path(args.model, data), field))
        evaluate_long(args, [asked] if asked else LONG_CACHES, told, window, contexts, as_json)
        return
    path = data_path(args.model, data)
    if per_layer:
        show_layers(args, path, field, window, as_json)
        return
    lists = _list(caches), _list(weights) or ()
    options = *lists, calibration_data, window, max_tokens, speed, report is not None, _list(states)
    _evaluate_grid(args, path, field, options, report, as_json)


_UNSET = {
    "--field": "text",
    "--contexts": 16,
    "--no-speed": False,
}  # what stands for "not given"; else None
_TEXT = frozenset(("--data", "--field", "--window"))
_USED = {  # by each measurement; "": that of the caches over a text
    "": _TEXT
    | {
        "--max-tokens",
        "--caches",
        "--states",
        "--weights",
        "--calibration-data",
        "--no-speed",
        "--report",
    },
    "--tasks": frozenset(("--include-path", "--limit", "--num-fewshot")),
    "--long": _TEXT | {"--contexts"},
    "--per-layer": _TEXT,
}


def _refuse_unused(kinds: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Raises ConfigError for two kinds of measurement, and for an option that the chosen one would
    not read.
    """
    chosen = [flag for flag, value in kinds.items() if value not in (None, False)]
    if len(chosen) > 1:
        raise ConfigError(
            "--tasks, --long and --per-layer are different measurements: give one of them"
        )
    kind = chosen[0] if chosen else ""
    for flag, value in options.items():
        if value == _UNSET.get(flag) or flag in _USED[kind]:
            continue
        given = flag if value is True else f"{flag} {value}"
        if not kind:
            user = next(user for user in _USED if flag in _USED[user])
            raise ConfigError(f"{given} belongs to {user}, which is not given")
        raise ConfigError(f"{given} is not read by {kind}: leave it out")


def _evaluate_grid(
    args: EngineArgs,
    path: Path,
    field: str,
    options: tuple[Any, ...],
    report: Path | None,
    as_json: bool,
) -> None:
    """Every cache over the text. `options`: the fields of GridArgs."""
    if report is not None:
        require_writable(report)
    log_to_stderr()
    from freight.evaluate.advice import advice
    from freight.evaluate.documents import read_documents
    from freight.evaluate.grid import GridArgs, evaluate_grid
    from freight.evaluate.report_page import write_report
    from freight.evaluate.table import legend, speed_table, table

    grid = GridArgs(*options)
    with progress("evaluating") as on_progress:
        evaluation = evaluate_grid(args, read_documents(path, field), grid, on_progress, path.name)
    if report is not None:
        write_report(evaluation, report)
    if as_json:
        print(json.dumps(evaluation.as_json() | {"advice": advice(evaluation).as_json()}))
        return
    for warning in evaluation.warnings:
        typer.echo(f"warning: {warning}")
    typer.echo(table(evaluation))
    if grid.speed:
        typer.echo(f"\nTokens per second of one sequence:\n\n{speed_table(evaluation)}\n")
    over = evaluation.overview
    size = f"weights: {over.weight_bytes:,} bytes in {over.weight_dtype}"
    typer.echo(f"{size}, embedding and head {over.embedding_bytes:,} bytes")
    typer.echo(legend(evaluation))
    typer.echo(str(advice(evaluation)))
    if report is not None:
        typer.echo(f"report: {report / 'report.html'}")


def _list(text: str | None) -> tuple[str, ...] | None:
    """'a,b' -> ('a', 'b')"""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def data_path(model: str, data: Path | None) -> Path:
    """The file to judge by. Raises ConfigError where there is none."""
    if data is None and model != "demo":
        raise ConfigError("--data FILE is needed: a text the model was not trained on")
    path = data or HELD_OUT
    try:
        with open_regular(path, DATA_LIMIT):
            return path
    except OSError as error:
        raise ConfigError(f"--data {data} cannot be read as text: {error}") from None


def show_layers(
    args: EngineArgs, path: Path, field: str, window: int | None, as_json: bool
) -> None:
    """`--per-layer`: each layer quantized alone, as a table or as JSON."""
    from freight.evaluate import sensitivity
    from freight.evaluate.documents import cut_documents, read_documents, window_length
    from freight.evaluate.perplexity import Window
    from freight.models.open import OpenModel

    documents = read_documents(path, field)

    def windows(opened: OpenModel, longest: int) -> list[Window]:
        parts = cut_documents(opened, documents, window_length(window, longest), LAYER_TOKENS)
        return [part.window for part in parts]

    with progress("measuring layers") as on_progress:
        found = sensitivity.per_layer(args, windows, on_progress)
    if as_json:
        print(json.dumps({"model": args.model, **sensitivity.as_json(found)}))
        return
    typer.echo(sensitivity.as_table(found))
    typer.echo(
        f"KL in nats against a 16-bit cache, over the first {found.num_tokens:,} tokens; one layer at a time"
    )


def read_text(model: str, data: Path | None) -> str:
    """The text to judge by, as one. Raises ConfigError where there is none."""
    path = data_path(model, data)
    try:
        return files.read_text(path, limit=DATA_LIMIT)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data} cannot be read as text: {error}") from None


def require_writable(folder: Path) -> None:
    """Make the report's folder, and try to write there. Raises ConfigError, before anything is
    measured.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--report {folder} cannot be written: {error}; name another folder"
        ) from None
