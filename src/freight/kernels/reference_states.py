"""Operations with a state in plain torch: convolutions, and linear attention with a decay.

As in `reference.py`, a row's result depends only on its own history, to the bit: products with a
state are called in one shape, STATE_TILE rows padded with zeros, and every other sum adds one row
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from freight.fp8.cast import amax, decode, encode, format_of, token_scale
from freight.kernels.reference import rms_norm
from freight.operands.batch import Sequences
from freight.operands.packed import PackedWeight
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)
from freight.operands.states import States, Stretch
from freight.operands.tiles import LEAST_DECAY, STATE_TILE


def _silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) in float32."""
    values = x.float()
    return values / (1.0 + torch.exp(-values))


def convolve(x: Tensor, convolution: Convolution, states: States, sequences: Sequences) -> Tensor:
    """Compute `KernelSet.convolve`."""
    weight = convolution.weight
    bias = convolution.bias
    columns = states.parts["columns"]
    width = weight.shape[1]
    earlier = width - 1  # inputs that a row reads besides its own
    stored = columns.shape[1]  # inputs; that of position p lies at p % stored
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for stretch in states.stretches(sequences):
        inputs = x[stretch.rows]
        first = stretch.position
        before = inputs.new_zeros(earlier, inputs.shape[1])
        for i in range(max(0, earlier - first), earlier):
            before[i] = columns[stretch.source, (first - earlier + i) % stored]
        padded = torch.cat((before, inputs))  # from position first - earlier on
        total = torch.zeros(inputs.shape, dtype=torch.float32, device=x.device)
        if bias is not None:
            total += bias.float()
        for j in range(width):
            total += weight[:, j].float() * padded[j : j + len(inputs)].float()
        if convolution.silu:
            total = _silu(total)
        out[stretch.rows] = total.to(x.dtype)
        end = first + len(inputs)
        for position in range(max(0, end - stored, first - earlier), end):
            columns[stretch.target, position % stored] = padded[position - first + earlier]
    return out


def decays(a: Tensor, b: Tensor | None, parameters: DecayParameters) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.decays` in float64, so that no value depends on its neighbours."""
    a_log = parameters.a_log
    dt_bias = parameters.dt_bias
    x = a.double() + dt_bias.double()
    rate = torch.exp(a_log.double())
    if len(dt_bias) != len(a_log):
        x = x.unflatten(1, (len(a_log), -1))
        rate = rate[:, None]
    dt = F.softplus(x).clamp(*parameters.limits)
    log_decay = -rate * dt
    if parameters.bound is not None:
        log_decay = parameters.bound * torch.sigmoid(rate * x)
    beta = dt if b is None else torch.sigmoid(b.double())
    return beta.float(), log_decay.float()


def gated_norm(
    x: Tensor, gate: Tensor, norm: GatedNorm, consumer: PackedWeight | None = None
) -> Tensor:
    """Compute `KernelSet.gated_norm`."""
    group = norm.group
    weight = norm.weight.view(-1, group)
    factor = _silu(gate)
    if norm.norm_first:
        normed = rms_norm(x.unflatten(1, (-1, group)), weight, norm.eps).flatten(1)
        return (normed.float() * factor).to(x.dtype)
    values = (x.float() * factor).unflatten(1, (-1, group))
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    rounded: Tensor
    if weight.dtype == x.dtype:
        rounded = weight * normed.to(x.dtype)
    else:
        rounded = (normed * weight).to(x.dtype)
    return rounded.flatten(1)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    rule: RecurrenceRule,
    states: States,
    sequences: Sequences,
) -> Tensor:
    """Compute `KernelSet.recurrence`."""
    key_heads, k_dim = states.parts["k"].shape[2:]
    heads, v_dim = states.parts["u"].shape[2:]
    queries = q.unflatten(1, (key_heads, k_dim)).float()
    keys = k.unflatten(1, (key_heads, k_dim)).float()
    if rule.norm:
        queries = _unit(queries) * k_dim**-0.5
        keys = _unit(keys)
    keys = keys.to(v.dtype)
    values = v.unflatten(1, (heads, v_dim)).float()
    out = torch.empty(len(v), heads, v_dim, dtype=v.dtype, device=v.device)
    for part in _tiles(states.stretches(sequences)):
        _open_tile(states, part)
        rows = part.rows
        tile = _Tile(states, part, keys[part.rows], log_decay[part.rows])
        results = tile.rows(queries[rows], values[rows], beta[rows], rule.delta)
        if rule.skip is not None:
            results = results + rule.skip[:, None] * values[rows]
        out[rows] = results.to(v.dtype)
    return out.flatten(1)


def _unit(x: Tensor) -> Tensor:
    """Divide the last dimension by its Euclidean length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _tiles(stretches: Iterator[Stretch]) -> Iterator[Stretch]:
    """Cut each stretch where tiles begin; only its first part reads the stretch's source."""
    for stretch in stretches:
        row = stretch.rows.start
        position = stretch.position
        source = stretch.source
        while row < stretch.rows.stop:
            count = min(STATE_TILE - position % STATE_TILE, stretch.rows.stop - row)
            yield Stretch(slice(row, row + count), position, source, stretch.target)
            row = row + count
            position = position + count
            source = stretch.target


def _open_tile(states: States, part: Stretch) -> None:
    """Store S if `part` begins a tile: zeros, or S advanced over the tile before it."""
    if part.position % STATE_TILE:
        assert part.source == part.target, "blocks begin where tiles do"
        return
    stored = states.parts["state"]
    target = part.target
    if part.source is None:
        advanced = torch.zeros(stored.shape[1:], dtype=torch.float32, device=stored.device)
    else:
        advanced = _advanced(states, part.source)
    if "scale" in states.parts:
        scale = token_scale(amax(advanced, 1), format_of(stored))
        states.parts["scale"][target] = scale
        stored[target] = encode(advanced, scale.float()[:, None], format_of(stored))
    else:
        stored[target] = advanced.to(stored.dtype)


def _state(states: States, block: int) -> Tensor:
    """Return the stored S, [heads, k_dim, v_dim] float32."""
    scale = states.parts["scale"][block].float()[:, None] if "scale" in states.parts else None
    return decode(states.parts["state"][block], scale)


def _by_channel(decay: Tensor) -> Tensor:
    """Return `decay` as [rows, heads, k_dim], or [rows, heads, 1] if a head has one decay."""
    return decay if decay.ndim == 3 else decay[..., None]


def _advanced(states: States, block: int) -> Tensor:
    """Return S after all rows of a full tile, [heads, k_dim, v_dim] float32."""
    parts = states.parts
    k = parts["k"][block].float()
    u = parts["u"][block].float()
    decay = _by_channel(parts["decay"][block].float())
    state = _state(states, block) * torch.exp(decay[-1])[..., None]
    k = k.repeat_interleave(u.shape[1] // k.shape[1], 1) * torch.exp(decay[-1] - decay)
    for row in range(STATE_TILE):
        state = state + k[row][:, :, None] * u[row][:, None, :]
    return state


class _Tile:
    """The open tile of one sequence.

    Its rows [begin, end) are computed; earlier rows are read from `states`.
    """

    def __init__(self, states: States, part: Stretch, keys: Tensor, log_decay: Tensor) -> None:
        """Keep the keys and decays of the new rows.

        keys: [rows, key_heads, k_dim] in the compute dtype; log_decay: [rows, heads], or [rows,
        heads, k_dim] with a decay of each channel
        """
        kept_k = states.parts["k"][part.target]
        decay = states.parts["decay"][part.target]
        self.kept_u = states.parts["u"][part.target]
        self.begin = part.position % STATE_TILE
        self.end = self.begin + len(keys)
        kept_k[self.begin : self.end] = keys
        for row, step in enumerate(log_decay.clamp(min=LEAST_DECAY), self.begin):
            decay[row] = step + decay[row - 1] if row else step
        heads = self.kept_u.shape[1]
        self.k = self._padded(
            kept_k[: self.end].repeat_interleave(heads // kept_k.shape[1], 1).float()
        )
        self.decay = self._padded(_by_channel(decay[: self.end]))  # G of `KernelSet.recurrence`
        self.state = _state(states, part.target)

    def _padded(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, STATE_TILE - len(rows)))

    def rows(self, queries: Tensor, values: Tensor, beta: Tensor, delta: bool) -> Tensor:
        """Compute u of each row and keep it; return o, [rows, heads, v_dim] float32."""
        heads = self.k.shape[1]
        q = torch.zeros_like(self.k)
        q[self.begin : self.end] = queries.repeat_interleave(heads // queries.shape[1], 1)
        factor = torch.exp(self.decay)
        k_state = self._product(self.k * factor)
        q_state = self._product(q * factor)
        out = torch.empty_like(values)
        for i, row in enumerate(range(self.begin, self.end)):
            keys = self.k[: row + 1] * torch.exp(self.decay[row] - self.decay[: row + 1])
            u = values[i]
            if delta:
                u = u - self._over(row, k_state[row], keys, self.k[row])
            self.kept_u[row] = u * beta[i][:, None]
            out[i] = self._over(row + 1, q_state[row], keys, q[row])
        return out

    def _product(self, rows: Tensor) -> Tensor:
        """Return rows @ S of every head, [STATE_TILE, heads, v_dim]."""
        return torch.bmm(rows.transpose(0, 1), self.state).transpose(0, 1)

    def _over(self, count: int, total: Tensor, keys: Tensor, with_key: Tensor) -> Tensor:
        """Add (key · with_key) u of the first `count` rows to `total`, one row after the other."""
        weights = (keys[:count] * with_key).sum(-1, keepdim=True)
        for j in range(count):
            total = total + weights[j] * self.kept_u[j].float()
        return total
