"""Stages, ranks and what else an engine does, in pairs: the tokens, log-probabilities and bytes of the
cache of one process.

`CASES` is a covering array: of the axes below each pair of values that can be is in some case.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import choose
from tests.e2e.test_ranks import close, of_ranks, opened_as, started
from tests.forked_server import CAN_FORK, forked
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.rank_follower import pages_of

from freight import SamplingParams
from freight.engine import build, leader
from freight.engine.engine import Engine
from freight.engine.step import Mode
from freight.kernels.cpu import library
from freight.model.config.model import ModelConfig

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other ranks are forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]

FAMILIES = {
    "dense": "llama-biases",
    "windows": "gemma3-two-ropes",
    "shared": "gemma4-shared",
    "own inputs": "gemma4-own-inputs",
    "experts": "qwen3-moe",
    "latents": "deepseek-v3",
    "delta net": "qwen3-next",
    "mamba": "granite-h-moe",
    "convolution": "lfm2",
}
CACHES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "token": {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"},
    "static": {"kv_cache_dtype": "fp8", "kv_scales": "0.03"},
    "int8": {"kv_cache_dtype": "int8", "kv_scales": "dynamic"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}
STAGES = (1, 2, 3)
RANKS = (1, 2, 4)
WEIGHTS: dict[str, dict[str, Any]] = {"16 bits": {}, "fp8": {"quantization": "fp8"}}
WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "no prefixes": {"enable_prefix_caching": False},
    "preempted": {},
    "overlapped": {},
}


def possible(row: tuple[Any, ...]) -> bool:
    family, _, stages, ranks, _, way = row
    if stages == ranks == 1:
        return False
    if (
        family in ("shared", "own inputs") and stages > 2
    ):  # their layers that read others' pages stay beside them
        return False
    return way != "overlapped" or ranks == 1


ROWS = [
    row
    for row in itertools.product(FAMILIES, CACHES, STAGES, RANKS, WEIGHTS, WAYS)
    if possible(row)
]
CASES = [ROWS[place] for place in choose(ROWS)]
EVERY_TIME = 4


def outputs_of(engine: Engine) -> list[Any]:
    """Six requests, some at once, in chunks; the last begins like the first."""
    generator = torch.Generator().manual_seed(11)
    prompts = [
        torch.randint(1, 90, (count,), generator=generator).tolist() for count in (33, 5, 18, 9, 21)
    ]
    prompts.append(prompts[0][:32] + prompts[1])
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    kinds = (
        plain,
        replace(plain, logprobs=3),
        replace(plain, temperature=1.0, seed=3),
        replace(plain, prompt_logprobs=2, logprobs=1),
        replace(plain, temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.2),
        plain,
    )
    for index, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
        engine.add(str(index), engine.accept(prompt, params), params)
        while index == 4 and engine.has_unfinished:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.output(str(index)) for index in range(len(prompts))]
    choices = [output.outputs[0] for output in outputs]
    assert not any(choice.finish_reason == "error" for choice in choices)
    return [
        *((choice.token_ids, choice.logprobs) for choice in choices),
        *(output.prompt_logprobs for output in outputs),
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            row, marks=[] if place < EVERY_TIME else [pytest.mark.slow], id="-".join(map(str, row))
        )
        for place, row in enumerate(CASES)
    ],
)
def test_any_division_has_the_bits_of_one_process(
    case: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, cache, stages, ranks, weights, way = case
    save_random(VARIANTS[FAMILIES[family]], tmp_path / "model", torch.bfloat16)
    given = str(tmp_path / "model")
    options = (
        CACHES[cache] | WEIGHTS[weights] | WAYS[way] | {"max_num_seqs": 4, "max_model_len": 48}
    )
    alone = started(opened_as(given, options, tmp_path, kv_cache_memory="8MiB")[0])
    blocks = alone.runner.pool.num_blocks
    if way == "preempted":
        of_request = alone.runner.pool.spec.blocks_of(48)
        blocks = tuple(max(count + 1, 3 * count // 2) for count in of_request)
    monkeypatch.setattr(build, "split_memory", lambda *_: blocks)
    alone = started(opened_as(given, options, tmp_path, kv_cache_memory="8MiB")[0])
    expected = outputs_of(alone)
    pages_file = tmp_path / "pages.pt"
    environ = os.environ | {"FREIGHT_TEST_PAGES": str(pages_file)}

    def spawn(files: Any) -> Any:
        return forked(["python", "-m", "tests.rank_follower", *map(str, files)], files, environ)

    monkeypatch.setattr(leader, "spawn", spawn)
    if way == "overlapped":
        monkeypatch.setattr(build, "_mode", lambda *_: Mode.OVERLAPPED)
    more: dict[str, Any] = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    more["kv_cache_memory"] = f"{8 * ranks}MiB"
    opened, _ = opened_as(given, options, tmp_path, **more)
    engine = started(opened)
    try:
        assert len(engine.runner.pool.stages) == (stages if stages > 1 else 0)
        assert outputs_of(engine) == expected
        first = pages_of(engine.runner.pool)
        whole = pages_of(alone.runner.pool)
    finally:
        if ranks > 1:
            close(engine)
    if way not in ("overlapped", "preempted"):  # there blocks follow from the order of steps
        compare_pages(opened.model, ranks, whole, first, pages_file)


def compare_pages(model: ModelConfig, ranks: int, whole: Any, first: Any, file: Path) -> None:
    """Of one process, rank 0, and the other ranks, whose pages are in a file."""
    if ranks == 1:
        for one, two in zip(whole, first, strict=True):
            for name, page in one.items():
                assert torch.equal(page, two[name]), name
    elif ranks == 2:
        layers = zip(model.layers, whole, first, torch.load(file), strict=True)
        for index, (layer, one, *parts) in enumerate(layers):
            for name, page in one.items():
                for part, own in zip(parts, of_ranks(layer.mixer, name, page), strict=True):
                    assert torch.equal(part[name], own), (index, name)
