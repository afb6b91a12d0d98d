"""`new_rig`: a scheduler with a model that shows whether anything it decided changed a token.

`FakeModel` stands for the model and its cache: it writes into every slot a digest of the history up
to that token, and samples from what it reads back through the blocks of the chunk. A wrong block, a
block written by two requests or one read before it was computed changes its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import pytest
from tests.unit.engine.fakes import FakeDetokenizer, new_engine

from freight import LLM
from freight.cache.groups import Pages
from freight.cache.manager import NOTHING, CacheManager
from freight.engine.drafts import Drafter
from freight.engine.request import Request, RequestState
from freight.engine.scheduler import Scheduler
from freight.engine.step import ScheduledChunk, Step
from freight.operands.tiles import KEY_TILE
from freight.outputs import FinishReason
from freight.sampling import SamplingParams

VOCAB = 50


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def first_seen(position: int, window: int | None) -> int:
    """The first token that attention reads for the one at `position`: whole tiles of keys."""
    return 0 if window is None else max(0, position - window + 1) // KEY_TILE * KEY_TILE


class FakeModel:
    """A pure function of the token history, computed through slots."""

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self.block_size, self.windows = block_size, windows
        self.slots: list[dict[int, bytes]] = [{} for _ in windows]

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, tables: Sequence[Sequence[int]], end: int) -> list[list[bytes]]:
        """By group, what the token at `end` - 1 sees: the tiles of its window."""
        return [
            [
                slots[self.slot(table, position)]
                for position in range(first_seen(end - 1, window), end)
            ]
            for slots, table, window in zip(self.slots, tables, self.windows, strict=True)
        ]

    def __call__(self, step: Step) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for chunk in step.chunks:
            end = chunk.start + chunk.num_tokens
            for position, token in enumerate(chunk.request.tokens(chunk.start, end), chunk.start):
                before = [
                    slots[self.slot(table, position - 1)] if position else b""
                    for slots, table in zip(self.slots, chunk.block_ids, strict=True)
                ]
                assert len(set(before)) == 1, "the groups hold different tokens"
                for slots, table in zip(self.slots, chunk.block_ids, strict=True):
                    slots[self.slot(table, position)] = digest(before[0], token)
            if chunk.samples:
                seen = self.read(chunk.block_ids, end)
                drawn = [self.next_token(seen, chunk.request.seed)]
                self.verify(chunk, drawn)
                sampled[chunk.request.request_id] = drawn
        return sampled

    def verify(self, chunk: ScheduledChunk, drawn: list[int]) -> None:
        """Store the drafts, and append what is drawn behind each that came true."""
        end = chunk.start + chunk.num_tokens
        for position, token in enumerate(chunk.drafts, end):
            for slots, table in zip(self.slots, chunk.block_ids, strict=True):
                before = slots[self.slot(table, position - 1)]
                slots[self.slot(table, position)] = digest(before, token)
        for position, token in enumerate(chunk.drafts, end):
            if token != drawn[-1]:
                return
            seen = self.read(chunk.block_ids, position + 1)
            drawn.append(self.next_token(seen, chunk.request.seed))

    @staticmethod
    def next_token(seen: list[list[bytes]], seed: int) -> int:
        return digest(seen, seed)[0] % VOCAB


def expected_tokens(
    request: Request, max_model_len: int, windows: Sequence[int | None]
) -> list[int]:
    """What the model generates for a request that is alone, uncached and never interrupted."""
    history: list[bytes] = []
    for token in request.prompt_token_ids:
        history.append(digest(history[-1] if history else b"", token))
    output: list[int] = []
    params = request.params
    while True:
        seen = [history[first_seen(len(history) - 1, window) :] for window in windows]
        token = FakeModel.next_token(seen, request.seed)
        output.append(token)
        history.append(digest(history[-1], token))
        stops = token in request.stop_token_ids and len(output) >= params.min_tokens
        if stops or len(output) == params.max_tokens or len(history) == max_model_len:
            return output


class Rig:
    """A scheduler, its allocator and a fake model; checks every step against what always holds."""

    def __init__(
        self,
        num_blocks: int | Sequence[int] = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int = 64,
        caching: bool = True,
        windows: Sequence[int | None] = (None,),
        most_drafts: int = 0,
        draft_tile: int | None = None,
        drafter: Callable[[Request], Drafter | None] = lambda request: None,
    ) -> None:
        groups = [Pages((index,), 1, window, block_size) for index, window in enumerate(windows)]
        counts = [num_blocks] * len(groups) if isinstance(num_blocks, int) else num_blocks
        self.cache = CacheManager(groups, counts, block_size, budget, caching)
        self.allocator = self.cache.allocators[0]
        self.windows = windows
        self.scheduler = Scheduler(
            self.cache, max_num_seqs, budget, max_model_len, most_drafts, draft_tile=draft_tile
        )
        self.drafter = drafter
        self.model = FakeModel(block_size, windows)
        self.max_num_seqs, self.budget, self.max_model_len = max_num_seqs, budget, max_model_len
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        group: str = "",
        index: int = 0,
        eos: Sequence[int] = (),
        **params: Any,
    ) -> Request:
        sampling = SamplingParams(**params)
        own_stops = frozenset(() if sampling.ignore_eos else eos)
        named_stops = frozenset(sampling.stop_token_ids) - own_stops
        request = Request(
            name,
            group or name,
            index,
            tuple(prompt),
            sampling,
            seed=index,
            stop_token_ids=own_stops | named_stops,
            named_stop_ids=named_stops,
        )
        request.drafter = self.drafter(request)
        request.needed_from = None if sampling.prompt_logprobs is None else 0
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def schedule(self) -> Step:
        expects_work = self.scheduler.has_unfinished
        continuing = [
            request for request in self.requests.values() if request.state is RequestState.RUNNING
        ]
        step = self.scheduler.schedule()
        scheduled = [chunk.request for chunk in step.chunks]
        assert bool(step.chunks) == expects_work
        assert step.num_tokens <= self.budget
        assert (
            len(set(scheduled)) == len(scheduled) == self.scheduler.num_running <= self.max_num_seqs
        )
        if step.preempted:  # and then nobody new is admitted
            assert {*scheduled, *step.preempted} == set(continuing)
            assert not set(scheduled) & set(step.preempted)
        assert set(continuing) <= {*scheduled, *step.preempted}
        for chunk in step.chunks:
            assert chunk.num_tokens > 0
            assert chunk.start == chunk.request.num_computed_tokens
            end = chunk.start + chunk.num_tokens
            assert chunk.samples == (
                end == chunk.request.num_tokens and chunk.request.params.max_tokens != 0
            )
            assert chunk.block_ids is chunk.request.held.block_ids
        for group in range(len(self.windows)):
            self.check_blocks(step, group)
        self.num_preemptions += len(step.preempted)
        self.check_counts()
        return step

    def check_blocks(self, step: Step, group: int) -> None:
        size = self.cache.block_size
        written = [
            block
            for chunk in step.chunks
            for block in chunk.block_ids[group][chunk.start // size :]
        ]
        assert len(set(written)) == len(written), "two requests write into one block"
        for chunk in step.chunks:
            end, table, window = (
                chunk.start + chunk.num_tokens + len(chunk.drafts),
                chunk.block_ids[group],
                self.windows[group],
            )
            assert len(table) >= -(-end // size)
            first = chunk.request.held.given_back[group]
            assert first == first_seen(chunk.start, window) // size, (
                "whole tiles are given back, and no more"
            )
            assert set(table[:first]) <= {0}
            assert not set(table[first : chunk.start // size]) & set(written), (
                "a block is written while others read it"
            )
            tile = max(KEY_TILE, size)
            assert (
                window is None
                or (len(table) - first) * size
                < window + chunk.num_tokens + len(chunk.drafts) + tile + size
            )

    def step(self) -> Step:
        step = self.schedule()
        self.apply(step, self.model(step))
        return step

    def apply(self, step: Step, tokens: Mapping[str, Sequence[int]]) -> None:
        """Take in what was drawn, those behind a draft one by one."""
        self.scheduler.apply(step, {name: drawn[:1] for name, drawn in tokens.items()})
        for chunk in step.chunks:
            for token in tokens.get(chunk.request.request_id, ())[1:]:
                if not chunk.request.is_finished:
                    self.scheduler.extend(chunk.request, token)
        self.check_counts()

    def run(self) -> list[Step]:
        steps = []
        while self.scheduler.has_unfinished:
            steps.append(self.step())
            assert len(steps) < 5000
        return steps

    def check_counts(self) -> None:
        for allocator in self.cache.allocators:
            assert (
                allocator.num_free + allocator.num_held + allocator.num_cached
                == allocator.num_blocks
            )

    def check_all_done(self, failed: Container[str] = ()) -> None:
        assert self.scheduler.num_waiting == self.scheduler.num_running == self.cache.num_held == 0
        for name, request in self.requests.items():
            assert request.state is RequestState.FINISHED
            assert request.held == NOTHING
            expected = expected_tokens(request, self.max_model_len, self.windows)
            got = request.output_token_ids
            ended_early = request.finish_reason is FinishReason.ABORT or name in failed
            assert got == (expected[: len(got)] if ended_early else expected)

    @staticmethod
    def shape(step: Step) -> list[tuple[str, int, int, bool]]:
        return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in step.chunks]


@pytest.fixture(scope="session")
def new_rig() -> type[Rig]:
    """Rig itself: every call makes a fresh one."""
    return Rig


@pytest.fixture
def new_llm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An LLM over the fake model: every call makes a fresh one, with the limits that `new_engine`
    takes.
    """
    monkeypatch.setattr(
        "freight.engine.engine.Detokenizer", lambda tokenizer, params, ids: FakeDetokenizer(params)
    )

    def make(**limits: int) -> LLM:
        monkeypatch.setattr("freight.llm.open_model", lambda args: None)
        monkeypatch.setattr(
            "freight.llm.start_engine", lambda opened, before_weights: (new_engine(**limits), None)
        )
        return LLM("demo")

    return make
