"""Steps as bytes: what rank 0 tells the others of the slices that a step computes. Imports no torch.

From one step to the next most block tables are the same, and others became a block longer. So
only what is new of a row's tables is sent, and the reader keeps the same tuple for a table that did
not change, as `engine/block_tables.py` wants it.

Of a step whose tokens every rank draws, what they are drawn with is sent as well, bit for bit: of a
row once, until another request takes its place. Each microbatch has rows of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from freight.sampling import SamplingParams

Table = tuple[int, ...]
Known = tuple[SamplingParams, int]  # what a row draws with: parameters and seed
_NUMBER = 8  # bytes
_OF_HEAD = -1  # in place of a microbatch
_NONE = -1  # for a slice without an adapter, or without a second text


class SliceNumbers(NamedTuple):
    """A slice of a sequence in numbers: `SequenceSlice` of `engine/prepare.py`, with `logits` as a
    code.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[Sequence[int]]
    logits: int
    adapter: int | None
    second_text: int | None = None


class DrawNumbers(NamedTuple):
    """What a token is drawn with: `Draw` of `engine/sampler.py`. `params` have what a draw depends on
    (temperature, top_p, top_k, min_p) and nothing else, `seed` is in [0, 2**64).
    """

    params: SamplingParams
    seed: int
    position: int


class Drawing(Protocol):
    """A Draw, or DrawNumbers."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def position(self) -> int: ...


class LaunchNumbers(NamedTuple):
    """A step of a microbatch whose tokens every rank draws: a draw for each of the slices that have
    logits, in their order. `rows`: where the slices' tokens are among those that the last launched step of the
    microbatch drew; None: the slices have them.
    """

    microbatch: int
    slices: Sequence[SliceNumbers]
    draws: Sequence[Drawing]
    rows: Sequence[int] | None


class StepWriter:
    """Writes steps. What it wrote is read in the same order by one reader each."""

    def __init__(self) -> None:
        self._tables: dict[int, list[list[Table]]] = {}  # by microbatch, then by row and group
        self._draws: dict[int, list[Known]] = {}  # by microbatch, then by row

    def clear(self) -> None:
        """Forget what was written: the readers are cleared, too."""
        self._tables = {}
        self._draws = {}

    def encode(self, slices: Sequence[SliceNumbers]) -> bytes:
        """Return a step as bytes."""
        return _bytes(self._slices(slices, 0))

    def encode_draft(self, slices: Sequence[SliceNumbers], features: bytes) -> bytes:
        """Return a pass of a head as bytes, with the features that it takes. Its rows are others than a
        step's.
        """
        numbers = self._slices(slices, _OF_HEAD)
        return _bytes([len(numbers), *numbers]) + features

    def encode_launch(self, launch: LaunchNumbers) -> bytes:
        """Return a step whose tokens every rank draws as bytes."""
        assert len(launch.draws) <= len(launch.slices)
        numbers = [launch.microbatch, _NONE]
        if launch.rows is not None:
            numbers[1] = len(launch.rows)
            numbers += launch.rows
        numbers.append(len(launch.draws))
        known = self._draws.setdefault(launch.microbatch, [])
        for row, draw in enumerate(launch.draws):
            numbers.append(draw.position)
            if row == len(known):
                known.append((SamplingParams(), _NONE))  # nobody's: seeds are not negative
            params, seed = known[row]
            if draw.params is params and draw.seed == seed:
                numbers.append(0)
                continue
            known[row] = draw.params, draw.seed
            numbers.append(1)
            numbers += _numbers_of(draw)
        return _bytes(numbers + self._slices(launch.slices, launch.microbatch))

    def _slices(self, slices: Sequence[SliceNumbers], microbatch: int) -> list[int]:
        known = self._tables.setdefault(microbatch, [])
        num_groups = 0
        if slices:
            num_groups = len(slices[0].block_ids)
        numbers = [len(slices), num_groups]
        tokens: list[int] = []
        blocks: list[int] = []
        for row, part in enumerate(slices):
            adapter = _NONE if part.adapter is None else part.adapter
            second = _NONE if part.second_text is None else part.second_text
            numbers += (len(part.token_ids), part.start, part.logits, adapter, second)
            tokens += part.token_ids
            if row == len(known):
                known.append([()] * len(part.block_ids))
            written = known[row]
            for group, table in enumerate(part.block_ids):
                old = written[group]
                if table is old:
                    numbers += (len(old), 0)
                    continue
                new = tuple(table)
                unchanged = 0
                if new[: len(old)] == old:
                    unchanged = len(old)
                numbers += (unchanged, len(new) - unchanged)
                blocks += new[unchanged:]
                written[group] = new
        return [*numbers, *tokens, *blocks]


class StepReader:
    """Reads the steps of a `StepWriter`."""

    def __init__(self) -> None:
        self._tables: dict[int, list[list[Table]]] = {}
        self._draws: dict[int, list[Known]] = {}

    def clear(self) -> None:
        """Forget what was read."""
        self._tables = {}
        self._draws = {}

    def decode(self, data: bytes) -> list[SliceNumbers]:
        """Return the slices of a step."""
        return self._slices(_numbers(data), 0)

    def decode_draft(self, data: bytes) -> tuple[list[SliceNumbers], bytes]:
        """Return the slices of a pass of a head, and its features."""
        (count,) = _numbers(data[:_NUMBER])
        end = _NUMBER * (1 + count)
        return self._slices(_numbers(data[_NUMBER:end]), _OF_HEAD), data[end:]

    def decode_launch(self, data: bytes) -> LaunchNumbers:
        """Return a step whose tokens every rank draws."""
        numbers = _numbers(data)
        following = iter(numbers)
        microbatch = next(following)
        rows = None
        num_rows = next(following)
        length = 3
        if num_rows != _NONE:
            rows = _next(following, num_rows)
            length += num_rows
        known = self._draws.setdefault(microbatch, [])
        draws = []
        for row in range(next(following)):
            position, is_fresh = _next(following, 2)
            length += 2
            if is_fresh:
                known[row : row + 1] = [_known_of(_next(following, _DRAW))]
                length += _DRAW
            draws.append(DrawNumbers(*known[row], position))
        return LaunchNumbers(microbatch, self._slices(numbers[length:], microbatch), draws, rows)

    def _slices(self, numbers: list[int], microbatch: int) -> list[SliceNumbers]:
        tables_of = self._tables.setdefault(microbatch, [])
        count, groups = numbers[:2]
        width = 5 + 2 * groups
        token = 2 + count * width
        heads = []
        block = token
        for begin in range(2, token, width):
            heads.append(numbers[begin : begin + width])
            block += numbers[begin]
        slices = []
        for row, (num_tokens, start, logits, adapter, second, *tables) in enumerate(heads):
            token_ids = tuple(numbers[token : token + num_tokens])
            token += num_tokens
            if row == len(tables_of):
                tables_of.append([()] * groups)
            known = tables_of[row]
            for group in range(groups):
                unchanged, fresh = tables[2 * group : 2 * group + 2]
                if fresh or unchanged != len(known[group]):
                    known[group] = known[group][:unchanged] + tuple(numbers[block : block + fresh])
                    block += fresh
            slot = None if adapter == _NONE else adapter
            begin_of_second = None if second == _NONE else second
            slices.append(
                SliceNumbers(token_ids, start, tuple(known), logits, slot, begin_of_second)
            )
        return slices


_DRAW = 5  # numbers of a draw without its position


def _numbers_of(draw: Drawing) -> list[int]:
    params = draw.params
    floats = struct.pack("=3d", params.temperature, params.top_p, params.min_p)
    return [
        *struct.unpack("=q", struct.pack("=Q", draw.seed)),
        params.top_k,
        *struct.unpack("=3q", floats),
    ]


def _known_of(numbers: Sequence[int]) -> Known:
    bits, top_k, *floats = numbers
    (seed,) = struct.unpack("=Q", struct.pack("=q", bits))
    temperature, top_p, min_p = struct.unpack("=3d", struct.pack("=3q", *floats))
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p), seed


def _next(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]


def _bytes(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype=np.int64).tobytes()


def _numbers(data: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(data, np.int64).tolist()
    return numbers
