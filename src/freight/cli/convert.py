"""freight convert MODEL OUT: a checkpoint that exists only as pytorch_model.bin, or as a GGUF file, as
safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freight.base import terminal
from freight.cli.options import (
    ModelIdOption,
    OptionalOut,
    Revision,
    argument,
    model_and_others,
)
from freight.quantizer.stages import stages


def convert(
    ctx: typer.Context,
    model: Annotated[
        str | None, argument("MODEL", "A folder with pytorch_model*.bin, a GGUF file, or a hub id.")
    ] = None,
    out: OptionalOut = None,
    model_id: ModelIdOption = None,
    revision: Revision = None,
) -> None:
    """Write a checkpoint of pytorch_model.bin files, or a GGUF file, as safetensors.

    Pickled files can hold code. It is not run: they are read as tensors alone, in a process with
    limited memory. The matrices of a GGUF file are decoded to 16 bits.
    """
    name, folder = model_and_others(ctx, model_id, ("MODEL", "OUT"), (model, out))
    from freight.checkpoint.convert import convert as run

    with stages() as on_progress:
        result = run(name, Path(folder), revision, on_progress)
    files = "1 file"
    if result.num_files > 1:
        files = f"{result.num_files} files"
    terminal.say(
        f"{result.path}: {result.num_tensors:,} tensors, {result.num_bytes / 2**20:,.2f} MiB, in {files}"
    )
    for name, written in result.tied.items():
        terminal.say(f"{name} is {written}: written once")
