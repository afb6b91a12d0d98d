"""`freight plan`: what fits into a memory, before anything is downloaded: a table with bars, or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.options import takes_model

if TYPE_CHECKING:
    from freight.evaluate.capacity import Plan, Setting

_BAR = 24  # characters of the longest bar
_REST = 68  # of the columns before it


@takes_model
def plan(
    model: str,
    memory: Annotated[str, typer.Option(metavar="BYTES|24GiB", help="Memory of the device, weights included.")],
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens of each request; default: the model's context.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Requests of that length in the cache at once.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="What it will run on; auto: a GPU if there is one here.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="What is computed in; auto: as config.json says.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count how many tokens and requests fit into a memory.

    With each format of cache and weights, and which to take; from config.json alone.
    """
    from freight.checkpoint.config_only import read_config_only
    from freight.config.options import choose
    from freight.device import DEVICES, cpu_features, gpu_present
    from freight.evaluate.capacity import Wish, make_plan, read_memory
    from freight.evaluate.capacity import as_json as plan_json
    from freight.models.sizes import Layout

    if choose("--device", device, DEVICES) == "auto":
        device = "cuda" if gpu_present() else "cpu"
    packed = Layout.TILES if {"amx_tile", "amx_bf16"} <= set(cpu_features()) else Layout.PACKED
    layout = packed if device == "cpu" else Layout.PLAIN
    wish = Wish(read_memory(memory), context, concurrency, device, layout, dtype)
    config, hf_quant_config = read_config_only(model, revision)
    made = make_plan(config, wish, hf_quant_config)
    if as_json:
        print(json.dumps({"model": model, **plan_json(made)}))
    else:
        _print(model, made)


def _print(model: str, made: Plan) -> None:
    from rich.console import Console
    from rich.text import Text

    from freight.cache.sizing import MEMORY_SHARE
    from freight.evaluate.capacity import size, verdict

    console = Console(markup=False, highlight=False, soft_wrap=True)
    wish = made.wish
    share = f"{MEMORY_SHARE[wish.device]:.0%}"
    console.print(f"{model} on {wish.device} with {size(wish.memory)}, requests of {made.context:,} tokens")
    fancy = console.is_terminal and console.encoding.lower().startswith("utf")
    rows: list[tuple[str, ...]] = [("weights", "", "KV cache", "", "tokens", "requests", "")]
    longest = max(4, min(_BAR, console.width - _REST)) if fancy else _BAR
    rows += [_row(one, made, "█" if fancy else "#", longest) for one in made.settings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = [str.ljust, str.rjust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
    for index, row in enumerate(rows, -1):
        cells = [pad(cell, width) for pad, cell, width in zip(flush, row, widths, strict=True)]
        mark = "*" if index == made.choice else " "
        style = "bold green" if index == made.choice else "bold" if index < 0 else ""
        console.print(Text(f"{mark} {'  '.join(cells)}".rstrip(), style))
    console.print(
        f"KV cache: {share} of what weights and rotary tables leave, as the engine takes by itself. Not counted: "
        "activations, logits, torch and its kernels; they have the rest."
    )
    console.print(Text(verdict(made), "bold"))


def _row(one: Setting, made: Plan, mark: str, longest: int) -> tuple[str, ...]:
    from freight.evaluate.capacity import size

    most = max(other.capacity_tokens for other in made.settings)
    length = -(-one.capacity_tokens * longest // most) if most else 0
    return (
        *(str(one.weights), size(one.loaded.total)),
        *(one.cache_name, size(one.cache_bytes) if one.cache_bytes else "no room"),
        *(f"{one.capacity_tokens:,}", f"{one.requests:,}", mark * length),
    )
