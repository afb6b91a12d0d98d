"""What storing costs, by layer: how far K, V and attention's output are from what they would have
been.

K and V: the rounding of the store alone, the stored values against those that were given to it, in
the same run. Attention's output: against the 16-bit run, so it also has what the layers before have
changed. Both are relative: the norm of the difference divided by the norm of the true values. Rows
of every fourth chunk are compared, so that this takes little time and memory: as many rows as if a
quarter of them were taken of every chunk, in a quarter of the operations, whose number is what
costs time. Rows of one chunk are more alike than those of four, so the errors are a little less
certain: a layer's moves by some per cent with the rows that are compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from freight.cache.pool import KVPool, PagedKV
from freight.fp8.cast import decode
from freight.kernels import reference
from freight.lab.evaluate.magnitudes import Magnitudes
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import read_slots, spread
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.rotary import Rotary

ROWS = 64  # of a chunk that are compared
EVERY = 4  # chunks from one that is compared to the next
MOST_ROWS = 2048  # in all: no chunk is compared after them


@dataclass
class Probe:
    """Sums over the rows seen so far, by layer; `rows` says which of this step's are compared,
    None: none. `magnitudes` sees all that is stored, if it is there.
    """

    num_layers: int
    rows: Tensor | None = None
    seconds: float = 0.0  # spent here, which are not the model's
    num_steps: int = 0
    num_rows: int = 0
    flushed: int = 0
    num_values: int = 0
    magnitudes: Magnitudes | None = None
    # attention's output of this step, by layer
    outputs: dict[int, Tensor] = field(default_factory=dict)
    # float64 [num_layers, 3, 2]: of K, V, attention, squares of (difference, truth)
    sums: Tensor = field(init=False)
    # of this step, by layer: `_rounding` of K and of V, [2, 3]
    stored: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.num_layers, 3, 2, dtype=torch.float64, device="cpu")

    def begin(self, count: int, device: str) -> None:
        """Begin a step of `count` rows."""
        self.outputs.clear()
        self.num_steps += 1
        self.rows = None
        if self.num_rows < MOST_ROWS and self.num_steps % EVERY == 1:
            step = -(-count // ROWS)
            self.rows = torch.arange(step // 2, count, step, dtype=torch.int64, device=device)
            self.num_rows += len(self.rows)

    def compare(self, reference: Mapping[int, Tensor]) -> None:
        """Attention's outputs of this step with those of the 16-bit run; then nothing of the step
        is kept but sums.

        The host reads what all layers have summed at once.
        """
        if not self.outputs:  # no layer has attention
            return
        begin = time.perf_counter()
        squares = []
        for layer, output in self.outputs.items():
            true = reference[layer].float()
            squares += [_square(output.float() - true), _square(true)]
        self.sums[list(self.outputs), 2] += torch.stack(squares).view(-1, 2).double().cpu()
        stored = torch.stack(list(self.stored.values())).double().cpu()
        self.sums[list(self.stored), :2] += stored[..., :2]
        self.flushed += int(stored[..., 2].sum())
        self.stored.clear()
        self.seconds += time.perf_counter() - begin

    @property
    def errors(self) -> list[dict[str, float]]:
        """By layer: relative errors of k, v and attention."""
        relative = (self.sums[..., 0] / self.sums[..., 1].clamp(min=1e-300)).sqrt().tolist()
        return [dict(zip(("k", "v", "attention"), layer, strict=True)) for layer in relative]

    @property
    def flushed_share(self) -> float:
        """Share of the keys and values, not zero themselves, that are stored as zero."""
        return self.flushed / max(1, self.num_values)


def _square(x: Tensor) -> Tensor:
    """Return the sum of the squares of float32 values: []."""
    norm: Tensor = torch.linalg.vector_norm(x)
    return norm.square()


def _rounding(stored: Tensor, values: Tensor, true: Tensor) -> list[Tensor]:
    """Return squares of (difference, truth), and how many of `values` are stored as zero."""
    zeros = ((stored == 0) & (values != 0)).sum()
    return [_square(stored.sub_(values)), _square(true.float()), zeros]


def _kept(page: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    """Return what the cache has for these slots: float32 [rows, num_kv_heads, head_dim]."""
    rows = read_slots(page, slots)
    if scale is None:
        return decode(rows)
    return decode(rows, scale if scale.ndim == 2 else spread(read_slots(scale, slots)))


@dataclass(frozen=True)
class ProbedKV(PagedKV):
    """A layer's cache that shows its probe what it stores, and what attention makes of it."""

    probe: Probe = field(default_factory=lambda: Probe(0))
    layer: int = 0

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        q = super().store(qkv, rotary, batch)
        self._see(batch)
        rows = self.probe.rows
        if rows is None:
            return q
        begin = time.perf_counter()
        pages = self.pages
        positions = batch.positions[rows]
        slots = batch.slots[self.group][rows]
        _, key, v = reference.split_heads(qkv[rows], rotary, replace(pages, k_center=None))
        k = key if pages.k_center is None else (key.float() - pages.k_center.b).to(key.dtype)
        k = reference.rotate(k, rotary.cos[positions], rotary.sin[positions])
        v = k[..., -pages.v.shape[3] :] if pages.v_in_k else v
        from_k = _kept(pages.k, pages.k_scale, slots)
        if pages.rotated is not None:
            from_k = torch.cat((read_slots(pages.rotated, slots).float(), from_k), -1)
        from_v = _kept(pages.v, pages.v_scale, slots)
        sums = [*_rounding(from_k, k, key), *_rounding(from_v, v, v)]
        self.probe.stored[self.layer] = torch.stack(sums).view(2, 3)
        self.probe.num_values += k.numel() + v.numel()
        self.probe.seconds += time.perf_counter() - begin
        return q

    def _see(self, batch: ForwardBatch) -> None:
        """Show what was stored for this step to the magnitudes, if there are any."""
        magnitudes = self.probe.magnitudes
        if magnitudes is None:
            return
        begin = time.perf_counter()
        slots = batch.slots[self.group]
        sides = [read_slots(self.pages.k, slots)]
        if not self.pages.v_in_k:
            sides.append(read_slots(self.pages.v, slots))
        magnitudes.see(self.layer, sides, batch.positions)
        self.probe.seconds += time.perf_counter() - begin

    def attend(
        self,
        q: Tensor,
        batch: ForwardBatch,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        rows = self.probe.rows
        if rows is None:
            return super().attend(q, batch, call, consumer)
        # not quantized yet
        attended = as_tensor(super().attend(q, batch, call))
        self.probe.outputs[self.layer] = attended[rows]
        return attended


def probed(pool: KVPool, probe: Probe) -> KVPool:
    """`pool` with its layers shown to `probe`."""
    layers = {}
    for index, kv in pool.paged.items():
        layers[index] = ProbedKV(kv.pages, kv.kernels, kv.group, kv.shared, probe, index)
    return pool.with_layers(layers)
