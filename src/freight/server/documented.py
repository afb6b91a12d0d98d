"""/openapi.json: what each route takes and gives, and the key that it needs.

The document is honest in both directions: a body that it does not allow is refused, and every
answer has the shape that stands here. Schemas show what can be said in JSON Schema; what depends on
the model or on several fields at once is told by the 4XX that it leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from freight.sampling import LARGEST_WHOLE
from freight.server.anthropic.errors import PATHS as ANTHROPIC_PATHS
from freight.server.limits import ServingLimits
from freight.server.openai.chat_request import CHAT_SCHEMA
from freight.server.openai.completion_request import COMPLETION_SCHEMA
from freight.server.tokens import MOST_TOKENS

Schema = Mapping[str, Any]
_MOST = ServingLimits()
_SCHEME = "key"
_ANY: dict[str, Any] = {}
_ABSENT = {"type": "null"}  # the same as no such field


def _maybe(**schema: Any) -> dict[str, Any]:
    """`schema`, or null, which means that the field is absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def _body(required: list[str], **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": _ABSENT,
    }
    return found | ({"required": required} if required else {})


_FLAG = _maybe(type="boolean")
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MOST_TOKENS}
_STOPS = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": _MOST.sampling.stop_length},
    "maxItems": _MOST.sampling.stop,
}
_GRAMMAR = {
    "type": "object",
    "properties": {
        "type": {"enum": ["json", "json_schema", "regex"]},
        "value": {"type": ["object", "string"]},
    },
    "required": ["type", "value"],
}
_PARAMETERS = _body(
    [],
    best_of=_maybe(const=1),
    decoder_input_details=_FLAG,
    details=_FLAG,
    do_sample=_FLAG,
    frequency_penalty=_maybe(type="number", minimum=-2, maximum=2),
    grammar=_maybe(**_GRAMMAR),
    max_new_tokens=_maybe(type="integer", minimum=1, maximum=LARGEST_WHOLE),
    repetition_penalty=_maybe(type="number", exclusiveMinimum=0),
    return_full_text=_FLAG,
    seed=_maybe(type="integer", minimum=-(2**63), maximum=2**64 - 1),
    stop={"anyOf": [_STOPS, _STOPS["items"], {"type": "null"}]},
    temperature=_maybe(type="number", minimum=0, maximum=_MOST.sampling.temperature),
    top_k=_maybe(type="integer", minimum=-1, maximum=LARGEST_WHOLE),
    top_n_tokens=_maybe(type="integer", minimum=0, maximum=_MOST.sampling.logprobs),
    top_p=_maybe(type="number", exclusiveMinimum=0, maximum=1),
    truncate=_maybe(type="integer", minimum=1),
    typical_p=_maybe(const=1),
    watermark=_maybe(const=False),
)
GENERATE_SCHEMA = _body(
    ["inputs"],
    inputs={"type": "string", "minLength": 1},
    parameters=_maybe(**_PARAMETERS),
    stream=_FLAG,
    options=_ANY,
    model=_ANY,
)
_MODEL = _maybe(type="string")
_MESSAGES = {"type": "array", "items": {"type": "object"}, "minItems": 1}
TOKENIZE_SCHEMA: dict[str, Any] = {
    "oneOf": [
        _body(
            ["prompt"],
            prompt={"type": "string"},
            model=_MODEL,
            add_special_tokens=_FLAG,
            return_token_strs=_FLAG,
        ),
        _body(
            ["messages"],
            messages=_MESSAGES,
            model=_MODEL,
            add_generation_prompt=_FLAG,
            continue_final_message=_FLAG,
            add_special_tokens=_FLAG,
            return_token_strs=_FLAG,
            tools=_maybe(type="array"),
            chat_template_kwargs=_maybe(type="object"),
        ),
        _body(
            ["inputs"],
            inputs={"type": "string"},
            add_special_tokens=_FLAG,
            parameters=_ANY,
            stream=_ANY,
        ),
    ]
}
DETOKENIZE_SCHEMA = _body(["tokens"], tokens=_IDS, model=_MODEL)

INVOCATION_SCHEMA = {"anyOf": [CHAT_SCHEMA, COMPLETION_SCHEMA, GENERATE_SCHEMA]}

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_OPENAI_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _MAYBE_TEXT,
                "code": _MAYBE_TEXT,
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}
_TGI_ERROR = {
    "type": "object",
    "properties": {
        "error": _TEXT,
        "error_type": {
            "enum": [
                *("validation", "generation", "incomplete_generation", "overloaded"),
                *("authentication", "not_found"),
            ]
        },
    },
    "required": ["error", "error_type"],
    "additionalProperties": False,
}
_TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})
NOT_JSON = frozenset({"/metrics", "/state/stream"})
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "error"],
    "additionalProperties": False,
}
_STREAMS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/", "/generate", "/generate_stream", "/invocations"),
    }
)


def request_body(schema: Schema, unknown_fields: str = "refuse") -> dict[str, Any]:
    """`openapi_extra` of a route whose body is JSON."""
    if unknown_fields == "ignore":
        schema = _opened(schema)
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": dict(schema)}}}
    }


def _opened(value: Any) -> Any:
    """A schema in which fields that nobody knows have any value."""
    if isinstance(value, list):
        return [_opened(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    opened = {name: _opened(entry) for name, entry in value.items()}
    return opened | (
        {"additionalProperties": True} if opened.get("additionalProperties") == _ABSENT else {}
    )


def answers(path: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its errors, and what it gives beside JSON."""
    error = (
        _TGI_ERROR
        if path in _TGI_PATHS
        else _ANTHROPIC_ERROR
        if path in ANTHROPIC_PATHS
        else _OPENAI_ERROR
    )
    failed = {"content": {"application/json": {"schema": error}}}
    found: dict[int | str, dict[str, Any]] = {
        "4XX": {
            "description": "what was asked for cannot be served: the message says why",
            **failed,
        },
        "5XX": {
            "description": "the server is loading or about to end (503), or it failed",
            **failed,
        },
    }
    if path in ("/health", "/ping"):
        found["5XX"] = {
            "description": "the server is loading or about to end",
            "content": {
                "application/json": {
                    "schema": {"type": "object", "required": ["status", "message"]}
                }
            },
        }
    if path in _STREAMS:
        found[200] = {"content": {"text/event-stream": {}}}
    elif path == "/metrics":
        found[200] = {
            "content": {
                "text/plain": {"schema": _TEXT},
                "application/openmetrics-text": {"schema": _TEXT},
            }
        }
    elif path == "/state/stream":
        found[200] = {"content": {"text/event-stream": {}}}
    return found


def document(app: FastAPI, open_paths: frozenset[str], needs_key: bool) -> None:
    """Make `app.openapi()` say which routes need a key."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        found = build()
        if needs_key:
            scheme = {
                "type": "http",
                "scheme": "bearer",
                "description": "Also as the header x-api-key.",
            }
            found.setdefault("components", {})["securitySchemes"] = {_SCHEME: scheme}
            for path, operations in found["paths"].items():
                for method, operation in operations.items():
                    if not (method == "get" and path in open_paths):
                        operation["security"] = [{_SCHEME: []}]
        return found

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document
