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
from freight.checkpoint.producers.common import E4M3, block_size, mapping, require_blocks_for_groups
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales

_TYPES = {
    "Float8DynamicActivationFloat8WeightConfig": Activations.DYNAMIC,
    "Float8WeightOnlyConfig": Activations.PLAIN,
}
_MAPS = {"ModuleFqnToConfig": "module_fqn_to_config", "FqnToConfig": "fqn_to_config"}


def read_torchao(declared: JsonObject) -> Scheme:
    """Read the declaration of torchao. Raises CheckpointError for what is not implemented."""
    quant_type = declared.get("quant_type")
    default = quant_type.get("default") if isinstance(quant_type, Mapping) else quant_type
    rules = patterns.rules(declared, "modules_to_not_convert", patterns.searched)
    kind = default.get("_type") if isinstance(default, Mapping) else None
    if isinstance(default, Mapping) and kind in _MAPS:
        rules += _mapped(
            mapping(mapping(default.get("_data"), "_data").get(_MAPS[str(kind)]), _MAPS[str(kind)])
        )
    else:
        rules.append(Rule(patterns.every(), _linear(default)))
    return Scheme("torchao", E4M3, rules=tuple(rules))


def _mapped(configs: JsonObject) -> list[Rule]:
    """Return the rules of a map: names first, then expressions, then `_default`. A name is that of
    the module or of its weight.
    """
    named = [name for name in configs if name != "_default"]
    order = sorted(named, key=lambda name: name.startswith("re:"))
    schemes = (
        (
            name.removesuffix(".weight"),
            None if configs[name] is None else _linear(configs[name]),
        )
        for name in order
    )
    rules = patterns.joined(schemes, patterns.exact, "the map of quant_type")
    default = configs.get("_default")
    return [*rules, Rule(patterns.every(), None if default is None else _linear(default))]


def _linear(config: Any) -> LinearScheme:
    kind = config.get("_type") if isinstance(config, Mapping) else config
    if kind not in _TYPES:
        raise CheckpointError(
            f"torchao with quant_type {kind!r} is not implemented; {', '.join(_TYPES)} are"
        )
    data = mapping(config.get("_data") if isinstance(config, Mapping) else None, f"{kind}._data")
    for key in ("weight_dtype", "activation_dtype"):
        declared = data.get(key)
        dtype = declared.get("_data") if isinstance(declared, Mapping) else declared
        if dtype not in (None, E4M3.torch_name, f"torch.{E4M3.torch_name}"):
            raise CheckpointError(
                f"torchao {kind} with {key} {dtype!r} is not implemented; {E4M3.torch_name} is"
            )
    limit = data.get("activation_value_ub")
    if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
        raise CheckpointError(
            f"torchao {kind} with activation_value_ub {limit!r}: it must be finite and above 0"
        )
    granularity = data.get("granularity")
    inputs, weights = (
        (granularity[0], granularity[-1]) if isinstance(granularity, list) else (None, granularity)
    )
    scales, block = _scales(weights, str(kind))
    if inputs is not None and block is None:
        require_blocks_for_groups(
            str(mapping(inputs, "granularity").get("_type")), f"torchao {kind} activations"
        )
    return LinearScheme(
        scales, _TYPES[kind], block, None if limit is None else float(limit), or_plain=True
    )


def _scales(granularity: Any, kind: str) -> tuple[WeightScales, tuple[int, int] | None]:
    """Return the weight's granularity and block; without a declared one, torchao's default."""
    if granularity is None:
        return (WeightScales.ROW if kind == "Float8WeightOnlyConfig" else WeightScales.TENSOR), None
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
        return WeightScales.BLOCK, block_size(
            [1, data.get("group_size")], "PerGroup [1, group_size]"
        )
    raise CheckpointError(f"torchao {kind} with granularity {granularity!r} is not implemented")
