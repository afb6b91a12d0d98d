"""KV scales per head or per channel, and centers of keys, in a side file that other engines ignore.

The standard tensors hold one scale per layer, valid without the file. config.json names the file
and its SHA-256; a missing file, or one of another run, is an error without a fallback:

    "freight": {"kv_scales": {"file": "freight_kv_scales.json", "sha256": "…"}}

The file is JSON: {"format": "fp8_e4m3fn", "granularity": "channel", "layers": [{"k": […], "v":
[…]}, …]}; scales are float32, row-major over [num_kv_heads, head_dim]. A layer that subtracts a
constant from its keys before it stores them has the constant as `k_center`, one number per channel;
its key scales are for the differences.

Where layers are stored in different ways (`freight quantize --kv-budget`), the file's granularity
is "mixed", and each layer has its own: {"granularity": "head", "k": […], "v": […]}, {"granularity":
"token"}, which is measured as it is stored, or {"granularity": null} for 16 bits. There are no
tensors and no declared KV scheme then: another engine would take 1.0 for the layers
without scales.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freight.base.files import read_bytes
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import PagedMixer

FILE = "freight_kv_scales.json"
MIXED = "mixed"
# `freight` in the config.json of what Freight writes: such folders may be overwritten
WRITTEN = {"checkpoint": 1}
_REQUIRED = dict.fromkeys(("k", "v"))  # fields of LayerScales
_OPTIONAL = dict.fromkeys(("k_center",))


def write_extras(scales: KVScales) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return (entries for config.json, {file name: content}). Every layer must have scales, or a
    choice in `mixed`.
    """
    if scales.mixed:
        assert len(scales.mixed) == len(scales.layers)
        granularity = MIXED
        layers = [
            {"granularity": chosen and str(chosen)} | _layer_content(layer)
            for chosen, layer in zip(scales.mixed, scales.layers, strict=True)
        ]
    else:
        assert not scales.missing
        granularity = next(str(layer.granularity) for layer in scales.layers if layer is not None)
        layers = [_layer_content(layer) for layer in scales.layers]
    content = {"format": str(scales.format), "granularity": granularity, "layers": layers}
    data = json.dumps(content).encode()
    named = {"file": FILE, "sha256": hashlib.sha256(data).hexdigest()}
    return {"freight": {"kv_scales": named}}, {FILE: data}


def read_extras(checkpoint: Checkpoint, model: ModelConfig) -> KVScales | None:
    """Read the scales of the file that config.json names; None if it names none. Raises
    CheckpointError for a missing or different file.
    """
    declared = checkpoint.config.get("freight")
    if declared is None or declared == WRITTEN:
        return None
    known = isinstance(declared, dict) and set(declared) - set(WRITTEN) == {"kv_scales"}
    named = declared.get("kv_scales") if known else None
    if (
        not isinstance(named, dict)
        or set(named) != {"file", "sha256"}
        or not all(map(_is_str, named.values()))
    ):
        raise CheckpointError(
            f"{checkpoint.path}/config.json: freight = {declared!r} is not understood by this version"
        )
    if Path(named["file"]).name != named["file"]:
        raise CheckpointError(
            f"{checkpoint.path}/config.json names {named['file']!r}, which lies outside the folder"
        )
    path = checkpoint.path / named["file"]
    way_out = (
        "copy it from the folder that the model was written to, or remove `freight` from config.json to use one scale "
        "per layer"
    )
    try:
        data = read_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(
            f"{path}, which config.json names, cannot be read: {error}; {way_out}"
        ) from error
    if hashlib.sha256(data).hexdigest() != named["sha256"]:
        raise CheckpointError(
            f"{path} is not the file that config.json names: its SHA-256 differs; {way_out}"
        )
    return _parse(path, data, model)


def _layer_content(layer: LayerScales | None) -> dict[str, Any]:
    if layer is None:
        return {}
    return {key: list(value) for key in _REQUIRED | _OPTIONAL if (value := getattr(layer, key))}


def _layer_values(content: Mapping[str, Any], mixed: bool) -> dict[str, tuple[float, ...]]:
    """Return the scales of a layer. `mixed`: the layer names its granularity as well."""
    values = {}
    for key, numbers in content.items():
        if not (mixed and key == "granularity"):
            values[key] = tuple(map(float, numbers))
    return values


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _parse(path: Path, data: bytes, model: ModelConfig) -> KVScales:
    """Parse the file's content. The hash shows that the file is unchanged; the content must still
    fit the model.
    """
    try:
        content = json.loads(data)
        format = Format(content["format"])
        by_layer = content["layers"]
        mixed: tuple[Granularity | None, ...] = ()
        if content["granularity"] == MIXED:
            mixed = tuple(
                one["granularity"] and Granularity(one["granularity"]) for one in by_layer
            )
        granularity = Granularity.TENSOR if mixed else Granularity(content["granularity"])
        layers = [_layer_values(one, mixed=bool(mixed)) for one in by_layer]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} holds no KV scales: {type(error).__name__}: {error}"
        ) from error
    if Granularity.GROUP in mixed:
        raise CheckpointError(
            f"{path} has a layer with scales per group, which such a file never has; quantize again"
        )
    if not format.is_e4m3 or granularity.is_dynamic or len(layers) != model.num_layers:
        raise CheckpointError(
            f"{path} has {MIXED if mixed else granularity} scales for {format} and {len(layers)} layers; the model has "
            f"{model.num_layers}"
        )
    scales: list[LayerScales | None] = []
    for index, layer in enumerate(layers):
        where = f"{path}: layer {index}"
        mixer = model.paged.get(index)
        own = mixed[index] if mixed else granularity
        if own is None or own is Granularity.TOKEN or mixer is None:
            if layer:
                raise CheckpointError(
                    f"{where} has {sorted(layer)}, but it is stored without static scales"
                )
            scales.append(None)
            continue
        _check_layer(where, layer, own, mixer)
        # Latents are also the values, which would lack the center: no channel may have one
        rotated = None if mixer.v_in_k else mixer.rope
        rotary_dim = 0 if rotated is None else model.ropes[rotated].rotary_dim
        _check_rotated(where, layer.get("k_center", ()), mixer.k_dim, rotary_dim)
        scales.append(
            LayerScales(**layer, granularity=own, names=(f"{path.name}:layers[{index}]",), alone="")
        )
    return KVScales(tuple(scales), format, mixed=mixed, unneeded=model.without_pages)


def _check_layer(
    where: str, layer: dict[str, tuple[float, ...]], granularity: Granularity, mixer: PagedMixer
) -> None:
    """Raise CheckpointError if scales or centers do not fit the layer, or are no valid numbers."""
    if "v_center" in layer:
        raise CheckpointError(
            f"{where} has v_center: it was made by an older version of Freight, which centered values as well; "
            "quantize the model again with --center"
        )
    if not set(_REQUIRED) <= set(layer) <= set(_REQUIRED | _OPTIONAL):
        raise CheckpointError(
            f"{where} has {sorted(layer)}, which this version does not understand"
        )
    heads = mixer.num_kv_heads
    dims = {"k": mixer.k_dim, "v": mixer.v_dim}
    for side in _REQUIRED:
        needed = granularity.num_scales(heads, dims[side])
        if len(layer[side]) != needed:
            raise CheckpointError(
                f"{where} has {len(layer[side])} scales of {side}, the model needs {needed}"
            )
        if not all(math.isfinite(value) and value > 0 for value in layer[side]):
            raise CheckpointError(f"{where}: a scale of {side} is not finite and above 0")
    for center in _OPTIONAL:
        values = layer.get(center, ())
        needed = heads * dims[center[0]]
        if values and (len(values) != needed or not all(map(math.isfinite, values))):
            raise CheckpointError(f"{where}: {center} is not {needed} finite numbers")


def _check_rotated(where: str, k_center: tuple[float, ...], k_dim: int, rotary_dim: int) -> None:
    """Raise CheckpointError for a center of a key's channel after the rotated ones (`KeyCenter`)."""
    for index, value in enumerate(k_center):
        if value and index % k_dim >= rotary_dim:
            raise CheckpointError(
                f"{where}: k_center is {value} in channel {index % k_dim} of a head, but this model rotates only the "
                f"first {rotary_dim}; remove `freight` from config.json to use one scale per layer"
            )
