"""`freight chat`: a conversation at the terminal, each answer printed as it comes."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from freight.cli.generate import print_stream
from freight.cli.options import takes_engine_options, takes_sampling_options
from freight.config.engine import EngineArgs
from freight.errors import ConfigError, GenerationError, RequestError
from freight.sampling import SamplingParams

HELP = "Type a message; /reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D ends."


@takes_engine_options
@takes_sampling_options
def chat(
    args: EngineArgs,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
) -> None:
    """Talk with a model that has a chat template."""
    if args.skip_tokenizer_init:
        raise ConfigError("chat needs a tokenizer: omit --skip-tokenizer-init, or use freight generate")
    start = [{"role": "system", "content": system}] if system else []

    from freight.llm import LLM
    from freight.tokenizer import require_chat_template

    llm = LLM(**vars(args), before_weights=lambda intake: require_chat_template(intake.tokenizer))
    typer.secho(HELP, dim=True, err=True)
    messages = list(start)
    while (line := _read_line()) is not None:
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = print_stream(llm, llm.chat_prompt(asked), params)
        except KeyboardInterrupt:
            typer.echo()
        except (RequestError, GenerationError) as error:  # the conversation has outgrown the context, say
            typer.secho(f"error: {error}; /reset starts anew", fg="red", err=True)
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """The next line typed, None at the end. Editing keys and history work where Python has readline."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401, importing it is what turns it on
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
