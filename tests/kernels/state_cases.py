"""Random layers that keep a state, and sequences in calls of any cut, for the tests of each set of
kernels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.operands.batch import Sequences
from freight.operands.recurrence import Convolution, RecurrenceRule
from freight.operands.states import States
from freight.operands.tiles import STATE_TILE

STATE_FORMATS = (Format.FLOAT32, Format.BFLOAT16, Format.INT8, Format.E4M3FN, Format.E4M3FNUZ)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer. `delta`: a gated delta net, else Mamba-2. `by_channel`: a decay of each
    channel of a key.
    """

    key_heads: int = 2
    heads: int = 4
    k_dim: int = 64
    v_dim: int = 32
    delta: bool = True
    by_channel: bool = False
    dtype: torch.dtype = torch.float32
    format: Format = Format.FLOAT32
    every: int = 32

    def states(self, num_blocks: int, garbage: float = torch.nan) -> States:
        """Blocks that nothing was written to."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "state": ((self.heads, self.k_dim, self.v_dim), torch_dtype(self.format)),
            "k": ((STATE_TILE, self.key_heads, self.k_dim), self.dtype),
            "u": ((STATE_TILE, self.heads, self.v_dim), self.dtype),
            "decay": ((STATE_TILE, *self.decays), torch.float32),
        }
        if self.format.is_quantized:
            shapes["scale"] = ((self.heads, self.v_dim), torch.bfloat16)
        parts = {}
        for name, (shape, dtype) in shapes.items():
            part = torch.empty((num_blocks, *shape), dtype=dtype)
            part.view(torch.uint8).fill_(0x7F) if dtype.itemsize == 1 else part.fill_(garbage)
            parts[name] = part
        return States(parts, self.every)

    def inputs(self, rows: int, seed: int = 0, half_life: float = 20.0) -> dict[str, Tensor]:
        """q, k, v, beta, log_decay of one sequence."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        decay = -0.693 / half_life * torch.exp(normal(rows, *self.decays))
        return {
            "q": normal(rows, self.key_heads * self.k_dim).to(self.dtype),
            "k": normal(rows, self.key_heads * self.k_dim).to(self.dtype),
            "v": normal(rows, self.heads * self.v_dim).to(self.dtype),
            "beta": torch.sigmoid(normal(rows, self.heads)),
            "log_decay": decay,
        }

    @property
    def decays(self) -> tuple[int, ...]:
        """The shape of a row's."""
        return (self.heads, self.k_dim) if self.by_channel else (self.heads,)

    @property
    def rule(self) -> RecurrenceRule:
        skip = None if self.delta else torch.linspace(-1.0, 1.0, self.heads)
        return RecurrenceRule(self.delta, self.delta, skip)

    def plain(self) -> Layer:
        return replace(self, dtype=torch.float32, format=Format.FLOAT32)


def sequences(parts: Sequence[tuple[int, int, Sequence[int]]]) -> Sequences:
    """(tokens before, rows in this call, blocks) of each sequence."""
    starts, lengths = [0], []
    for before, rows, _ in parts:
        starts.append(starts[-1] + rows)
        lengths.append(before + rows)
    longest = max(len(blocks) for _, _, blocks in parts)
    tables = [[*blocks, *(0,) * (longest - len(blocks))] for _, _, blocks in parts]
    return Sequences(
        *(torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, lengths, tables))
    )


def in_calls(call: Any, rows: int, cuts: Sequence[int], blocks: Sequence[int]) -> Tensor:
    """call(rows of this call as a slice, sequences) for one sequence, cut where `cuts` says in
    turns.
    """
    outs, done = [], 0
    while done < rows:
        count = min(cuts[len(outs) % len(cuts)], rows - done)
        outs.append(call(slice(done, done + count), sequences([(done, count, blocks)])))
        done += count
    return torch.cat(outs)


def with_rows_taken_back(call: Any, rows: int, blocks: Sequence[int], most: int) -> Tensor:
    """call(rows of this call as indices, sequences) for one sequence of `rows` tokens, one or a few a
    call. Behind the last one of a call are up to `most` others of its tile, from the row `rows` of the
    inputs on, which the next call takes back.
    """
    chance = random.Random(most)
    outs = []
    done = 0
    while done < rows:
        count = min(chance.choice((1, 1, 1, 2, 5, 17)), rows - done)
        others = min(chance.randint(0, most), -(done + count) % STATE_TILE)
        indices = [*range(done, done + count), *range(rows, rows + others)]
        where = sequences([(done, count + others, blocks)])
        outs.append(call(torch.tensor(indices), where)[:count])
        done += count
    return torch.cat(outs)


def check_recurrence_taken_back(kernels: Any, layer: Layer, rows: int, device: str) -> None:
    """Compare a sequence of `rows` tokens with one whose rows are taken back: outputs, and the states of
    full blocks.
    """
    blocks = (3, 1, 4, 2, 0)
    inputs = layer.inputs(rows + STATE_TILE - 1)
    rule = layer.rule
    if rule.skip is not None:
        rule = replace(rule, skip=rule.skip.to(device))

    def calls(states: States) -> Any:
        def call(part: Any, where: Sequences) -> Tensor:
            chosen = {name: x[part].to(device) for name, x in inputs.items()}
            out: Tensor = kernels.recurrence(
                **chosen, states=states, sequences=sequences_on(device, where), rule=rule
            )
            return out

        return call

    def states_of() -> States:
        made = layer.states(6)
        return replace(made, parts={name: part.to(device) for name, part in made.parts.items()})

    plain = states_of()
    wanted = in_calls(calls(plain), rows, (rows,), blocks)
    drafted = states_of()
    assert torch.equal(with_rows_taken_back(calls(drafted), rows, blocks, STATE_TILE - 1), wanted)
    full = list(blocks[: rows // layer.every])
    assert full
    for name, part in plain.parts.items():
        taken = drafted.parts[name].view(torch.uint8)
        assert torch.equal(taken[full], part.view(torch.uint8)[full]), name


def check_convolution_taken_back(kernels: Any, most: int, width: int, device: str) -> None:
    """Compare a convolution whose inputs are taken back, up to `most` at once, with one whose are not;
    also where another sequence goes on from a full block.
    """
    blocks = (3, 1, 4, 2, 0)
    generator = torch.Generator().manual_seed(width)
    rows = 70
    x = torch.randn(rows + most, 40, generator=generator).to(device)
    weight = torch.randn(40, width, generator=generator).to(device)

    def calls(kept: int) -> Any:
        states = States({"columns": torch.full((6, kept, 40), torch.nan, device=device)}, 16)

        def call(part: Any, where: Sequences) -> Tensor:
            out: Tensor = kernels.convolve(
                x[part], Convolution(weight, None, True), states, sequences_on(device, where)
            )
            return out

        return call

    wanted = in_calls(calls(width - 1), rows, (rows,), blocks)
    drafted = calls(width - 1 + most)
    assert torch.equal(with_rows_taken_back(drafted, rows, blocks, most), wanted)
    for count in range(16, rows, 16):
        where = sequences([(count, 1, (*blocks[: count // 16], 5))])
        row = slice(count, count + 1)
        assert torch.equal(drafted(row, where), wanted[row])


def sequences_on(device: str, where: Sequences) -> Sequences:
    return Sequences(
        where.query_starts.to(device), where.context_lens.to(device), where.block_tables.to(device)
    )


def token_by_token(layer: Layer, inputs: dict[str, Tensor]) -> Tensor:
    """The recurrence of a sequence in float64, with no tiles: S = decay S + k uᵀ, o = qᵀ S."""
    values, rows = {name: x.double() for name, x in inputs.items()}, len(inputs["v"])
    ratio = layer.heads // layer.key_heads
    q, k = (
        values[name].view(rows, layer.key_heads, layer.k_dim).repeat_interleave(ratio, 1)
        for name in ("q", "k")
    )
    if layer.rule.norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * layer.k_dim**-0.5
    v, out = values["v"].view(rows, layer.heads, layer.v_dim), []
    decay = values["log_decay"].exp()
    state = torch.zeros(layer.heads, layer.k_dim, layer.v_dim, dtype=torch.float64)
    for t in range(rows):
        state = state * (decay[t, :, :, None] if layer.by_channel else decay[t, :, None, None])
        known = (k[t][:, :, None] * state).sum(1) if layer.delta else 0.0
        state = state + k[t][:, :, None] * (values["beta"][t][:, None] * (v[t] - known))[:, None]
        out.append((q[t][:, :, None] * state).sum(1))
    return torch.stack(out).flatten(1)
