"""Models with recurrent states, computed one way or another, and what they have to give: two that
are trained, and Kimi Linear with random weights, whose layers that attend store latents.

The oracle of each pair of formats, of states and pages, is one request, its prompt in one step,
nothing cached. Every condition is looked up in the steps that the scheduler gave.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random
from tests.parity.shapes import KIMI_LINEAR
from transformers import KimiLinearConfig

from freight import LLM, SamplingParams
from freight.engine.step import ScheduledChunk, Step
from freight.kernels.select import select_kernels
from freight.model import open as opening
from freight.operands.tiles import STATE_TILE
from freight.settings.engine import EngineArgs

HYBRIDS = Path(__file__).parent / "fixtures" / "hybrids"
TEXT = (Path(__file__).parents[1] / "src/freight/demo/heldout.txt").read_text(encoding="utf-8")[
    :6000
]
MODELS = ["delta_net", "mamba2", "kimi_linear"]
STATES = ["float32", "bfloat16", "int8", "fp8"]
PAGES = ["bfloat16", "fp8", "int8"]
CHUNKS = [1, 7, 16, 33]
LENGTH = 85  # of the main prompt: it crosses blocks of 16 and of 32 tokens, and so does its answer
SEEN = 50  # tokens of it that went before, where there are hits: they end within a tile
LEAVES = (
    60,
    LENGTH + 6,
)  # tokens after which it is preempted, if it is: within its prompt, and within its answer
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, seed=7, logprobs=3, ignore_eos=True)


@cache
def folder(model: str) -> Path:
    """The checkpoint of a model; that of Kimi Linear is made, with the tokenizer of the others."""
    if model != "kimi_linear":
        return HYBRIDS / model
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made)
    config = {
        **KIMI_LINEAR,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "pad_token_id": None,
    }
    save_random(
        KimiLinearConfig(**config | {"bos_token_id": 0, "eos_token_id": 1}), made, torch.bfloat16
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HYBRIDS / "delta_net" / file, made)
    return made


@cache
def ids(model: str) -> list[int]:
    tokenizer = opening.open_model(EngineArgs(str(folder(model)))).load_tokenizer()
    assert tokenizer is not None
    return tokenizer.encode(TEXT, add_special_tokens=False)


def neighbours(model: str) -> list[list[int]]:
    """Shorter than a convolution is wide; one tile; a token less than two, and the first of them
    the main prompt's.
    """
    tokens = ids(model)
    return [tokens[200:202], tokens[300:316], tokens[:1] + tokens[400:430]]


@dataclass(frozen=True)
class Setup:
    """What decides bits."""

    model: str
    states: str
    pages: str = "bfloat16"
    kernels: str = "auto"

    def engine(self, **options: Any) -> LLM:
        made: dict[str, Any] = {
            "kv_cache_dtype": self.pages, "state_dtype": self.states, "state_every": 32, "enable_prefix_caching": False,
            "kv_cache_memory": "6MiB", "max_num_seqs": 4, "max_model_len": 512, "speculate": 0, **options,
        }  # fmt: skip
        if self.pages != "bfloat16":
            made["kv_scales"] = "dynamic"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "select_kernels", lambda *_: select_kernels(self.kernels))
            llm = LLM(str(folder(self.model)), **made)
        assert self.kernels in ("auto", llm.engine.runner.model.kernels.name)
        return llm


@dataclass(frozen=True)
class Answer:
    """state: digests of what the request left behind its last token; of kept rows, those of the
    open tile.

    A list of short texts and digests, because pytest takes minutes to tell where long ones differ.
    """

    tokens: list[int]
    logprobs: list[str]
    state: dict[tuple[int, str], str]  # by layer and part


class Run:
    """One request, stepped to its end beside what else the engine runs.

    chunks    what it had in each of its steps
    company   how many requests these steps had
    left      how many chunks it had when it gave way
    """

    def __init__(
        self, llm: LLM, prompt: Sequence[int], params: SamplingParams = DRAWN, name: str = "main"
    ) -> None:
        self.llm, self.name = llm, name
        llm.engine.add(name, llm.engine.accept(list(prompt), params), params)
        self.request = llm.engine.groups[name].completions[0].request
        self.chunks: list[ScheduledChunk] = []
        self.company: set[int] = set()
        self.left: list[int] = []

    def step(self) -> None:
        scheduler = self.llm.engine.scheduler

        def remember(*most: int | None) -> Step:
            step = schedule(*most)
            own = [chunk for chunk in step.chunks if chunk.request is self.request]
            self.chunks += own
            self.company |= {len(step.chunks) for _ in own}
            return step

        with pytest.MonkeyPatch.context() as patch:
            schedule = scheduler.schedule
            patch.setattr(scheduler, "schedule", remember)
            self.llm.engine.step()

    def until(self, num_tokens: int) -> None:
        """Step until that many tokens are computed, or all."""
        for _ in range(2000):
            if self.request.is_finished or self.request.num_computed_tokens >= num_tokens:
                return
            self.step()
        pytest.fail(f"request {self.name} makes no progress")

    def give_way(self) -> None:
        """As the latest request does when blocks run out."""
        assert self.llm.engine.scheduler.preempt_latest() is self.request
        self.left.append(len(self.chunks))

    def answer(self) -> Answer:
        self.until(self.request.token_limit)
        output = self.llm.engine.output(self.name).outputs[0]
        return Answer(
            list(output.token_ids), [repr(one) for one in output.logprobs or []], self._state()
        )

    def _state(self) -> dict[tuple[int, str], str]:
        last, found = self.chunks[-1], {}
        length = last.start + last.num_tokens
        for index, layer in self.llm.engine.runner.pool.states.items():
            block = last.block_ids[layer.group][(length - 1) // layer.states.every]
            for name, part in layer.states.parts.items():
                rows = slice((length - 1) % STATE_TILE + 1 if name in ("k", "u", "decay") else None)
                stored = part[block][rows].flatten().view(torch.uint8).cpu().numpy().tobytes()
                found[index, name] = sha256(stored).hexdigest()
        return found


@cache
def oracle(setup: Setup) -> list[Answer]:
    """Of the main prompt and its neighbours, each alone and in one step."""
    llm, found = setup.engine(max_num_batched_tokens=256), []
    for index, prompt in enumerate([ids(setup.model)[:LENGTH], *neighbours(setup.model)]):
        run = Run(llm, prompt, name=str(index))
        found.append(run.answer())
        assert [chunk.num_tokens for chunk in run.chunks] == [len(prompt)] + [1] * (
            len(found[-1].tokens) - 1
        )
        assert run.company == {1}
    return found


def check(setup: Setup, chunk: int, batched: bool, hit: bool, preempted: bool, every: int) -> None:
    """Compute the main prompt so, see that it was, and compare it, and its neighbours, with the
    oracle.
    """
    prompt, others = ids(setup.model)[:LENGTH], neighbours(setup.model) if batched else []
    llm = setup.engine(
        max_num_batched_tokens=chunk + len(others), enable_prefix_caching=hit, state_every=every
    )
    if hit:
        Run(llm, prompt[:SEEN], replace(DRAWN, max_tokens=1), "before").answer()
    endless = replace(DRAWN, max_tokens=400)
    beside = [Run(llm, other, endless, str(index)) for index, other in enumerate(others)]
    for one, other in zip(beside, others, strict=True):
        one.until(len(other))
    run = Run(llm, prompt)
    for num_tokens in LEAVES if preempted else ():
        run.until(num_tokens)
        run.give_way()
    answer = run.answer()

    again = [run.chunks[index].start for index in run.left]
    assert {one.num_tokens for one in run.chunks if not one.samples} == {chunk}
    assert run.company == {1 + len(others)}
    assert (
        run.request.num_cached_tokens
        == run.chunks[0].start
        == (SEEN // every * every if hit else 0)
    )
    assert run.request.num_preemptions == len(again) == (len(LEAVES) if preempted else 0)
    assert not again or all(start > 0 for start in again) is hit, "what was cached is found again"

    expected = oracle(setup)
    assert answer == expected[0]
    for one, plain in zip(beside, expected[1:], strict=False):
        output = llm.engine.output(one.name).outputs[0]
        count = len(plain.tokens)
        assert list(output.token_ids[:count]) == plain.tokens
        assert [repr(logprobs) for logprobs in output.logprobs[:count]] == plain.logprobs
        llm.engine.abort(one.name)
    assert llm.engine.cache.num_held == 0
