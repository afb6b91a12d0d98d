"""`freight generate`: complete one prompt, as the text comes, or several at once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base import terminal
from freight.base.fields import JsonObject
from freight.base.files import PROMPT_LIMIT, read_text, reading, too_large
from freight.cli.options import (
    Json,
    Lora,
    adapter_of,
    option,
    takes_engine_options,
    takes_sampling_options,
)
from freight.engine.adapters import LoRARequest
from freight.errors import GenerationError, RequestError
from freight.outputs import CompletionOutput, RequestOutput
from freight.sampling import SamplingParams
from freight.settings.engine import EngineArgs
from freight.structured import StructuredOutputs

if TYPE_CHECKING:
    from freight.engine.intake import Intake
    from freight.llm import LLM

Prompts = list[str] | list[list[int]]


@takes_engine_options
@takes_sampling_options
def generate(
    args: EngineArgs,
    params: SamplingParams,
    prompt: Annotated[
        list[str] | None, option("TEXT", "A text to complete; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        option("FILE", "A file that is one prompt; - reads standard input."),
    ] = None,
    prompt_token_ids: Annotated[
        list[str] | None,
        option("1,2,3", "A prompt as token ids; may be repeated."),
    ] = None,
    n: Annotated[
        int, typer.Option("--n", "-n", metavar="COUNT", help="Completions per prompt.")
    ] = 1,
    json_schema: Annotated[
        Path | None,
        option("FILE", "A JSON schema that each completion satisfies."),
    ] = None,
    regex: Annotated[
        str | None,
        option("TEXT", "A regular expression that each completion matches."),
    ] = None,
    choice: Annotated[
        list[str] | None,
        option("TEXT", "A possible completion; repeat it for each."),
    ] = None,
    lora: Lora = None,
    as_json: Json = False,
) -> None:
    """Complete prompts. One prompt prints its text as it comes; several are computed together."""
    adapter = adapter_of(args, lora)
    form = read_form(json_schema, regex, choice or [])
    params = replace(params, n=n, detokenize=not args.skip_tokenizer_init, structured_outputs=form)
    prompts = read_prompts(prompt or [], prompt_file, prompt_token_ids or [])
    if args.skip_tokenizer_init:
        require_token_ids(prompts, form)

    from freight.llm import LLM

    def check(intake: Intake) -> None:
        for prompt in prompts:
            intake.accept(prompt, params)
        if form is not None:
            intake.check_form(form)

    llm = LLM(**vars(args), before_weights=check)
    if len(prompts) == 1 and n == 1 and not as_json:
        print_stream(llm, prompts[0], params, adapter)
        return
    failed = False
    try:
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty(), lora_request=adapter)
    except GenerationError as error:
        outputs = error.outputs
        failed = True
    if as_json:
        print(json.dumps(as_object(llm, outputs)))
    print_outputs(outputs, params, only_errors=as_json)
    if failed:
        raise typer.Exit(1)


def print_outputs(outputs: list[RequestOutput], params: SamplingParams, only_errors: bool) -> None:
    """Print each completion under its title, and what failed on standard error."""
    for output in outputs:
        for completion in output.outputs:
            title = _title(output, completion)
            if not only_errors:
                terminal.write(f"--- {title}", dim=True)
                typer.echo(terminal.on_stdout(text_of(completion, params)))
            if completion.error is not None:
                terminal.write(f"error: {title}: {completion.error}", fg="red", err=True)


def read_prompts(texts: list[str], file: Path | None, token_ids: list[str]) -> Prompts:
    """Return the prompts, of one kind only. Raises RequestError for none and for two kinds."""
    ways = sum((bool(texts), file is not None, bool(token_ids)))
    if ways != 1:
        fault = "there is no prompt"
        if ways:
            fault = "the prompt is given in more than one way"
        raise RequestError(
            f"{fault}; give it in one way: --prompt TEXT, --prompt-file FILE or --prompt-token-ids 1,2,3"
        )
    if token_ids:
        return [_parse_ids(text) for text in token_ids]
    if file is not None:
        with reading(f"--prompt-file {file}", RequestError):
            texts = [_read_prompt(file)]
    return texts


def _read_prompt(file: Path) -> str:
    if str(file) != "-":
        return read_text(file, limit=PROMPT_LIMIT)
    text = sys.stdin.read(PROMPT_LIMIT + 1)
    if len(text) > PROMPT_LIMIT:
        raise too_large(PROMPT_LIMIT, "standard input")
    return text


def require_token_ids(prompts: Prompts, form: StructuredOutputs | None) -> None:
    """Raises RequestError for a text or a form, which need a tokenizer."""
    if isinstance(prompts[0], str):
        raise RequestError(
            "a text needs a tokenizer: omit --skip-tokenizer-init, or give the prompt as --prompt-token-ids 1,2,3"
        )
    if form is not None:
        raise RequestError(
            "--json-schema, --regex and --choice need a tokenizer: omit --skip-tokenizer-init"
        )


def read_form(
    json_schema: Path | None, regex: str | None, choice: list[str]
) -> StructuredOutputs | None:
    """Return the form that was asked for, if one. Raises RequestError for several, and for one that
    is none.
    """
    form: dict[str, object] = {}
    if json_schema is not None:
        with reading(f"--json-schema {json_schema}", RequestError):
            form["json"] = read_text(json_schema)
    if regex is not None:
        form["regex"] = regex
    if choice:
        form["choice"] = choice
    if len(form) > 1:
        raise RequestError(
            "a completion has one form; give one of --json-schema FILE, --regex TEXT and --choice TEXT"
        )
    if not form:
        return None
    try:
        return StructuredOutputs.of(form)
    except RequestError as error:
        name = next(iter(form))
        option = f"--{name}"
        if name == "json":
            option = f"--json-schema {json_schema}"
        raise RequestError(str(error).replace(f"structured_outputs.{name}", option)) from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise RequestError(
            f"--prompt-token-ids is {text!r}; it must be whole numbers, as in 1,2,3"
        ) from None


def text_of(completion: CompletionOutput, params: SamplingParams) -> str:
    """Return what a terminal shows of a completion: its text, or its token ids where there is no
    text.
    """
    if params.detokenize:
        return completion.text
    return " ".join(map(str, completion.token_ids))


def print_stream(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    adapter: LoRARequest | None = None,
) -> str:
    """Print one completion as it grows; gives back all of it. Raises GenerationError when it fails
    half-way.
    """
    printed = ""
    try:
        for output in llm.stream(prompt, params, lora_request=adapter):
            text = text_of(output.outputs[0], params)
            sys.stdout.write(terminal.on_stdout(text[len(printed) :]))
            sys.stdout.flush()
            printed = text
    except GenerationError:
        sys.stdout.write("\n")
        raise
    sys.stdout.write("\n")
    return printed


def _title(output: RequestOutput, completion: CompletionOutput) -> str:
    prompt = output.prompt
    if prompt is None:
        prompt = str(output.prompt_token_ids)
    if len(prompt) > 60:
        prompt = prompt[:57] + "..."
    if len(output.outputs) == 1:
        return repr(prompt)
    return f"{prompt!r} [{completion.index + 1}/{len(output.outputs)}]"


def as_object(llm: LLM, outputs: list[RequestOutput]) -> JsonObject:
    """Return what --json prints: one entry for each completion, and the cache it was made with."""
    entries = []
    for output in outputs:
        for completion in output.outputs:
            entry = {
                "prompt": output.prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if completion.error is not None:
                entry["error"] = completion.error
            entries.append(entry)
    return {"outputs": entries, "kv_cache": llm.kv_cache_info()}
