"""/tokenize, /detokenize, /tokenizer_info over the demo's tokenizer."""

import dataclasses
import json
from pathlib import Path

import pytest

import freight
from freight.serve.call import Conversation, Served
from freight.serve.limits import ServingLimits
from freight.serve.tokens import detokenize, parse_tokenize, tokenizer_info
from freight.serve.transport.errors import ApiError
from freight.text.tokenizer import Tokenizer

DEMO = Path(freight.__file__).parent / "demo"
TOKENIZER = Tokenizer.load(DEMO)
SERVED = Served(("demo", "alias"), TOKENIZER, TOKENIZER.vocab_size, 512, {}, "fp")
TEXT = "Das war — ein Schloß 😀."


def ask(body, served=SERVED):
    call = parse_tokenize(body, served, ServingLimits())
    assert isinstance(call.prompt, str)
    return call.answer(call.prompt, served)


def test_a_prompt():
    ids = TOKENIZER.encode(TEXT)
    assert ask({"prompt": TEXT, "model": "alias"}) == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": None,
    }
    bare = ask({"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True})
    assert bare["tokens"] == TOKENIZER.encode(TEXT, add_special_tokens=False)
    assert bare["token_strs"] == [TOKENIZER.token_string(token, False) for token in bare["tokens"]]


def test_there_and_back():
    ids = ask({"prompt": TEXT, "add_special_tokens": False})["tokens"]
    assert detokenize({"tokens": ids}, SERVED) == {"prompt": TEXT}
    with_special = ask({"prompt": TEXT})["tokens"]
    assert detokenize({"tokens": with_special}, SERVED)["prompt"] == TOKENIZER.decode(
        with_special, False
    )


def test_tgis_offsets_count_characters():
    answer = ask({"inputs": TEXT})
    assert [entry["id"] for entry in answer] == TOKENIZER.encode(TEXT)
    assert all(entry["text"] == TEXT[entry["start"] : entry["stop"]] for entry in answer)
    covered = {place for entry in answer for place in range(entry["start"], entry["stop"])}
    assert covered == set(range(len(TEXT)))
    assert len(ask({"inputs": TEXT, "add_special_tokens": False})) == len(
        TOKENIZER.encode(TEXT, False)
    )


def test_messages_are_rendered_first():
    messages, tools = [{"role": "user", "content": "a"}], [{"type": "function"}]
    body = {
        "messages": messages,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    call = parse_tokenize(body, SERVED, ServingLimits())
    assert call.prompt == Conversation(
        messages, True, False, {"enable_thinking": False, "tools": tools}
    )
    assert call.answer("<s>a", SERVED)["tokens"] == TOKENIZER.encode(
        "<s>a", add_special_tokens=False
    )
    final = parse_tokenize(
        {"messages": messages, "continue_final_message": True}, SERVED, ServingLimits()
    ).prompt
    assert (final.add_generation_prompt, final.continue_final_message) == (False, True)
    without = parse_tokenize({"messages": messages, "tools": []}, SERVED, ServingLimits()).prompt
    assert without.template_values == {}  # as in a chat: templates test whether tools are there


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "prompt, messages and inputs"),
        ({"prompt": "a", "messages": []}, 400, "one of"),
        ({"prompt": [1]}, 400, "prompt must be a string"),
        ({"prompt": "a\ud800"}, 400, "not Unicode"),
        ({"inputs": "a\ud800"}, 400, "not Unicode"),
        ({"prompt": "a", "add_special_token": True}, 400, "did you mean add_special_tokens"),
        ({"prompt": "a", "model": "gpt"}, 404, "demo"),
        ({"prompt": "a", "model": 1}, 404, "demo"),
        ({"messages": "a"}, 400, "messages must be a list"),
        ({"messages": [], "chat_template": "x"}, 400, "chat_template"),
        ({"messages": [], "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
        (
            {"messages": [], "chat_template_kwargs": {"enable_thinkin": False}},
            400,
            "enable_thinkin",
        ),
    ],
)
def test_refused(body, status, says):
    with pytest.raises(ApiError, match=says) as caught:
        ask(body)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "tokens", [None, "a", [-1], [True], ["1"], [1.0], [2**70], [TOKENIZER.vocab_size], [0] * 2**21]
)
def test_tokens_that_are_none(tokens):
    with pytest.raises(ApiError, match="tokens") as caught:
        detokenize({"tokens": tokens}, SERVED)
    assert caught.value.status == 400


def test_info(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{{ messages }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    info = tokenizer_info(dataclasses.replace(SERVED, tokenizer=Tokenizer.load(tmp_path)))
    assert {name: info[name] for name in config} == config
    assert tokenizer_info(SERVED)["pad_token"] is None
    assert tokenizer_info(SERVED)["chat_template"] is None
    with pytest.raises(ApiError, match="no tokenizer"):
        tokenizer_info(dataclasses.replace(SERVED, tokenizer=None))
