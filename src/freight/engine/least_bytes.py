"""What the weights of a model take at least, from its headers alone."""

from __future__ import annotations

import math

from freight.model.architectures import tensor_names
from freight.model.loader import tensor_shapes
from freight.model.open import OpenModel
from freight.settings.engine import EngineConfig


def least_weight_bytes(opened: OpenModel, config: EngineConfig) -> int:
    """Bytes that the weights occupy at least: layers' matrices in the format they are kept in, the
    rest as computed.
    """
    model = opened.model
    scheme = opened.scheme
    names = tensor_names(model)
    matrix = min(config.weight_format.bytes, config.compute_format.bytes)
    total = 0
    for name, shape in tensor_shapes(model).items():
        count = math.prod(shape)
        if len(shape) < 2 or name.endswith("bias") or name in names.outer:
            total += count * config.compute_format.bytes
            continue
        size = count * matrix
        declared = scheme.linear(name.rpartition(".")[0])
        if config.int4 or (declared is not None and declared.bits == 4):
            size //= 2
        total += size
    return total
