"""`freight evaluate`: what FP8 costs in quality and saves in memory, by five measurements.

Each is a sub-command with the options that it reads: `caches` over a text, `long` far back in a long
context, `tasks` of lm-eval, `layers`, and `embeddings` of a model that embeds. The spellings without
a sub-command stay: `freight evaluate MODEL` is `caches`, and `--long`, `--tasks` or `--per-layer`
choose another one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from freight.base import files, terminal
from freight.base.files import DATA_LIMIT, open_regular, reading, writing
from freight.base.start_log import log_to_stderr
from freight.base.terminal import progress
from freight.base.text_lines import read_lines
from freight.cli.options import Command, Json, option, takes_options_of_one_rank
from freight.errors import ConfigError
from freight.quantizer.stages import stages
from freight.settings.engine import EngineArgs

# What `freight demo` shows. E5M2 needs no scales, and cannot use those that a checkpoint has for
# E4M3.
CACHES = [("fp8_e4m3", "auto"), ("fp8_e5m2", "unit")]
LONG_CACHES = [("fp8_e4m3", "auto"), ("fp8_e4m3", "unit"), ("fp8_e5m2", "unit")]

LEGEND = "KL (nats) and top token are against the first row."
HELD_OUT = Path(__file__).parent.parent / "demo" / "heldout.txt"

# What chose a measurement before there were sub-commands. `--tasks` has a value, and stays
_FLAGS = {"--long": "long", "--per-layer": "layers", "--tasks": "tasks"}
_DROPPED = ("--long", "--per-layer")


class _Measurements(TyperGroup):
    """The sub-commands. Arguments that name none get the one that their options mean."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _named(args, self.commands))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[COMMAND]", "[MODEL]", "[OPTIONS]"]


def _named(args: Sequence[str], measurements: Iterable[str]) -> list[str]:
    """`args` with the sub-command in front. Raises ConfigError for the flags of two.

    A folder called as a sub-command is ./long. Where its name and a flag come together, as in
    `long --long`, which no sub-command takes, the name is MODEL.
    """
    chosen = set()
    arguments = []
    for arg in args:
        flag = arg.partition("=")[0].replace("_", "-")
        if flag in _FLAGS:
            chosen.add(_FLAGS[flag])
        if arg.replace("_", "-") not in _DROPPED:
            arguments.append(arg)
    first = args[0] if args else ""
    named = first in measurements and (not chosen or (first, chosen) == ("tasks", {"tasks"}))
    if named or first in ("-h", "--help"):
        return list(args)
    if len(chosen) > 1:
        raise ConfigError(
            "--tasks, --long and --per-layer are different measurements: give one of them"
        )
    return [*(chosen or {"caches"}), *arguments]


app = typer.Typer(cls=_Measurements, rich_markup_mode=None)


@app.callback()
def _measurements() -> None:
    """Measure what FP8 costs in quality, and what it saves.

    Without a command it is `caches`. The older spellings stay: --long for `long`, --per-layer for
    `layers`, --tasks for `tasks`.
    """


Data = Annotated[
    Path | None,
    option("FILE", "Text or JSONL to judge by; for 'demo', its held-out text."),
]
Field = Annotated[str, option("NAME", "The field of a JSONL line that has its text.")]
Tokens = Annotated[int | None, option("TOKENS", "Tokens judged together.", min=2)]


@app.command("caches", cls=Command)
@takes_options_of_one_rank
def evaluate_caches(
    args: EngineArgs,
    data: Data = None,
    field: Field = "text",
    prompt_field: Annotated[
        str | None,
        option("NAME", "The field of a JSONL line that has its prompt: context, and not scored."),
    ] = None,
    window: Tokens = None,
    max_tokens: Annotated[
        int | None,
        option("COUNT", "Judge the first tokens only.", "--max-tokens", "--tokens", min=2),
    ] = None,
    caches: Annotated[
        str | None,
        option("LIST", "Of unit,tensor,head,channel,token,group,e5m2,centered,int8."),
    ] = None,
    states: Annotated[
        str | None,
        option("LIST", "Formats of recurrent states to measure: float32,bfloat16,int8,fp8."),
    ] = None,
    weights: Annotated[
        str | None,
        option(
            "LIST",
            "Weights to measure as well: fp8[-channel|-block],int8,int4[-64|-32],mxfp4; "
            "-a16 behind a name: inputs stay in 16 bits. Or a folder with a /: a quantized checkpoint "
            "of the same model.",
        ),
    ] = None,
    calibration_data: Annotated[
        str | None,
        option("FILE", "Text for static scales that the checkpoint does not have."),
    ] = None,
    speed: Annotated[bool, typer.Option(help="Time prefill and decoding.")] = True,
    noise: Annotated[
        bool | None,
        typer.Option(
            "--noise/--no-noise",
            help="Measure what computing in 16 bits costs by itself; "
            "default: where float32 weights take 4 GiB at most.",
        ),
    ] = None,
    kl_by_layer: Annotated[
        bool,
        typer.Option(
            "--kl-by-layer",
            help="Measure the KL of each layer alone as well: a pass for every layer of every cache.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        option("DIR", "Write report.html, report.md with its charts, and report.json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare caches over a text, and say which to take.

    Perplexity, divergence from a 16-bit cache, memory and speed, of all FP8 caches or of the one
    asked for.
    """
    path = data_path(args.model, data)
    if report is not None:
        require_writable(report)
    log_to_stderr()
    from freight.lab.evaluate.advice import as_json as to_json
    from freight.lab.evaluate.advice import summary
    from freight.lab.evaluate.documents import PromptedText, read_documents, read_prompted
    from freight.lab.evaluate.grid import GridArgs, evaluate_grid
    from freight.lab.evaluate.report_page import write_report

    grid = GridArgs(
        caches=_list(caches),
        weights=_list(weights) or (),
        calibration_data=calibration_data,
        window=window,
        max_tokens=max_tokens,
        speed=speed,
        per_layer=kl_by_layer,
        noise=noise,
        states=_list(states),
    )
    documents: Sequence[str] | Sequence[PromptedText] = (
        read_documents(path, field)
        if prompt_field is None
        else read_prompted(path, field, prompt_field)
    )
    with stages() as on_progress:
        evaluation = evaluate_grid(args, documents, grid, on_progress, path.name)
    # Printed before it is written: a disk that is full must not take the measurement
    if as_json:
        print(json.dumps(to_json(evaluation)), flush=True)
    else:
        for line in summary(evaluation):
            terminal.say(line)
    if report is not None:
        with writing("--report"):
            write_report(evaluation, report)
        if not as_json:
            terminal.say(f"report: {report / 'report.html'}")


@app.command("long", cls=Command)
@takes_options_of_one_rank
def evaluate_long(
    args: EngineArgs,
    data: Data = None,
    field: Field = "text",
    window: Tokens = None,
    contexts: Annotated[int, option("COUNT", "Contexts to ask questions in.", min=2)] = 16,
    as_json: Json = False,
) -> None:
    """Measure retrieval and perplexity by depth in a long context.

    Two tables: the share of values found at each depth, and the perplexity of the text by position.
    """
    from freight.base.tables import markdown
    from freight.lab.evaluate.documents import read_documents
    from freight.lab.evaluate.long import compare_long
    from freight.lab.evaluate.long_table import (
        CHANGES,
        POSITIONS,
        RETRIEVAL,
        position_rows,
        retrieval_rows,
    )

    text = None
    if data is not None or args.model == "demo":
        text = "\n\n".join(read_documents(data_path(args.model, data), field))
    caches = [(args.kv_cache_dtype, args.kv_scales)] if args.names_cache else LONG_CACHES
    with progress("evaluating") as on_progress:
        scores = compare_long(args, caches, text, window, contexts, on_progress=on_progress)
    if as_json:
        runs = [asdict(score) for score in scores]
        print(
            json.dumps({"model": args.model, "seed": args.seed, "contexts": contexts, "runs": runs})
        )
        return
    terminal.say(f"{RETRIEVAL}\n{CHANGES}\n\n{markdown(retrieval_rows(scores), num_left=2)}\n")
    if scores[0].positions:
        terminal.say(f"{POSITIONS} {CHANGES}\n\n{markdown(position_rows(scores), num_left=2)}")
    elif text is None:
        terminal.say("No perplexity by position: --data FILE gives a text to measure it on.")
    else:
        terminal.say("No perplexity by position: the text is shorter than the context.")


@app.command("tasks", cls=Command)
@takes_options_of_one_rank
def evaluate_tasks(
    args: EngineArgs,
    tasks: Annotated[str, option("NAME,…", "Tasks of lm-eval, or groups of them.")],
    include_path: Annotated[Path | None, option("DIR", "Task files of your own.")] = None,
    limit: Annotated[int | None, option("COUNT", "Documents of each task.", min=1)] = None,
    num_fewshot: Annotated[
        int | None, option("COUNT", "Examples before each document.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run tasks of lm-eval with an FP8 cache and without.

    Each metric with its difference, whose error is of the same documents under both caches.
    """
    from freight.base.tables import markdown
    from freight.lab.evaluate.tasks import as_rows, compare_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    folder = None if include_path is None else str(include_path)
    cache = (args.kv_cache_dtype, args.kv_scales) if args.names_cache else CACHES[0]
    comparison = compare_tasks(args, cache, names, folder, limit, num_fewshot)
    if as_json:
        print(json.dumps({"model": args.model, **asdict(comparison)}))
        return
    plain, other = comparison.caches
    dtypes = (str(plain["dtype"]), str(other["dtype"]))
    terminal.say(markdown(as_rows(comparison.tasks, dtypes), num_left=2))
    terminal.say("{dtype}: scales {granularity}, {scale_source}".format_map(other))
    methods = {score.method for score in comparison.tasks}
    if "paired" in methods:
        terminal.say(
            "± is one standard error; the difference's is of the differences by document (paired)."
        )
    if "bootstrap" in methods:
        terminal.say(
            "Where a metric is no mean over documents, ± is of 500 draws of documents, the same for both."
        )


@app.command("layers", cls=Command)
@takes_options_of_one_rank
def evaluate_layers(
    args: EngineArgs,
    data: Data = None,
    field: Field = "text",
    window: Tokens = None,
    as_json: Json = False,
) -> None:
    """Measure each layer's share of what the cache costs.

    Each layer is quantized alone, and the whole is measured beside their sum.
    """
    from freight.lab.evaluate import sensitivity
    from freight.lab.evaluate.documents import read_documents

    documents = read_documents(data_path(args.model, data), field)
    with progress("measuring layers") as on_progress:
        costs = sensitivity.per_layer(args, documents, window, on_progress)
    if as_json:
        print(json.dumps({"model": args.model, **asdict(costs)}))
        return
    terminal.say(sensitivity.as_table(costs))
    terminal.say(
        f"KL in nats against an unquantized cache, over the first {costs.num_tokens:,} tokens; one layer at a time"
    )


@app.command("embeddings", cls=Command)
@takes_options_of_one_rank
def evaluate_embeddings(
    args: EngineArgs,
    data: Annotated[Path, option("FILE", "Your texts: one a line, or JSONL.")],
    field: Field = "text",
    weights: Annotated[
        str,
        option(
            "LIST",
            "Of fp8,int8,int4, or a folder with a /: a quantized checkpoint of the same model.",
        ),
    ] = "fp8,int8,int4",
    prompt_name: Annotated[
        str | None, option("NAME", "Which of the model's prompts is put before each text.")
    ] = None,
    dimensions: Annotated[
        int | None, option("COUNT", "Leading numbers that are kept, before normalizing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare embeddings by weights in fewer bits with those of 16 bits.

    Cosines of each text's two embeddings, and how far its nearest neighbours stay the same.
    """
    from freight.base.tables import markdown
    from freight.lab.evaluate.embeddings import as_rows, compare_embeddings

    texts = read_lines(data, f"--data {data}", field)
    with progress("embedding") as on_progress:
        scores = compare_embeddings(
            args, texts, _list(weights) or (), prompt_name, dimensions, on_progress
        )
    if as_json:
        print(json.dumps({"model": args.model, "weights": [asdict(score) for score in scores]}))
        return
    terminal.say(markdown(as_rows(scores), num_left=1))
    terminal.say(
        f"{scores[0].texts:,} texts, against the stored weights; overlap of the {scores[0].nearest} nearest others"
    )


def _list(text: str | None) -> tuple[str, ...] | None:
    """'a,b' -> ('a', 'b')"""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def data_path(model: str, data: Path | None) -> Path:
    """Return the text's file. Raises ConfigError where there is none."""
    if data is None and model != "demo":
        raise ConfigError("--data FILE is needed: a text the model was not trained on")
    path = data or HELD_OUT
    with reading(f"--data {data}"), open_regular(path, DATA_LIMIT):
        pass
    return path


def read_text(model: str, data: Path | None) -> str:
    """Return the text as one. Raises ConfigError where there is none."""
    path = data_path(model, data)
    with reading(f"--data {data}"):
        text = files.read_text(path, limit=DATA_LIMIT)
    return text  # noqa: RET504, mypy takes a `with` for one that may suppress


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
