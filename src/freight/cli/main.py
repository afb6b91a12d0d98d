"""The `freight` command: its verbs, and how errors reach a person.

A FreightError becomes one line on stderr, without a traceback: exit status 2 for what was asked
wrongly (ConfigError, RequestError), 1 for the rest. So do what the system refuses (OSError) and a
lack of memory, with 1; their tracebacks are in the log at the level of debugging. Where nobody
reads standard output any more the command ends with 141 and says nothing. Signals are `__main__.py`'s.
Nothing here loads torch; a verb does, once its arguments are checked.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from freight import __version__
from freight.base import terminal
from freight.base.files import FULL
from freight.cli import bench, evaluate, scales, store, variables
from freight.cli.audit import audit
from freight.cli.batch import batch
from freight.cli.chat import chat
from freight.cli.convert import convert
from freight.cli.demo import demo
from freight.cli.embed import embed
from freight.cli.env import env
from freight.cli.generate import generate
from freight.cli.inspect import inspect
from freight.cli.merge import merge
from freight.cli.options import (
    CONTEXT,
    Command,
    IgnoredKeys,
    OneJson,
    Revision,
    option,
    takes_model,
)
from freight.cli.plan import plan
from freight.cli.quantize import quantize
from freight.cli.serve import serve
from freight.cli.streams import (
    CLOSED_PIPE,
    ClosedPipeError,
    OutputError,
    discard_stdout,
    finish_stdout,
)
from freight.cli.verify import verify
from freight.errors import ConfigError, FreightError, RequestError, shown
from freight.settings.engine import names_of

Launcher = Callable[[Sequence[str], Mapping[str, str]], None]  # of arguments and environment

logger = logging.getLogger("freight")
app = typer.Typer(
    help="Run large language models with an FP8 KV cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut long option names off
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run large language models with an FP8 KV cache."""


@takes_model
def _inspect(
    model: str,
    picture: Annotated[
        Path | None,
        option("FILE.svg", "Draw the KV scales by layer into a new file."),
    ] = None,
    revision: Revision = None,
    ignore_config_keys: IgnoredKeys = None,
    as_json: OneJson = False,
) -> None:
    """Show what a checkpoint holds.

    Architecture, bytes by format, declared scheme, KV scales; no weight is read.
    """
    inspect(model, as_json, picture, revision, names_of(ignore_config_keys or ()))


for verb in (
    generate,
    chat,
    serve,
    batch,
    embed,
    verify,
    quantize,
    convert,
    merge,
    audit,
    plan,
    demo,
    env,
):
    app.command(cls=Command)(verb)
app.command("run", cls=Command, help="The same as serve.")(serve)
app.command("inspect", cls=Command)(_inspect)
app.add_typer(scales.app, name="scales")
app.add_typer(store.app, name="store")
app.add_typer(evaluate.app, name="evaluate")
app.add_typer(bench.app, name="bench")


def main(launch: Launcher | None = None) -> None:
    """Run the command line of this process, or hand it to `launch`. Ends by SystemExit."""
    try:
        try:
            _warn_of_variables()
            if launch is not None:
                launch(sys.argv[1:], os.environ)
            app()
        finally:
            finish_stdout()
    except OutputError as error:
        discard_stdout()
        if isinstance(error, ClosedPipeError):
            sys.exit(CLOSED_PIPE)
        _print_error(error)
        sys.exit(1)
    except (ConfigError, RequestError) as error:
        _print_error(error)
        sys.exit(2)
    except FreightError as error:
        _print_error(error)
        sys.exit(1)
    except (OSError, MemoryError) as error:
        logger.debug("the command ends", exc_info=error)
        _print_error(_refusal(error))
        sys.exit(1)


def _refusal(error: OSError | MemoryError) -> str:
    """Say in a line what the system refused, and for which file."""
    reason = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"there is not enough memory{reason and f': {reason}'}; free some, or use a smaller model"
    name = error.filename
    if name is None:
        return reason or type(error).__name__
    fault = f"{shown(name)} cannot be read or written: {error.strerror}"
    if error.errno in FULL:
        return f"{fault}; make room, or name one on another disk"
    return fault


def _warn_of_variables() -> None:
    if any(name.startswith(variables.PREFIX) for name in os.environ):
        line = variables.unknown(os.environ, variables.known(get_command(app)))
        if line is not None:
            terminal.say(line, err=True)


def _print_error(error: object) -> None:
    from rich.text import Text

    text = Text("error: ", "bold red").append(str(error), "not bold default")
    terminal.console(stderr=True).print(text, soft_wrap=True)
