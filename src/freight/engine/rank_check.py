"""A check of ranks at start: each computes small cases with the others, and alone.

Ranks on GPUs promise the bits of one rank, which rests on kernels, compilers and transports that no
test of Freight has seen together. So before an engine serves, every rank compares bits, and one that
differs is named, with the operation and the place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_rows
from freight.kernels.interface import KernelSet
from freight.model.open import OpenModel
from freight.operands.activation import GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Weight
from freight.parallel.ranks import ALONE, Ranks
from freight.settings.engine import EngineConfig

ROWS = (3, 20)  # one count for each class of rows in which a row keeps its bits
OUTPUTS = 64  # of a rank
INPUTS = 512  # of a rank: so many that products of few rows are summed in parts
CHANNELS = 32  # of a rank, of each expert
EXPERTS = 4
EXPERTS_OF_ROW = 2

logger = logging.getLogger("freight")


def rank_check(opened: OpenModel, config: EngineConfig) -> Callable[[], None] | None:
    """Return the check that this rank runs, as all others do; None where there is none: for one rank,
    for the kernels of CPUs, whose bits tests compare, and where the options leave it out.
    """
    kernels = opened.kernels(config)
    if opened.ranks.size == 1 or kernels.name != "triton":
        return None
    if not opened.args.check_ranks:
        logger.warning("ranks are not compared with one rank before they serve: --no-check-ranks")
        return None

    def check() -> None:
        drawn = Drawn(opened.device.native_e4m3, torch_dtype(config.compute_format), config.device)
        with opened.threads(config), torch.inference_mode():
            compare(kernels, opened.kernels(config, ALONE), drawn)
        logger.info("%d ranks have the bits of one: products, experts, gathers", opened.ranks.size)

    return check


@dataclass(frozen=True)
class Drawn:
    """Random operands, the same on every rank.

    format   of weights, E4M3
    dtype    of rows
    device   'cpu' or 'cuda'
    """

    format: Format
    dtype: torch.dtype
    device: str

    def rows(self, count: int, columns: int) -> Tensor:
        """Return rows, [count, columns]."""
        return self._normal(count, columns).to(self.device, self.dtype)

    def weight(self, outputs: int, inputs: int, seed: int = 0) -> Weight:
        """Return a matrix whose inputs are quantized by row."""
        data, scale = quantize_rows(self._normal(outputs, inputs, seed) / inputs**0.5, self.format)
        return Weight(data.to(self.device), scale.to(self.device), Activations.DYNAMIC)

    def _normal(self, rows: int, columns: int, seed: int = 0) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class _Case:
    """The result of an operation on all ranks, and on this one alone: [rows, columns]."""

    operation: str
    shared: Tensor
    alone: Tensor


def compare(kernels: KernelSet, alone: KernelSet, drawn: Drawn) -> None:
    """Compute small cases with the `ranks` of `kernels`, and with `alone`. Raises KernelError where bits
    differ, and as `KernelSet.gather`.

    All ranks gather the same before the first compares anything, so one that differs keeps none
    waiting.
    """
    cases = list(_cases(kernels, alone, drawn))
    if kernels.ranks.transport is not None:
        kernels.ranks.transport.finish()
    for case in cases:
        _require_equal(case, kernels.ranks.size)


def _cases(kernels: KernelSet, alone: KernelSet, drawn: Drawn) -> Iterator[_Case]:
    ranks = kernels.ranks
    whole = drawn.rows(ROWS[0], ranks.size * OUTPUTS)
    yield _Case("a gather", kernels.gather(_part(whole, ranks)), whole)
    weight = drawn.weight(ranks.size * OUTPUTS, ranks.size * INPUTS)
    own = kernels.pack(_own_rows(weight, ranks))
    packed = alone.pack(weight)
    for count in ROWS:
        x = drawn.rows(count, ranks.size * INPUTS)
        shared = kernels.shared_linear(_part(x, ranks), own)
        yield _Case(f"a product of {count} rows", shared, alone.linear(x, packed))
    yield _experts(kernels, alone, drawn)


def _experts(kernels: KernelSet, alone: KernelSet, drawn: Drawn) -> _Case:
    ranks = kernels.ranks
    channels = ranks.size * CHANNELS
    drawn_weights = [drawn.weight(channels, channels, seed) for seed in range(3 * EXPERTS)]
    gate_up = list(zip(drawn_weights[::3], drawn_weights[1::3], strict=True))
    down = drawn_weights[2::3]
    merged = [Weight.concat(pair) for pair in gate_up]
    parts = [Weight.concat([_own_rows(each, ranks) for each in pair]) for pair in gate_up]
    x = drawn.rows(ROWS[0], channels)
    first = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] % (EXPERTS - 1)
    ids = torch.cat((first, first + 1), 1)  # EXPERTS_OF_ROW of them
    weights = torch.full(ids.shape, 1 / EXPERTS_OF_ROW, dtype=torch.float32, device=x.device)
    silu = GatedActivation.SILU
    own_down = [_own_rows(each, ranks) for each in down]
    own = ExpertLayers(kernels.pack_experts(parts), kernels.pack_experts(own_down), silu)
    layers = ExpertLayers(alone.pack_experts(merged), alone.pack_experts(down), silu)
    shared = kernels.experts(x, ids, weights, own, x)
    return _Case("a mixture of experts", shared, alone.experts(x, ids, weights, layers, x))


def _part(x: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's columns."""
    return x.chunk(ranks.size, 1)[ranks.rank].contiguous()


def _own_rows(weight: Weight, ranks: Ranks) -> Weight:
    """Return this rank's rows of a matrix with a scale per row."""
    assert weight.scale is not None
    data = weight.data.view(torch.uint8).chunk(ranks.size)[ranks.rank]
    return replace(
        weight,
        data=data.view(weight.data.dtype),
        scale=weight.scale.chunk(ranks.size)[ranks.rank],
        whole=len(weight.data),
    )


def _require_equal(case: _Case, size: int) -> None:
    bits = {2: torch.int16, 4: torch.int32}[case.alone.itemsize]
    differs = case.shared.contiguous().view(bits) != case.alone.contiguous().view(bits)
    places = differs.nonzero()
    if not len(places):
        return
    row, column = places[0].tolist()
    owner = column // (case.alone.shape[1] // size)
    raise KernelError(
        f"{case.operation}: row {row}, column {column}, which rank {owner} computed, is "
        f"{case.shared[row, column].item()!r} of all ranks and {case.alone[row, column].item()!r} of one alone, so "
        "they would not give what one rank gives: ranks need GPUs, drivers and a Triton of one kind. "
        "--no-check-ranks starts without this comparison"
    )
