"""KV scales, from a checkpoint's tensors or from the kv_cache_scales.json of older engines.

Scales are found by tensor name, whatever the declared method: one pattern covers the names of all
known producers. Each scale is checked when it is read (shape, finite, above 0). A layer has valid
scales or None, with a fault for those that are stored and cannot be used; a missing scale is never
replaced by 1.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freight.base.fields import JsonObject, is_number
from freight.base.files import read_text, unique_names
from freight.checkpoint.extras import read_extras
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales, ScaleFault, Scheme
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import PagedMixer
from freight.settings.kv_source import nearest_float32

_NAME = re.compile(
    r"""(?:^|\.) layers\.(?P<layer>\d+)\. (?:
        self_attn\.(?:
            (?P<a>k|v|kv)_scale                         # AutoFP8, compressed-tensors, Quark, TGI (kv)
          | attn\.(?P<b>[kv])_scale                     # saved in vLLM's own form
          | (?:qkv_proj\.)?(?P<c>[kv])_proj\.output_scale  # compressed-tensors before 0.7, Quark native
          | (?P<d>[kv])_proj\.(?P=d)_scale              # ModelOpt
          | qk(?:qk)?v_proj\.(?P<e>[kv])_scale          # fused projections
          | (?P<f>[kv])_cache\.scale                    # Hy3
        )
      | mixer\.(?:                                      # Nemotron-H
            (?P<g>[kv])_proj\.(?P=g)_scale              # ModelOpt
          | (?:attn\.)?(?P<j>[kv])_scale                # compressed-tensors, vLLM
        )
      | attention\.(?:
            (?P<h>k|v|kv)_fake_quantizer\.qscale_act    # Mistral's own files
          | (?P<i>kv)_cache_scaling_factor              # TensorRT-LLM, AMMO
          | (?:attn\.)?(?P<l>[kv])_scale                # Ling: compressed-tensors, vLLM
        )
    )$""",
    re.VERBOSE,
)
# Biases of ModelOpt's affine cache
_AFFINE = re.compile(r"layers\.(\d+)\.(?:self_attn|mixer)\.(?:k_proj\.k|v_proj\.v)_bias$")
_ZERO_POINT = re.compile(r"layers\.(\d+)\.[\w.]*\b(?:[kv]|[kv]_proj\.output)_zero_point$")
# Parts whose layers are numbered from 0 again: those that predict further tokens (mtp), and models
# of pictures and sounds
_OTHER_PART = re.compile(r"(?:^|\.)(?:mtp|\w*(?:vision|visual|audio|sound)\w*)\.")
_ORDER = (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)  # from coarse to fine


def is_other_part(name: str) -> bool:
    """Return whether the tensor belongs to a part whose layer numbers are not the decoder's."""
    return _OTHER_PART.search(name) is not None


def parse_scale_name(name: str) -> tuple[int, str] | None:
    """Parse a KV scale's tensor name into (layer, 'k', 'v' or 'kv'); None for any other tensor, and
    for other parts' scales.
    """
    match = _NAME.search(name)
    if match is None or is_other_part(name):
        return None
    layer, *sides = match.groups()
    return int(layer), next(filter(None, sides))


def is_shift(name: str) -> bool:
    """Return whether the tensor is a bias or a zero point of the KV cache."""
    return _shift(name) is not None


_Side = tuple[str, tuple[float, ...]]  # a tensor's name, and its values
_Factor = tuple[str, float]  # a name, and the scale of K and V


def read_kv_scales(
    checkpoint: Checkpoint, model: ModelConfig, scheme: Scheme, extras: bool = True
) -> KVScales:
    """Take all KV scales of the checkpoint. Their format is the one that `scheme` declares; without
    one, E4M3FN is assumed.

    The scales of a side file (`checkpoint.extras`) take precedence. With `extras` False the scales
    of the tensors are returned, which are valid without centers.

    If only K or V has a scale, it is used for both, and `LayerScales.alone` names it; `kv_scale` is
    for both. `KVScales.faults` names tensor and value of a scale that is not positive and finite,
    has a shape that fits neither tensor, head nor channel granularity, has different values under
    two names, or belongs to a layer that stores no keys and values, of affine (biased) KV scales,
    of a side file that cannot be used, and of scales of a cache in another format than FP8
    (`Scheme.kv_refused`). Raises CheckpointError for a scale of a layer that the
    model does not have.
    """
    by_layer: list[dict[str, _Side]] = [{} for _ in range(model.num_layers)]
    faults: list[ScaleFault] = []
    for name in sorted(checkpoint.names):
        index = _layer_of(name, model)
        if index is None:
            continue
        try:
            _add(by_layer[index], checkpoint, name, index, model)
        except CheckpointError as error:
            faults.append(ScaleFault(index, str(error)))
        checkpoint.skip(name, "a KV scale that is not used")  # unless it was taken
    if scheme.kv_refused:
        what = (
            f"config.json declares a KV cache that is not implemented ({scheme.kv_refused}), and its scales are for "
            "that; FP8 is"
        )
        faults = [ScaleFault(None, what)]
        by_layer = [{} for _ in range(model.num_layers)]
    try:
        finer = read_extras(checkpoint, model) if extras else None
    except CheckpointError as error:
        missing = (None,) * model.num_layers
        fault = ScaleFault(None, str(error))
        return KVScales(missing, unneeded=model.without_pages, faults=(fault,))
    if finer is not None:
        return finer
    faulty = {fault.layer for fault in faults}
    layers: list[LayerScales | None] = [None] * model.num_layers
    for index, mixer in model.paged.items():
        source = index if mixer.kv_from is None else mixer.kv_from
        if by_layer[source] and source not in faulty:
            layers[index] = _layer(by_layer[source], mixer)
    return KVScales(
        tuple(layers),
        scheme.kv_format or Format.E4M3FN,
        scheme.kv_format is None and any(layers),
        unneeded=model.without_pages,
        faults=tuple(faults),
    )


def _layer_of(name: str, model: ModelConfig) -> int | None:
    """Return the layer of a tensor of the KV cache; None for any other, and for those of layers that
    predict further tokens, which Freight does not run. Raises CheckpointError for a scale of a
    layer that the model does not have.
    """
    parsed = parse_scale_name(name)
    layer = parsed[0] if parsed else _shift(name)
    if layer is None or layer < model.num_layers:
        return layer
    if layer >= model.num_layers + model.prediction_layers:
        raise CheckpointError(
            f"{name} is a KV scale of layer {layer}, but the model has {model.num_layers} layers"
        )
    return None


def _shift(name: str) -> int | None:
    """Return the layer of a bias or a zero point of keys or values; None for any other tensor."""
    match = _AFFINE.search(name) or _ZERO_POINT.search(name)
    return None if match is None or is_other_part(name) else int(match[1])


def _add(
    sides: dict[str, _Side], checkpoint: Checkpoint, name: str, layer: int, model: ModelConfig
) -> None:
    """Read the tensor `name` of a layer into its `sides`. Raises CheckpointError for one that
    cannot be used.
    """
    parsed = parse_scale_name(name)
    if parsed is None:
        if _AFFINE.search(name) or checkpoint.copy(name).float().any():
            raise checkpoint.fault(
                f"{name}: an affine KV cache (with a bias or a zero point for each scale) is not implemented; export "
                "the model with a symmetric FP8 cache"
            )
        return
    if layer in model.without_pages:
        raise CheckpointError(
            f"{name} is a KV scale of layer {layer}, which has no attention and stores no keys and values; remove "
            "it from the checkpoint"
        )
    source = model.paged[layer].kv_from
    if source is not None:
        raise CheckpointError(
            f"{name} is a KV scale of layer {layer}, which reads the keys and values of layer {source} and stores "
            "none; remove it from the checkpoint"
        )
    values = _read(checkpoint, name, parsed[1], model.paged[layer])
    for side in parsed[1]:
        other, present = sides.setdefault(side, (name, values))
        if present != values:
            raise CheckpointError(
                f"{other} = {_short(present)} and {name} = {_short(values)} are two values of one KV scale"
            )


def _layer(sides: Mapping[str, _Side], mixer: PagedMixer) -> LayerScales:
    """Build the scales of a layer, both sides in the finer of their granularities; expanding is
    exact. Values of a latent layer are channels of keys, so K's scale is used for both there, and
    V's is ignored.
    """
    k_name, k = sides.get("k") or sides["v"]
    v_name, v = sides.get("v") or sides["k"]
    alone = ""
    if len(sides) == 1:
        (alone,) = sides
    heads = mixer.num_kv_heads
    if mixer.v_in_k:
        v = k[-mixer.v_dim :]
        granularity = Granularity.TENSOR if len(k) == 1 else Granularity.CHANNEL
        if alone == "k":
            alone = ""
    else:
        granularities = _granularity(k, heads, mixer.k_dim), _granularity(v, heads, mixer.v_dim)
        granularity = max(granularities, key=_ORDER.index)
        k = _repeat(k, granularity.num_scales(heads, mixer.k_dim))
        v = _repeat(v, granularity.num_scales(heads, mixer.v_dim))
    names = tuple(dict.fromkeys((k_name, v_name)))
    return LayerScales(k, v, granularity, names, alone=alone)


def _granularity(scales: Sequence[float], heads: int, dim: int) -> Granularity:
    """Return the first of `_ORDER` that has as many scales."""
    numbers = [granularity.num_scales(heads, dim) for granularity in _ORDER]
    return _ORDER[numbers.index(len(scales))]


def _repeat(values: tuple[float, ...], size: int) -> tuple[float, ...]:
    """Repeat each value to fill `size`, row-major: (a, b) -> (a, a, b, b)."""
    repeated: list[float] = []
    for value in values:
        repeated += [value] * (size // len(values))
    return tuple(repeated)


def _read(checkpoint: Checkpoint, name: str, sides: str, mixer: PagedMixer) -> tuple[float, ...]:
    shape = checkpoint.shape_of(name)
    heads = mixer.num_kv_heads
    channels = mixer.k_dim if "k" in sides else mixer.v_dim
    known = [(heads,), (heads, 1, 1), (1, heads, 1, 1), (heads, channels)]
    if math.prod(shape) != 1 and shape not in known:
        raise CheckpointError(
            f"KV scale {name} has shape {list(shape)}; one number, [{heads}], [{heads}, 1, 1] (one per KV head) or "
            f"[{heads}, {channels}] (one per channel) can be read"
        )
    values: list[float] = checkpoint.take(name, shape).float().flatten().tolist()
    for value in values:
        require_positive(f"KV scale {name}", value)
    return tuple(values)


def _short(values: tuple[float, ...]) -> str:
    if len(values) == 1:
        return f"{values[0]:.9g}"
    return f"{values[0]:.9g}, … ({len(values)} values)"


def require_positive(what: str, value: float) -> None:
    """Raise CheckpointError unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{what} is {value}; a scale has to be finite and above 0")


def read_scale_json(path: Path, model: ModelConfig) -> KVScales:
    """Read the kv_cache_scales.json of older engines: one factor per rank and layer, for K and V,
    made for E4M3FN.

    Form: {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0":
    {"0": 0.015, …}}}}, where scaling_factor is {rank: {layer: factor}}. `model_type` may be
    missing. A rank's factor is for its KV heads (`join_ranks`). Raises CheckpointError, naming file
    and entry, unless every rank has one positive finite factor for each of the model's layers with
    attention, and where ranks that share a KV head differ.
    """
    content = _load(path)
    if content.get("model_type") not in (None, model.model_type):
        raise CheckpointError(
            f"{path} is for model_type {content['model_type']!r}, but the model is {model.model_type!r}"
        )
    kv_cache = _object(path, content, "kv_cache")
    if kv_cache.get("dtype") != "float8_e4m3fn":
        raise CheckpointError(
            f"{path}: kv_cache.dtype is {kv_cache.get('dtype')!r}; only 'float8_e4m3fn' can be read"
        )
    ranks = _object(path, kv_cache, "scaling_factor")
    _check_ranks(path, ranks, model)
    expected = [str(layer) for layer in model.paged]
    by_rank = [_rank_factors(path, ranks, str(rank), expected) for rank in range(len(ranks))]
    by_layer = dict(zip(model.paged, zip(*by_rank, strict=True), strict=True))
    heads = {layer: mixer.num_kv_heads for layer, mixer in model.paged.items()}
    scales = join_ranks(path, by_layer, heads)
    layers = tuple(map(scales.get, range(model.num_layers)))
    return KVScales(layers, Format.E4M3FN, unneeded=model.without_pages)


def _check_ranks(path: Path, ranks: JsonObject, model: ModelConfig) -> None:
    """Check that ranks are '0', '1', … without a gap, and share the KV heads of every layer evenly."""
    count = len(ranks)
    if not ranks or set(ranks) != {str(rank) for rank in range(count)}:
        bad = [rank for rank in ranks if not rank.isdecimal()]
        if bad:
            why = f"{bad[0]!r} is not a rank number"
        else:
            why = f"it has {count} ranks, {_some(ranks) or 'none'}"
        raise CheckpointError(
            f"{path}: scaling_factor must have ranks '0', '1' and so on without a gap, but {why}"
        )
    for index, mixer in model.paged.items():
        _require_even(path, count, mixer.num_kv_heads, index)


def _require_even(source: Path, count: int, heads: int, layer: int) -> None:
    """Raise CheckpointError where `count` ranks cannot share the KV heads of a layer evenly."""
    if heads % count and count % heads:
        raise CheckpointError(
            f"{source} is for {count} ranks, which cannot share the {heads} KV heads of layer {layer}: it belongs to "
            "another model"
        )


def join_ranks(
    source: Path,
    factors: Mapping[int, Sequence[_Factor]],
    num_kv_heads: Mapping[int, int],
) -> dict[int, LayerScales]:
    """Make scales of what each rank of a tensor-parallel engine has for its own KV heads.

    factors: by layer, (name, factor of K and V) of each rank; num_kv_heads: of the whole model, by
    layer. Such engines give rank r of n the heads from r * num_kv_heads / n on; with fewer heads
    than ranks, n / num_kv_heads ranks have the same one. The result has one scale per layer where
    all ranks agree, in every layer, else one per KV head.

    Raises CheckpointError, naming `source`, layer and factors, where ranks with the same head
    differ, or do not divide the heads evenly.
    """
    by_layer = {}
    if not _differing(factors.values()):
        for layer, ((name, factor), *_) in factors.items():
            by_layer[layer] = LayerScales((factor,), (factor,), Granularity.TENSOR, (name,))
        return by_layer
    different = []
    for layer, ranks in factors.items():
        count = len(ranks)
        heads = num_kv_heads[layer]
        _require_even(source, count, heads, layer)
        per_head = max(1, count // heads)
        values = [factor for _, factor in ranks]
        if _differing(ranks[first : first + per_head] for first in range(0, count, per_head)):
            named = (f"rank {rank}: {factor:.9g}" for rank, factor in enumerate(values))
            different.append(f"layer {layer} ({', '.join(named)})")
        scales = _repeat(tuple(values[::per_head]), heads)
        names = tuple(name for name, _ in ranks)
        by_layer[layer] = LayerScales(scales, scales, Granularity.HEAD, names)
    if different:
        more = f" and {len(different) - 3} more layers" if len(different) > 3 else ""
        raise CheckpointError(
            f"{source}: ranks that have the same KV head have different factors in {'; '.join(different[:3])}{more}; a "
            "head can have one: write the largest for all of its ranks"
        )
    return by_layer


def _differing(groups: Iterable[Sequence[_Factor]]) -> bool:
    """Return whether the factors of any group of ranks differ."""
    return any(len({factor for _, factor in ranks}) > 1 for ranks in groups)


def _rank_factors(path: Path, ranks: JsonObject, rank: str, expected: list[str]) -> list[_Factor]:
    factors = _object(path, ranks, rank)
    if set(factors) != set(expected):
        faults = []
        missing = [layer for layer in expected if layer not in factors]
        if missing:
            faults.append(f"lacking {_some(missing)}")
        unknown = [layer for layer in factors if layer not in expected]
        if unknown:
            faults.append(f"unknown {_some(unknown)}")
        of_rank = f" in rank {rank}" if len(ranks) > 1 else ""
        raise CheckpointError(
            f"{path} has factors for {len(factors)} layers{of_rank}, but the model has {len(expected)}: "
            f"{'; '.join(faults)}"
        )
    return [_json_factor(path, rank, layer, factors[layer]) for layer in expected]


def _json_factor(path: Path, rank: str, layer: str, value: Any) -> tuple[str, float]:
    name = f"scaling_factor[{rank}][{layer}]"
    if not is_number(value):
        raise CheckpointError(f"{path}: {name} is {value!r}, not a number")
    factor = nearest_float32(value)
    if not (math.isfinite(factor) and factor > 0):
        raise CheckpointError(f"{path}: {name} is {value}; a scale has to be finite and above 0")
    return f"{path.name}:{name}", factor


def _load(path: Path) -> JsonObject:
    try:
        content = json.loads(read_text(path), object_pairs_hook=unique_names)
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON file of KV scales: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON file of KV scales: it has no object")
    return content


def _object(path: Path, parent: JsonObject, key: str) -> JsonObject:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key!r} is missing, or not an object")
    return value


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(map(repr, names[:6])) + (", …" if len(names) > 6 else "")
