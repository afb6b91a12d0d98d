"""Heads that draft on several ranks: the drafts, bytes of the cache, tokens and log-probabilities of one
process.

Each head is divided as the model is, so its drafts have to be those of one process, to the last bit. Some
of them are replaced by what is right, the same on any number of ranks, so that requests go on behind
drafts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.test_ranks import of_ranks
from tests.forked_server import CAN_FORK, forked
from tests.parity import test_eagle
from tests.parity.random_models import save_random
from tests.parity.test_eagle import TARGET, random_tensors, write_head
from tests.parity.test_eagle import VARIANTS as EAGLES
from tests.parity.test_predicting import CASES as PREDICTING
from tests.parity.test_predicting import save
from tests.rank_follower import clear, pages_of
from tests.refusals import refuses
from transformers import LlamaConfig

from freight import LLM, SamplingParams
from freight.cache import stored
from freight.engine import leader
from freight.engine.drafting import Drafting
from freight.engine.engine import Engine
from freight.engine.guesses import Guesses
from freight.engine.leader import Leader
from freight.errors import ConfigError, RankError
from freight.kernels.cpu import library
from freight.model.eagle import EagleHead
from freight.model.mixers.attention.layer import Attention
from freight.parallel.steps import StepWriter

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other ranks are forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]

MOST = 6
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
}
FP8 = {"kv_cache_dtype": "fp8"}
INT8 = {"kv_cache_dtype": "int8"}
# sizes that 2 and 3 ranks divide
SIXTHS = {**TARGET, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
# a kind, which of them, and options
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "second model, fp8": ("draft_model", "", FP8),
    "second model, int8": ("draft_model", "", INT8 | {"quantization": "fp8"}),
    "latents and experts": ("mtp", "deepseek-v3", FP8),
    "experts with biases": ("mtp", "glm4-moe", INT8),
    "states first": ("mtp", "mimo", FP8 | {"quantization": "int8"}),
    "shared embedding": ("eagle3", "midlayer", FP8),
    "own embedding, norms": ("eagle3", "speculators-qwen3", INT8),
    "last states": ("eagle3", "last-states", FP8),
    "another width": ("eagle3", "wide", FP8),
    "whole vocabulary": ("eagle3", "whole-vocabulary", INT8),
}
SLOW = ["experts with biases", "whole vocabulary", "another width"]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there is room for: the heads are hardly ever right."""
    monkeypatch.setattr(Guesses, "wants", lambda self, num_output: True)
    monkeypatch.setattr(Guesses, "likely", lambda self, kinds: 1.0)
    monkeypatch.setattr(Guesses, "goes_on", lambda self, kinds: True)


def disturbed(folder: Path, to: Path) -> Path:
    """A copy of a model with noise on its weights."""
    shutil.copytree(folder, to)
    numbers = torch.Generator().manual_seed(0)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=numbers)
                tensors[name] = (tensor.float() * (1 + 0.1 * noise)).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return to


def written(kind: str, which: str, folder: Path, sizes: dict[str, Any]) -> tuple[str, Any]:
    """A model and what drafts for it."""
    config: dict[str, Any] = {"method": kind, "num_speculative_tokens": MOST}
    model = folder / "model"
    if kind == "mtp":
        save(PREDICTING[which], model)
        return str(model), config
    save_random(LlamaConfig(**sizes), model, torch.float32)
    if kind == "draft_model":
        return str(model), {**config, "model": str(disturbed(model, folder / "second"))}
    variant = EAGLES[which]
    head = write_head(folder / "head", variant, random_tensors(variant))
    return str(model), {**config, "model": str(head)}


class Started:
    """Engines, and the ranks of these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.llms: list[LLM] = []
        self.pids: list[int] = []

    @property
    def pages(self) -> Path:
        """What rank 1 has stored, once it has ended."""
        return self.folder / "pages.pt"

    def start(self, model: str, fault: str = "", **options: Any) -> LLM:
        environ = os.environ | {"FREIGHT_TEST_PAGES": str(self.pages)}
        environ["FREIGHT_TEST_FAULT"] = fault

        def spawn(files: Any) -> Any:
            command = ["python", "-m", "tests.rank_follower", *map(str, files)]
            process = forked(command, files, environ)
            self.pids.append(process.pid)
            return process

        self.monkeypatch.setattr(leader, "spawn", spawn)
        llm = LLM(model, **(OPTIONS | options))
        self.llms.append(llm)
        clear(llm.engine.runner.pool)
        if llm.engine._drafting is not None:
            clear(llm.engine._drafting.runner.pool)
        return llm

    def close(self) -> None:
        for llm in self.llms:
            leading = llm.engine.runner.leader
            if isinstance(leading, Leader):
                leading.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Started]:
    made = Started(monkeypatch, tmp_path)
    yield made
    made.close()


def drafting_of(engine: Engine) -> Drafting:
    assert engine._drafting is not None
    return engine._drafting


def outputs_of(engine: Engine) -> list[Any]:
    """What an engine gives: 3 prompts at once, of which two come in chunks, then one alone, and one that
    begins as the first.
    """
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(3, 90, (count,), generator=generator).tolist() for count in (45, 7, 30, 12)
    ]
    prompts.append(prompts[0][:40] + prompts[1])
    greedy = SamplingParams(
        max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True, detokenize=False
    )
    kinds = (
        greedy,
        replace(greedy, prompt_logprobs=1),
        replace(greedy, temperature=1.0, seed=5),
        replace(greedy, temperature=0.7, seed=6, top_p=0.9),
        greedy,
    )
    for index, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
        engine.add(str(index), engine.accept(prompt, params), params)
        while index > 1 and engine.has_unfinished:
            engine.step()
    outputs = [engine.output(str(index)) for index in range(len(prompts))]
    for index in range(len(prompts)):
        engine.release(str(index))
    choices = [output.outputs[0] for output in outputs]
    assert not any(choice.finish_reason == "error" for choice in choices)
    return [
        *((choice.token_ids, choice.logprobs) for choice in choices),
        *(output.prompt_logprobs for output in outputs),
    ]


def told(drafting: Drafting, answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have some drafts be right; return what is drafted from now on, with the draws before that."""
    rng = Random(1)
    noted: list[Any] = []
    drawn = drafting._drawn
    propose = drafting._propose

    def drawn_or_told(logits: Any, going: Any) -> Any:
        further = drawn(logits, going)
        noted.append([item.drafts[-1:] for item in going])
        for item in going:
            answer = answers[int(item.work.chunk.request.request_id.partition("/")[0])][0]
            position = item.work.row.position + len(item.drafts) - 1
            if item.drafts and position < len(answer) and rng.random() < 0.6:
                item.drafts[-1] = answer[position]
        return further

    def noted_proposal(work: Any) -> Any:
        drafts = propose(work)
        noted.append(drafts)
        return drafts

    monkeypatch.setattr(drafting, "_drawn", drawn_or_told)
    monkeypatch.setattr(drafting, "_propose", noted_proposal)
    return noted


def counted(engine: Engine) -> tuple[Any, ...]:
    stats = engine.stats()
    return stats.drafted, stats.accepted, stats.drafted_by, stats.prefix_hits


def compare(
    started: Started,
    model: str,
    config: Any,
    options: dict[str, Any],
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ranks` ranks have the drafts of one, and the results of one without drafts."""
    plain = started.start(model, kv_cache_memory="4MiB", speculate=0, **options)
    expected = outputs_of(plain.engine)
    alone = started.start(model, speculative_config=config, kv_cache_memory="4MiB", **options)
    engine = alone.engine
    drafts = told(drafting_of(engine), expected, monkeypatch)
    assert outputs_of(engine) == expected
    several = started.start(
        model,
        speculative_config=config,
        kv_cache_memory=f"{4 * ranks}MiB",
        tensor_parallel_size=ranks,
        **options,
    )
    found = told(drafting_of(several.engine), expected, monkeypatch)
    assert outputs_of(several.engine) == expected
    assert found == drafts
    assert len(drafts) > 20
    assert counted(several.engine) == counted(engine)
    stats = engine.stats()
    assert 10 < stats.accepted < stats.drafted
    assert stats.prefix_hits > 0
    if ranks == 2:
        compare_pages(started, engine, several.engine)


def compare_pages(started: Started, alone: Engine, several: Engine) -> None:
    """Of the head's layers: both ranks have a part of each page of one process."""
    wholes = pages_of(drafting_of(alone).runner.pool)
    own = pages_of(drafting_of(several).runner.pool)
    started.close()
    others = torch.load(started.pages)[-len(own) :]
    mixers = drafting_of(alone).runner.head.mixers
    for mixer, whole, *parts in zip(mixers, wholes, own, others, strict=True):
        blocks = min(len(page) for page in parts[0].values())
        for name, page in whole.items():
            assert page.any(), name
            for part, expected in zip(parts, of_ranks(mixer, name, page), strict=True):
                count = min(blocks, len(expected))
                assert torch.equal(part[name][:count], expected[:count]), name


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
def test_two_ranks_draft_as_one(
    case: str, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, which, options = CASES[case]
    model, config = written(kind, which, tmp_path, TARGET)
    compare(started, model, config, options, 2, monkeypatch)


@pytest.mark.parametrize("kind", ["draft_model", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_three_ranks_draft_as_one(
    kind: str, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabularies, 160 tokens and 49, do not divide evenly."""
    for name, value in (("HEADS", 6), ("KV_HEADS", 3), ("SIZE", 96), ("DRAFT", 49)):
        monkeypatch.setattr(test_eagle, name, value)
    model, config = (
        written(kind, "", tmp_path, SIXTHS) if kind == "draft_model" else eagle_of_sixths(tmp_path)
    )
    compare(started, model, config, FP8, 3, monkeypatch)


def eagle_of_sixths(folder: Path) -> tuple[str, Any]:
    save_random(LlamaConfig(**SIXTHS), folder / "model", torch.float32)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    said = {**test_eagle.PLAIN, **heads, "hidden_size": 96, "draft_vocab_size": 49}
    variant = replace(EAGLES["midlayer"], config=said, size=96)
    head = write_head(folder / "head", variant, random_tensors(variant))
    return str(folder / "model"), {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": MOST,
    }


@pytest.mark.parametrize(
    ("kind", "which", "fault"),
    [
        ("draft_model", "", "draft 3"),
        ("eagle3", "midlayer", "draft 4"),
        ("eagle3", "midlayer", "drafted 4"),
        pytest.param("draft_model", "", "drafted 3", marks=pytest.mark.slow),
        pytest.param("mtp", "mimo", "draft 1", marks=pytest.mark.slow),
    ],
)
def test_a_pass_that_fails_on_another_rank_costs_drafts_alone(
    kind: str,
    which: str,
    fault: str,
    started: Started,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before its first gather, for which rank 0 then waits, or behind its last one."""
    model, config = written(kind, which, tmp_path, TARGET)
    expected = outputs_of(started.start(model, speculate=0, kv_cache_memory="4MiB", **FP8).engine)
    llm = started.start(
        model,
        fault,
        speculative_config=config,
        tensor_parallel_size=2,
        kv_cache_memory="8MiB",
        **FP8,
    )
    with caplog.at_level(logging.WARNING, "freight"):
        assert outputs_of(llm.engine) == expected
    said = [line for line in caplog.messages if "CapacityError: no memory on this rank" in line]
    if fault.startswith("draft "):
        assert said == [
            "a step has no drafts, nor others like it: rank 1: CapacityError: no memory on this rank"
        ]
    assert said  # where it fails behind the pass, what comes next may be a pass as well as a step
    assert llm.engine.stats().drafted > 20
    assert outputs_of(llm.engine) == expected


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_pass_that_fails_on_rank_0_leaves_no_rank_waiting(
    place: str,
    started: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each third pass, before its first gather or between two."""
    model, config = written("eagle3", "midlayer", tmp_path, TARGET)
    expected = outputs_of(started.start(model, speculate=0, kv_cache_memory="4MiB", **FP8).engine)
    llm = started.start(
        model, speculative_config=config, tensor_parallel_size=2, kv_cache_memory="8MiB", **FP8
    )
    head = drafting_of(llm.engine).runner.head
    of = EagleHead if place == "before" else Attention
    name = "hidden" if place == "before" else "__call__"
    usual = getattr(of, name)
    passes: list[int] = []

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        if self is head or self is head.attention:  # type: ignore[attr-defined]
            passes.append(1)
            if len(passes) % 3 == 0:
                raise MemoryError("no memory")
        return usual(self, *given, **named)

    monkeypatch.setattr(of, name, failing)
    with caplog.at_level(logging.WARNING, "freight"):
        assert outputs_of(llm.engine) == expected
    assert len(passes) > 10
    assert llm.engine.stats().drafted > 5
    assert caplog.text.count("a step has no drafts") == 1


def test_a_rank_that_is_lost_in_a_pass_ends_the_engine(
    started: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, config = written("draft_model", "", tmp_path, TARGET)
    llm = started.start(
        model, speculative_config=config, tensor_parallel_size=2, kv_cache_memory="8MiB", **FP8
    )
    encode = StepWriter.encode_draft

    def encode_and_kill(*given: Any) -> bytes:
        os.kill(started.pids[-1], signal.SIGKILL)
        return encode(*given)

    monkeypatch.setattr(StepWriter, "encode_draft", encode_and_kill)
    with pytest.raises(RankError, match="rank 1 has ended"):
        outputs_of(llm.engine)
    assert "a step has no drafts" not in caplog.text


@pytest.mark.parametrize("writers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_store_has_what_a_head_computed_for_any_number_of_ranks(
    writers: int, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is right as long as it finds its keys and values."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    model, config = written("draft_model", "", tmp_path, TARGET)
    config["model"] = model
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
    answers = []
    found = []
    for ranks in (writers, 3 - writers):
        llm = started.start(
            model,
            speculative_config=config,
            tensor_parallel_size=ranks,
            kv_cache_memory=f"{4 * ranks}MiB",
            kv_store=str(tmp_path / "store"),
            kv_store_memory=0,
            **FP8,
        )
        engine = llm.engine
        assert engine.store is not None
        while not engine.store.mover.tiers.is_open:
            time.sleep(0.001)
        output = llm.generate([list(range(3, 73))], params)[0]
        answers.append(output.outputs[0].token_ids)
        found.append(output.num_cached_tokens)
        stats = engine.stats()
        assert stats.drafted > 15
        assert stats.accepted == stats.drafted
        engine.close(30)
    assert answers[0] == answers[1]
    assert found[0] == 0
    assert found[1] >= 64


def test_auto_finds_the_layers_of_the_checkpoint(started: Started, tmp_path: Path) -> None:
    model, _ = written("mtp", "mimo", tmp_path, TARGET)
    llm = started.start(
        model, speculate="auto", tensor_parallel_size=2, kv_cache_memory="8MiB", **FP8
    )
    assert drafting_of(llm.engine).method == "mtp"


def test_heads_that_do_not_divide_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a rank starts, with the way out."""
    monkeypatch.setattr(test_eagle, "HEADS", 3)
    monkeypatch.setattr(test_eagle, "KV_HEADS", 3)
    model, eagle = written("eagle3", "midlayer", tmp_path, TARGET)
    file = Path(eagle["model"]) / "config.json"
    own = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    thirds = {**TARGET, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    save_random(LlamaConfig(**thirds), tmp_path / "thirds", torch.float32)
    second = {"method": "draft_model", "model": str(tmp_path / "thirds")}
    for config, ranks, said in (
        (second, 2, "the 3 attention heads of layer 0"),
        (eagle, 2, "the 3 attention heads of layer 0"),
        ({**second, "draft_tensor_parallel_size": 1}, 2, "is divided as the model is; omit it"),
        ({**second, "draft_tensor_parallel_size": 2}, 1, "is divided as the model is; omit it"),
    ):
        with refuses(ConfigError, "--speculative-config", said):
            LLM(model, **OPTIONS, speculative_config=config, tensor_parallel_size=ranks)
