"""llama-index-llms-openai-like: complete, chat, streams, structured answers, errors. Run as:
try_llama_index.py URL
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from wanted import LENGTH, PROMPT, Plain, raises, tell

URL = sys.argv[1]
CHAT = [ChatMessage(role="user", content=PROMPT)]


def model(**more: Any) -> OpenAILike:
    given = {
        "is_chat_model": True,
        "max_tokens": 24,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 60,
    } | more
    return OpenAILike(
        model="demo", api_base=f"{URL}/v1", api_key="none", context_window=8192, **given
    )


def complete() -> None:
    for is_chat in (False, True):
        one = model(is_chat_model=is_chat)
        assert (
            "".join(piece.delta for piece in one.stream_complete(PROMPT))
            == one.complete(PROMPT).text
            != ""
        )


def chat() -> None:
    whole = model().chat(CHAT).message.content
    assert "".join(piece.delta or "" for piece in model().stream_chat(CHAT)) == whole != ""


def structured() -> None:
    for how in ({"is_function_calling_model": True}, {"should_use_structured_outputs": True}):
        one = model(max_tokens=LENGTH, **how)
        if "is_function_calling_model" in how:
            found = FunctionCallingProgram.from_defaults(
                output_cls=Plain, llm=one, prompt_template_str=PROMPT, tool_required=True
            )()
        else:
            found = one.as_structured_llm(Plain).chat(CHAT).raw
        assert isinstance(found, Plain), found


def errors() -> None:
    raises(BadRequestError, lambda: model(max_tokens=50_000).chat(CHAT))


tell([complete, chat, structured, errors])
