"""Several ranks with the kernels for GPUs, which Triton interprets, over gloo: the log-probabilities,
tokens and bytes of the cache of one rank.

So everything of ranks on GPUs is tried but the GPUs: what is gathered where, tiles of the whole
weight, the start of processes, and a step that a rank leaves. The interpreter is slow, so models
have a layer or two, and requests a few tokens.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.test_ranks import QWEN2_MOE, close, like_llama, of_ranks, opened_as, started
from tests.forked_server import CAN_FORK, forked
from tests.interpreter import numbers_as_on_a_gpu, quick_interpreter
from tests.machines import other_machine, two_machines
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.rank_follower import corrupt, draws_of, note_draws, pages_of
from transformers import LlamaConfig

from freight import SamplingParams
from freight.engine import build, leader
from freight.engine.engine import Engine
from freight.engine.runner import ModelRunner
from freight.engine.step import Mode
from freight.errors import KernelError
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks
from freight.parallel.distributed import Distributed

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton interprets the kernels"),
    # the interpreter computes rows without a key, too, and nothing reads them
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU"),
]

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 33,
    "max_position_embeddings": 64,
}
NARROW = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LLAMA = like_llama(**SIZES)
TRITON: dict[str, Any] = {
    "kernels": "triton",
    "exact_products": True,
    "max_model_len": 32,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "block_size": 8,
}
FP8 = {"quantization": "fp8"}
TOKEN = {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"}
STORED = {"kv_cache_dtype": "fp8"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "W8A8, scales per token": (LLAMA, FP8 | TOKEN),
    "16 bits, tied": (LLAMA | {"tie_word_embeddings": True}, {}),
    "one KV head for both": (LLAMA | {"num_key_value_heads": 1}, FP8 | TOKEN),
    "scales per head": ((2,), FP8 | STORED),
    "scales per channel": ((2, 16), FP8 | STORED),
    "windows": (like_llama("Mistral", **SIZES, sliding_window=6), FP8 | TOKEN),
    "experts, and a shared one": (QWEN2_MOE | SIZES | NARROW, FP8 | TOKEN),
    "latents, of q too; experts": (VARIANTS["deepseek-v3"], FP8 | TOKEN),
    "delta nets, states in INT8": (VARIANTS["qwen3-next"], FP8 | {"state_dtype": "int8"}),
    "Mamba-2, one group and norm": (VARIANTS["granite-h-moe"], FP8 | TOKEN),
    "short convolutions": (VARIANTS["lfm2-biases"], FP8),
    "blocks of scales": ("blocks", {}),
}
EVERY_TIME = "experts, and a shared one"  # beside attention; the others are slow
COMPARED = "2 ranks have the bits of one: products, experts, gathers"


@pytest.fixture(scope="module", autouse=True)
def mended_interpreter() -> Iterator[None]:
    with numbers_as_on_a_gpu(), quick_interpreter():
        yield


@pytest.fixture
def pages_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rank 1 is forked; its pages are in this file once it has ended."""
    path = tmp_path / "pages.pt"
    monkeypatch.setenv("FREIGHT_TEST_PAGES", str(path))
    monkeypatch.setenv("FREIGHT_TEST_INTERPRETER", "1")

    def spawn(files: Any) -> Any:
        return forked(["python", "-m", "tests.rank_follower", *map(str, files)], files, os.environ)

    monkeypatch.setattr(leader, "spawn", spawn)
    return path


def outputs_of(engine: Engine) -> list[Any]:
    """What an engine gives: two prompts at once, in chunks, then one that begins like the first."""
    length = 18 if engine.runner.pool.states else 10  # states are written every 16 tokens
    generator = torch.Generator().manual_seed(7)
    first, second = (
        torch.randint(1, 32, (count,), generator=generator).tolist() for count in (length, 3)
    )
    greedy = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, ignore_eos=True)
    scored = replace(greedy, prompt_logprobs=2)
    requests = ((first, greedy), (second, scored), (first[:-1] + second[:1], greedy))
    for index, (prompt, params) in enumerate(requests):
        engine.add(str(index), engine.accept(prompt, params), params)
        while index > 0 and engine.has_unfinished:
            engine.step()
    outputs = [engine.output(str(index)) for index in range(len(requests))]
    choices = [output.outputs[0] for output in outputs]
    return [
        *((choice.token_ids, choice.logprobs) for choice in choices),
        *(output.prompt_logprobs for output in outputs),
    ]


def saved(given: Any, folder: Path) -> Any:
    """A model, or for a shape a folder with KV scales of that shape, or one in blocks of scales."""
    if isinstance(given, tuple):
        save_random(LlamaConfig(**SIZES), folder, torch.bfloat16)
        tensors = load_file(folder / "model.safetensors")
        for name in ("k", "v"):
            tensors[f"model.layers.0.self_attn.{name}_scale"] = 0.01 + torch.rand(given) / 50
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    if given != "blocks":
        return given
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    save_random(LlamaConfig(**SIZES | wide), folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        data, scale = quantize_blocks(tensors[name].float(), Format.E4M3FN)
        tensors |= {name: data, f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config["quantization_config"] = scheme | {"activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == EVERY_TIME else [pytest.mark.slow]) for case in CASES],
)
def test_two_ranks_have_the_bits_of_one(
    case: str,
    tmp_path: Path,
    pages_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given, options = CASES[case]
    given = saved(given, tmp_path / "stored")
    options = TRITON | {"check_ranks": case == EVERY_TIME} | options
    caplog.set_level(logging.INFO, "freight")
    alone = started(opened_as(given, options, tmp_path, kv_cache_memory="4MiB")[0])
    expected = outputs_of(alone)
    assert alone.stats().prefix_hits > 0
    blocks = alone.runner.pool.num_blocks
    monkeypatch.setattr(build, "split_memory", lambda *_: blocks)
    more: dict[str, Any] = {"kv_cache_memory": "8MiB", "tensor_parallel_size": 2}
    opened = opened_as(given, options, tmp_path, **more)[0]
    engine = started(opened)
    assert (COMPARED in caplog.messages) == (case == EVERY_TIME)
    assert outputs_of(engine) == expected
    assert engine.stats().prefix_hits == alone.stats().prefix_hits
    first = pages_of(engine.runner.pool)
    close(engine)
    layers = zip(opened.model.layers, pages_of(alone.runner.pool), strict=True)
    for index, ((layer, whole), *ranks) in enumerate(
        zip(layers, first, torch.load(pages_file), strict=True)
    ):
        for name, page in whole.items():
            for rank, part in zip(ranks, of_ranks(layer.mixer, name, page), strict=True):
                assert torch.equal(rank[name], part), (index, name)
            assert page.any(), (index, name)


def with_ranks(tmp_path: Path, **more: Any) -> Engine:
    given, options = CASES["W8A8, scales per token"]
    options = TRITON | options | {"kv_cache_memory": "2MiB", "tensor_parallel_size": 2} | more
    return started(opened_as(given, options, tmp_path)[0])


@pytest.mark.slow
def test_two_machines_have_the_bits_of_one(tmp_path: Path, pages_file: Path) -> None:
    """Which are two addresses of this one: a rank on each, as on GPUs of two."""
    expected = outputs_of(with_ranks(tmp_path, tensor_parallel_size=1))
    given, options = CASES["W8A8, scales per token"]
    more: dict[str, Any] = {"kv_cache_memory": "2MiB", "tensor_parallel_size": 2}
    options = TRITON | options | more | two_machines() | {"check_ranks": False}
    opened = opened_as(given, options, tmp_path)[0]
    with other_machine(opened.args, opened.random_shape) as machine:
        engine = started(opened)
        assert outputs_of(engine) == expected
        close(engine)
        assert machine.wait() == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_gathers_a_wrong_byte_does_not_serve(
    rank: int, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = r"a gather: row 1, column 127, which rank 1 computed, is .* of all ranks and .* of one"
    # the other rank may be the first to say what came of it
    if rank:
        monkeypatch.setenv("FREIGHT_TEST_FAULT", "byte")
        place = f"(rank 1: {place}|a product of 3 rows: row 1, )"
    else:
        monkeypatch.setattr(Distributed, "gather", Distributed.gather)
        corrupt()
        place = f"({place}|rank 1: a product of 3 rows: row 1, )"
    with pytest.raises(KernelError, match=f"^{place}.*--no-check-ranks"):
        with_ranks(tmp_path)


@pytest.mark.slow
def test_ranks_that_are_not_compared_say_so(
    tmp_path: Path, pages_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    close(with_ranks(tmp_path, check_ranks=False))
    assert any("--no-check-ranks" in message for message in caplog.messages)
    assert COMPARED not in caplog.messages


@pytest.mark.slow
def test_a_step_that_a_rank_leaves_is_computed_again(
    tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a group that all connect anew."""
    expected = outputs_of(with_ranks(tmp_path, tensor_parallel_size=1))
    monkeypatch.setenv("FREIGHT_TEST_FAULT", "step 2")
    engine = with_ranks(tmp_path, check_ranks=False)
    assert outputs_of(engine) == expected
    close(engine)


DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 7},
    {"seed": -3, "temperature": 0.7, "top_k": 9, "top_p": 0.85, "min_p": 0.01, "max_tokens": 4},
    {"seed": 2**63 + 5, "temperature": 3.0, "max_tokens": 5},
)


def drawn_by(engine: Engine, stop: int | None = None) -> list[Any]:
    """Tokens of requests for which nothing needs the host. The last ends at `stop` where it comes."""
    for index, kind in enumerate(DRAWS):
        params = SamplingParams(**kind, ignore_eos=True)
        if stop is not None and index == len(DRAWS) - 1:
            params = replace(params, stop_token_ids=(stop,))
        engine.add(str(index), engine.accept([index + 1] * (1 + index % 2), params), params)
    while engine.has_unfinished:
        engine.step()
    return [list(engine.output(str(index)).outputs[0].token_ids) for index in range(len(DRAWS))]


def drawn_alone(tmp_path: Path) -> tuple[list[Any], int]:
    """What one process draws that waits for each step, and the id that ends the last request early."""
    alone = with_ranks(tmp_path, tensor_parallel_size=1)
    alone.mode = Mode.REPEATABLE
    expected = drawn_by(alone)
    stop = expected[-1][2]
    expected[-1] = expected[-1][: expected[-1].index(stop) + 1]
    return expected, stop


def with_layers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `with_ranks` take a model of so many layers."""
    given, options = CASES["W8A8, scales per token"]
    given = given | {"num_hidden_layers": count}
    monkeypatch.setitem(CASES, "W8A8, scales per token", (given, options))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_every_rank_draws_the_same_and_no_step_waits_for_the_host(
    stages: int, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two stages steps of two microbatches are under way."""
    with_layers(stages, monkeypatch)
    expected, stop = drawn_alone(tmp_path)
    monkeypatch.setattr(ModelRunner, "launch", ModelRunner.launch)
    noted = note_draws()
    engine = with_ranks(tmp_path, check_ranks=False, pipeline_parallel_size=stages)
    assert engine.scheduler.num_microbatches == stages
    assert drawn_by(engine, stop) == expected
    last = SamplingParams(max_tokens=1)
    engine.add("last", engine.accept([1, 2], last), last)
    engine.step()  # once rank 1 gathers for this, it has drawn what was launched before
    close(engine)
    assert draws_of(pages_file) == noted
    for microbatch in range(stages):
        assert any(of == microbatch and ahead for of, ahead, _ in noted)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("fault", ["ahead 1", "drawn 1"])
def test_what_was_launched_on_a_step_that_a_rank_left_is_computed_again(
    fault: str, stages: int, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 leaves a step that rank 0 has launched on top of one that it has not read."""
    with_layers(stages, monkeypatch)
    expected, stop = drawn_alone(tmp_path)
    monkeypatch.setenv("FREIGHT_TEST_FAULT", fault)
    engine = with_ranks(tmp_path, check_ranks=False, pipeline_parallel_size=stages)
    assert drawn_by(engine, stop) == expected
    close(engine)
    noted = draws_of(pages_file)
    aheads = [tokens for _, ahead, tokens in noted if ahead]
    assert aheads[0] is None
    assert aheads[1] is not None
