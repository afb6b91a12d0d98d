"""A model for tests of the engine: a pure function of the token history, computed through the
blocks it is given.

So a wrong block, a lost or a doubled token changes what comes out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from freight import LLM, SamplingParams
from freight.cache.groups import Pages
from freight.cache.manager import CacheManager
from freight.engine import compute
from freight.engine.engine import Engine
from freight.engine.intake import Intake
from freight.engine.prepare import SequenceSlice
from freight.engine.runner import Drawn, Inputs
from freight.engine.sampler import Draw, draw
from freight.engine.scheduler import Scheduler
from freight.engine.step import Mode
from freight.errors import RequestError
from freight.outputs import RequestOutput

VOCAB, BLOCK, EOS = 61, 4, 60


class FakeRows:
    features = None

    def __init__(self, num_rows: list[int], logits: Tensor) -> None:
        self.num_rows, self._logits = num_rows, logits

    def logits(self, rows: Sequence[int]) -> Tensor:
        assert len(rows) <= compute.SCORED_AT_ONCE
        return self._logits[list(rows)]


class FakePool:
    values_per_token = 1

    def counters(self) -> tuple[int, int]:
        return 0, 0

    def leave_out(self, rows: Sequence[int]) -> None:
        pass


class FakeRunner:
    """Writes a digest of the history into each slot, and makes logits of what it reads back.

    `fails(slices)` may raise, as a whole forward pass would; a history with the token `bad` gives
    NaN.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots = [b""] * (num_blocks * BLOCK)
        self.pool = FakePool()
        self.fails: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None
        self.bad: int | None = None
        self.sizes: list[int] = []
        self.num_ahead = 0  # steps that took tokens from the device

    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> FakeRows:
        self.sizes.append(len(slices))
        if tokens is not None:  # the step was launched ahead
            self.num_ahead += 1
            given = tokens.tolist()
            slices = [
                part._replace(token_ids=[token]) for part, token in zip(slices, given, strict=True)
            ]
        self.fails(slices)
        rows = []
        for part in slices:
            of_part = []
            for position, token in enumerate(part.token_ids, part.start):
                before = b"" if position == 0 else self.slots[self._slot(part, position - 1)]
                broken = token == self.bad or before.endswith(b"NaN")
                digest = (
                    hashlib.blake2b(before + bytes([token]), digest_size=8).digest()
                    + b"NaN" * broken
                )
                self.slots[self._slot(part, position)] = digest
                history = [self.slots[self._slot(part, earlier)] for earlier in range(position + 1)]
                of_part.append(self._logits(history))
            rows += of_part[len(of_part) - part.num_logit_rows :]
        return FakeRows(
            [part.num_logit_rows for part in slices],
            torch.stack(rows) if rows else torch.empty(0, VOCAB),
        )

    def launch(
        self,
        slices: Sequence[SequenceSlice],
        draws: Sequence[Draw],
        microbatch: int = 0,
        inputs: Inputs | None = None,
    ) -> Drawn:
        tokens = None if inputs is None else inputs.tokens()
        return Drawn(*draw(self.run(slices, tokens)._logits, draws))

    def settle(self, drawn: Drawn, copied: torch.cuda.Event | None) -> None:
        pass

    def _slot(self, part: SequenceSlice, position: int) -> int:
        return part.block_ids[0][position // BLOCK] * BLOCK + position % BLOCK

    def _logits(self, history: list[bytes]) -> Tensor:
        if history[-1].endswith(b"NaN"):
            return torch.full((VOCAB,), torch.nan)
        seed = int.from_bytes(hashlib.blake2b(b"".join(history), digest_size=7).digest(), "big")
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


class FakeTokenizer:
    """Token t is the character 'A' + t."""

    special_token_ids: frozenset[int] = frozenset()

    def check_empty(self, add_special_tokens: bool = True) -> None:
        raise RequestError("an empty prompt has no tokens")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def token_text(self, token_id: int) -> str:
        return chr(65 + token_id)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        return True

    def detokenizer(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> FakeDetokenizer:
        return FakeDetokenizer(params)


class FakeDetokenizer:
    """Holds the last token's character back, as text that may begin a stop string is."""

    def __init__(self, params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self._held = ""
        self._stops = params.stop

    def append(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if self.stop_reason is None:
                text, self._held = text + self._held, chr(65 + token)
                self.stop_reason = self._held if self._held in self._stops else None
        return text

    def finish(self) -> str:
        text, self._held = ("" if self.stop_reason else self._held), ""
        return text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 12),
        seed=rng.randrange(9),
        temperature=rng.choice([0.0, 1.0]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        n=rng.choice([1, 1, 2]),
        stop=rng.choice([(), "F", ("M", "c")]),
        repetition_penalty=rng.choice([1.0, 1.3]),
    )


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randint(1, 20))]


def check_clean(llm: LLM) -> None:
    """Nothing is left of any request."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    engine.release("-")  # mends, if need be
    assert not engine.groups
    assert not engine._completions
    assert not engine._deadlines
    assert not llm._turns.released
    assert scheduler.num_waiting == scheduler.num_running == engine.cache.num_held == 0
    for allocator in engine.cache.allocators:
        assert allocator.num_free + allocator.num_cached == allocator.num_blocks


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (one.prompt_token_ids, one.outputs, one.prompt_logprobs, one.finished) for one in outputs
    ]


def new_engine(
    num_blocks: int = 24,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    mode: Mode = Mode.REPEATABLE,
    most_drafts: int = 0,
    num_microbatches: int = 1,
) -> Engine:
    cache = CacheManager((Pages((0,), 1, None, BLOCK),), (num_blocks,), BLOCK, budget)
    scheduler = Scheduler(
        cache,
        max_num_seqs,
        budget,
        max_model_len,
        most_drafts,
        num_microbatches=num_microbatches,
    )
    intake = Intake(FakeTokenizer(), VOCAB, max_model_len)  # type: ignore[arg-type]
    runner: Any = FakeRunner(num_blocks)
    parts = (runner, cache, scheduler, intake, frozenset({EOS}))
    return Engine(*parts, seed=0, threads=nullcontext(), clock=Clock(), mode=mode)
