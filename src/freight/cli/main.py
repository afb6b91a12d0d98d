"""The `freight` command: its verbs, and how errors reach a person.

A FreightError becomes one line on stderr, without a traceback: exit status 2 for what was asked wrongly (ConfigError,
RequestError), 1 for the rest. Ctrl-C is 130. Nothing here loads torch; a verb does, once its arguments are checked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from freight import __version__
from freight.cli import bench, scales
from freight.cli.audit import audit
from freight.cli.chat import chat
from freight.cli.convert import convert
from freight.cli.demo import demo
from freight.cli.env import env
from freight.cli.evaluate import evaluate
from freight.cli.generate import generate
from freight.cli.inspect import inspect
from freight.cli.launcher import is_launcher, launch
from freight.cli.options import CONTEXT, Command, takes_model
from freight.cli.plan import plan
from freight.cli.quantize import quantize
from freight.cli.serve import serve
from freight.errors import ConfigError, FreightError, RequestError

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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run large language models with an FP8 KV cache."""


@takes_model
def _inspect(
    model: str,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the KV scales by layer into a new file.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds.

    Architecture, bytes by format, declared scheme, KV scales; no weight is read.
    """
    inspect(model, as_json, picture, revision)


for verb in (generate, chat, serve, quantize, convert, evaluate, audit, plan, demo, env):
    app.command(cls=Command)(verb)
app.command("run", cls=Command, help="The same as serve.")(serve)
app.command("inspect", cls=Command)(_inspect)
app.add_typer(scales.app, name="scales")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the `freight` script."""
    try:
        if is_launcher(sys.argv[1:]):
            launch(sys.argv[1:], os.environ)
        app()
    except FreightError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text("error: ", "bold red").append(str(error), "not bold default"), soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError | RequestError) else 1)
