"""benchmarks/questions/rounded_cache.py: rounding against numpy, and stored once whatever the chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cache_ladder
import ml_dtypes
import numpy as np
import pytest
import torch
from questions.rounded_cache import BIASED, SIMULATED, RoundedKV, rounded_runner, with_rounding
from tests.demo_chat import demo_with_chat_template
from torch import Tensor

from freight import LLM, SamplingParams
from freight.cache.pool import KVPool, PagedKV
from freight.checkpoint.reader import resolve_model
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.lab.evaluate.report import cache_run, load_for, plain_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

# name -> bits and the channels that share a scale, None for all of a head
FORMATS = {
    "int7": (7, None),
    "int6": (6, None),
    "int5": (5, None),
    "int4-32": (4, 32),
    "int4": (4, None),
    "int3-32": (3, 32),
}
TEXT = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")


def rounded_by_numpy(values: np.ndarray, bits: int, group: int | None) -> np.ndarray:
    """Vector by vector, in float64."""
    out = np.zeros(values.shape)
    most = {7: 63, 6: 31, 5: 15, 4: 7, 3: 3}[bits]
    width = group or values.shape[-1]
    for row, head in np.ndindex(values.shape[:2]):
        for start in range(0, values.shape[-1], width):
            vector = values[row, head, start : start + width].astype(np.float64)
            scale = np.abs(vector).max() / most
            if scale > 0:
                out[row, head, start : start + width] = np.rint(vector / scale) * scale
    return out


def test_every_format_is_covered() -> None:
    assert {*FORMATS, *BIASED} == set(SIMULATED)


def test_e4m3_is_rounded_as_ml_dtypes_does() -> None:
    values = torch.randn(20, 3, 64, generator=torch.Generator().manual_seed(2))
    values[1, 0, 5] = 354.0  # a bias beside which the others are small
    x = values.numpy()
    unit = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(SIMULATED["unit-biased"](values).numpy(), unit)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    token = (x / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    assert np.array_equal(SIMULATED["token-biased"](values).numpy(), token)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_rounded_as_numpy_does(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20, 3, 64, generator=generator)
    values[0] = 0.0
    values[1, 0, 5] = 1000.0  # the others of its scale become 0
    values[2] *= 1e-30
    expected = rounded_by_numpy(values.numpy(), *FORMATS[name])
    torch.testing.assert_close(
        SIMULATED[name](values).double(), torch.from_numpy(expected), rtol=1e-5, atol=0.0
    )


def passed(runner: ModelRunner, ids: list[int], chunk: int) -> Tensor:
    """Final states of `ids`, `chunk` of them a step."""
    states = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        hidden = runner.run([SequenceSlice(part, start, runner.pool.whole, Logits.ALL)]).hidden
        assert hidden is not None
        states.append(hidden.clone())
    return torch.cat(states)


@torch.inference_mode()
def test_chunks_give_the_bits_of_a_single_pass() -> None:
    opened = open_model(EngineArgs("demo"))
    config = plain_config(opened)
    tokenizer = opened.load_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT[:1000])[:150]
    with opened.threads(config):
        decoder = load_for(opened, [config], len(ids))

        def runner(change: Callable[[KVPool], KVPool]) -> ModelRunner:
            run = cache_run(opened, decoder, config, len(ids)).runner
            return replace(run, pool=change(run.pool))

        plain = runner(lambda pool: pool)
        whole = runner(lambda pool: with_rounding(pool, SIMULATED["int4"]))
        chunked = runner(lambda pool: with_rounding(pool, SIMULATED["int4"]))
        exact = passed(plain, ids, len(ids))
        states = passed(whole, ids, len(ids))
        assert torch.equal(passed(chunked, ids, 37), states)
    assert not torch.equal(exact, states)
    # the first layer's keys and values do not depend on what any cache has
    for name in ("k", "v"):
        given, stored, again = [
            getattr(run.pool.paged[0].pages, name) for run in (plain, whole, chunked)
        ]
        rows = given.reshape(-1, *given.shape[2:])[: len(ids)].float()
        expected = SIMULATED["int4"](rows).to(stored.dtype)
        assert torch.equal(stored.reshape(-1, *stored.shape[2:])[: len(ids)], expected)
        written = [page.reshape(-1, *page.shape[2:])[: len(ids)] for page in (again, stored)]
        assert torch.equal(*written)


def test_answers_are_the_same_from_a_cached_prefix() -> None:
    """The engine stores through the rounded pool, in chunks as well, and rounds no page again."""

    def answered(**options: Any) -> tuple[list[Any], int]:
        llm = LLM("demo", max_model_len=512, **options)
        llm.engine.runner = rounded_runner(llm.engine.runner, "int3-32")
        sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
        prompts = [TEXT[:700], TEXT[:700], TEXT[:650]]
        outputs = [llm.generate([prompt], sampling)[0] for prompt in prompts]
        answers = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
        return answers, outputs[1].num_cached_tokens

    whole, num_cached = answered(enable_prefix_caching=True)
    chunked, without = answered(enable_prefix_caching=False, max_num_batched_tokens=48)
    assert num_cached > 0
    assert without == 0
    assert whole == chunked
    assert whole[0] == whole[1]


def test_the_ladder_continues_a_file_of_answers_that_was_cut(tmp_path: Path) -> None:
    """Also behind a line with a separator that Python takes for the end of a line."""
    model = str(demo_with_chat_template(tmp_path / "chat"))
    requests = tmp_path / "gsm8k-0.jsonl"
    lines = []
    for number in range(3):
        body = {"messages": [{"role": "user", "content": f"Hi\u2028{number}"}], "max_tokens": 3}
        lines.append(json.dumps({"custom_id": f"gsm8k/{number}", "body": body}, ensure_ascii=False))
    requests.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = tmp_path / "gsm8k-0.int4.jsonl"
    cache_ladder.answer(model, requests, "int4", 128)
    whole = out.read_bytes()
    separated = json.dumps({"custom_id": "gsm8k/0", "of": "\u2028"}, ensure_ascii=False)
    ends = [place for place, byte in enumerate(whole) if byte == 10]
    out.write_bytes(separated.encode() + whole[ends[0] : ends[1] - 9])
    cache_ladder.answer(model, requests, "int4", 128)
    assert out.read_bytes() == separated.encode() + whole[ends[0] :]


def test_what_a_layer_shares_stays_shared() -> None:
    opened = open_model(EngineArgs("demo"))
    config = plain_config(opened)
    with opened.threads(config):
        pool = cache_run(opened, load_for(opened, [config], 32), config, 32).runner.pool
    shared = replace(pool.paged[0], group=3, shared=True)
    changed = with_rounding(pool.with_layers({0: shared}), SIMULATED["int4"])
    assert all(isinstance(layer, RoundedKV) for layer in changed.paged.values())
    layer = changed.paged[0]
    assert isinstance(layer, PagedKV)
    assert (layer.pages is shared.pages, layer.group, layer.shared) == (True, 3, True)
