"""From logits to tokens, and their log-probabilities.

The definition, for one row of logits x over the vocabulary (v, token ids), in this order:

    thought       x[v] = -inf, and 0 for one v                        the budget of a thought is
                  used up: v is the next token of its closing tag, which a grammar, if there is one,
                  permits. Nothing below but the draw changes such a row
    bias          x[v] += logit_bias[v]
    repetition    x[v] = x[v] / r if x[v] > 0 else x[v] * r           v in the prompt or the output
    presence      x[v] -= presence_penalty + frequency_penalty * n(v) v in the output, n(v) times
    min_tokens    x[v] = -inf                                         v a stop id, position <
                  min_tokens
    allowed       x[v] = -inf                                         v not in allowed_token_ids
    bad_words     x[v] = -inf                                         v would end one of them
    grammar       x[v] = -inf                                         v a token that it does not
                  permit next
    greedy        the token is argmax x, the lowest id of several; the rest is for temperature > 0
    temperature   x = (x - max x) / temperature
    min_p         keep v with exp(x[v]) >= min_p
    top_k         keep the first k, by falling x, then by rising id
    top_p         p = softmax x; keep the shortest run, by falling p, then by rising id, whose sum
                  is >= top_p
    draw          the first v, by rising id, where the sum of p up to v is > u * (sum of all p)

With a grammar (structured outputs) the model's own stop ids are barred under ignore_eos too, and
neither that nor min_tokens bars any when the grammar, allowed_token_ids and bad_words leave no
other token: a complete text ends.

u in [0, 1) has 53 random bits and is SplitMix64 (Steele, Lea, Flood 2014) of the row's seed and its
position in the output, and of nothing else: neither other rows, chunks, preemption nor the device
change it.

Guarantees: a row's result has the same bits whatever other rows are in the batch. Each step is
therefore elementwise and exactly rounded, a comparison, an integer sum, or one of torch's kernels
that walk a row on its own (softmax, log_softmax, cumsum); a float `sum` is not, and is not used.
Log-probabilities are float32 log_softmax of the logits as the model gave them. A row with NaN or
without a finite maximum gives an error in place of a token, in that row alone.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freight.engine.adjust import SamplingRow as SamplingRow
from freight.engine.adjust import adjust, send
from freight.outputs import LogprobEntry, Scores
from freight.sampling import NO_TOKEN_LEFT, SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment
_ALL_BITS = 2**64 - 1
# most likely tokens tried first for top_p; of a row that they do not reach, all are sorted
_NUCLEUS = 1024
_ROWS_AT_ONCE = 32  # bounds what log-probabilities of a long prompt hold in memory


class Sampled(NamedTuple):
    """A drawn token, or why there is none.

    token_id  -1 when `error` is set
    logprobs  the asked-for most likely by rank, then the token itself unless it is among them;
              None: not asked for
    error     why this row has no token; other rows are not affected
    """

    token_id: int
    logprobs: tuple[LogprobEntry, ...] | None
    error: str | None = None


class Draw(NamedTuple):
    """What a draw from a model's own logits depends on. `position` counts the output tokens before
    it.
    """

    params: SamplingParams
    seed: int
    position: int


class _Row(Protocol):
    """A SamplingRow or a Draw."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def position(self) -> int: ...


def draw(logits: Tensor, rows: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Draw a token for each row as `sample` does, of logits that no parameter changes. The host
    waits for nothing.

    Returns the tokens, int64 [num_rows], ids of the vocabulary in any case, and int64 [2,
    num_rows]: the tokens and 1 where they are what `sample` gives, 0 where it gives an error or
    looks at more of the vocabulary.
    """
    tokens, reached, peaks = _choose(logits, rows, _NUCLEUS)
    # of a row of NaN it may be anything, and another step looks it up
    tokens = tokens.clamp(0, logits.shape[1] - 1)
    return tokens, torch.stack((tokens, (reached & peaks.isfinite()).long()))


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw a token for each row. logits: float32 [num_rows, vocab_size], not changed.

    A row of logits without a finite maximum, or with parameters that leave no token to draw, gives
    a Sampled with an `error`.
    """
    assert logits.dtype == torch.float32
    assert logits.shape[0] == len(rows)
    adjusted = adjust(logits, rows)
    tokens, reached, adjusted_peaks = _choose(adjusted, rows, _NUCLEUS)
    peaks = adjusted_peaks
    if adjusted is not logits:
        peaks = logits.amax(-1)
    on_host = _on_host(tokens, reached, peaks, adjusted_peaks)
    drawn, all_reached, *both_peaks = [column.numpy() for column in on_host]
    token_ids: list[int] = drawn.astype(np.int64).tolist()
    errors: list[str | None] = [None] * len(rows)
    if not np.isfinite(both_peaks).all():
        for i, row in enumerate(rows):
            errors[i] = _fault(row, float(both_peaks[0][i]), float(both_peaks[1][i]))
    unresolved = [i for i in np.flatnonzero(all_reached == 0).tolist() if errors[i] is None]
    if unresolved:
        index = send(unresolved, torch.int64, logits.device)
        tokens[index] = _choose(adjusted[index], [rows[i] for i in unresolved], logits.shape[1])[0]
        token_ids = tokens.tolist()
    with_logprobs: dict[int, int] = {}  # row -> how many
    for i, row in enumerate(rows):
        if row.params.logprobs is not None and errors[i] is None:
            with_logprobs[i] = row.params.logprobs
    entries: dict[int, tuple[LogprobEntry, ...]] = {}
    if with_logprobs:
        index = send(list(with_logprobs), torch.int64, logits.device)
        ranked = _logprobs(logits[index], tokens[index], list(with_logprobs.values()))
        entries = dict(zip(with_logprobs, ranked, strict=True))
    results = []
    for i, (token, error) in enumerate(zip(token_ids, errors, strict=True)):
        if error:
            token = -1
        results.append(Sampled(token, entries.get(i), error))
    return results


def _on_host(*columns: Tensor) -> Sequence[Tensor]:
    """`columns` [num_rows]; those on a GPU all at once, in float64. The only place where the host
    waits for a GPU.
    """
    if columns[0].device.type == "cpu":
        return columns
    return torch.stack([column.double() for column in columns]).cpu().unbind()


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> Scores | None:
    """Return the k most likely tokens of each row, and its target; None where a row has no finite
    maximum.

    logits: float32 [num_rows, vocab_size]; targets: int64 [num_rows], the tokens that follow in the
    prompt.
    """
    if not all(map(math.isfinite, logits.amax(-1).tolist())):  # a maximum passes NaN on
        return None
    parts = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        ids, logprobs, ranks = _ranked(logits[rows], targets[rows], k)
        parts.append(Scores(ids.shape[1], _ints(ids), _floats(logprobs), _ints(ranks)))
    return Scores.joined(parts)


def _ints(values: Tensor) -> array[int]:
    return array("i", values.int().cpu().numpy().tobytes())


def _floats(values: Tensor) -> array[float]:
    """values: float32"""
    return array("f", values.cpu().numpy().tobytes())


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed, in [0, 2 ** 64), of the index-th completion that shares `seed`; different
    for every index.
    """
    return _mix(_mix(seed) + index * _GOLDEN)


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | None = None
) -> Tensor:
    """float64 [num_rows] in [0, 1): the random number of each (seed, output position)."""
    numbers = []
    for seed, position in zip(seeds, positions, strict=True):
        bits = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
        numbers.append(math.ldexp(bits >> 11, -53))
    return send(numbers, torch.float64, device or torch.device("cpu"))


def _mix(bits: int) -> int:
    """SplitMix64's output function of `bits` modulo 2 ** 64. Python's whole numbers take less time
    than any array's for the rows of a step."""
    bits &= _ALL_BITS
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _ALL_BITS
    return bits ^ (bits >> 31)


def _fault(row: SamplingRow, peak: float, adjusted_peak: float) -> str | None:
    """Say why a row has no token, from the maximum of its logits and of what its parameters made of
    them; None: it has.
    """
    params = row.params
    if not math.isfinite(peak):
        return (
            "the model gave NaN or infinite logits; its weights or its scales are damaged, "
            "or a value overflowed its format"
        )
    if adjusted_peak == math.inf:
        return (
            f"repetition_penalty={params.repetition_penalty} raised a logit of {peak:.3g} beyond float32; "
            "use a value closer to 1"
        )
    if adjusted_peak == -math.inf:
        return (row.grammar and row.grammar.error) or _nothing_left(row)
    return None


def _nothing_left(row: SamplingRow) -> str:
    """Say what to change where the parameters leave no token."""
    params = row.params
    barring = {
        "structured_outputs": row.grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": row.bad_words is not None,
        f"min_tokens={params.min_tokens}": row.bars_stop_ids,
        "logit_bias": bool(params.logit_bias),
    }
    names = " and ".join(name for name, bars in barring.items() if bars)
    return (
        f"{NO_TOKEN_LEFT} after {row.position} output tokens: each has the logit -inf or is barred by "
        f"{names}; change these parameters"
    )


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[len(values), 1] float64 on `like`'s device."""
    return send(values, torch.float64, like.device).unsqueeze(-1)


def highest(x: Tensor) -> Tensor:
    """Return where each row [rows, tokens], in 32 or 64 bits, is highest: the first, thus the
    lowest id, of equals.

    On a CPU by numpy, which takes a fifth of torch's time or less. int64 [rows].
    """
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def _choose(x: Tensor, rows: Sequence[_Row], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """From adjusted logits x: tokens int64 [num_rows]; bool [num_rows], whether the `width` most
    likely were enough; and the maximum of each row, NaN where it has one."""
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        return _draw(x, rows, width)
    tokens = highest(x)
    reached = torch.ones_like(tokens, dtype=torch.bool)
    peaks = x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if drawn:
        index = send(drawn, torch.int64, x.device)
        tokens[index], reached[index], _ = _draw(x[index], [rows[i] for i in drawn], width)
    return tokens, reached, peaks


def _draw(x: Tensor, rows: Sequence[_Row], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_choose` for rows with temperature > 0."""
    peaks = x.amax(-1, keepdim=True)
    x = (x - peaks) / _column([row.params.temperature for row in rows], x).float()
    x = _on(x, rows, lambda params: params.min_p > 0, _min_p)
    x = _on(x, rows, lambda params: 0 < params.top_k < x.shape[-1], _top_k)
    p = x.softmax(-1)
    reached = torch.ones(len(rows), dtype=torch.bool, device=x.device)
    nucleus = [i for i, row in enumerate(rows) if row.params.top_p < 1]
    if nucleus:
        index = send(nucleus, torch.int64, x.device)
        nucleus_p, reached[index] = _top_p(p[index], [rows[i].params.top_p for i in nucleus], width)
        p = p.index_copy(0, index, nucleus_p)
    mass = _running_sums(p)
    total = mass[:, -1:]
    seeds = [row.seed for row in rows]
    positions = [row.position for row in rows]
    u = uniforms(seeds, positions, x.device).unsqueeze(-1)
    below_total = total.nextafter(torch.zeros_like(total))
    point = torch.minimum(u * total, below_total)  # < total, also after rounding
    tokens = torch.searchsorted(mass, point, right=True)
    return tokens.squeeze(-1), reached, peaks.squeeze(-1)


def _on(
    x: Tensor,
    rows: Sequence[_Row],
    asked: Callable[[SamplingParams], bool],
    keep: Callable[[Tensor, Sequence[SamplingParams]], Tensor],
) -> Tensor:
    """`keep` on the rows that asked for it; the others as they are."""
    chosen = [i for i, row in enumerate(rows) if asked(row.params)]
    if not chosen:
        return x
    if len(chosen) == len(rows):
        return keep(x, [row.params for row in rows])
    index = send(chosen, torch.int64, x.device)
    return x.index_copy(0, index, keep(x[index], [rows[i].params for i in chosen]))


def _min_p(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    floor = _column([math.log(p.min_p) for p in params], x)
    return x.masked_fill(x < floor, -math.inf)


def _top_k(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    count = _column([p.top_k for p in params], x).long()
    values = x.topk(max(p.top_k for p in params)).values
    return x.masked_fill(~_first(x, values.gather(-1, count - 1), count), -math.inf)


def _top_p(p: Tensor, goals: Sequence[float], width: int) -> tuple[Tensor, Tensor]:
    """p with 0 outside of the nucleus; and whether the `width` largest of a row have its goal, bool
    [num_rows].
    """
    goal = _column(goals, p)
    values = _largest(p, width)
    mass = _running_sums(values)
    reached = (mass[:, -1] >= goal[:, 0]) | (values.shape[-1] == p.shape[-1])
    # rounding may leave 1 unreached
    count = (torch.searchsorted(mass, goal) + 1).clamp(max=values.shape[-1])
    return p.masked_fill(~_first(p, values.gather(-1, count - 1), count), 0), reached


def _running_sums(p: Tensor) -> Tensor:
    """Return float64 [num_rows, tokens]: the sums of each row up to each token, in an order that is
    the same at every call, and on all ranks.
    """
    if p.device.type == "cpu" or len(p) > 1:
        return p.cumsum(-1, dtype=torch.float64)
    # of one row torch has another kernel on a GPU, whose blocks add what others have by that moment
    return p.expand(2, -1).cumsum(-1, dtype=torch.float64)[:1]


def _largest(p: Tensor, width: int) -> Tensor:
    """Return the `width` largest of each row, or all of them, by falling value."""
    # numpy sorts all, with vector instructions, in less time than topk takes for 1024
    if p.device.type == "cpu":
        return torch.from_numpy(np.sort(p.numpy(), axis=-1)).flip(-1)
    if width < p.shape[-1]:
        return p.topk(width).values
    return p.sort(dim=-1, descending=True).values


def _first(values: Tensor, cutoff: Tensor, count: Tensor) -> Tensor:
    """Mask of the first `count` entries of each row, by falling value, then by rising id.

    values: [num_rows, vocab_size]; cutoff: [num_rows, 1], the count-th largest value; count: int64
    [num_rows, 1].
    """
    above = values > cutoff
    ties = values == cutoff
    num_ties = count - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= num_ties))


def _logprobs(
    logits: Tensor, tokens: Tensor, counts: Sequence[int]
) -> list[tuple[LogprobEntry, ...]]:
    """For each row its `counts` most likely tokens and, unless among them, `tokens` [num_rows]."""
    ranked: list[tuple[LogprobEntry, ...]] = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        columns = _ranked(logits[rows], tokens[rows], max(counts[rows]))
        all_ids, all_values, ranks = [column.tolist() for column in columns]
        for ids, values, rank, count in zip(all_ids, all_values, ranks, counts[rows], strict=True):
            entries = list(zip(ids[:-1][:count], values, range(1, count + 1), strict=False))
            if rank > count:
                entries.append((ids[-1], values[-1], rank))
            ranked.append(tuple(entries))
    return ranked


def _ranked(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` most likely tokens of each row, or all of them, then `tokens` [num_rows].

    Returns their ids, int64 [num_rows, count + 1], their log-probabilities, and the rank of
    `tokens`, int64 [num_rows].
    """
    logprobs = logits.log_softmax(-1)
    ids = torch.cat((_most_likely(logits, min(count, logits.shape[-1])), tokens.unsqueeze(-1)), -1)
    return ids, logprobs.gather(-1, ids), _ranks(logits, tokens)


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [num_rows]: the rank of each row's token, from 1. Of equal logits the lower id comes
    first.
    """
    # numpy counts with vector instructions, in a tenth of the time of torch's sum
    if logits.device.type == "cpu":
        ranks = []
        for row, token in zip(logits.numpy(), tokens.tolist(), strict=True):
            value = row[token]
            num_above = np.count_nonzero(row > value)
            num_ties = np.count_nonzero(row[: token + 1] == value)
            ranks.append(num_above + num_ties)
        return torch.tensor(ranks, dtype=torch.int64, device=logits.device)
    return _ranks_on_device(logits, tokens)


def _ranks_on_device(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return `_ranks` without a wait for the device."""
    column = tokens.unsqueeze(-1)
    value = logits.gather(-1, column)
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
    ties = (logits == value) & (token_ids <= column)
    return ((logits > value) | ties).sum(-1)


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """int64 [num_rows, count]: token ids by falling logit, then by rising id."""
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    cutoff = logits.topk(count).values[:, -1:]
    if logits.device.type == "cpu":
        ids_of_rows = np.empty((logits.shape[0], count), np.int64)
        for ids, row, least in zip(ids_of_rows, logits.numpy(), cutoff.numpy(), strict=True):
            among = np.flatnonzero(row >= least)
            ids[:] = among[np.argsort(-row[among], kind="stable")[:count]]
        return torch.from_numpy(ids_of_rows)
    return _first_by_mask(logits, cutoff, count)


def _first_by_mask(logits: Tensor, cutoff: Tensor, count: int) -> Tensor:
    """Return `_most_likely` without a wait for the device. cutoff: [num_rows, 1], the count-th
    largest logit.
    """
    vocab_size = logits.shape[-1]
    mask = _first(logits, cutoff, torch.full_like(cutoff, count, dtype=torch.int64))
    everyone = torch.arange(vocab_size, dtype=torch.int64, device=logits.device)
    ids = torch.where(mask, everyone, vocab_size).topk(count, largest=False).values.sort(-1).values
    return ids.gather(-1, logits.gather(-1, ids).sort(stable=True, dim=-1, descending=True).indices)
