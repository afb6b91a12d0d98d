"""From logits to tokens, and their log-probabilities.

The definition, for one row of logits x over the vocabulary (v, token ids), in this order:

    bias          x[v] += logit_bias[v]
    repetition    x[v] = x[v] / r if x[v] > 0 else x[v] * r           v in the prompt or the output
    presence      x[v] -= presence_penalty + frequency_penalty * n(v) v in the output, n(v) times
    min_tokens    x[v] = -inf                                         v a stop id, position < min_tokens
    greedy        the token is argmax x, the lowest id of several; the rest is for temperature > 0
    temperature   x = (x - max x) / temperature
    min_p         keep v with exp(x[v]) >= min_p
    top_k         keep the first k, by falling x, then by rising id
    top_p         p = softmax x; keep the shortest run, by falling p, then by rising id, whose sum is >= top_p
    draw          the first v, by rising id, where the sum of p up to v is > u * (sum of all p)

u in [0, 1) has 53 random bits and is SplitMix64 (Steele, Lea, Flood 2014) of the row's seed and its position in the
output, and of nothing else: neither other rows, chunks, preemption nor the device change it.

Guarantees: a row's result has the same bits whatever other rows are in the batch. Each step is therefore elementwise
and exactly rounded, a comparison, an integer sum, or one of torch's kernels that walk a row on its own (softmax,
log_softmax, cumsum); a float `sum` is not, and is not used. Log-probabilities are float32 log_softmax of the logits as
the model gave them. A row with NaN or without a finite maximum is a broken model: KernelError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.sampling import SamplingParams

LogprobEntry = tuple[int, float, int]  # token id, log-probability, rank from 1 (of equal logits, the lower id first)

_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment
_NUCLEUS = 1024  # most likely tokens tried first for top_p; all are sorted when the host sees that they do not reach it
_ROWS_AT_ONCE = 32  # bounds what log-probabilities of a long prompt hold in memory


@dataclass(frozen=True)
class SamplingRow:
    """What one row of logits is sampled with. `position` counts the output tokens before this one."""

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]


@dataclass(frozen=True)
class Sampled:
    """A drawn token. `logprobs`: the asked-for most likely by rank, then the token itself unless it is among them."""

    token_id: int
    logprobs: tuple[LogprobEntry, ...] | None


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw a token for each row. logits: float32 [num_rows, vocab_size], not changed.

    Raises KernelError for a row of NaN or infinite logits, and when `min_tokens` leaves no token to draw.
    """
    assert logits.dtype == torch.float32
    assert logits.shape[0] == len(rows)
    adjusted = _adjust(logits, rows)
    tokens, reached = _choose(adjusted, rows, _NUCLEUS)
    barred = torch.zeros_like(reached) if adjusted is logits else adjusted.amax(-1) == -math.inf
    told = torch.stack((tokens, reached.long(), _broken(logits).long(), barred.long()))
    token_ids, all_reached, broken, no_token = told.tolist()  # where the host waits for a GPU, the only place
    _refuse(broken)
    if any(no_token):
        params = rows[no_token.index(1)].params
        raise KernelError(f"min_tokens={params.min_tokens} bars every stop id, and no other token is left")
    if not all(all_reached):
        tokens, _ = _choose(adjusted, rows, logits.shape[1])
        token_ids = tokens.tolist()
    entries: list[tuple[LogprobEntry, ...] | None] = [None] * len(rows)
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if wanted:
        index = _send(wanted, torch.int64, logits.device)
        counts = [rows[i].params.logprobs or 0 for i in wanted]
        for i, found in zip(wanted, _logprobs(logits[index], tokens[index], counts), strict=True):
            entries[i] = found
    return [Sampled(token, found) for token, found in zip(token_ids, entries, strict=True)]


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[tuple[LogprobEntry, ...]]:
    """The k most likely tokens of each row and, unless among them, its target.

    logits: float32 [num_rows, vocab_size]; targets: int64 [num_rows], the tokens that follow in the prompt.
    Raises KernelError for a row of NaN or infinite logits.
    """
    _refuse(_broken(logits).tolist())
    return _logprobs(logits, targets, [k] * logits.shape[0])


def sibling_seed(seed: int, index: int) -> int:
    """The seed, in [0, 2 ** 64), of the index-th completion that shares `seed`; different for every index."""
    return int(_mix(_mix(_int64([seed])) + _int64([index * _GOLDEN]))) % 2**64


def uniforms(seeds: Sequence[int], positions: Sequence[int], device: torch.device | None = None) -> Tensor:
    """float64 [num_rows] in [0, 1): the random number of each (seed, output position)."""
    stream = _mix(_int64(seeds, device) + _int64([_GOLDEN], device))
    bits = _mix(stream + _int64([(position + 1) * _GOLDEN for position in positions], device))
    return _shifted(bits, 11).double() * 2.0**-53


def _int64(values: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Whole numbers modulo 2 ** 64, as the int64 of the same bits."""
    return _send([(value + 2**63) % 2**64 - 2**63 for value in values], torch.int64, device or torch.device("cpu"))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A right shift that brings in zeros; torch's own repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's output function on int64, whose products wrap around."""
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ _shifted(bits, 31)


def _broken(logits: Tensor) -> Tensor:
    """bool [num_rows]: which rows have a NaN or no finite maximum."""
    return ~logits.amax(-1).isfinite()  # a maximum passes NaN on


def _refuse(broken: Sequence[int | bool]) -> None:
    if any(broken):
        row = next(i for i, one in enumerate(broken) if one)
        raise KernelError(
            f"the model gave NaN or infinite logits in row {row} of {len(broken)}; "
            "its weights or its scales are damaged, or a value overflowed its format"
        )


def _send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on `device`; the host does not wait for what a GPU still computes, as torch.tensor would."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[len(values), 1] float64 on `like`'s device."""
    return _send(values, torch.float64, like.device).unsqueeze(-1)


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Bias, penalties and min_tokens; the given tensor itself when no row has any."""
    adjusted = logits
    for i, row in enumerate(rows):
        params = row.params
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        barred = row.stop_token_ids if row.position < params.min_tokens else frozenset()
        if params.logit_bias or penalised or barred:
            if adjusted is logits:
                adjusted = logits.clone()
            _adjust_row(adjusted[i], row, barred)
    return adjusted


def _adjust_row(x: Tensor, row: SamplingRow, barred: frozenset[int]) -> None:
    """Change the logits x [vocab_size] of one row in place."""

    def ids(tokens: Sequence[int]) -> Tensor:
        return _send(tokens, torch.int64, x.device)

    def change(values: Sequence[float]) -> Tensor:
        return _send(values, x.dtype, x.device)

    params = row.params
    if params.logit_bias:
        x[ids(list(params.logit_bias))] += change(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        seen = ids(list({*row.prompt_token_ids, *row.output_token_ids}))
        penalty = change([params.repetition_penalty])
        x[seen] = torch.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    if row.output_token_ids and (params.presence_penalty != 0 or params.frequency_penalty != 0):
        counts = Counter(row.output_token_ids)
        cost = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        x[ids(list(counts))] -= change(cost)
    if barred:
        x[ids([token for token in barred if token < x.shape[0]])] = -math.inf


def _choose(x: Tensor, rows: Sequence[SamplingRow], width: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [num_rows] from adjusted logits x; bool [num_rows], whether the `width` most likely were enough."""
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        return _draw(x, rows, width)
    tokens = x.argmax(-1)  # the first, thus the lowest id, of equal maxima
    reached = torch.ones_like(tokens, dtype=torch.bool)
    if drawn:
        index = _send(drawn, torch.int64, x.device)
        tokens[index], reached[index] = _draw(x[index], [rows[i] for i in drawn], width)
    return tokens, reached


def _draw(x: Tensor, rows: Sequence[SamplingRow], width: int) -> tuple[Tensor, Tensor]:
    """`_choose` for rows with temperature > 0."""
    x = (x - x.amax(-1, keepdim=True)) / _column([row.params.temperature for row in rows], x).float()
    x = _on(x, rows, lambda params: params.min_p > 0, _min_p)
    x = _on(x, rows, lambda params: 0 < params.top_k < x.shape[-1], _top_k)
    p = x.softmax(-1)
    reached = torch.ones(len(rows), dtype=torch.bool, device=x.device)
    nucleus = [i for i, row in enumerate(rows) if row.params.top_p < 1]
    if nucleus:
        index = _send(nucleus, torch.int64, x.device)
        kept, reached[index] = _top_p(p[index], [rows[i].params.top_p for i in nucleus], width)
        p = p.index_copy(0, index, kept)
    mass = p.cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    u = uniforms([row.seed for row in rows], [row.position for row in rows], x.device).unsqueeze(-1)
    point = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))  # < total, also after rounding
    return torch.searchsorted(mass, point, right=True).squeeze(-1), reached


def _on(
    x: Tensor,
    rows: Sequence[SamplingRow],
    asked: Callable[[SamplingParams], bool],
    keep: Callable[[Tensor, Sequence[SamplingParams]], Tensor],
) -> Tensor:
    """`keep` on the rows that asked for it; the others as they are."""
    chosen = [i for i, row in enumerate(rows) if asked(row.params)]
    if not chosen:
        return x
    if len(chosen) == len(rows):
        return keep(x, [row.params for row in rows])
    index = _send(chosen, torch.int64, x.device)
    return x.index_copy(0, index, keep(x[index], [rows[i].params for i in chosen]))


def _min_p(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    floor = _column([math.log(p.min_p) for p in params], x)
    return x.masked_fill(x < floor, -math.inf)


def _top_k(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    count = _column([p.top_k for p in params], x).long()
    values = x.topk(max(p.top_k for p in params)).values
    return x.masked_fill(~_first(x, values.gather(-1, count - 1), count), -math.inf)


def _top_p(p: Tensor, goals: Sequence[float], width: int) -> tuple[Tensor, Tensor]:
    """p with 0 outside of the nucleus; and whether the `width` largest of a row have its goal, bool [num_rows]."""
    goal = _column(goals, p)
    values = p.topk(min(width, p.shape[-1])).values
    mass = values.cumsum(-1, dtype=torch.float64)
    reached = (mass[:, -1] >= goal[:, 0]) | (width >= p.shape[-1])
    count = ((mass < goal).sum(-1, keepdim=True) + 1).clamp(max=values.shape[-1])  # rounding may leave 1 unreached
    return p.masked_fill(~_first(p, values.gather(-1, count - 1), count), 0), reached


def _first(values: Tensor, cutoff: Tensor, count: Tensor) -> Tensor:
    """Mask of the first `count` entries of each row, by falling value, then by rising id.

    values: [num_rows, vocab_size]; cutoff: [num_rows, 1], the count-th largest value; count: int64 [num_rows, 1].
    """
    above = values > cutoff
    ties = values == cutoff
    return above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))


def _logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[tuple[LogprobEntry, ...]]:
    """For each row its `counts` most likely tokens and, unless among them, `tokens` [num_rows]."""
    found: list[tuple[LogprobEntry, ...]] = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found += _logprobs_at_once(logits[rows], tokens[rows], counts[rows])
    return found


def _logprobs_at_once(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[tuple[LogprobEntry, ...]]:
    logprobs = logits.log_softmax(-1)
    ids = _most_likely(logits, min(max(counts), logits.shape[-1]))
    top = zip(ids.tolist(), logprobs.gather(-1, ids).tolist(), strict=True)
    own = tokens.unsqueeze(-1)
    value = logits.gather(-1, own)
    everyone = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
    ranks = ((logits > value) | ((logits == value) & (everyone <= own))).sum(-1).tolist()
    owns = zip(tokens.tolist(), logprobs.gather(-1, own).squeeze(-1).tolist(), ranks, strict=True)
    found = []
    for (top_ids, top_values), (token, logprob, rank), count in zip(top, owns, counts, strict=True):
        entries = tuple(zip(top_ids[:count], top_values[:count], range(1, count + 1), strict=False))
        found.append(entries if rank <= count else (*entries, (token, logprob, rank)))
    return found


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """int64 [num_rows, count]: token ids by falling logit, then by rising id."""
    vocab_size = logits.shape[-1]
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    cutoff = logits.topk(count).values[:, -1:]
    mask = _first(logits, cutoff, torch.full_like(cutoff, count, dtype=torch.int64))
    everyone = torch.arange(vocab_size, dtype=torch.int64, device=logits.device)
    ids = torch.where(mask, everyone, vocab_size).topk(count, largest=False).values.sort(-1).values
    return ids.gather(-1, logits.gather(-1, ids).sort(stable=True, dim=-1, descending=True).indices)
