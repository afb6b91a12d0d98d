"""KV scales from one checkpoint, or from a file, into another: what `freight scales` does. No
weight is changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from freight.base.files import write_whole, writing
from freight.base.options import choose
from freight.base.terminal import OnStage, unseen
from freight.checkpoint.kv_scales import read_scale_json
from freight.checkpoint.writer import require_new
from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales
from freight.model.config.model import ModelConfig
from freight.quantizer.carried import Carried, open_scales, per_layer, require_fit
from freight.quantizer.modules import head_module, kept_modules, linear_modules
from freight.quantizer.plan import (
    KV_LAYOUTS,
    ActivationScheme,
    Layout,
    QuantizePlan,
    WeightScheme,
)
from freight.quantizer.quantize import (
    NOTHING_CALIBRATED,
    Unquantized,
    open_unquantized,
    require_own_form,
)
from freight.quantizer.write import check_disk_space, write_quantized


def extract_scales(
    quantized: str,
    base: str,
    out: Path,
    on_progress: OnStage = unseen,
    format: str = Layout.COMPRESSED_TENSORS,
) -> KVScales:
    """Write `base`, a 16-bit model, into the new folder `out` with the KV scales of `quantized`, a
    model of its shape.

    `quantized` may be an export of AMMO or ModelOpt for TensorRT-LLM. `format` is one of
    KV_LAYOUTS. Raises ConfigError where the two differ, CheckpointError where scales are missing.
    """
    layout = _layout(format)
    require_new(out)
    carried, source = open_scales(quantized)
    opened = open_unquantized(base)
    require_fit(source, quantized, opened.model, base)
    return _write(opened, carried, out, layout, on_progress)


def import_scales(
    file: Path,
    model: str,
    out: Path,
    on_progress: OnStage = unseen,
    format: str = Layout.COMPRESSED_TENSORS,
) -> KVScales:
    """Write `model` into the new folder `out` with the scales of a kv_cache_scales.json.

    A folder in the place of the file is a model, or an export, whose scales are extracted.
    """
    layout = _layout(format)
    require_new(out)
    if file.is_dir():
        return extract_scales(str(file), model, out, on_progress, layout)
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file")
    opened = open_unquantized(model)
    scales = read_scale_json(file, opened.model)
    carried = Carried(scales, per_layer(scales))
    return _write(opened, carried, out, layout, on_progress)


def export_scales(model: str, file: Path) -> KVScales:
    """Write the KV scales of `model` as the kv_cache_scales.json of older engines.

    That file has one factor per layer, for K and V and all heads: the largest of the layer's
    scales, so no value saturates that did not before. Raises ConfigError if the file exists,
    CheckpointError where scales are missing.
    """
    if file.exists():
        raise ConfigError(f"{file} exists; remove it, or name another")
    carried, source = open_scales(model)
    factors = {}
    for index, layer in enumerate(carried.coarse.layers):
        if layer is not None:
            factors[str(index)] = max(*layer.k, *layer.v)
    model_type = source.model_type if isinstance(source, ModelConfig) else source.model_types[0]
    kv_cache = {"dtype": Format.E4M3FN.torch_name, "scaling_factor": {"0": factors}}
    content = {"model_type": model_type, "kv_cache": kv_cache}
    with writing("scales export"):
        write_whole(file, json.dumps(content, indent=2) + "\n")
    return carried.coarse


def _layout(format: str) -> Layout:
    return Layout(choose("--format", format, KV_LAYOUTS))


def _write(
    opened: Unquantized, carried: Carried, out: Path, layout: Layout, on_progress: OnStage
) -> KVScales:
    """Write the scales in float32, with the bits that were read.

    AutoFP8's form declares FP8 weights by leaving modules out, so there every module is listed as
    left out.
    """
    if opened.packed:
        require_own_form(opened, WeightScheme.NONE, layout)
    check_disk_space(opened.checkpoint, out)
    activations = ActivationScheme.NONE
    ignored: tuple[str, ...] = ()
    if layout is Layout.FP8:
        model = opened.model
        activations = ActivationScheme.DYNAMIC
        ignored = (*linear_modules(model), *kept_modules(model), head_module(model))
    plan = QuantizePlan(
        weights=WeightScheme.NONE,
        activations=activations,
        kv_granularity=carried.granularity,
        layout=layout,
    )
    measured = replace(NOTHING_CALIBRATED, kv=carried.coarse, kv_finer=carried.finer)
    write_quantized(
        opened.checkpoint,
        opened.model,
        plan,
        ignored,
        measured,
        out,
        on_progress,
        opened.packed,
        kv_scale_format=Format.FLOAT32,
    )
    return carried.scales
