"""What the inputs of a layer's Linear modules were over the calibration data: their Hessians, and the
magnitudes of their channels.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.model.decoder import DecoderLayer
from freight.quantizer.expert_inputs import ExpertWatch, Side
from freight.quantizer.layer_record import GroupRecord
from freight.quantizer.modules import LayerModules
from freight.quantizer.watch import Observers, observed_layer

_ROWS = 8192  # of float32 at a time


class ChannelStatistics:
    """Statistics of one input, by channel, over all rows that were observed.

    hessian    float32 [channels, channels]: the sum of x^T x
    magnitude  float32 [channels]: the sum of |x|
    least      float32 [channels]: the smallest x
    most       float32 [channels]: the largest x
    """

    def __init__(self, name: str) -> None:
        """`name`: what is observed, for messages."""
        self.name = name
        self.num_rows = 0
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self.hessian = nothing
        self.magnitude = nothing
        self.least = nothing
        self.most = nothing

    def observe(self, x: Tensor) -> None:
        """Add rows, [rows, channels]. Raises CheckpointError for NaN and infinities."""
        if not self.num_rows:
            channels = x.shape[1]
            self.hessian = torch.zeros(channels, channels, dtype=torch.float32, device=x.device)
            self.magnitude = torch.zeros(channels, dtype=torch.float32, device=x.device)
            self.least = torch.full_like(self.magnitude, torch.inf)
            self.most = torch.full_like(self.magnitude, -torch.inf)
        self.num_rows += len(x)
        for part in x.split(_ROWS):
            rows = part.float()
            magnitude = rows.abs().sum(0)
            if not magnitude.isfinite().all():
                raise CheckpointError(
                    f"{self.name}: NaN or infinity during calibration, so its Hessian cannot be measured; the model "
                    "computes it in 16 or 32 bits too"
                )
            self.hessian.addmm_(rows.t(), rows)
            self.magnitude += magnitude
            self.least = torch.minimum(self.least, rows.amin(0))
            self.most = torch.maximum(self.most, rows.amax(0))


class LayerInputs:
    """The inputs of the modules of one layer that are to be quantized.

    by_group   statistics by the modules that share an input; each expert has inputs of its own.
               Those of experts that no token reached are empty
    """

    def __init__(self, modules: LayerModules, left_out: Collection[str], device: str) -> None:
        self._modules = modules
        self._experts: ExpertWatch | None = None
        self.by_group: dict[tuple[str, ...], ChannelStatistics] = {}
        self._of_experts: dict[tuple[Side, int], ChannelStatistics] = {}
        experts = modules.experts
        of_layer = frozenset(left_out)
        self._left_out = of_layer
        shared = (modules.mixed, modules.dense, modules.latent, modules.per_layer)
        for fields in shared:
            for group in fields.values():
                self._add(group, of_layer)
        if experts is None:
            return
        for expert, (gate_up, down) in enumerate(experts.by_expert):
            for side, group in ((Side.GATE_UP, gate_up), (Side.DOWN, (down,))):
                statistics = self._add(group, of_layer)
                if statistics is not None:
                    self._of_experts[side, expert] = statistics
        if self._of_experts:
            num_tokens = torch.zeros(experts.count, dtype=torch.int64, device=device)
            self._experts = ExpertWatch(_nothing, _nothing, num_tokens, self._see)

    def _add(self, group: tuple[str, ...], left_out: frozenset[str]) -> ChannelStatistics | None:
        if left_out.issuperset(group):
            return None
        statistics = ChannelStatistics(f"{group[0]}: input")
        self.by_group[group] = statistics
        return statistics

    def _see(self, side: Side, expert: int, rows: Tensor) -> None:
        self._of_experts[side, expert].observe(rows)

    def records(self) -> list[GroupRecord]:
        """Return the tokens that each group had."""
        records = []
        for group, statistics in self.by_group.items():
            modules = tuple(name for name in group if name not in self._left_out)
            records.append(GroupRecord(modules, statistics.num_rows, {}))
        return records

    def around(self, layer: DecoderLayer) -> DecoderLayer:
        """Return the layer with its inputs observed."""
        observers: Observers = {
            group: partial(statistics.observe) for group, statistics in self.by_group.items()
        }
        return observed_layer(layer, self._modules, observers, self._experts)


def _nothing(rows: Tensor) -> None:
    """Take inputs that nobody asks for."""
