"""A kernel that raises for a row ends the requests of that row alone: all others answer as without
them, to the bit.

The model's embedding of one token is NaN, and kernels are made to raise where they meet it:
attention of the second layer, when the first has stored its keys and values already, and recorded
decode steps once they have run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.covering import covered
from torch import Tensor

from freight import LLM, SamplingParams
from freight.engine import build
from freight.engine.recordings import CpuStep
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import ReferenceKernels
from freight.outputs import CompletionOutput, RequestOutput

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
BAD = 7  # the token whose embedding is NaN
COUNT = 16
ERROR = "its step failed: FloatingPointError: a row of NaN"
LIMITS = {"skip_tokenizer_init": True, "kv_cache_memory": "2MiB"}
LIMITS |= {"max_model_len": 96, "max_num_seqs": COUNT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "nan"
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


STEPS = ("recorded", "ordinary", "reference")


@pytest.fixture
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How decode steps run; kernels raise where they meet NaN."""
    for kernels in (CpuKernels, ReferenceKernels):
        monkeypatch.setattr(kernels, "attention", refusing(kernels.attention))
    replay = CpuStep.__call__

    def checked(self: CpuStep) -> Tensor:
        return refuse(replay(self))

    monkeypatch.setattr(CpuStep, "__call__", checked)
    if request.param != "recorded":
        monkeypatch.setattr(build, "captured_steps", lambda *_: None)
    return request.param


def refuse(rows: Tensor) -> Tensor:
    if rows.isnan().any():
        raise FloatingPointError("a row of NaN")
    return rows


def refusing(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(self: Any, q: Tensor, *rest: Any) -> Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:  # an operation of torch would end a recording
            refuse(q)
        return attention(self, q, *rest)

    return checked


def open_llm(model: str, steps: str, **options: Any) -> LLM:
    llm = LLM(model, kernels="reference" if steps == "reference" else "auto", **LIMITS, **options)
    assert (llm.engine.runner.captured is not None) == (steps == "recorded")
    return llm


def work(draws_bad: Sequence[int] = ()) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike, in blocks that prefix hits share; those of `draws_bad` draw BAD,
    the others never.
    """
    rng = random.Random(0)
    common = [rng.randrange(10, 60) for _ in range(32)]
    prompts = [
        [*common, *(rng.randrange(10, 60) for _ in range(rng.randint(1, 24)))] for _ in range(COUNT)
    ]
    params = [
        SamplingParams(
            max_tokens=5,
            seed=i,
            temperature=i % 2,
            logprobs=2,
            prompt_logprobs=1 if i % 5 == 4 else None,
            n=2 if i % 5 == 3 else 1,
            ignore_eos=True,
            detokenize=False,
            logit_bias={BAD: 100.0 if i in draws_bad else -100.0},
        )
        for i in range(COUNT)
    ]
    return prompts, params


def answers(outputs: Sequence[RequestOutput], but: Sequence[int]) -> list[Any]:
    sound = [output for index, output in enumerate(outputs) if index not in but]
    return [(output.outputs, output.prompt_logprobs) for output in sound]


def assert_failed(completion: CompletionOutput, token_ids: list[int]) -> None:
    assert (completion.finish_reason, completion.error) == ("error", ERROR)
    assert completion.token_ids == token_ids


@pytest.mark.parametrize(
    ("steps", "options", "caching", "bad"),
    covered(
        STEPS,
        [{}, {"max_num_batched_tokens": 48, "kv_cache_dtype": "bfloat16"}],
        [True, False],
        [[5], [3, 14]],
    ),
    indirect=["steps"],
    ids=str,
)
def test_in_prefill(model: str, steps: str, bad: list[int], caching: bool, options: dict[str, Any]):
    """Also in a chunk of a longer prompt, as the steps have 48 tokens; request 3 has two
    completions, 14 scores its prompt."""
    prompts, params = work()
    llm = open_llm(model, steps, enable_prefix_caching=caching, **options)
    expected = answers(llm.generate(prompts, params), bad)
    llm = open_llm(model, steps, enable_prefix_caching=caching, **options)
    for index in bad:
        prompts[index][-1] = BAD
    outputs = llm.generate(prompts, params, on_error="return")
    assert answers(outputs, bad) == expected
    for index in bad:
        for completion in outputs[index].outputs:
            assert_failed(completion, [])
    assert llm.engine.cache.num_held == 0
    # what the failed ones stored is nobody's prefix
    assert answers(llm.generate(*work()), bad) == expected


@pytest.mark.parametrize(
    ("steps", "caching", "bad"),
    covered(STEPS, [True, False], [[5], [0, 10]]),
    indirect=["steps"],
    ids=str,
)
def test_in_decoding(model: str, steps: str, bad: list[int], caching: bool):
    """In their second step: the first drew the token, and their blocks are full of what is sound."""
    prompts, params = work()
    llm = open_llm(model, steps, enable_prefix_caching=caching)
    expected = answers(llm.generate(prompts, params), bad)
    llm = open_llm(model, steps, enable_prefix_caching=caching)
    _, drawing = work(draws_bad=bad)
    outputs = llm.generate(prompts, drawing, on_error="return")
    assert answers(outputs, bad) == expected
    for index in bad:
        (completion,) = outputs[index].outputs
        assert_failed(completion, [BAD])
    assert answers(llm.generate(prompts, params), bad) == expected


@pytest.mark.parametrize("steps", STEPS, indirect=True)
def test_in_all_rows(model: str, steps: str):
    prompts, params = work()
    llm = open_llm(model, steps)
    expected = answers(llm.generate(prompts, params), [])
    bad = [[*prompt[:-1], BAD] for prompt in prompts]
    outputs = llm.generate(bad, params, on_error="return")
    assert {completion.error for output in outputs for completion in output.outputs} == {ERROR}
    assert llm.engine.cache.num_held == 0
    assert answers(llm.generate(prompts, params), []) == expected
