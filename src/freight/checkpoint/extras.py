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

from freight.base.fields import JsonObject
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


def write_extras(scales: KVScales) -> tuple[JsonObject, dict[str, bytes]]:
    """Return (entries for config.json, {file name: content}). Every layer must have scales, or a
    choice in `mixed`.
    """
    layers: list[JsonObject] = []
    if scales.mixed:
        assert len(scales.mixed) == len(scales.layers)
        granularity = MIXED
        for chosen, layer in zip(scales.mixed, scales.layers, strict=True):
            layers.append({"granularity": chosen and str(chosen)} | _layer_content(layer))
    else:
        assert not scales.missing
        granularity = next(str(layer.granularity) for layer in scales.layers if layer is not None)
        layers += map(_layer_content, scales.layers)
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
    named = _named(declared)
    if named is None:
        raise CheckpointError(
            f"{checkpoint.path}/config.json: freight = {declared!r} is not understood by this version"
        )
    file, digest = named
    if Path(file).name != file:
        raise CheckpointError(
            f"{checkpoint.path}/config.json names {file!r}, which lies outside the folder"
        )
    path = checkpoint.path / file
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
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(
            f"{path} is not the file that config.json names: its SHA-256 differs; {way_out}"
        )
    return _parse(path, data, model)


def _named(declared: object) -> tuple[str, str] | None:
    """Return (file, SHA-256) of what `freight` declares; None for a form of another version."""
    match declared:
        case {"kv_scales": {"file": str(file), "sha256": str(digest), **more}, **outer} if not more:
            return (file, digest) if outer.keys() <= WRITTEN.keys() else None
    return None


def _layer_content(layer: LayerScales | None) -> dict[str, list[float]]:
    if layer is None:
        return {}
    content = {"k": list(layer.k), "v": list(layer.v)}
    if layer.k_center:
        content["k_center"] = list(layer.k_center)
    return content


def _parse(path: Path, data: bytes, model: ModelConfig) -> KVScales:
    """Parse the file's content. The hash shows that the file is unchanged; the content must still
    fit the model.
    """
    try:
        content = json.loads(data)
        format = Format(content["format"])
        named = content["granularity"]
        mixed: tuple[Granularity | None, ...] = ()
        if named == MIXED:
            chosen = [layer.pop("granularity") for layer in content["layers"]]
            mixed = tuple(name and Granularity(name) for name in chosen)
        granularity = Granularity.TENSOR if mixed else Granularity(named)
        layers: list[dict[str, tuple[float, ...]]] = []
        for layer in content["layers"]:
            layers.append({key: tuple(map(float, numbers)) for key, numbers in layer.items()})
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
            f"{path} has {named} scales for {format} and {len(layers)} layers; the model has "
            f"{model.num_layers}"
        )
    scales: list[LayerScales | None] = []
    for index, layer in enumerate(layers):
        where = f"{path}: layer {index}"
        mixer = model.paged.get(index)
        of_layer = mixed[index] if mixed else granularity
        if of_layer is None or of_layer is Granularity.TOKEN or mixer is None:
            if layer:
                raise CheckpointError(
                    f"{where} has {sorted(layer)}, but it is stored without static scales"
                )
            scales.append(None)
            continue
        # Latents are also the values, which would lack the center: no channel may have one
        rotary_dim = 0
        if not mixer.v_in_k and mixer.rope is not None:
            rotary_dim = model.ropes[mixer.rope].rotary_dim
        _check_layer(where, layer, of_layer, mixer, rotary_dim)
        names = (f"{path.name}:layers[{index}]",)
        scales.append(LayerScales(**layer, granularity=of_layer, names=names, alone=""))
    return KVScales(tuple(scales), format, mixed=mixed, unneeded=model.without_pages)


def _check_layer(
    where: str,
    layer: Mapping[str, tuple[float, ...]],
    granularity: Granularity,
    mixer: PagedMixer,
    rotary_dim: int,
) -> None:
    """Raise CheckpointError if scales or centers do not fit the layer, or are no valid numbers, and
    for a center of a key's channel after the rotated ones (`KeyCenter`).
    """
    if "v_center" in layer:
        raise CheckpointError(
            f"{where} has v_center: it was made by an older version of Freight, which centered values as well; "
            "quantize the model again with --center"
        )
    if not {"k", "v"} <= layer.keys() <= {"k", "v", "k_center"}:
        raise CheckpointError(
            f"{where} has {sorted(layer)}, which this version does not understand"
        )
    heads = mixer.num_kv_heads
    for side, dim in (("k", mixer.k_dim), ("v", mixer.v_dim)):
        needed = granularity.num_scales(heads, dim)
        if len(layer[side]) != needed:
            raise CheckpointError(
                f"{where} has {len(layer[side])} scales of {side}, the model needs {needed}"
            )
        if not all(0 < value < math.inf for value in layer[side]):
            raise CheckpointError(f"{where}: a scale of {side} is not finite and above 0")
    center = layer.get("k_center", ())
    needed = heads * mixer.k_dim
    if center and (len(center) != needed or not all(map(math.isfinite, center))):
        raise CheckpointError(f"{where}: k_center is not {needed} finite numbers")
    for index, value in enumerate(center):
        if value and index % mixer.k_dim >= rotary_dim:
            raise CheckpointError(
                f"{where}: k_center is {value} in channel {index % mixer.k_dim} of a head, but this model rotates only "
                f"the first {rotary_dim}; remove `freight` from config.json to use one scale per layer"
            )
