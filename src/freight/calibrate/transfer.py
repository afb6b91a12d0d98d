"""KV scales from one checkpoint, or from a file, into another: what `freight scales` does. No weight is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freight.calibrate.quantize import NOTHING_CALIBRATED, Unquantized, open_unquantized
from freight.calibrate.run import Progress
from freight.calibrate.write import check_disk_space, write_quantized
from freight.checkpoint.kv_scales import read_scale_json
from freight.checkpoint.writer import require_new
from freight.config.model import ModelConfig
from freight.config.plan import ActivationScheme, Layout, ObserverKind, QuantizePlan, WeightScheme
from freight.config.resolve import for_variant
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.models.open import open_checkpoint

_SHAPE: Mapping[str, Callable[[ModelConfig], object]] = {  # what two models share whose KV scales fit each other
    "model_type": lambda model: model.model_type,
    "num_layers": lambda model: model.num_layers,
    "num_kv_heads": lambda model: _by_layer(model, "num_kv_heads"),
    "head_dim": lambda model: _by_layer(model, "k_dim"),
    "head_dim of values": lambda model: _by_layer(model, "v_dim"),
}


def _by_layer(model: ModelConfig, what: str) -> object:
    """A number of the layers' mixers: one if all layers agree, else one each."""
    values = [getattr(layer.mixer, what) for layer in model.layers]
    return values[0] if len(set(values)) == 1 else values


def extract_scales(
    quantized: str, base: str, out: Path, on_progress: Progress = lambda what, done, total: None
) -> KVScales:
    """Write `base`, a 16-bit model, into the new folder `out` with the KV scales of `quantized`, a model of its shape.

    Raises ConfigError where the two differ, CheckpointError where scales are missing.
    """
    require_new(out)
    scales, coarse, source = _complete_scales(quantized)
    opened = open_unquantized(base)
    for what, of in _SHAPE.items():
        theirs, ours = of(source), of(opened.model)
        if theirs != ours:
            raise ConfigError(f"the scales of {quantized} do not fit {base}: {what} is {theirs} there and {ours} here")
    return _write(opened, scales, coarse, out, on_progress)


def import_scales(
    file: Path, model: str, out: Path, on_progress: Progress = lambda what, done, total: None
) -> KVScales:
    """Write `model` into the new folder `out` with the scales of a kv_cache_scales.json."""
    require_new(out)
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file")
    opened = open_unquantized(model)
    scales = read_scale_json(file, opened.model)
    return _write(opened, scales, scales, out, on_progress)


def export_scales(model: str, file: Path) -> KVScales:
    """Write the KV scales of `model` as the kv_cache_scales.json of older engines.

    That file has one factor per layer, for K and V and all heads: the largest of the layer's scales, so no value
    saturates that did not before. Raises ConfigError if the file exists, CheckpointError where scales are missing.
    """
    if file.exists():
        raise ConfigError(f"{file} exists; remove it, or name another")
    _, scales, config = _complete_scales(model)
    factors = {str(index): max(*layer.k, *layer.v) for index, layer in enumerate(scales.layers) if layer is not None}
    kv_cache: dict[str, Any] = {"dtype": Format.E4M3FN.torch_name, "scaling_factor": {"0": factors}}
    try:
        file.write_text(json.dumps({"model_type": config.model_type, "kv_cache": kv_cache}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error
    return scales


def _complete_scales(model: str) -> tuple[KVScales, KVScales, ModelConfig]:
    """Scales for E4M3FN of every layer of `model`, and those valid without centers, one per layer and side."""
    stored = open_checkpoint(model)
    scales = stored.kv_scales
    if scales.missing:
        which = "no KV scales" if scales.empty else f"no KV scales for layers {', '.join(map(str, scales.missing))}"
        raise CheckpointError(f"{model} has {which}; make them with freight quantize --kv-cache fp8")
    uncentered = stored.uncentered_scales() if any(map(_centered, scales.layers)) else scales
    coarse = per_layer(for_variant(uncentered, Format.E4M3FN))
    return for_variant(scales, Format.E4M3FN), coarse, stored.model


def _centered(layer: LayerScales | None) -> bool:
    return layer is not None and bool(layer.k_center)


def per_layer(scales: KVScales) -> KVScales:
    """One scale per layer and side: the largest."""
    return replace(scales, layers=tuple(layer and _coarse(layer) for layer in scales.layers))


def _coarse(layer: LayerScales) -> LayerScales:
    return replace(layer, k=(max(layer.k),), v=(max(layer.v),), granularity=Granularity.TENSOR)


def _write(opened: Unquantized, scales: KVScales, coarse: KVScales, out: Path, on_progress: Progress) -> KVScales:
    """Scales are written in float32, with the bits that were read."""
    check_disk_space(opened.checkpoint, out)
    granularity = next(layer.granularity for layer in scales.layers if layer is not None)
    plan = QuantizePlan(
        weights=WeightScheme.NONE,
        activations=ActivationScheme.NONE,
        kv_granularity=granularity,
        ignore=(),
        num_samples=0,
        max_seq_len=0,
        observer=ObserverKind.ABSMAX,
        layout=Layout.COMPRESSED_TENSORS,
    )
    finer = scales if granularity is not Granularity.TENSOR or any(map(_centered, scales.layers)) else None
    measured = replace(NOTHING_CALIBRATED, kv=coarse, kv_finer=finer)
    write_quantized(opened.checkpoint, opened.model, plan, (), measured, out, on_progress, Format.FLOAT32)
    return scales
