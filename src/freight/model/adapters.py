"""The banks of a model's projections: memory for adapters that is allocated once, and what is loaded
into its slots.

`Builder` asks for a bank for each projection that it builds. A module may be a part of several
projections, as q is where its rows also hold a gate.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.checkpoint.lora import LoraAdapter
from freight.model.mixers.dividing import Rank
from freight.model.shares import Share
from freight.operands.adapters import AdapterBank


class AdaptedPart(NamedTuple):
    """A module's part of a projection. `order`: which of its rows, in this order; None: all."""

    module: str
    order: Tensor | None


class _Bank(NamedTuple):
    """A bank, and its entries of each slot: as many as experts (`ExpertBanks`), or one."""

    bank: AdapterBank
    num_entries: int


@dataclass(frozen=True, eq=False)
class _Place:
    """A part of a bank that a module's adapters go to. `expert`: which of the bank's experts the
    module is of; 0 if it has none.
    """

    bank: _Bank
    part: int
    order: Tensor | None = None
    expert: int = 0


class AdapterBanks:
    """The banks of all projections of a model, or of a rank's share of it."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: str,
        share: Share | None = None,
    ) -> None:
        """num_slots: adapters that are loaded at a time; max_rank: the largest rank of one; dtype: the
        model's. device: of the banks that are added next.
        """
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self._share = share
        self._banks: list[_Bank] = []
        self._places: dict[str, list[_Place]] = {}

    @property
    def modules(self) -> Set[str]:
        """Names of the modules that take adapters, as the checkpoint calls them."""
        return self._places.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all banks."""
        return sum(bank.a.nbytes + bank.b.nbytes for bank, _ in self._banks)

    def add(self, parts: Sequence[AdaptedPart], shapes: Sequence[Shape]) -> AdapterBank:
        """Allocate the bank of a projection. shapes: of the matrices of `parts`, [out, in]."""
        inputs = shapes[0][1]
        sizes = []
        for part, shape in zip(parts, shapes, strict=True):
            assert shape[1] == inputs, "parts of a projection read the same input"
            sizes.append(shape[0] if part.order is None else len(part.order))
        bank = self._allocate(sizes, inputs, 1)
        for index, part in enumerate(parts):
            self._places.setdefault(part.module, []).append(_Place(bank, index, part.order))
        return bank.bank

    def add_experts(self, modules: Sequence[Sequence[str]], shapes: Sequence[Shape]) -> AdapterBank:
        """Allocate the bank of a product of all experts (`ExpertBanks`). modules: the parts of each
        expert; shapes: of the matrices of one expert's parts, [out, in], as this rank has them.
        """
        bank = self._allocate([shape[0] for shape in shapes], shapes[0][1], len(modules))
        for expert, parts in enumerate(modules):
            for index, module in enumerate(parts):
                assert module not in self._places
                self._places[module] = [_Place(bank, index, expert=expert)]
        return bank.bank

    def _allocate(self, sizes: Sequence[int], inputs: int, num_entries: int) -> _Bank:
        """Allocate a bank of parts with `sizes` outputs and `num_entries` entries of each slot."""
        ends = tuple(accumulate(sizes))
        slots = self.num_slots * num_entries
        parts = len(sizes)
        # zeros: memory that no adapter was loaded into is never touched, nor taken from the system
        bank = AdapterBank(
            a=torch.zeros(
                slots, parts, self.max_rank, inputs, dtype=self.dtype, device=self.device
            ),
            b=torch.zeros(slots, self.max_rank, ends[-1], dtype=self.dtype, device=self.device),
            ranks=torch.zeros(slots, parts, dtype=torch.int32, device=self.device),
            scalings=torch.zeros(slots, parts, dtype=torch.float32, device=self.device),
            ends=ends,
        )
        self._banks.append(_Bank(bank, num_entries))
        return self._banks[-1]

    @torch.inference_mode()
    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Copy an adapter of this model (`adapter_modules`) into a slot that no request uses.

        Raises CheckpointError for files that were changed since it was opened; the slot then has a part
        of the adapter, and must be loaded anew before a request uses it.
        """
        assert adapter.ranks.keys() <= self.modules, "banks are those of `adapted_modules`"
        self.clear(slot)
        for module in adapter.ranks:
            self._place(slot, module, adapter)

    def clear(self, slot: int) -> None:
        """Take the adapter out of a slot that no request uses."""
        for bank, count in self._banks:
            bank.ranks[slot * count : (slot + 1) * count] = 0

    def _place(self, slot: int, module: str, adapter: LoraAdapter) -> None:
        matrices = adapter.matrices(module)
        rank = len(matrices.a)
        assert rank <= self.max_rank, "the adapter's files were checked"
        for place in self._places[module]:
            bank = place.bank.bank
            entry = slot * place.bank.num_entries + place.expert
            begin, end = bank.outputs[place.part]
            b = self._own_rows(module, matrices.b, place.bank.num_entries > 1)
            rows = b if place.order is None else b[place.order.to(b.device)]
            bank.a[entry, place.part, :rank] = matrices.a.to(bank.a.device, self.dtype)
            bank.b[entry, :rank, begin:end] = rows.t().to(bank.b.device, self.dtype)
            bank.scalings[entry, place.part] = matrices.scaling
            bank.ranks[entry, place.part] = rank

    def _own_rows(self, module: str, b: Tensor, of_expert: bool) -> Tensor:
        """Return the rows that this rank has of the module's outputs."""
        if self._share is None:
            return b
        pieces = self._share.pieces.get(f"{module}.weight")
        if pieces is not None:
            return torch.cat([b[piece] for piece in pieces])
        if of_expert:  # whose matrix is a part of a tensor that is divided evenly
            return b[Rank(self._share.rank, self._share.size).part(len(b))]
        return b
