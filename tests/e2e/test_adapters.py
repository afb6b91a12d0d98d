"""Adapters by row through all that runs a model: every answer is that of its adapter alone, to the
bit, whatever runs beside it and whatever is loaded meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.demo_adapter import write_random_adapter

from freight import LLM, CapacityError, LoRARequest, RequestError, RequestOutput, SamplingParams
from freight.cache.store.pace import Rates
from freight.checkpoint.merge import merge
from freight.engine.guesses import Guesses
from freight.engine.verification import Outcome
from freight.errors import FreightError
from freight.model.open import OpenModel

PROMPT = "def main("
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
RANKS = (1, 2, 3, 8, 16, 5, 7, 64)
LONG = "import os\n\n\nclass Table:\n" * 8  # some blocks of the cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters for the demo model, of all these ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_random_adapter(root / str(rank), rank, rank) for rank in RANKS]


def served(slots: int, **options: object) -> LLM:
    return LLM(
        "demo",
        enable_lora=True,
        max_loras=slots,
        max_lora_rank=64,
        kv_cache_memory="24MiB",
        **options,
    )


def asked(folder: Path) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def said(output: RequestOutput) -> list[tuple[int, dict[int, float]]]:
    """Return the tokens of an answer, with log-probabilities."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    facts = []
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        facts.append((token, {name: entry.logprob for name, entry in position.items()}))
    return facts


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
def test_rows_are_those_of_a_row_alone(quantization: str | None, folders: list[Path]):
    llm = served(len(folders), quantization=quantization, enable_prefix_caching=False)
    requests = [*map(asked, folders), None]
    alone = [said(llm.generate(PROMPT, GREEDY, lora_request=one)[0]) for one in requests]
    together = llm.generate([PROMPT] * len(requests), GREEDY, lora_request=requests)
    assert [said(output) for output in together] == alone
    texts = {json.dumps(facts) for facts in alone}
    assert len(texts) == len(requests)
    # without adapters: the bits of an engine that takes none
    plain = LLM("demo", kv_cache_memory="24MiB", quantization=quantization)
    assert said(plain.generate(PROMPT, GREEDY)[0]) == alone[-1]


def test_chunks_threads_and_kernels_of_prompts_change_nothing(folders: list[Path]):
    prompts = [LONG + str(index) for index in range(4)]
    requests = [asked(folders[3]), None, asked(folders[7]), asked(folders[3])]
    answers = []
    for options in ({}, {"max_num_batched_tokens": 24}, {"threads": 1}, {"speculate": 0}):
        llm = served(2, **options)
        outputs = llm.generate(prompts, GREEDY, lora_request=requests)
        answers.append([said(output) for output in outputs])
    assert all(answer == answers[0] for answer in answers)


def test_a_second_model_that_drafts_changes_nothing(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
):
    """It has no adapter, and is right where the adapter says what the model says."""
    monkeypatch.setattr(Guesses, "wants", lambda *_: True)
    requests = [asked(folders[3]), None, asked(folders[7])]
    answers = []
    for options in ({"speculate": 0}, {"speculative_config": {"model": "demo"}}):
        llm = served(2, **options)
        outputs = llm.generate([PROMPT] * 3, GREEDY, lora_request=requests)
        answers.append([said(output) for output in outputs])
    assert llm.engine.stats().drafted > 0
    assert answers[0] == answers[1]


def test_ranks_give_the_bits_of_one(folders: list[Path]):
    requests = [asked(folders[3]), None, asked(folders[7])]
    answers = []
    for size in (1, 2):
        llm = served(2, tensor_parallel_size=size)
        outputs = llm.generate([LONG] * 3, GREEDY, lora_request=requests)
        answers.append([said(output) for output in outputs])
        llm.engine.close()
    assert answers[0] == answers[1]


def test_an_adapter_is_what_it_is_merged(folders: list[Path], tmp_path: Path):
    merge("demo", str(folders[3]), tmp_path / "merged")
    merged = LLM(str(tmp_path / "merged"), dtype="float32", kv_cache_memory="24MiB")
    llm = served(1, dtype="float32")
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scores = []
    for output in (
        merged.generate(LONG, params)[0],
        llm.generate(LONG, params, lora_request=asked(folders[3]))[0],
    ):
        assert output.prompt_logprobs is not None
        tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        scores.append([position[token].logprob for token, position in tokens if position])
    # the merged weights are rounded to the 16 bits of the demo's file
    differences = [abs(a - b) for a, b in zip(*scores, strict=True)]
    assert max(differences) < 0.2
    assert sum(differences) / len(differences) < 0.02


def test_prefixes_are_found_within_one_adapter(folders: list[Path]):
    llm = served(2)
    first, second = folders[3:5]
    for request in (asked(first), None, asked(second)):
        assert llm.generate(LONG, GREEDY, lora_request=request)[0].num_cached_tokens == 0
        assert llm.generate(LONG, GREEDY, lora_request=request)[0].num_cached_tokens > 0
    before = said(llm.generate(LONG, GREEDY, lora_request=asked(first))[0])
    # the same values under another name are the same adapter; others under its name are not
    llm.unload_adapter(second.name)
    other = llm.generate(LONG, GREEDY, lora_request=LoRARequest("other", 2, str(first)))[0]
    assert other.num_cached_tokens > 0
    assert said(other) == before
    llm.unload_adapter("other")
    llm.load_adapter(first.name, str(folders[6]))
    replaced = llm.generate(LONG, GREEDY, lora_request=LoRARequest(first.name))[0]
    assert replaced.num_cached_tokens == 0
    assert said(replaced) != before


def test_stored_prefixes_are_found_within_one_adapter(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Rates, "is_worth", lambda *of: True)  # the demo model computes as fast
    answers = []
    for folder, found in ((folders[3], False), (folders[3], True), (folders[4], False)):
        llm = served(1, kv_store=str(tmp_path / "store"))
        assert llm.engine.store is not None
        wait_for(lambda store=llm.engine.store: store.mover.tiers.is_open)
        output = llm.generate(LONG * 8, GREEDY, lora_request=asked(folder))[0]
        assert (output.num_cached_tokens > 0) == found
        answers.append(said(output))
        llm.engine.close()
    assert answers[0] == answers[1] != answers[2]


def test_an_answer_is_of_the_version_that_it_began_with(folders: list[Path]):
    llm = served(2, enable_prefix_caching=False)
    old, new = folders[3:5]
    longer = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
    expected = {}
    for folder in (old, new):
        llm.load_adapter("adapter", str(folder))
        expected[folder] = said(
            llm.generate(PROMPT, longer, lora_request=LoRARequest("adapter"))[0]
        )
    llm.load_adapter("adapter", str(old))
    stream = llm.stream(PROMPT, longer, lora_request=LoRARequest("adapter"))
    next(stream)
    llm.load_adapter("adapter", str(new))
    with pytest.raises(CapacityError, match=r"all 2 are in use.*--max-loras"):
        llm.load_adapter("third", str(folders[5]))
    assert (
        said(llm.generate(PROMPT, longer, lora_request=LoRARequest("adapter"))[0]) == expected[new]
    )
    last = None
    for output in stream:
        last = output
    assert last is not None
    assert said(last) == expected[old]
    llm.load_adapter("third", str(folders[5]))  # its slot is free now


def test_a_slot_has_nothing_left_of_the_adapter_before(folders: list[Path], tmp_path: Path):
    small = write_random_adapter(tmp_path / "small", 9, rank=2, only="o_proj")
    llm = served(1, enable_prefix_caching=False)
    expected = said(llm.generate(PROMPT, GREEDY, lora_request=asked(small))[0])
    llm.unload_adapter("small")
    llm.generate(PROMPT, GREEDY, lora_request=asked(folders[7]))
    llm.unload_adapter(folders[7].name)
    assert said(llm.generate(PROMPT, GREEDY, lora_request=asked(small))[0]) == expected


def test_a_load_that_fails_leaves_what_was(folders: list[Path], tmp_path: Path):
    llm = served(1, enable_prefix_caching=False)
    llm.load_adapter("adapter", str(folders[3]))
    expected = said(llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("adapter"))[0])
    broken = write_random_adapter(tmp_path / "broken", 3)
    (broken / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(Exception, match="adapter_model"):
        llm.load_adapter("adapter", str(broken))
    assert said(llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("adapter"))[0]) == expected
    with pytest.raises(RequestError, match="no adapter is called 'absent': choose adapter"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("absent"))
    with pytest.raises(RequestError, match="--enable-lora"):
        LLM("demo", kv_cache_memory="4MiB").load_adapter("adapter", str(folders[3]))


def test_answers_are_verified_with_their_adapter(folders: list[Path]):
    llm = served(2)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=1)
    requests = [asked(folders[3]), None, asked(folders[4])]
    outputs = llm.generate([PROMPT] * 3, params, lora_request=requests)
    right = llm.verify(outputs, params, lora_request=requests)
    assert [result.outcome for result in right] == [Outcome.EQUAL] * 3
    wrong = llm.verify(outputs, params, lora_request=requests[::-1])
    assert [result.outcome for result in wrong] == [
        Outcome.DIFFERS,
        Outcome.EQUAL,
        Outcome.DIFFERS,
    ]


def test_preempted_requests_go_on_with_their_adapter(folders: list[Path]):
    longer = SamplingParams(max_tokens=150, temperature=0.0, logprobs=2, ignore_eos=True)
    requests = [asked(folders[3]), None, asked(folders[4]), asked(folders[3])]
    prompts = [LONG + str(index) for index in range(4)]
    wide = served(2, max_model_len=512)
    expected = [said(output) for output in wide.generate(prompts, longer, lora_request=requests)]
    narrow = LLM(
        "demo",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=64,
        max_model_len=512,
        kv_cache_memory="2MiB",
    )
    outputs = narrow.generate(prompts, longer, lora_request=requests)
    assert narrow.engine.stats().preemptions
    assert [said(output) for output in outputs] == expected


def test_adapters_of_the_start_are_refused_before_weights_are_read(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = write_random_adapter(tmp_path / "broken", 3)
    tensors = load_file(broken / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 1] = float("inf")
    save_file(tensors, broken / "adapter_model.safetensors")

    def load(*of: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(OpenModel, "load", load)
    for folder, options, words in (
        (broken, {}, "lora_A"),
        (folders[7], {"max_lora_rank": 8}, "--max-lora-rank 64"),
        (tmp_path / "absent", {}, "absent"),
    ):
        with pytest.raises(FreightError, match=words):
            LLM("demo", enable_lora=True, lora_modules=[f"name={folder}"], **options)
