"""The bodies of the two APIs that are read as chats, for /openapi.json: Responses, and Messages
with its count_tokens.

Fields that nobody here knows are ignored, so the schemas are open. What they say of the fields that
are read holds: a body that they do not allow is refused. Fields that mean what they mean in a chat
have the chat's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freight.sampling import LARGEST_WHOLE
from freight.server.anthropic.messages_request import MEDIA
from freight.server.bodies import schema_of
from freight.server.limits import ServingLimits
from freight.server.openai.as_chat import OURS
from freight.server.openai.chat_request import ChatRequest
from freight.server.openai.responses_request import TEXTS

CHAT_SCHEMA = schema_of(ChatRequest)
_MOST = ServingLimits()
_TEXT = {"type": "string"}
_NULL = {"type": "null"}


def _object(required: list[str], **properties: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | ({"required": required} if required else {})


def _maybe(*kinds: Mapping[str, Any]) -> dict[str, Any]:
    """One of `kinds`, or null, which means that the field is absent."""
    return {"anyOf": [*kinds, _NULL]}


def _chat(*names: str) -> dict[str, Any]:
    """The fields of a chat with these names."""
    return {name: CHAT_SCHEMA["properties"][name] for name in names}


def _list(items: Mapping[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most} | (
        {"minItems": least} if least else {}
    )


def _another(*known: str) -> dict[str, Any]:
    """An object of a type that is left out, and named as ignored."""
    return _object(["type"], type={"type": "string", "not": {"enum": [*known]}})


_EFFORT = CHAT_SCHEMA["properties"]["reasoning_effort"]
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_JSON_SCHEMA = _object(
    ["type", "schema"], type={"const": "json_schema"}, schema={"type": ["object", "boolean"]}
)

_PART = {
    "anyOf": [
        _object(["type", "text"], type={"enum": [*TEXTS]}, text=_TEXT),
        _object(["type", "refusal"], type={"const": "refusal"}, refusal=_TEXT),
    ]
}
_CONTENT = {"anyOf": [_TEXT, _list(_PART, _MOST.messages)]}
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_ITEM = {
    "anyOf": [
        _object(
            ["role", "content"],
            type=_maybe({"const": "message"}),
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_CONTENT,
        ),
        _object(
            ["type", "call_id", "name", "arguments"],
            type={"const": "function_call"},
            call_id=_TEXT,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _object(
            ["type", "call_id", "output"],
            type={"const": "function_call_output"},
            call_id=_TEXT,
            output=_CONTENT,
        ),
        _object(["type"], type={"const": "reasoning"}),
        _another(*_KINDS),
    ]
}
_FUNCTION = _object(
    ["type", "name"], type={"const": "function"}, name=_NAME, parameters=_maybe({"type": "object"})
)
RESPONSES_SCHEMA: dict[str, Any] = _object(
    ["input"],
    input={"anyOf": [_TEXT, _list(_ITEM, _MOST.messages, 1)]},
    instructions=_maybe(_TEXT),
    max_output_tokens=CHAT_SCHEMA["properties"]["max_tokens"],
    tools=_maybe(_list({"anyOf": [_FUNCTION, _another("function")]}, _MOST.tools)),
    tool_choice=_maybe({"enum": ["none", "auto", "required"]}, {"type": "object"}),
    text=_maybe(
        _object(
            [],
            format=_maybe(_object(["type"], type={"enum": ["text", "json_object"]}), _JSON_SCHEMA),
        ),
    ),
    reasoning=_maybe(_object([], effort=_EFFORT)),
    previous_response_id=_NULL,
    conversation=_NULL,
    prompt=_NULL,
    background=_maybe({"const": False}),
    **_chat(
        "model", "stream", "temperature", "top_p", "top_k", "stop", "parallel_tool_calls", *OURS
    ),
)

_BLOCK = _object(["type", "text"], type={"const": "text"}, text=_TEXT)
_BLOCKS = {"anyOf": [_TEXT, _list({"anyOf": [_BLOCK, _another("text", *MEDIA)]}, _MOST.messages)]}
_RESULT = _object(
    ["type", "tool_use_id"],
    type={"const": "tool_result"},
    tool_use_id=_TEXT,
    content=_maybe(_BLOCKS),
)
_ANSWERED = {
    "anyOf": [
        _BLOCK,
        _object(["type", "thinking"], type={"const": "thinking"}, thinking=_TEXT),
        _object(
            ["type", "id", "name"],
            type={"const": "tool_use"},
            id=_TEXT,
            name=_TEXT,
            input={"type": "object"},
        ),
        _another("text", "thinking", "tool_use", *MEDIA),
    ]
}
_MESSAGE = {
    "anyOf": [
        _object(
            ["role", "content"],
            role={"const": "user"},
            content={
                "anyOf": [
                    _TEXT,
                    _list(
                        {"anyOf": [_BLOCK, _RESULT, _another("text", "tool_result", *MEDIA)]},
                        _MOST.messages,
                    ),
                ]
            },
        ),
        _object(["role", "content"], role={"const": "system"}, content=_BLOCKS),
        _object(
            ["role", "content"],
            role={"const": "assistant"},
            content={"anyOf": [_TEXT, _list(_ANSWERED, _MOST.messages)]},
        ),
    ]
}
_TOOL = _object(
    ["name"], type=_maybe({"const": "custom"}), name=_NAME, input_schema=_maybe({"type": "object"})
)
COUNT_SCHEMA: dict[str, Any] = _object(
    ["messages"],
    messages=_list(_MESSAGE, _MOST.messages, 1),
    system=_maybe(_BLOCKS),
    tools=_maybe(_list({"anyOf": [_TOOL, _another("custom")]}, _MOST.tools)),
    tool_choice=_maybe(_object(["type"], type={"enum": ["auto", "any", "tool", "none"]})),
    stop_sequences=_maybe(CHAT_SCHEMA["properties"]["stop"]["anyOf"][1]),
    thinking=_maybe(_object(["type"], type={"enum": ["enabled", "adaptive", "disabled"]})),
    output_config=_maybe(_object([], format=_maybe(_JSON_SCHEMA), effort=_EFFORT)),
    **_chat("model", "max_tokens", "stream", "temperature", "top_p", "top_k", *OURS),
)
MESSAGES_SCHEMA: dict[str, Any] = COUNT_SCHEMA | {
    "required": ["messages", "max_tokens"],
    "properties": COUNT_SCHEMA["properties"]
    | {"max_tokens": {"type": "integer", "minimum": 1, "maximum": LARGEST_WHOLE}},
}
