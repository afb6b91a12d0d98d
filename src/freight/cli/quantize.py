"""freight quantize MODEL OUT: FP8 weights, activations and KV cache, calibrated, in a checkpoint
others load too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base import terminal
from freight.base.fields import JsonObject
from freight.cli.kv_choice import choice_facts, choice_sentences
from freight.cli.options import (
    MODEL_VARIABLE,
    IgnoredKeys,
    Json,
    OptionalOut,
    Revision,
    argument,
    model_and_others,
    option,
)
from freight.errors import ConfigError, choices
from freight.quantizer.choice_words import (
    choice_content,
    choice_lines,
    least_and_most,
    runs,
    span,
)
from freight.quantizer.plan import (
    KV_CACHES,
    KV_GRANULARITIES,
    MAX_SEQ_LEN,
    METHOD_SAMPLES,
    METHOD_SEQ_LEN,
    NUM_SAMPLES,
    WEIGHTS,
    ActivationScheme,
    ActOrder,
    DuoScaling,
    Layout,
    ObserverKind,
    QuantizeArgs,
    WeightObserver,
    WeightScheme,
    plan,
)
from freight.quantizer.stages import stages
from freight.settings.device import DEVICES
from freight.settings.engine import names_of

if TYPE_CHECKING:
    from rich.table import Table

    from freight.quantizer.quantize import QuantizeResult
    from freight.quantizer.weight_budget import WeightChoice


# AMMO's names -> --weights
_QFORMATS = {"fp8": str(WeightScheme.TENSOR), "full_prec": str(WeightScheme.NONE)}


BY_LAYER = "by layer"  # as the name of numbers, where a budget chose them
Format = Annotated[str, option(Layout, "The form of the checkpoint.")]


def quantize(
    ctx: typer.Context,
    model: Annotated[
        str | None, argument("MODEL", "A folder, a GGUF file, a hub id, or 'demo'.")
    ] = None,
    out: OptionalOut = None,
    model_id: Annotated[
        str | None,
        option(
            "MODEL",
            "The same as MODEL.",
            "--model-id",
            "--model",
            "--model-dir",
            envvar=MODEL_VARIABLE,
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, option("OUT", "The same as OUT.", "--output-dir", "--save-path")
    ] = None,
    weights: Annotated[
        str | None,
        option(
            WEIGHTS,
            "FP8 with one scale per tensor, output row (default) or 128 x 128 block; INT8; or 4 bits.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, option("INPUTS", "Inputs that share a scale of int4: 32, 64 or 128 (default).")
    ] = None,
    method: Annotated[
        str | None,
        option(
            "awq|smoothquant|rotation|gptq|nearest",
            "What keeps the error of rounding low; gptq may follow another, as in rotation,gptq.",
        ),
    ] = None,
    damping: Annotated[
        float | None,
        option("SHARE", "Of GPTQ: added to the Hessian's diagonal, of its mean; default: 0.01."),
    ] = None,
    act_order: Annotated[
        str | None,
        option(ActOrder, "Of GPTQ: large inputs first (default), with their groups, or as stored."),
    ] = None,
    smoothing: Annotated[
        float | None, option("EXPONENT", "Of SmoothQuant, above 0 and at most 1; default: 0.5.")
    ] = None,
    duo_scaling: Annotated[
        str | None,
        option(DuoScaling, "Of AWQ: whether candidates depend on weights as well (default: on)."),
    ] = None,
    weight_observer: Annotated[
        str | None,
        option(WeightObserver, "How a weight's scale is found; default in 4 bits: mse."),
    ] = None,
    asymmetric: Annotated[
        bool | None,
        typer.Option(
            "--asymmetric", help="Groups of int4 have a zero point each; default: symmetric."
        ),
    ] = None,
    activations: Annotated[
        str | None,
        option(
            ActivationScheme,
            "Inputs of FP8 weights: measured as they come (default), calibrated, or in 16 bits.",
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        option(
            KV_CACHES,
            "Calibrate scales for an FP8 KV cache; default: none.",
            "--kv-cache",
            "--kv-cache-dtype",
        ),
    ] = None,
    kv_granularity: Annotated[
        str | None, option(KV_GRANULARITIES, "What shares a KV scale; default: tensor.")
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "KL=NATS|bits=BITS",
            "Choose each layer's weights among INT4, FP8 and 16 bits, so that they cost at most this.",
        ),
    ] = None,
    kv_budget: Annotated[
        str | None,
        option(
            "kl=NATS|bits=BITS",
            "Choose by layer among FP8 and 16 bits, so that the KV cache costs at most this.",
        ),
    ] = None,
    center: Annotated[
        bool | None,
        typer.Option(
            "--center", help="Subtract the means of keys before they are stored, where that pays."
        ),
    ] = None,
    lm_head: Annotated[
        bool | None,
        typer.Option("--lm-head", help="Round the output head as well; default: 16 bits."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        option("PATTERN", "A module to leave in 16 bits: a name, or re:REGEX; may be repeated."),
    ] = None,
    calibration_data: Annotated[
        Path | None,
        option("FILE", "Text, or .jsonl with text, messages or input_ids in each line."),
    ] = None,
    num_samples: Annotated[
        int | None,
        option(
            "COUNT",
            f"Samples to calibrate with; default: {NUM_SAMPLES}, with --method {METHOD_SAMPLES}.",
            "--num-samples",
            "--calib-size",
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        option(
            "TOKENS",
            f"Longest sample; default: {MAX_SEQ_LEN}, with --method alone {METHOD_SEQ_LEN}.",
        ),
    ] = None,
    observer: Annotated[
        str | None, option(ObserverKind, "How a scale follows from what was seen; default: absmax.")
    ] = None,
    format: Format = Layout.COMPRESSED_TENSORS,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="OUT may be a folder that Freight wrote before.")
    ] = False,
    dtype: Annotated[
        str | None, option("DTYPE", "What the model is stored in; another dtype is refused.")
    ] = None,
    qformat: Annotated[
        str | None, option("fp8|full_prec", "The same as --weights fp8 or none, as AMMO calls it.")
    ] = None,
    batch_size: Annotated[
        int | None, option("COUNT", "Taken from AMMO's command line; changes no scale.")
    ] = None,
    device: Annotated[
        str | None, option(DEVICES, "Where the model runs while it is calibrated; default: auto.")
    ] = None,
    revision: Revision = None,
    ignore_config_keys: IgnoredKeys = None,
    as_json: Json = False,
) -> None:
    """Quantize a model once, for every engine.

    FP8 weights, activations and KV cache; what is static is calibrated on the unquantized model.
    """
    name, folder = _names(ctx, model, out, model_id, output_dir)
    options: JsonObject = {
        "weights": _weights(weights, qformat, format),
        "group_size": group_size,
        "method": method,
        "damping": damping,
        "act_order": act_order,
        "smoothing": smoothing,
        "duo_scaling": duo_scaling,
        "weight_observer": weight_observer,
        "asymmetric": bool(asymmetric),
        "activations": activations,
        "kv_cache": kv_cache,
        "kv_granularity": kv_granularity,
        "kv_budget": kv_budget,
        "budget": budget,
        "center": bool(center),
        "lm_head": bool(lm_head),
        "ignore": tuple(ignore or ()),
        "calibration_data": calibration_data,
        "num_samples": num_samples,
        "max_seq_len": max_seq_len,
        "observer": observer,
        "format": format,
        "dtype": dtype,
        "device": device,
    }
    plan(QuantizeArgs.from_options(**options))

    from freight.quantizer.quantize import quantize as run

    if batch_size is not None:
        terminal.say(
            f"note: --batch-size {batch_size} changes no scale: each sample is measured on its own",
            err=True,
        )
    source: JsonObject = {
        "revision": revision,
        "ignore_config_keys": names_of(ignore_config_keys or ()),
    }
    with stages() as on_progress:
        result = run(
            name, Path(folder), overwrite=overwrite, on_progress=on_progress, **source, **options
        )
    _show(result, as_json)


def _names(
    ctx: typer.Context,
    model: str | None,
    out: Path | None,
    model_id: str | None,
    output_dir: Path | None,
) -> tuple[str, str]:
    """MODEL and OUT, in either of their forms."""
    if output_dir is None:
        name, folder = model_and_others(ctx, model_id, ("MODEL", "OUT"), (model, out))
        return name, folder
    folder = either("OUT", out, "--output-dir", output_dir)
    [name] = model_and_others(ctx, model_id, ("MODEL",), (model,))
    return name, folder


def _show(result: QuantizeResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts(result), indent=2))
    else:
        for line in sentences(result):
            terminal.say(line)
        if result.weight_choice is not None:
            terminal.console().print(choice_table(result.weight_choice))
    for warning in result.warnings:
        terminal.say(f"warning: {warning}", err=True)


def _weights(weights: str | None, qformat: str | None, format: str) -> str | None:
    """`--weights`, or what AMMO calls it. With `--format tgi` its script writes 16-bit weights."""
    if qformat is None:
        return weights
    if weights is not None:
        raise ConfigError(f"--weights is {weights} and --qformat {qformat}: give one of the two")
    if qformat not in _QFORMATS:
        raise ConfigError(f"--qformat {qformat!r} is not implemented: choose {choices(_QFORMATS)}")
    if format == Layout.TGI:
        return "none"
    return _QFORMATS[qformat]


def either(argument: str, value: str | Path | None, option: str, other: str | Path | None) -> str:
    """Return one of the two forms of an argument. Raises ConfigError where none or both are given."""
    values = [str(path) for path in (value, other) if path is not None]
    if len(values) != 1:
        fault = f"is given as {' and as '.join(values)}" if values else "is missing"
        raise ConfigError(f"{argument} {fault}: give either the argument {argument} or {option}")
    return values[0]


def facts(result: QuantizeResult) -> JsonObject:
    """Return the JSON object of `freight quantize --json`."""
    plan = result.plan
    kv_facts: dict[str, object] = {"kv_cache": "none" if plan.kv_granularity is None else "fp8"}
    if result.kv_choice is not None:
        kv_facts["kv_budget"] = choice_facts(result.kv_choice)
    weights: dict[str, object] = {"weights": plan.weights}
    if result.weight_choice is not None:
        weights = {"weights": BY_LAYER, "budget": choice_content(result.weight_choice)}
    other_parts = {}
    if result.beside:
        other_parts["other_parts"] = dict(result.beside)
    centers = []
    for index, layer in enumerate(result.centers):
        centers.append({"layer": index, "k": None if layer.k is None else layer.k_gain})
    return {
        "path": str(result.path),
        "format": result.form,
        **weights,
        "method": str(plan.method) or None,
        "activations": plan.activations,
        **kv_facts,
        "granularity": plan.kv_granularity,
        "centers": centers,
        "num_samples": result.num_samples,
        "num_tokens": result.num_tokens,
        "longest_sample": result.longest,
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        **other_parts,
        "warnings": list(result.warnings),
    }


def sentences(result: QuantizeResult) -> Iterator[str]:
    """Yield the same for people."""
    plan = result.plan
    kv = "16 bits"
    if plan.kv_granularity is not None:
        kv = f"fp8, a scale per {plan.kv_granularity}"
    elif result.kv_choice is not None:
        kv = "chosen by layer"
    weights = str(plan.weights) if result.weight_choice is None else "chosen by layer"
    if str(plan.method):
        weights += f" by {plan.method}"
    yield f"{result.path}: {result.form}; weights {weights}, activations {plan.activations}, KV cache {kv}"
    yield f"tensors: {result.bytes_before / 2**20:,.2f} MiB before, {result.bytes_after / 2**20:,.2f} MiB after"
    if result.beside:
        formats = " and ".join(f"{count:,} in {name}" for name, count in result.beside.items())
        yield f"other parts than the text model, carried over as they are: {formats}"
    if result.num_tokens:
        gains = [layer.k_gain for layer in result.centers if layer.k is not None]
        if gains:
            span = " to ".join(dict.fromkeys((f"{min(gains):.1f}", f"{max(gains):.1f}")))
            where = f"keys centered in {len(gains)} of {len(result.centers)} layers"
            yield f"{where}: squared error of rounding divided by {span}"
        samples = "1 sample"
        if result.num_samples > 1:
            samples = f"{result.num_samples:,} samples"
        yield f"calibrated on {result.num_tokens:,} tokens in {samples}, positions 0 to {result.longest - 1:,}"
    if result.weight_choice is not None:
        yield from choice_lines(result.weight_choice)
    if result.kv_choice is not None:
        yield from choice_sentences(result.kv_choice)


def choice_table(choice: WeightChoice) -> Table:
    """Return the layers of a choice, those of one kind in a row: their numbers, their share of the
    bytes, and what each candidate costs there alone.
    """
    from rich.table import Table

    candidates = dict.fromkeys(name for layer in choice.layers for name in layer.kl)
    table = Table("layers", "weights", "bytes", *candidates, title="KL of each in one layer alone")
    for indices in runs([layer.name for layer in choice.layers]):
        layers = [choice.layers[index] for index in indices]
        cells = [span(indices), layers[0].name, f"{sum(layer.num_bytes for layer in layers):,}"]
        for name in candidates:
            cells.append(least_and_most([layer.kl[name] for layer in layers if name in layer.kl]))
        table.add_row(*cells)
    return table
