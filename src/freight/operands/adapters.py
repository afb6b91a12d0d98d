"""Low-rank adapters of one projection (LoRA, Hu et al. 2021), as the kernels take them.

Which adapter a row has is data of the step (`ForwardBatch.adapters`), so rows of several adapters and
of none are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

NO_ADAPTER = -1  # of a row in `ForwardBatch.adapters`


@dataclass(frozen=True, eq=False)
class AdapterBank:
    """What each adapter adds to one projection y = W x: y + scaling * B (A x), by slot.

    The projection may be several modules merged along the outputs, its parts: each has an A and a
    scaling of its own. The memory stays in place while adapters are loaded into slots and taken out.

    a          [num_slots, num_parts, max_rank, in_features], in the dtype of the rows
    b          [num_slots, max_rank, out_features]: B transposed, the parts side by side
    ranks      [num_slots, num_parts] int32: rows of a and b in use; 0: nothing is added
    scalings   [num_slots, num_parts] float32
    ends       where the outputs of each part end; the last is out_features
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scalings: Tensor
    ends: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]

    @property
    def outputs(self) -> tuple[tuple[int, int], ...]:
        """Where the outputs of each part begin and end."""
        return tuple(pairwise((0, *self.ends)))


@dataclass(frozen=True, eq=False)
class ExpertBanks:
    """What each adapter adds to the two products of a mixture's experts.

    Both banks have num_slots * num_experts entries: that of expert e in slot s is
    s * num_experts + e (`entries`). So a pair of a row and an expert is a row with an adapter.
    """

    gate_up: AdapterBank
    down: AdapterBank
    num_experts: int

    def entries(self, adapters: Tensor, experts: Tensor | int) -> Tensor:
        """Return the entries of pairs, int32: NO_ADAPTER where the row has no adapter, or the
        expert is none.

        adapters: slots of the rows, int32; experts: their experts, of a shape to which `adapters`
        is expanded
        """
        entries = adapters * self.num_experts + experts
        valid = adapters >= 0
        if isinstance(experts, Tensor):
            valid = valid & (experts >= 0) & (experts < self.num_experts)
        return torch.where(valid, entries, NO_ADAPTER)
