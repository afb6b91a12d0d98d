"""An empty text is a prompt where the tokenizer adds BOS, in every API; else a refusal says what to
do.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import demo_with_chat_template
from tests.unit.server.openai_cases import LIMITS, SERVED
from tokenizers import Tokenizer as Backend

from freight import LLM, RequestError, SamplingParams
from freight.sampling import SamplingLimits
from freight.serve.call import Served
from freight.serve.openai.completion_request import parse_completion
from freight.serve.tgi.request import parse_generate
from freight.serve.transport.errors import ApiError
from freight.text.tokenizer import Tokenizer

WAY_OUT = "at least one character or token id"


def without_bos(folder: Path) -> Path:
    demo_with_chat_template(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    return folder


@pytest.fixture
def adding() -> Served:
    return dataclasses.replace(SERVED, tokenizer=_demo())


@pytest.fixture
def plain(tmp_path: Path) -> Served:
    backend = Backend.from_file(str(without_bos(tmp_path) / "tokenizer.json"))
    return dataclasses.replace(SERVED, tokenizer=Tokenizer(backend))


def _demo() -> Tokenizer:
    from freight.checkpoint.reader import resolve_model

    return Tokenizer.load(resolve_model("demo"))


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
def test_an_empty_text_is_a_completions_prompt_where_bos_is_added(
    prompt: Any, adding: Served
) -> None:
    texts = [work.prompt for work in parse_completion({"prompt": prompt}, adding, LIMITS).work]
    assert texts == ([prompt] if isinstance(prompt, str) else prompt)


@pytest.mark.parametrize(
    ("prompt", "field"), [("", "prompt"), ([""], "prompt[0]"), (["a", ""], "prompt[1]")]
)
def test_else_a_completion_is_refused_with_the_way_out(
    prompt: Any, field: str, adding: Served, plain: Served
) -> None:
    refused = (
        (plain, {}, WAY_OUT),
        (adding, {"add_special_tokens": False}, "add_special_tokens"),
    )
    for served, fields, way_out in refused:
        with pytest.raises(ApiError) as caught:
            parse_completion({"prompt": prompt, **fields}, served, LIMITS)
        assert (caught.value.status, caught.value.param) == (400, field)
        assert way_out in caught.value.message


def test_tgis_inputs_alike(adding: Served, plain: Served) -> None:
    [work] = parse_generate({"inputs": ""}, adding, SamplingLimits(), None).work
    assert work.prompt == ""
    with pytest.raises(ApiError, match=WAY_OUT) as caught:
        parse_generate({"inputs": ""}, plain, SamplingLimits(), None)
    assert caught.value.status == 422


def test_an_engines_prompts_alike(tmp_path: Path) -> None:
    few = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    llm = LLM(kv_cache_memory="4MiB", max_model_len=64)
    [empty] = llm.generate("", few)
    [bos] = llm.generate([[0]], few)
    assert empty.prompt_token_ids == [0]
    assert empty.outputs[0].token_ids == bos.outputs[0].token_ids
    for prompt in ([[]], {"prompt_token_ids": []}):
        with pytest.raises(RequestError, match=WAY_OUT):
            llm.generate(prompt, few)
    other = LLM(str(without_bos(tmp_path)), kv_cache_memory="4MiB", max_model_len=64)
    with pytest.raises(RequestError, match=WAY_OUT):
        other.generate("", few)
