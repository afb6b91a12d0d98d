"""torchao's Float8 types: `X.weight` is stored as `X._weight_qdata` and `X._weight_scale`.

The configuration gives the granularity of activations and weights. The tensors show which modules
were quantized, because torchao skips those that its kernels do not support.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freight.base.fields import JsonObject
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import (
    E4M3,
    block_size,
    mapping,
    part,
    require_blocks_for_groups,
)
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales

_TYPES = {
    "Float8DynamicActivationFloat8WeightConfig": Activations.DYNAMIC,
    "Float8WeightOnlyConfig": Activations.PLAIN,
}
_MAPS = {"ModuleFqnToConfig": "module_fqn_to_config", "FqnToConfig": "fqn_to_config"}


def read_torchao(declared: JsonObject) -> Scheme:
    """Read the declaration of torchao. Raises CheckpointError for what is not implemented."""
    default = _inner(declared.get("quant_type"), "default")
    rules = patterns.rules(declared, "modules_to_not_convert", patterns.searched)
    kind = _inner(default, "_type")
    if isinstance(default, Mapping) and kind in _MAPS:
        rules += _mapped(part(part(default, "_data"), _MAPS[kind]))
    else:
        rules.append(Rule(patterns.every(), _linear(default)))
    return Scheme("torchao", E4M3, rules=tuple(rules))


def _inner(value: object, key: str) -> Any:
    """Return what an object has under `key`; a value that is no object unchanged."""
    return value.get(key) if isinstance(value, Mapping) else value


def _mapped(configs: JsonObject) -> list[Rule]:
    """Return the rules of a map: names first, then expressions, then `_default`. A name is that of
    the module or of its weight.
    """
    schemes: dict[str, LinearScheme | None] = dict.fromkeys(configs)
    for name, config in configs.items():
        if config is not None:
            schemes[name] = _linear(config)
    default = schemes.pop("_default", None)
    named = []
    for name in sorted(schemes, key=lambda name: name.startswith("re:")):
        named.append((name.removesuffix(".weight"), schemes[name]))
    rules = patterns.joined(named, patterns.exact, "the map of quant_type")
    return [*rules, Rule(patterns.every(), default)]


def _linear(config: Any) -> LinearScheme:
    kind = _inner(config, "_type")
    if kind not in _TYPES:
        raise CheckpointError(
            f"torchao with quant_type {kind!r} is not implemented; {', '.join(_TYPES)} are"
        )
    data: JsonObject = {}
    if isinstance(config, Mapping):
        data = mapping(config.get("_data"), f"{kind}._data")
    for key in ("weight_dtype", "activation_dtype"):
        dtype = _inner(data.get(key), "_data")
        if dtype not in (None, E4M3.torch_name, f"torch.{E4M3.torch_name}"):
            raise CheckpointError(
                f"torchao {kind} with {key} {dtype!r} is not implemented; {E4M3.torch_name} is"
            )
    limit = data.get("activation_value_ub")
    if limit is not None:
        if not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise CheckpointError(
                f"torchao {kind} with activation_value_ub {limit!r}: it must be finite and above 0"
            )
        limit = float(limit)
    weights = data.get("granularity")
    inputs = None
    if isinstance(weights, list):
        inputs = weights[0]
        weights = weights[-1]
    scales, block = _scales(weights, kind)
    if inputs is not None and block is None:
        of_inputs = str(mapping(inputs, "granularity").get("_type"))
        require_blocks_for_groups(of_inputs, f"torchao {kind} activations")
    return LinearScheme(scales, _TYPES[kind], block, limit, or_plain=True)


def _scales(granularity: Any, kind: str) -> tuple[WeightScales, tuple[int, int] | None]:
    """Return the weight's granularity and block; without a declared one, torchao's default."""
    if granularity is None and kind == "Float8WeightOnlyConfig":
        return WeightScales.ROW, None
    if granularity is None:
        return WeightScales.TENSOR, None
    declared = mapping(granularity, f"{kind} granularity")
    name = declared.get("_type")
    data = mapping(declared.get("_data"), f"{kind} granularity._data")
    if name == "PerRow" and data.get("dim", -1) in (-1, 1):
        return WeightScales.ROW, None
    if name == "PerTensor":
        return WeightScales.TENSOR, None
    if name == "PerBlock":
        return WeightScales.BLOCK, block_size(data.get("block_size"), "PerBlock block_size")
    if name == "PerGroup":
        size = [1, data.get("group_size")]
        return WeightScales.BLOCK, block_size(size, "PerGroup [1, group_size]")
    raise CheckpointError(f"torchao {kind} with granularity {granularity!r} is not implemented")
