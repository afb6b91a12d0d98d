"""freight merge BASE ADAPTER OUT: a LoRA adapter merged into the model that it was trained on."""

from __future__ import annotations

from typing import Annotated

from freight.base import terminal
from freight.cli.options import OutFolder, argument, option
from freight.quantizer.stages import stages


def merge(
    base: Annotated[str, argument("BASE", "The model in 16 bits, a folder or a hub id.")],
    adapter: Annotated[str, argument("ADAPTER", "PEFT's adapter, a folder or a hub id.")],
    out: OutFolder,
    revision: Annotated[str | None, option("NAME", "Branch, tag or commit of a hub BASE.")] = None,
) -> None:
    """Merge a LoRA adapter into the weights of its model.

    Computed in float32 and rounded once. The result is a model like any other: serve it, or
    quantize it.
    """
    from freight.checkpoint.merge import merge as run

    with stages() as on_progress:
        result = run(base, adapter, out, revision, on_progress)
    terminal.say(
        f"{result.path}: {result.num_changed:,} of {result.num_tensors:,} tensors changed, "
        f"{result.num_bytes / 2**20:,.2f} MiB"
    )
    if result.untied:
        terminal.say(
            "lm_head has a tensor of its own now: the adapter changes it or the embedding, which it shared"
        )
