"""Which tokens end a completion: those that any file of a model names, and the tokenizer's EOS."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import demo_with_chat_template
from tests.refusals import line_naming

from freight import LLM, AsyncLLM, FinishReason, SamplingParams
from freight.model.config.parse import stop_token_ids
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

OTHER, END = 2, 1  # END is what the demo's tokenizer calls its EOS
SIZE: dict[str, Any] = {"kv_cache_memory": "4MiB", "max_model_len": 128}
# draws END whatever the model computes
ENDS = SamplingParams(max_tokens=4, temperature=0.0, logit_bias={END: 100.0})


def folder(
    path: Path, config: object, generation: object, named: object = "<|end_of_text|>"
) -> Path:
    """The demo with these values of `eos_token_id`, and of the tokenizer's `eos_token`."""
    demo_with_chat_template(path)
    values = {"config.json": config, "generation_config.json": generation}
    for name, value in values.items():
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | {"eos_token_id": value}))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": named}))
    return path


@pytest.mark.parametrize(
    ("config", "generation", "named", "ids"),
    [
        (None, None, "<|end_of_text|>", {END}),
        (OTHER, None, "<|end_of_text|>", {OTHER, END}),
        (OTHER, [OTHER, 5], {"content": "<|end_of_text|>"}, {OTHER, 5, END}),
        ([OTHER, 7], 5, None, {OTHER, 7, 5}),
        (None, None, None, set()),
    ],
)
def test_the_union_of_every_file_ends_a_completion(
    tmp_path: Path, config: object, generation: object, named: object, ids: set[int]
) -> None:
    opened = open_model(EngineArgs(str(folder(tmp_path, config, generation, named))))
    assert opened.stop_token_ids() == ids
    for token in ids:
        assert f" {token} " in opened.describe_stops()
    assert ("max_tokens" in opened.describe_stops()) == (not ids)


def test_without_a_tokenizer_the_other_files_count(tmp_path: Path) -> None:
    path = str(folder(tmp_path, OTHER, None))
    assert open_model(EngineArgs(path, skip_tokenizer_init=True)).stop_token_ids() == {OTHER}


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
@pytest.mark.parametrize("model_type", ["gemma3", "unknown"])
def test_a_nested_end_joins_the_outer_one(model_type: str, key: str) -> None:
    nested = {"model_type": model_type, key: {"eos_token_id": [3, 4]}}
    assert stop_token_ids(nested, None) == {3, 4}
    assert stop_token_ids(nested | {"eos_token_id": 9}, {"eos_token_id": 8}) == {3, 4, 8, 9}
    assert stop_token_ids(nested | {"eos_token_id": None}, {"eos_token_id": None}) == {3, 4}


@pytest.mark.parametrize("config", [None, OTHER])
def test_the_end_that_only_the_tokenizer_names_ends_every_call(
    tmp_path: Path, config: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "freight")
    path = str(folder(tmp_path, config, None))
    llm = LLM(path, **SIZE)
    line_naming(caplog.text, "'<|end_of_text|>'", "tokenizer")
    for output in (
        llm.generate("x", ENDS)[0],
        llm.chat([{"role": "user", "content": "x"}], ENDS)[0],
    ):
        assert output.outputs[0].finish_reason is FinishReason.STOP
        assert output.outputs[0].token_ids == [END]
        assert output.outputs[0].stop_reason is None
    endless = SamplingParams(
        max_tokens=4, temperature=0.0, logit_bias={END: 100.0}, ignore_eos=True
    )
    assert len(llm.generate("x", endless)[0].outputs[0].token_ids) == 4


def test_it_ends_answers_of_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = str(folder(tmp_path, None, None))

    async def answer() -> list[int]:
        async with AsyncLLM(path, **SIZE) as llm:
            outputs = [output async for output in llm.generate("x", ENDS)]
        return outputs[-1].outputs[0].token_ids

    assert asyncio.run(answer()) == [END]
