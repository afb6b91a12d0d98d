"""A model's weights under the schemes of `freight quantize --weights`, made in memory as they are
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from freight.checkpoint.declare import scale_format
from freight.config.engine import EngineConfig
from freight.config.quantize_plan import Layout
from freight.errors import ConfigError, choices
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows, quantize_tensor
from freight.models.decoder import Decoder
from freight.models.loader import build_decoder
from freight.models.open import OpenModel
from freight.models.sources import CheckpointSource, WeightSource
from freight.operands.weight import Activations, Weight

SCHEMES = ("fp8", "fp8-channel", "fp8-block")


@dataclass(frozen=True)
class RoundedSource:
    """A source of 16-bit weights whose matrices, but not the head, are rounded to FP8; activations
    are dynamic.
    """

    plain: WeightSource
    scheme: str
    format: Format
    scale_format: Format

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.plain.tensor(name, shape)

    def table(self, name: str, shape: tuple[int, ...], format: Format) -> Tensor:
        return self.plain.table(name, shape, format)

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.plain.exact(name, shape)

    def head(self, name: str, shape: tuple[int, ...]) -> Weight:
        return self.plain.head(name, shape)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        return self._rounded(self.plain.weight(name, shape).data)

    def input_scale(self, name: str) -> float | None:
        return None  # activations are dynamic

    def experts(self, name: str, shape: tuple[int, ...], pairs: bool) -> Iterator[Weight]:
        return (self._rounded(weight.data) for weight in self.plain.experts(name, shape, pairs))

    def _rounded(self, data: Tensor) -> Weight:
        rounded = {
            "fp8": quantize_tensor,
            "fp8-channel": quantize_rows,
            "fp8-block": quantize_blocks,
        }[self.scheme]
        stored, scale = rounded(data, self.format, self.scale_format)
        if scale.ndim == 0:
            scale = scale.expand(len(stored)).contiguous()
        return Weight(stored, scale, Activations.DYNAMIC)


def check_schemes(opened: OpenModel, schemes: tuple[str, ...], quantization: str | None) -> None:
    """Raises ConfigError for an unknown scheme, and where the weights are not in 16 or 32 bits."""
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ConfigError(f"--weights {scheme!r} is unknown: choose among {choices(SCHEMES)}")
    if schemes and (
        quantization is not None
        or opened.scheme.weight_format is not None
        or opened.checkpoint is None
    ):
        raise ConfigError(
            f"--weights {','.join(schemes)}, but the weights are quantized already, or asked to be; "
            "name the 16-bit model, without --quantization"
        )


def load_rounded(
    opened: OpenModel, config: EngineConfig, scheme: str, num_positions: int
) -> Decoder:
    """The model with its weights under `scheme`, for `num_positions` as in `OpenModel.load`.

    Its 16-bit decoder has been loaded, so its tensors are checked.
    """
    assert opened.checkpoint is not None
    plain = CheckpointSource(
        opened.checkpoint, config.compute_format, config.compute_format, config.device
    )
    scales_in = scale_format(Layout.COMPRESSED_TENSORS, opened.model.checkpoint_format)
    source = RoundedSource(plain, scheme, opened.device.native_e4m3, scales_in)
    model = opened.model.for_context(config.max_model_len)
    return build_decoder(model, source, opened.kernels(config), num_positions, config.device)
