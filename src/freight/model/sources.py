"""Sources of a model's tensors: the loader's interface, and a checkpoint behind it.

A 16-bit weight that becomes FP8 or INT8 is released before the next one is read, so memory peaks
near the size in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from freight.checkpoint.four_bits import StoredGroups, StoredPowers
from freight.checkpoint.gguf.stored import StoredBlocks
from freight.checkpoint.headers import Shape
from freight.checkpoint.linears import StoredLinear
from freight.checkpoint.mxfp4 import StoredExperts
from freight.checkpoint.reader import Checkpoint
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.four_bits import int4_scale_dtype, round_int4
from freight.fp8.scheme import INT4_GROUP, int4_group
from freight.fp8.weights import fit_rows, quantize_rows
from freight.operands.weight import Activations, Codes, Groups, Weight

# A matrix that its checkpoint has quantized
Stored = StoredLinear | StoredGroups | StoredPowers | StoredBlocks


class WeightSource(Protocol):
    """A source of a model's tensors, on the device that the model will run on."""

    @property
    def compute_format(self) -> Format:
        """The compute dtype."""
        ...

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """Read a norm or a bias, in the compute dtype."""
        ...

    def embedding(self, name: str, shape: Shape) -> Tensor | Weight:
        """Read the embedding of tokens, in the compute dtype, or in blocks where kernels take it so."""
        ...

    def table(self, name: str, shape: Shape, format: Format) -> Tensor | Weight:
        """Read a tensor whose rows are looked up, in `format`, the checkpoint's, or in the compute
        dtype if that is narrower; or in blocks where kernels take it so.
        """
        ...

    def exact(self, name: str, shape: Shape) -> Tensor:
        """Read a tensor that chooses experts, in float32: rounding it would choose others."""
        ...

    def weight(self, name: str, shape: Shape) -> Weight:
        """Read the matrix of a Linear, in its final format."""
        ...

    def input_scale(self, name: str) -> float | None:
        """Return the input scale of `weight`, without reading the matrix."""
        ...

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterable[Weight]:
        """Yield the matrices [outputs, inputs] of a tensor [experts, inputs, outputs], converted as
        by `weight`.

        `pairs`: outputs of gate and up alternate in the tensor; in a matrix all of gate come first,
        then all of up.
        """
        ...

    def head(self, name: str, shape: Shape) -> Weight:
        """Read the matrix of the output head, or of a projection next to it; neither is quantized
        at load.
        """
        ...


@dataclass(frozen=True)
class RankSource:
    """A source of one rank's tensors, whose matrices know how many outputs they have in the whole
    model (`Weight.whole`).

    source   reads the rank's tensors
    uncut    every tensor's shape in the whole model, by its name
    """

    source: WeightSource
    uncut: Mapping[str, Shape]

    @property
    def compute_format(self) -> Format:
        return self.source.compute_format

    def tensor(self, name: str, shape: Shape) -> Tensor:
        return self.source.tensor(name, shape)

    def embedding(self, name: str, shape: Shape) -> Tensor | Weight:
        return self.source.embedding(name, shape)

    def table(self, name: str, shape: Shape, format: Format) -> Tensor | Weight:
        return self.source.table(name, shape, format)

    def exact(self, name: str, shape: Shape) -> Tensor:
        return self.source.exact(name, shape)

    def weight(self, name: str, shape: Shape) -> Weight:
        return replace(self.source.weight(name, shape), whole=self.uncut[name][0])

    def input_scale(self, name: str) -> float | None:
        return self.source.input_scale(name)

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterator[Weight]:
        for weight in self.source.experts(name, shape, pairs):
            yield replace(weight, whole=self.uncut[name][-1])

    def head(self, name: str, shape: Shape) -> Weight:
        return replace(self.source.head(name, shape), whole=self.uncut[name][0])


def narrower(compute: Format, stored: Format) -> Format:
    """Return the format that a table is held in (`WeightSource.table`): the stored one, if both
    have the same width.
    """
    return compute if compute.bytes < stored.bytes else stored


def in_halves(x: Tensor, dim: int) -> Tensor:
    """Return x with its even places along `dim` first, then its odd ones.

    That turns alternating rows of gate and up into the order of a merged projection.
    """
    even = torch.arange(0, x.shape[dim], 2, dtype=torch.int64, device=x.device)
    return x.index_select(dim, torch.cat((even, even + 1)))


def round_to_int4(stored: Tensor, dtype: torch.dtype, group: int = INT4_GROUP) -> Weight:
    """Round a matrix to INT4 in groups of `group` inputs, or of fewer where these do not divide
    them; one that no groups divide becomes `dtype`.
    """
    size = int4_group(stored.shape[1], group)
    if size is None:
        return Weight(stored.to(dtype).contiguous())
    data, scales = round_int4(stored, size, int4_scale_dtype(dtype))
    return Weight(data, groups=Groups(Codes.INT4, size, scales))


@dataclass(frozen=True)
class CheckpointSource:
    """A source that takes tensors from a checkpoint.

    Matrices in `stored` are quantized already: those in FP8 or INT8 become `weight_format`, those
    in 4 bits and in a GGUF file's blocks stay so, and those in MXFP8 become 16 bits. The others are
    quantized to it if it has 8 bits, or keep 16 or 32 bits if `rounds` is False. Experts in `packed`
    are in MXFP4; what is in MXFP4 stays so with `keeps_mxfp4` where it can. With `int4` the matrices
    that would be rounded become INT4 (`round_to_int4`).
    """

    checkpoint: Checkpoint
    compute_format: Format
    weight_format: Format
    device: str
    stored: Mapping[str, Stored] = field(default_factory=dict)
    rounds: bool = True
    packed: Mapping[str, StoredExperts] = field(default_factory=dict)
    keeps_mxfp4: bool = False
    int4: bool = False

    def tensor(self, name: str, shape: Shape) -> Tensor:
        if name in self.stored:
            return self._stored(name).dequantized().to(torch_dtype(self.compute_format))
        stored = self.checkpoint.take(name, shape)
        return stored.to(device=self.device, dtype=torch_dtype(self.compute_format)).contiguous()

    def embedding(self, name: str, shape: Shape) -> Tensor | Weight:
        stored = self.stored.get(name)
        if isinstance(stored, StoredBlocks):
            return stored.read(self.checkpoint, self.device)
        return self.tensor(name, shape)

    def table(self, name: str, shape: Shape, format: Format) -> Tensor | Weight:
        stored = self.stored.get(name)
        if isinstance(stored, StoredBlocks):
            return stored.read(self.checkpoint, self.device)
        return replace(self, compute_format=narrower(self.compute_format, format)).tensor(
            name, shape
        )

    def exact(self, name: str, shape: Shape) -> Tensor:
        if name in self.stored:
            return self._stored(name).dequantized()
        return (
            self.checkpoint.take(name, shape)
            .to(device=self.device, dtype=torch.float32)
            .contiguous()
        )

    def weight(self, name: str, shape: Shape) -> Weight:
        if name in self.stored:
            return self._stored(name)
        if not (self.rounds and self.weight_format.is_quantized):
            return Weight(self.tensor(name, shape))
        return self._rounded(self.checkpoint.take(name, shape).to(self.device))

    def input_scale(self, name: str) -> float | None:
        stored = self.stored.get(name)
        return (
            stored.input_scale_in(self.weight_format) if isinstance(stored, StoredLinear) else None
        )

    def _stored(self, name: str) -> Weight:
        stored = self.stored[name]
        if isinstance(stored, StoredGroups | StoredBlocks):
            return stored.read(self.checkpoint, self.device)
        formats = self.compute_format, self.weight_format
        if isinstance(stored, StoredPowers):
            return stored.read(self.checkpoint, *formats, self.device, self.keeps_mxfp4)
        return stored.read(self.checkpoint, *formats, self.device)

    def _rounded(self, stored: Tensor) -> Weight:
        if self.int4:
            return round_to_int4(stored, torch_dtype(self.compute_format))
        # Even steps: a larger scale than that of the amax has more error everywhere
        quantize = quantize_rows if self.weight_format is Format.INT8 else fit_rows
        data, scale = quantize(stored, self.weight_format)
        return Weight(data, scale, Activations.DYNAMIC)

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterator[Weight]:
        if name in self.packed:
            order = torch.arange(shape[2], dtype=torch.int64, device="cpu")
            order = in_halves(order, 0) if pairs else order
            formats = self.compute_format, self.weight_format
            yield from self.packed[name].read(
                self.checkpoint, *formats, self.device, order, self.keeps_mxfp4
            )
            return
        for stored in self.checkpoint.take(name, shape):
            matrix = stored.to(self.device).t()
            matrix = in_halves(matrix, 0) if pairs else matrix
            if self.rounds and self.weight_format.is_quantized:
                yield self._rounded(matrix.contiguous())
            else:
                yield Weight(matrix.to(torch_dtype(self.compute_format)).contiguous())

    def head(self, name: str, shape: Shape) -> Weight:
        if name in self.stored:
            return self._stored(name)
        return Weight(self.tensor(name, shape))
