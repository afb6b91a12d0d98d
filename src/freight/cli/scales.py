"""freight scales: KV scales out of one checkpoint, into another, and from and to the JSON file of
older engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base import terminal
from freight.cli.options import ModelIdOption, OptionalOut, argument, model_and_others, option
from freight.cli.quantize import either
from freight.quantizer.plan import KV_LAYOUTS, Layout
from freight.quantizer.stages import stages

if TYPE_CHECKING:
    from freight.fp8.scheme import KVScales

_Format = Annotated[str, option(KV_LAYOUTS, "The form of the checkpoint.")]

app = typer.Typer(
    help="Move KV scales between checkpoints and files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def extract(
    quantized: Annotated[
        str | None,
        argument("QUANTIZED", "A model with KV scales, or an export."),
    ] = None,
    base: Annotated[str | None, argument("BASE", "The 16-bit model that gets them.")] = None,
    out: OptionalOut = None,
    quantized_model: Annotated[str | None, option("QUANTIZED", "The same as QUANTIZED.")] = None,
    model: Annotated[
        str | None, option("BASE", "The same as BASE.", "--model", "--model-id")
    ] = None,
    save_path: Annotated[
        Path | None, option("OUT", "The same as OUT.", "--save-path", "--output-dir")
    ] = None,
    format: _Format = Layout.COMPRESSED_TENSORS,
) -> None:
    """Take KV scales out of a quantized checkpoint and put them into a 16-bit one."""
    names = (
        either("QUANTIZED", quantized, "--quantized-model", quantized_model),
        either("BASE", base, "--model", model),
        Path(either("OUT", out, "--save-path", save_path)),
    )
    from freight.quantizer.transfer import extract_scales

    with stages() as on_progress:
        scales = extract_scales(*names, on_progress, format)
    _say(names[2], scales)


@app.command("export")
def export(
    ctx: typer.Context,
    model: Annotated[str | None, argument("MODEL", "A model with KV scales, or an export.")] = None,
    file: Annotated[
        Path | None,
        argument("FILE.json", "The file to write; it must not exist."),
    ] = None,
    model_id: ModelIdOption = None,
) -> None:
    """Write a model's KV scales as the kv_cache_scales.json of older engines, one factor per layer."""
    name, path = model_and_others(ctx, model_id, ("MODEL", "FILE.json"), (model, file))
    from freight.quantizer.transfer import export_scales

    _say(Path(path), export_scales(name, Path(path)), "; the file has the largest of each layer")


@app.command("import")
def import_(
    ctx: typer.Context,
    file: Annotated[Path | None, argument("FILE.json", "A kv_cache_scales.json.")] = None,
    model: Annotated[
        str | None, argument("MODEL", "The 16-bit model that gets the scales.")
    ] = None,
    out: OptionalOut = None,
    model_id: ModelIdOption = None,
    format: _Format = Layout.COMPRESSED_TENSORS,
) -> None:
    """Put the factors of a kv_cache_scales.json into a 16-bit checkpoint."""
    source, name, folder = model_and_others(
        ctx, model_id, ("FILE.json", "MODEL", "OUT"), (file, model, out)
    )
    from freight.quantizer.transfer import import_scales

    with stages() as on_progress:
        scales = import_scales(Path(source), name, Path(folder), on_progress, format)
    _say(Path(folder), scales)


def _say(out: Path, scales: KVScales, note: str = "") -> None:
    granularity = next(layer.granularity for layer in scales.layers if layer is not None)
    terminal.say(f"{out}: KV scales of {len(scales.layers)} layers, per {granularity}{note}")
