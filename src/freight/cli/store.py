"""freight store: what the folder of --kv-store holds, whether it is sound, and how to empty it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from freight.base import terminal
from freight.base.tables import aligned
from freight.cli.options import OneJson, argument

app = typer.Typer(
    help="Look into the folder of --kv-store.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[Path, argument("DIR", "The folder of --kv-store.")]


@app.command("ls")
def ls(folder: Folder, as_json: OneJson = False) -> None:
    """List what is stored, by model, cache and build: blocks of one are never read by another."""
    from freight.cache.store.survey import survey

    spaces = survey(folder)
    if as_json:
        print(json.dumps({"spaces": [asdict(space) for space in spaces]}, indent=2))
        return
    rows = [("name space", "model and cache", "freight", "blocks", "bytes", "last used", "")]
    for space in spaces:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(space.last_used))
        name = space.decides.get("name", "?")
        version = space.decides.get("freight", "?")
        counts = f"{space.num_blocks:,}", f"{space.num_bytes:,}"
        writes = ""
        if space.writers:
            writes = "being written"
        rows.append((space.name, name, version, *counts, used, writes))
    console = terminal.console(soft_wrap=True)
    if not spaces:
        console.print("The store is empty.")
        return
    for cells in aligned(rows, "lllrrll"):
        console.print("  ".join(cells).rstrip())


@app.command("verify")
def verify(folder: Folder, as_json: OneJson = False) -> None:
    """Read every block and compare its digest. Exit status 1 if one is damaged."""
    from freight.cache.store.survey import verify

    result = verify(folder)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        print(f"{result.sound:,} blocks are sound, {result.damaged:,} are damaged")
    if result.damaged:
        print("Damaged blocks are never used; freight store clear removes them.", file=sys.stderr)
        raise typer.Exit(1)


@app.command("clear")
def clear(folder: Folder, as_json: OneJson = False) -> None:
    """Delete all blocks, except those of files that an engine is writing now."""
    from freight.cache.store.survey import clear

    freed = clear(folder)
    if as_json:
        print(json.dumps({"bytes": freed}))
    else:
        print(f"{freed:,} bytes deleted")
