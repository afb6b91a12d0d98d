"""`freight chat`: a conversation at the terminal, each answer printed as it comes."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from freight.base import terminal
from freight.cli.generate import print_stream
from freight.cli.options import (
    Lora,
    adapter_of,
    option,
    takes_engine_options,
    takes_sampling_options,
)
from freight.errors import ConfigError, GenerationError, RequestError, nearest
from freight.sampling import SamplingParams
from freight.settings.engine import EngineArgs

HELP = "Type a message; /clear forgets the conversation, Ctrl-C stops an answer, /exit or Ctrl-D ends, /help says more."
COMMANDS = {
    "/clear": "forget the conversation (also /reset)",
    "/exit": "end (also /quit, Ctrl-D, or Ctrl-C twice)",
    "/help": "this list",
    "//…": "a message that begins with a slash",
    "Ctrl-C": "stop an answer, which then is not part of the conversation; before an answer, clear the line",
}
_SAME = {"/reset": "/clear", "/quit": "/exit"}
_CLEARED = "Ctrl-C again, Ctrl-D or /exit ends"


@takes_engine_options
@takes_sampling_options
def chat(
    args: EngineArgs,
    params: SamplingParams,
    system: Annotated[str | None, option("TEXT", "System prompt.")] = None,
    lora: Lora = None,
) -> None:
    """Talk with a model that has a chat template."""
    if args.skip_tokenizer_init:
        raise ConfigError(
            "chat needs a tokenizer: omit --skip-tokenizer-init, or use freight generate"
        )
    adapter = adapter_of(args, lora)
    start = []
    if system:
        start.append({"role": "system", "content": system})

    from freight.llm import LLM
    from freight.text.tokenizer import require_chat_template

    llm = LLM(**vars(args), before_weights=lambda intake: require_chat_template(intake.tokenizer))
    terminal.write(HELP, err=True, dim=True)
    messages = list(start)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        if line.startswith("/") and not line.startswith("//"):
            command = _SAME.get(line.strip(), line.strip())
            if command == "/exit":
                break
            if command == "/clear":
                messages = list(start)
            else:
                _explain(command)
            continue
        if line.startswith("//"):
            line = line.removeprefix("/")
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = print_stream(llm, llm.chat_prompt(asked), params, adapter)
        except KeyboardInterrupt:
            typer.echo()
        except (
            RequestError,
            GenerationError,
        ) as error:  # the conversation has outgrown the context, say
            terminal.write(f"error: {error}; /clear starts anew", err=True, fg="red")
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _explain(command: str) -> None:
    """Print what /help shows, or that there is no such command."""
    if command == "/help":
        for name, what in COMMANDS.items():
            terminal.write(f"{name:8}{what}", err=True, dim=True)
        return
    word = command.split()[0]
    hint = nearest(word, [*COMMANDS, *_SAME])
    terminal.write(
        f"no such command: {word}{hint}; // sends a message that begins with a slash",
        err=True,
        dim=True,
    )


def _read_line() -> str | None:
    """Return the next line typed, None at the end: Ctrl-D, or Ctrl-C twice in a row at a terminal.

    Editing keys and history work where Python has readline. Raises KeyboardInterrupt where no
    terminal is read.
    """
    if not sys.stdin.isatty():
        return _next_line("")
    with suppress(ImportError):
        import readline  # noqa: F401, importing it is what turns it on
    for _ in range(2):
        try:
            return _next_line("> ")
        except KeyboardInterrupt:
            terminal.write(f"\n{_CLEARED}", err=True, dim=True)
    return None


def _next_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None
