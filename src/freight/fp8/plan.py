"""QuantizePlan: what a quantizer run will do, as plain values. Imports no torch. `config.quantize.plan` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freight.fp8.formats import Granularity


class WeightScheme(StrEnum):
    """Which elements of a weight share a scale."""

    TENSOR = "fp8"
    CHANNEL = "fp8-channel"  # one output row
    BLOCK = "fp8-block"  # 128 x 128
    NONE = "none"


class ActivationScheme(StrEnum):
    """What the checkpoint declares about the inputs of quantized Linear modules."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    NONE = "none"


class Layout(StrEnum):
    """The checkpoint layout that is written."""

    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"  # AutoFP8's; with fp8-block, DeepSeek's
    TGI = "tgi"


class ObserverKind(StrEnum):
    """How a scale is derived from the observed values."""

    ABSMAX = "absmax"
    PERCENTILE = "percentile"
    MSE = "mse"


@dataclass(frozen=True)
class QuantizePlan:
    """A resolved quantizer run. `kv_granularity` is None if the KV cache is not quantized; `center` requires one.

    `lm_head`: the output head is quantized like the other Linear modules.
    """

    weights: WeightScheme
    activations: ActivationScheme
    kv_granularity: Granularity | None
    ignore: tuple[str, ...]
    num_samples: int
    max_seq_len: int
    observer: ObserverKind
    layout: Layout
    center: bool = False
    lm_head: bool = False

    @property
    def needs_data(self) -> bool:
        """Whether anything is calibrated."""
        return self.activations is ActivationScheme.STATIC or self.kv_granularity is not None

    @property
    def needed_by(self) -> str:
        """The settings that need calibration data, for messages."""
        static = ["--activations static"] * (self.activations is ActivationScheme.STATIC)
        return " and ".join(static + ["--kv-cache fp8"] * (self.kv_granularity is not None))
