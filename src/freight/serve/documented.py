"""/openapi.json: the request and the response of each route, and the key that it needs.

The document holds in both directions: a body that it does not allow is refused, and every answer
has the documented shape. Schemas show what JSON Schema can express. The 4XX answer covers rules
that depend on the model or on several fields at once.
"""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI

from freight.base.fields import JsonDict, JsonObject
from freight.serve.anthropic.errors import PATHS as ANTHROPIC_PATHS
from freight.serve.bodies import schema_of

_SCHEME = "key"
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
_TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/embed", "/predict"})
NOT_JSON = frozenset({"/metrics", "/state/stream"})
PLAIN_TEXT = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
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
SUMMARIES = {  # of a path, whatever its method
    "/v1/chat/completions": "Answer a conversation: OpenAI's API",
    "/v1/completions": "Complete prompts: OpenAI's API",
    "/v1/responses": "Answer a conversation: OpenAI's API for agents, without state",
    "/v1/messages": "Answer a conversation: Anthropic's API",
    "/v1/messages/count_tokens": "Count the tokens of a conversation: Anthropic's API",
    "/generate": "Complete a prompt: TGI's API",
    "/generate_stream": "Stream the completion of a prompt: TGI's API",
    "/": "Complete a prompt, as a stream if the body says so: TGI's API; TEI's of a model that pools",
    "/v1/embeddings": "Embed inputs: OpenAI's API",
    "/rerank": "Rank documents for a query: Cohere's, Jina's and TEI's API",
    "/v1/rerank": "Rank documents for a query: Cohere's and Jina's API",
    "/v2/rerank": "Rank documents for a query: Cohere's API",
    "/score": "Score pairs of texts: vLLM's API",
    "/v1/score": "Score pairs of texts: vLLM's API",
    "/classify": "Classify inputs: vLLM's API",
    "/pooling": "Embed or classify inputs: vLLM's API",
    "/embed": "Embed inputs: TEI's API",
    "/predict": "Classify texts: TEI's API",
    "/invocations": "Answer what the body asks for, by its fields: SageMaker's address",
    "/tokenize": "Return the token ids of a prompt or a conversation",
    "/detokenize": "Return the text of token ids",
    "/v1/load_lora_adapter": "Load a LoRA adapter under a name, or replace the one that has it",
    "/v1/unload_lora_adapter": "Take a LoRA adapter away",
    "/pause": "Serve no requests for a while; those that run end, finish or stand still: vLLM's API",
    "/resume": "Serve requests again: vLLM's API",
    "/is_paused": "Say whether requests wait: vLLM's API",
    "/update_weights_from_disk": "Load other weights of the same model: SGLang's API",
    "/get_weight_version": "Return the trainer's name of the weights: SGLang's API",
    "/reset_prefix_cache": "Find no block of the cache again: vLLM's API",
    "/sleep": "Give the memory of the cache back, or that of the weights, too: vLLM's API",
    "/wake_up": "Take the memory again that /sleep gave back: vLLM's API",
    "/is_sleeping": "Say whether the engine sleeps: vLLM's API",
    "/v1/models": "List the names of the served model",
    "/v1/models/{model_id:path}": "Describe a name of the served model",
    "/info": "Describe the model, its limits, its cache and its defaults",
    "/tokenizer_info": "Describe the tokenizer's special tokens and the chat template",
    "/model_info": "Describe the model under SGLang's names",
    "/get_model_info": "Describe the model under SGLang's names",
    "/server_info": "Describe the limits under SGLang's names",
    "/get_server_info": "Describe the limits under SGLang's names",
    "/health": "Say whether the model can be used: 200 or 503",
    "/ping": "Say whether the model can be used: 200 or 503",
    "/version": "Return the version of Freight",
    "/metrics": "Return the metrics, in Prometheus' text format or as OpenMetrics",
    "/state": "Say what the engine does",
    "/state/stream": "Say what the engine does, once a second",
}
SEVERAL_SUMMARIES = {  # of a server that has several models
    "/models/load": "Load a model that nobody has asked yet: llama.cpp's API",
    "/models/unload": "Unload a model: llama.cpp's API",
}
_NAMED = {
    "type": "object",
    "properties": {"model": _TEXT},
    "required": ["model"],
    "additionalProperties": False,
}
_DONE = {
    "type": "object",
    "properties": {"success": {"const": True}},
    "required": ["success"],
    "additionalProperties": False,
}
_STREAMS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/", "/generate", "/generate_stream", "/invocations"),
    }
)


def answers(path: str) -> dict[int | str, JsonDict]:
    """Return `responses` of a route: its errors, and its answers that are not JSON."""
    error = _OPENAI_ERROR
    if path in _TGI_PATHS:
        error = _TGI_ERROR
    elif path in ANTHROPIC_PATHS:
        error = _ANTHROPIC_ERROR
    failed = {"content": {"application/json": {"schema": error}}}
    responses: dict[int | str, JsonDict] = {
        "4XX": {
            "description": "the request cannot be served; the message says why",
            **failed,
        },
        "5XX": {
            "description": "the server is loading or shutting down (503), or it failed",
            **failed,
        },
    }
    if path in ("/health", "/ping"):
        responses["5XX"] = {
            "description": "the server is loading or shutting down",
            "content": {
                "application/json": {
                    "schema": {"type": "object", "required": ["status", "message"]}
                }
            },
        }
    if path in _STREAMS:
        responses[200] = {"content": {"text/event-stream": {}}}
    elif path == "/metrics":
        responses[200] = {
            "content": {
                "text/plain": {"schema": _TEXT},
                "application/openmetrics-text": {"schema": _TEXT},
            }
        }
    elif path in PLAIN_TEXT:
        responses[200] = {"content": {"text/plain": {"schema": _TEXT}}}
    elif path == "/state/stream":
        responses[200] = {"content": {"text/event-stream": {}}}
    return responses


def with_several(document: JsonObject, needs_key: bool) -> JsonDict:
    """Return the document of one model with the routes of a server that has several."""
    paths = dict(document["paths"])
    operation = dict(paths["/v1/models"]["get"])
    operation.pop("operationId", None)
    paths["/models"] = {"get": operation}
    for path, summary in SEVERAL_SUMMARIES.items():
        done = {"description": "it is begun", "content": {"application/json": {"schema": _DONE}}}
        operation = {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _NAMED}}},
            "responses": {"200": done, **answers(path)},
        }
        if needs_key:
            operation["security"] = [{_SCHEME: []}]
        paths[path] = {"post": operation}
    return {**document, "paths": paths}


def document(
    app: FastAPI,
    bodies: JsonObject,
    unknown_fields: str,
    open_paths: frozenset[str],
    needs_key: bool,
) -> None:
    """Add the bodies of the routes, and the routes that need a key, to `app.openapi()`.

    bodies: path -> its model, or `A | B` for one of several
    """
    build = app.openapi

    @cache
    def openapi() -> JsonDict:
        built = build()
        for path, body in bodies.items():
            schema = schema_of(body, unknown_fields)
            built["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        if needs_key:
            scheme = {
                "type": "http",
                "scheme": "bearer",
                "description": "Also as the header x-api-key.",
            }
            built.setdefault("components", {})["securitySchemes"] = {_SCHEME: scheme}
            for path, operations in built["paths"].items():
                for method, operation in operations.items():
                    if not (method == "get" and path in open_paths):
                        operation["security"] = [{_SCHEME: []}]
        return built

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document
