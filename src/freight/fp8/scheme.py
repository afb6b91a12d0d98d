"""What a checkpoint declares about its quantization, and the KV scales it carries, as plain values. Imports no torch.

Scales are Python floats (exact images of the float32 values), always multipliers: `true ≈ stored * scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.fp8.formats import Format, Granularity


@dataclass(frozen=True)
class LayerScales:
    """The static KV scales of one attention layer.

    `k` and `v` hold 1 (`tensor`), `num_kv_heads` (`head`) or `num_kv_heads * head_dim` (`channel`) positive finite
    floats, in row-major order; `names` are the tensors (or the JSON entries) they were read from.
    """

    k: tuple[float, ...]
    v: tuple[float, ...]
    granularity: Granularity
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class KVScales:
    """KV scales by layer, `None` where a layer has none, and the format they were made for."""

    layers: tuple[LayerScales | None, ...]
    format: Format = Format.E4M3FN

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the layers without scales."""
        return tuple(i for i, layer in enumerate(self.layers) if layer is None)

    @property
    def empty(self) -> bool:
        return len(self.missing) == len(self.layers)


@dataclass(frozen=True)
class Scheme:
    """What config.json (or hf_quant_config.json) declares.

    `method` is the producer's name ('compressed-tensors', 'fp8', 'modelopt', …) or None for an unquantized model;
    `weight_format` is FP8 when Linear weights are declared quantized; `kv_format` is FP8 when an FP8 KV cache is
    declared; `kv_static` says that the declaration promises scales in the checkpoint, which ModelOpt's cast mode
    does not. `description` is one line for people.
    """

    method: str | None = None
    weight_format: Format | None = None
    kv_format: Format | None = None
    kv_static: bool = False
    description: str = "none"
