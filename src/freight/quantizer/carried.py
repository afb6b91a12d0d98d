"""The KV scales that a model already has, complete and for E4M3FN: what is put into another, or
kept by `quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from freight.checkpoint.rank_export import RankExport, is_rank_export, read_rank_export
from freight.checkpoint.reader import resolve_model
from freight.checkpoint.writer import require_own_files
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.config.model import ModelConfig
from freight.model.open import OpenCheckpoint, open_folder, require_native
from freight.settings.resolve import for_variant


def _shape(model: ModelConfig) -> dict[str, object]:
    """Return what two models share whose KV scales fit each other."""
    return {
        "model_type": model.model_type,
        "num_layers": model.num_layers,
        "num_kv_heads": _by_layer(model, "num_kv_heads"),
        "head_dim": _by_layer(model, "k_dim"),
        "head_dim of values": _by_layer(model, "v_dim"),
    }


def _by_layer(model: ModelConfig, what: str) -> object:
    """Return a number of the layers with attention: one if all of them agree, else one each."""
    values = [getattr(mixer, what) for mixer in model.paged.values()]
    return values[0] if len(set(values)) == 1 else values


@dataclass(frozen=True)
class Carried:
    """Scales for E4M3FN of every layer.

    scales   as fine as the model has them, with centers
    coarse   one per layer and side, valid without centers
    """

    scales: KVScales
    coarse: KVScales

    @property
    def granularity(self) -> Granularity:
        return next(layer.granularity for layer in self.scales.layers if layer is not None)

    @property
    def finer(self) -> KVScales | None:
        """What `coarse` does not express, for the side file; None if there is nothing."""
        if self.granularity is Granularity.TENSOR and not _has_centers(self.scales):
            return None
        return self.scales


def open_scales(model: str) -> tuple[Carried, ModelConfig | RankExport]:
    """Read the scales of `model`, a checkpoint or an export for TensorRT-LLM.

    Raises CheckpointError where some are missing, and for files outside of its folder
    (`writer.require_own_files`): the scales get into what is written.
    """
    path = resolve_model(model)
    require_own_files(path)
    if is_rank_export(path):
        export = read_rank_export(path)
        _require_complete(export.scales, model)
        return Carried(export.scales, per_layer(export.scales)), export
    stored = open_folder(path, model)
    require_native(stored.model, model, "carrying KV scales over")
    return carried_by(stored, model), stored.model


def carried_by(stored: OpenCheckpoint, name: str) -> Carried:
    """Return the scales of an opened checkpoint. Raises CheckpointError where some are missing."""
    scales = stored.kv_scales
    _require_complete(scales, name)
    uncentered = scales
    if _has_centers(scales):
        uncentered = stored.uncentered_scales()
        _require_complete(uncentered, name)
    coarse = per_layer(for_variant(uncentered, Format.E4M3FN))
    return Carried(for_variant(scales, Format.E4M3FN), coarse)


def require_fit(
    source: ModelConfig | RankExport, source_name: str, model: ModelConfig, name: str
) -> None:
    """Raise ConfigError if the scales of `source` are for a model of another shape than `model`."""
    ours = _shape(model)
    for what, theirs in _facts(source, model).items():
        if theirs not in (None, ours[what]):
            raise ConfigError(
                f"the scales of {source_name} do not fit {name}: {what} is {theirs} there and {ours[what]} here"
            )


def _facts(source: ModelConfig | RankExport, model: ModelConfig) -> dict[str, object]:
    """Return `_shape` of `source`; None for what an export does not say."""
    if isinstance(source, ModelConfig):
        return _shape(source)
    exported_as = source.model_types[0]
    if model.model_type in source.model_types:
        exported_as = model.model_type
    return {
        "model_type": exported_as,
        "num_layers": source.num_layers,
        "num_kv_heads": source.num_kv_heads,
        "head_dim": source.head_dim,
    }


def _require_complete(scales: KVScales, name: str) -> None:
    scales.require_valid("make others with freight quantize --kv-cache fp8")
    if scales.mixed:
        raise CheckpointError(
            f"{name} has a choice of its own by layer ({scales.by_granularity}), which only its own file expresses; "
            "quantize the 16-bit model that it was made from"
        )
    if scales.alone("v"):
        which = ", ".join(map(str, scales.alone("v")))
        raise CheckpointError(
            f"{name} has KV scales of V alone for layers {which}; make both with freight quantize"
        )
    if scales.missing:
        which = "no KV scales"
        if not scales.empty:
            which += f" for layers {', '.join(map(str, scales.missing))}"
        raise CheckpointError(f"{name} has {which}; make them with freight quantize --kv-cache fp8")


def _has_centers(scales: KVScales) -> bool:
    return any(layer is not None and layer.k_center for layer in scales.layers)


def per_layer(scales: KVScales) -> KVScales:
    """Return one scale per layer and side: the largest."""
    return replace(scales, layers=tuple(layer and _coarse(layer) for layer in scales.layers))


def _coarse(layer: LayerScales) -> LayerScales:
    return replace(layer, k=(max(layer.k),), v=(max(layer.v),), granularity=Granularity.TENSOR)
