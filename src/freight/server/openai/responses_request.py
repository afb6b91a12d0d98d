"""`POST /v1/responses`, without state: a body becomes a ResponsesCall.

The items of `input` become a conversation, and the other fields those of a chat. Nothing is kept
between requests, so what refers to an earlier response is refused. Agents send more than any server
knows: tools that are no functions, items of theirs and fields that nobody here knows are left out
and named in `x-freight-ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from freight.server.call import Reply, ReplyHead, Served, TokenizedWork
from freight.server.limits import ServingLimits, check_body, check_context
from freight.server.openai.as_chat import (
    OURS,
    CallAsChat,
    Messages,
    chat_call,
    entries,
    mapping,
    string,
)
from freight.server.openai.chat_request import ChatCall
from freight.server.openai.fields import named, refuse
from freight.server.openai.responses_reply import ResponsesReply
from freight.server.transport.errors import ApiError

# Fields with the same name and meaning in a chat.
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "stop", "parallel_tool_calls", *OURS)
_STATE = {
    "previous_response_id": "this server keeps no responses; send the whole conversation as input",
    "conversation": "this server keeps no conversations; send the whole conversation as input",
    "prompt": "this server keeps no prompts; send instructions and input",
}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA = ("input_image", "input_file", "input_audio")
_ROLES = ("user", "assistant", "system", "developer")
# What an item has without effect, because answers have it and clients send answers back.
_QUIET = frozenset(
    {"id", "type", "status", "phase", "role", "content", "summary", "encrypted_content", "call_id"}
)
_CALL = frozenset({"name", "arguments", "output"})


@dataclass(frozen=True)
class ResponsesCall(CallAsChat):
    """A request for a response that was understood. `echo`: what the answer repeats of the request."""

    echo: Mapping[str, Any]

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """The answer to come. Raises ApiError when the prompt and max_output_tokens exceed the
        context.
        """
        check_context(len(work[0].token_ids), self.chat.max_tokens, served.max_model_len, "input")
        return ResponsesReply(
            head, served, work[0], self.chat.tools.tools, self.chat.parallel, self.echo
        )

    def failure_body(self, error: ApiError) -> object:
        return error.openai_body()


def parse_responses(body: object, served: Served, limits: ServingLimits) -> ResponsesCall:
    """The call that `body`, parsed JSON, asks for.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    given = {name: value for name, value in check_body(body, limits).items() if value is not None}
    reader = _Reader(given, limits)
    chat = reader.chat()
    renamed = [
        (r"max_tokens", "max_output_tokens"),
        (r"reasoning_effort", "reasoning.effort"),
        (r"response_format\.json_schema", "text.format"),
        (r"response_format", "text.format"),
        (r"messages", "input"),
        (r"tools\[\]\.function", "tools[]"),
        *(
            (rf"tools\[{at}\]\.function", f"tools[{index}]")
            for at, index in enumerate(reader.places)
        ),
    ]
    call = chat_call(chat, served, limits, renamed)
    return ResponsesCall(call, named((*reader.ignored, *call.ignored)), reader.echo(call))


class _Reader:
    """Reads one body. `ignored` and `places` are complete after `chat`.

    places  of each tool of the chat its place in the request
    """

    def __init__(self, given: dict[str, Any], limits: ServingLimits) -> None:
        self._given = given
        self._limits = limits
        self._tools: list[dict[str, Any]] = []
        self._choice: object = None
        self.ignored: list[str] = []
        self.places: list[int] = []

    def chat(self) -> dict[str, Any]:
        """The same as a chat's body."""
        given = self._given
        for name, why in _STATE.items():
            if name in given:
                raise ApiError(
                    400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter"
                )
        if given.get("background", False) is not False:
            raise ApiError(
                400,
                "background is not supported: this server keeps no responses; use stream",
                param="background",
                code="unsupported_parameter",
            )
        chat = {name: given[name] for name in _SAME if name in given}
        chat["messages"] = self._messages()
        self._read_tools(chat)
        if "max_output_tokens" in given:
            chat["max_tokens"] = given["max_output_tokens"]
        self._read_form(chat)
        self._read_reasoning(chat)
        read = {
            *_SAME,
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "max_output_tokens",
            "text",
            "reasoning",
        }
        self.ignored += [name for name in given if name not in read | {"background", "metadata"}]
        return chat

    def echo(self, call: ChatCall) -> dict[str, Any]:
        """The fields of the answer that say what was asked for."""
        given, params = self._given, call.work[0].params
        reasoning, text, metadata = (given.get(name) for name in ("reasoning", "text", "metadata"))
        return {
            "instructions": given.get("instructions"),
            "max_output_tokens": call.max_tokens,
            "metadata": metadata if isinstance(metadata, dict) else {},
            "parallel_tool_calls": call.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": (reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (text or {}).get("format") or {"type": "text"}},
            "tool_choice": self._choice if self._choice is not None else "auto",
            "tools": [
                {"parameters": None, "strict": False, **tool, "type": "function"}
                for tool in self._tools
            ],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def _messages(self) -> list[dict[str, Any]]:
        given, messages = self._given, Messages()
        if "instructions" in given:
            messages.system(string("instructions", given["instructions"]))
        items = given.get("input")
        if isinstance(items, str):
            messages.user(items)
        elif not items:
            what = "missing" if items is None else show(items)
            raise refuse("input", f"input is {what}; it must be a string, or a list of messages")
        else:
            for index, item in enumerate(entries("input", items, self._limits.messages)):
                self._item(f"input[{index}]", item, messages)
        if not messages.all:
            raise refuse(
                "input", "input has no item that this server can read; give at least one message"
            )
        return messages.finished()

    def _item(self, where: str, item: Mapping[str, Any], messages: Messages) -> None:
        kind = "message" if item.get("type") is None else string(f"{where}.type", item["type"])
        known = _QUIET | (_CALL if kind != "message" else frozenset())
        if kind == "message":
            role, text = item.get("role"), self._text(f"{where}.content", item.get("content"))
            if role not in _ROLES:
                raise refuse(
                    f"{where}.role",
                    f"{where}.role is {show(role)}; it must be one of {', '.join(_ROLES)}",
                )
            tell = {"user": messages.user, "assistant": messages.answer}.get(role, messages.system)
            tell(text)
        elif kind == "function_call":
            name = string(f"{where}.name", item.get("name"))
            arguments = string(f"{where}.arguments", item.get("arguments"))
            messages.call(string(f"{where}.call_id", item.get("call_id")), name, arguments)
        elif kind == "function_call_output":
            output = self._text(f"{where}.output", item.get("output"))
            messages.result(string(f"{where}.call_id", item.get("call_id")), output)
        elif kind == "reasoning":
            name = "content" if item.get("content") else "summary"
            text = self._text(f"{where}.{name}", item.get(name) or "")
            if text:  # it may be encrypted, by somebody else
                messages.reasoning(text)
        elif kind == "item_reference":
            path = f"{where}.type"
            raise refuse(
                path,
                f"{path} is 'item_reference', and this server keeps no items; send the item itself",
            )
        else:
            self.ignored.append(f"input[].{kind}")
            return
        self.ignored += [
            f"input[].{name}"
            for name, value in item.items()
            if name not in known and value is not None
        ]

    def _text(self, where: str, content: object) -> str:
        if isinstance(content, str):
            return content
        texts = []
        for index, part in enumerate(entries(where, content, self._limits.messages)):
            kind = part.get("type")
            if kind in TEXTS:
                texts.append(string(f"{where}[{index}].text", part.get("text")))
            elif kind == "refusal":
                texts.append(string(f"{where}[{index}].refusal", part.get("refusal")))
            else:
                path = f"{where}[{index}].type"
                why = (
                    "only text can be read"
                    if kind in _MEDIA
                    else "it must be input_text or output_text"
                )
                raise refuse(path, f"{path} is {show(kind)}; {why}")
        return "".join(texts)

    def _read_tools(self, chat: dict[str, Any]) -> None:
        """Functions, and which of them has to be called."""
        if "tools" in self._given:
            most = self._limits.tools
            for index, tool in enumerate(entries("tools", self._given["tools"], most)):
                if string(f"tools[{index}].type", tool.get("type")) != "function":
                    self.ignored.append(f"tools[].{tool['type']}")
                    continue
                known = ("name", "description", "parameters", "strict")
                self.ignored += [f"tools[].{name}" for name in tool if name not in (*known, "type")]
                self._tools.append(
                    {name: tool[name] for name in known if tool.get(name) is not None}
                )
                self.places.append(index)
        choice = self._choice = self._given.get("tool_choice")
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "function":
                choice = {"type": "function", "function": {"name": choice.get("name")}}
            elif kind == "allowed_tools":
                choice = self._allowed(choice)
            else:  # it names a tool that was left out
                self.ignored.append(f"tool_choice.{kind}")
                choice = self._choice = "auto"
        if self._tools:
            chat["tools"] = [{"type": "function", "function": tool} for tool in self._tools]
        if choice is not None:
            chat["tool_choice"] = choice

    def _allowed(self, choice: Mapping[str, Any]) -> object:
        """`tool_choice` of the tools that may be called; only these are left."""
        where = "tool_choice.tools"
        names = [
            tool.get("name") for tool in entries(where, choice.get("tools"), self._limits.tools)
        ]
        kept = [at for at, tool in enumerate(self._tools) if tool.get("name") in names]
        self._tools = [self._tools[at] for at in kept]
        self.places = [self.places[at] for at in kept]
        return choice.get("mode") or "auto"

    def _read_form(self, chat: dict[str, Any]) -> None:
        text = mapping("text", self._given.get("text", {}))
        self.ignored += [f"text.{name}" for name in text if name != "format"]
        if "format" not in text:
            return
        form = mapping("text.format", text["format"])
        if form.get("type") == "json_schema":
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"schema": form.get("schema")},
            }
        elif form.get("type") == "json_object":
            chat["response_format"] = {"type": "json_object"}
        elif form.get("type") != "text":
            path = "text.format.type"
            raise refuse(
                path,
                f"{path} is {show(form.get('type'))}; it must be text, json_object or json_schema",
            )

    def _read_reasoning(self, chat: dict[str, Any]) -> None:
        reasoning = mapping("reasoning", self._given.get("reasoning", {}))
        self.ignored += [f"reasoning.{name}" for name in reasoning if name != "effort"]
        if "effort" in reasoning:
            chat["reasoning_effort"] = reasoning["effort"]
