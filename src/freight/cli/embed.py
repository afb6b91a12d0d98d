"""`freight embed`: the embedding of each line of a file, into a .npy or a .jsonl file."""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base import terminal
from freight.base.files import writing
from freight.base.terminal import bars
from freight.base.text_lines import read_lines
from freight.cli.batch import SPEED
from freight.cli.embed_files import EmbeddingFile
from freight.cli.options import OneJson, argument, option, takes_options_of_one_rank
from freight.errors import RequestError
from freight.pooling import PoolingParams
from freight.settings.engine import EngineArgs

if TYPE_CHECKING:
    from freight.engine.intake import Intake

_TEXTS_PER_SEQUENCE = 4  # given to the engine at a time: waiting ones keep every step full


@takes_options_of_one_rank
def embed(
    args: EngineArgs,
    source: Annotated[Path, argument("IN", "A file with a text on each line, or .jsonl.")],
    out: Annotated[Path, argument("OUT", "The .npy or .jsonl file to write; it must not exist.")],
    field: Annotated[str, option("NAME", "The field of a JSONL line that has its text.")] = "text",
    prompt_name: Annotated[
        str | None, option("NAME", "Which of the model's prompts is put before each text.")
    ] = None,
    dimensions: Annotated[
        int | None, option("COUNT", "Leading numbers that are kept, before normalizing.")
    ] = None,
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Keep the length of each embedding.")
    ] = False,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut a text that is too long, instead of refusing it."),
    ] = False,
    as_json: OneJson = False,
) -> None:
    """Embed each line of a file.

    A run that was killed is continued by the same command, and writes the same bytes.
    """
    params = PoolingParams(dimensions=dimensions, normalize=False if no_normalize else None)
    most = -1 if truncate else None
    texts = read_lines(source, f"IN {source}", field)
    folder = Path(args.model).expanduser()
    options = {name: value for name, value in asdict(args).items() if name not in SPEED}
    options["model"] = str(folder.resolve()) if folder.exists() else args.model
    decide = [options, asdict(params), prompt_name, truncate, _states(folder)]
    started = time.monotonic()
    with EmbeddingFile(out, texts, decide) as output:
        before = output.num_done
        if before < len(texts):
            _embed(args, texts, output, params, prompt_name, most)
        with writing(f"OUT {out}"):
            output.finish()
    seconds = time.monotonic() - started
    if as_json:
        counts = {"texts": len(texts), "before": before, "seconds": round(seconds, 3)}
        terminal.say(json.dumps(counts))
    terminal.say(
        f"{out}: {len(texts):,} texts are embedded, {before:,} of them by earlier runs", err=True
    )


def _states(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and date of change of a local model's files, down to the folders of its
    modules: rows of weights that were replaced must not be mixed. A hub's name has none.
    """
    files = [folder]
    if folder.is_dir():
        files = sorted([*folder.glob("*"), *folder.glob("[0-9]*/*")])
    states = []
    for file in files:
        if file.is_file():
            status = file.stat()
            states.append((str(file.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return states


def _embed(
    args: EngineArgs,
    texts: list[str],
    output: EmbeddingFile,
    params: PoolingParams,
    prompt_name: str | None,
    most: int | None,
) -> None:
    """Embed the texts that `output` does not have yet. Raises RequestError, with its line, for one
    that the model does not take, before weights are read.
    """
    from freight.llm import LLM
    from freight.sampling import SamplingParams
    from freight.text.pooling_inputs import named_prompt

    sampling = SamplingParams(max_tokens=0, pooling=params, truncate_prompt_tokens=most)

    def check(intake: Intake) -> None:
        intake.check_task(params)
        assert intake.pooling is not None
        for number, text in enumerate(texts, 1):
            named = named_prompt(intake.pooling, text, prompt_name)
            try:
                intake.accept(named, sampling)
            except RequestError as error:
                raise RequestError(f"line {number}: {error}") from None

    llm = LLM(**vars(args), before_weights=check)
    at_once = _TEXTS_PER_SEQUENCE * args.max_num_seqs
    with bars() as bar:
        task = bar.add_task("embedding", total=len(texts), completed=output.num_done)
        for begin in range(output.num_done, len(texts), at_once):
            part = texts[begin : begin + at_once]
            results = llm.embed(
                part, pooling_params=params, prompt_name=prompt_name, truncate_prompt_tokens=most
            )
            with writing(f"OUT {output.out}"):
                output.write([array("f", result.outputs.embedding) for result in results])
            bar.update(task, completed=begin + len(part))
