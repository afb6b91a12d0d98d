"""Models of a given shape with random weights, made in memory, to measure speed without downloads.

Every matrix is created in its final format, so a 16-bit copy of an FP8 model never exists. Values
are finite and have the variance that keeps activations near 1; the generated text is meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.fp8.four_bits import int4_scale_dtype
from freight.fp8.scheme import int4_group
from freight.kernels.interface import KernelSet
from freight.model.config.model import ModelConfig
from freight.model.decoder import Decoder
from freight.model.loader import build_decoder, require_groups
from freight.model.shapes import tensor_shapes
from freight.model.shares import Share
from freight.model.sources import narrower
from freight.operands.weight import Activations, Codes, Groups, Weight
from freight.parallel.stages import Stage
from freight.settings.lora import LoraConfig

_MEAN_SQUARE = 21.5  # of the integers from -8 to 7
# In each of 8 bytes, clear the top bit of the exponent and set the last bit of the mantissa. No
# such code is a NaN or an infinity in any FP8 format.
_CLEARED = ~0x4040404040404040
_SET = 0x0101010101010101


@dataclass(frozen=True)
class RandomSource:
    """A `WeightSource` that draws each tensor at random; the same seed gives the same model.

    `norm` is the value of every norm weight, as it is stored.
    """

    compute_format: Format
    weight_format: Format
    device: str
    generator: torch.Generator
    norm: float = 1.0
    int4: bool = False

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """Draw a tensor: norm weights are `norm`, biases 0, matrices uniform."""
        values = torch.empty(shape, dtype=torch_dtype(self.compute_format), device=self.device)
        if name.endswith("bias"):
            return values.zero_()
        if len(shape) == 1:
            return values.fill_(self.norm)
        bound = math.sqrt(3.0 / math.prod(shape[1:]))
        return values.uniform_(-bound, bound, generator=self.generator)

    def embedding(self, name: str, shape: Shape) -> Tensor:
        return self.tensor(name, shape)

    def table(self, name: str, shape: Shape, format: Format) -> Tensor:
        return replace(self, compute_format=narrower(self.compute_format, format)).tensor(
            name, shape
        )

    def exact(self, name: str, shape: Shape) -> Tensor:
        return self.tensor(name, shape).float()

    def weight(self, name: str, shape: Shape) -> Weight:
        size = int4_group(shape[1]) if self.int4 else None
        if size is not None:
            return self._in_groups(shape, size)
        if self.int4 or not self.weight_format.is_quantized:
            return Weight(self.tensor(name, shape))
        rows, columns = shape
        words = torch.empty(-(-rows * columns // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self.generator).bitwise_and_(_CLEARED).bitwise_or_(
            _SET
        )
        codes = words.view(torch_dtype(self.weight_format))[: rows * columns].view(shape)
        every = torch.arange(2**8, dtype=torch.uint8, device=self.device) & (_CLEARED & 0xFF) | 1
        mean_square = decode(every.view(torch_dtype(self.weight_format))).square().mean()
        scale = (mean_square * columns).rsqrt().expand(rows).contiguous()
        return Weight(codes, scale, Activations.DYNAMIC)

    def _in_groups(self, shape: Shape, size: int) -> Weight:
        """Draw codes of INT4, all equally likely, with one scale for all groups."""
        rows, columns = shape
        data = torch.empty(rows, columns // 2, dtype=torch.uint8, device=self.device)
        data.random_(0, 256, generator=self.generator)
        scales = torch.full(
            (rows, columns // size),
            (_MEAN_SQUARE * columns) ** -0.5,
            dtype=int4_scale_dtype(torch_dtype(self.compute_format)),
            device=self.device,
        )
        return Weight(data, groups=Groups(Codes.INT4, size, scales))

    def input_scale(self, name: str) -> float | None:
        return None  # activations are dynamic

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterator[Weight]:
        num_experts, columns, rows = shape
        return (self.weight(name, (rows, columns)) for _ in range(num_experts))

    def head(self, name: str, shape: Shape) -> Weight:
        return Weight(self.tensor(name, shape))


@dataclass(frozen=True)
class CutSource:
    """A `WeightSource` that takes whole tensors from another one and returns a rank's share of
    them.
    """

    source: RandomSource
    share: Share
    _shared: dict[str, Tensor] = field(default_factory=dict)  # the embedding, for a tied head

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return tensor_shapes(self.share.whole)

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        pieces = self.share.pieces.get(name)
        if pieces is None:
            return tensor
        return torch.cat([tensor[piece] for piece in pieces]).contiguous()

    def tensor(self, name: str, shape: Shape) -> Tensor:
        uncut = self.source.tensor(name, self._shapes[name])
        if name == self.share.head[1]:
            self._shared[name] = uncut
        return self._cut(name, uncut)

    @property
    def compute_format(self) -> Format:
        return self.source.compute_format

    def embedding(self, name: str, shape: Shape) -> Tensor:
        return self.tensor(name, shape)

    def table(self, name: str, shape: Shape, format: Format) -> Tensor:
        return self._cut(name, self.source.table(name, self._shapes[name], format))

    def exact(self, name: str, shape: Shape) -> Tensor:
        return self._cut(name, self.source.exact(name, self._shapes[name]))

    def weight(self, name: str, shape: Shape) -> Weight:
        uncut = self.source.weight(name, self._shapes[name])
        scale = None if uncut.scale is None else self._cut(name, uncut.scale)
        groups = uncut.groups
        if groups is not None:
            groups = replace(groups, scales=self._cut(name, groups.scales))
        return replace(uncut, data=self._cut(name, uncut.data), scale=scale, groups=groups)

    def input_scale(self, name: str) -> float | None:
        return self.source.input_scale(name)

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterator[Weight]:
        ((*_, own),) = self.share.pieces[name]
        assert isinstance(own, slice)
        for uncut in self.source.experts(name, self._shapes[name], pairs):
            half = len(uncut.data) // 2
            parts = [own]
            if pairs:  # all of gate come first here
                gate = slice(own.start // 2, own.stop // 2)
                parts = [gate, slice(half + gate.start, half + gate.stop)]
            scale = uncut.scale
            groups = uncut.groups
            if groups is not None:
                groups = Groups.concat([groups.of_rows(rows) for rows in parts])
            yield replace(
                uncut,
                data=torch.cat([uncut.data[rows] for rows in parts]),
                scale=None if scale is None else torch.cat([scale[rows] for rows in parts]),
                groups=groups,
            )

    def head(self, name: str, shape: Shape) -> Weight:
        head, of_head = self.share.head
        if name == head and of_head in self._shared:
            return Weight(self._cut(name, self._shared.pop(of_head)))
        uncut = self.source.head(name, self._shapes[name])
        return replace(uncut, data=self._cut(name, uncut.data))


def random_model(
    config: ModelConfig,
    kernels: KernelSet,
    compute_format: Format,
    weight_format: Format,
    max_len: int,
    device: str,
    seed: int = 0,
    share: Share | None = None,
    int4: bool = False,
    lora: LoraConfig | None = None,
    stages: tuple[Stage, ...] = (),
) -> Decoder:
    """Build a model as `load_model` does, without a checkpoint. Every rank draws all of it, and
    keeps its `share`. `stages` as in `build_decoder`.

    Raises ConfigError for `int4` with kernels that do not take it.
    """
    require_groups(kernels, {}, int4)
    generator = torch.Generator(device).manual_seed(seed)
    source = RandomSource(
        compute_format, weight_format, device, generator, 1.0 - config.norm_offset, int4
    )
    if share is None:
        return build_decoder(config, source, kernels, max_len, device, None, lora, stages)
    rank_config = replace(share.model, ropes=config.ropes)
    cut = CutSource(source, share)
    return build_decoder(rank_config, cut, kernels, max_len, device, share, lora, stages)
