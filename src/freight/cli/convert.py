"""freight convert MODEL OUT: a checkpoint that exists only as pytorch_model.bin, as safetensors."""

from __future__ import annotations

from typing import Annotated

import typer

from freight.calibrate.stages import stages
from freight.cli.options import OutFolder, Revision, argument


def convert(
    model: Annotated[str, argument("MODEL", "A folder with pytorch_model*.bin, or a hub id.")],
    out: OutFolder,
    revision: Revision = None,
) -> None:
    """Write a checkpoint of pytorch_model.bin files as safetensors.

    Pickled files can hold code. It is not run: they are read as tensors alone, in a process with
    limited memory.
    """
    from freight.checkpoint.convert import convert as run

    with stages() as on_progress:
        result = run(model, out, revision, on_progress)
    files = "1 file" if result.num_files == 1 else f"{result.num_files} files"
    typer.echo(
        f"{result.path}: {result.num_tensors:,} tensors, {result.num_bytes / 2**20:,.2f} MiB, in {files}"
    )
    for name, kept in result.tied.items():
        typer.echo(f"{name} is {kept}: written once")
