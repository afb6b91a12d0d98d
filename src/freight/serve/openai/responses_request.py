"""`POST /v1/responses`, without state: a body becomes a ResponsesCall.

The items of `input` become a conversation, and the other fields those of a chat. Nothing is kept
between requests, so a reference to an earlier response is refused. Agents send more than any one
server implements: tools that are not functions, unknown items and unknown fields are left out and
listed in `x-freight-ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SkipValidation

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError
from freight.serve.bodies import MOST, Stop, Stops, checked_later, option, present, sampled, says
from freight.serve.call import Reply, ReplyHead, Served, TokenizedWork
from freight.serve.limits import ServingLimits, check_body, check_context
from freight.serve.openai.as_chat import (
    CallAsChat,
    JsonSchema,
    LikeChat,
    Messages,
    Open,
    chat_call,
    entries,
    string,
    unlike,
)
from freight.serve.openai.chat_request import ChatCall, Effort, ToolChoice
from freight.serve.openai.fields import from_request_error, missing_or, named, part, refuse
from freight.serve.openai.responses_reply import ResponsesReply
from freight.serve.openai.tool_fields import ToolName
from freight.serve.transport.errors import ApiError
from freight.text.messages import read_arguments

_STATE = {
    "previous_response_id": "this server keeps no responses; send the whole conversation as input",
    "conversation": "this server keeps no conversations; send the whole conversation as input",
    "prompt": "this server keeps no prompts; send instructions and input",
    "background": "this server keeps no responses; use stream",
}
_TextKind = Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
_Role = Literal["user", "assistant", "system", "developer"]
_ROLES = get_args(_Role)
_MEDIA = ("input_image", "input_file", "input_audio")
# Fields of items that are not reported as ignored: clients send answers back unchanged.
_QUIET = frozenset(
    {"id", "type", "status", "phase", "role", "content", "summary", "encrypted_content", "call_id"}
)
_CALL = frozenset({"name", "arguments", "output"})


class _Text(Open):
    type: _TextKind
    text: str


class _Refusal(Open):
    type: Literal["refusal"]
    refusal: str


_Parts = str | Annotated[list[_Text | _Refusal], Field(max_length=MOST.messages)]


class _Message(Open):
    type: Literal["message"] | None = None
    content: SkipValidation[_Parts]
    role: SkipValidation[_Role]


class _Call(Open):
    type: Literal["function_call"]
    name: str
    arguments: str | None = None
    call_id: str


class _Output(Open):
    type: Literal["function_call_output"]
    output: SkipValidation[_Parts]
    call_id: str


class _Reasoning(Open):
    type: Literal["reasoning"]


_ITEMS: Mapping[str, type[Open]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
}


class _Left(Open):
    type: Annotated[str, unlike("reasoning", "item_reference", *_ITEMS)]


class _Tool(Open):
    type: Literal["function"]
    name: ToolName
    parameters: JsonDict | None = None


class _LeftTool(Open):
    type: Annotated[str, unlike("function")]


class _Form(Open):
    type: Literal["text", "json_object"]


class _Format(Open):
    format: _Form | JsonSchema | None = checked_later()


class _AnyForm(Open):
    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        says("must be text, json_object or json_schema"),
    ]


class _Effort(Open):
    effort: Effort | None = checked_later()


class ResponsesBody(LikeChat):
    """The body of a request for a response. `_Reader` checks the lists."""

    previous_response_id: None = checked_later()
    conversation: None = checked_later()
    prompt: None = checked_later()
    background: Literal[False] | None = checked_later()
    instructions: str | None = None
    input: SkipValidation[
        str
        | Annotated[
            list[_Message | _Call | _Output | _Reasoning | _Left],
            Field(min_length=1, max_length=MOST.messages),
        ]
    ]
    tools: Annotated[list[_Tool | _LeftTool], Field(max_length=MOST.tools)] | None = checked_later()
    tool_choice: ToolChoice | JsonDict | None = checked_later()
    max_output_tokens: int | None = sampled("max_tokens", checked=False, minimum=1)
    text: _Format | None = None
    reasoning: _Effort | None = None
    metadata: Any = None
    stop: Stop | Stops | None = option("stop")
    parallel_tool_calls: bool | None = checked_later()


@dataclass(frozen=True)
class ResponsesCall(CallAsChat):
    """A parsed request for a response. `echo`: fields of the request that the answer repeats."""

    echo: JsonObject

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """Return the empty reply. Raises ApiError if the prompt and max_output_tokens exceed the
        context.
        """
        check_context(len(work[0].token_ids), self.chat.max_tokens, served.max_model_len, "input")
        return ResponsesReply(
            head, served, work[0], self.chat.tools.tools, self.chat.parallel, self.echo
        )

    def failure_body(self, error: ApiError) -> object:
        return error.openai_body()


def parse_responses(body: object, served: Served, limits: ServingLimits) -> ResponsesCall:
    """Build the call from `body`, decoded JSON.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    fields = present(check_body(body, limits))
    reader = _Reader(fields, limits)
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

    places  for each tool of the chat, its index in the request
    """

    def __init__(self, fields: JsonDict, limits: ServingLimits) -> None:
        self._fields = fields
        self._limits = limits
        self._tools: list[JsonDict] = []
        self._choice: object = None
        self.ignored: list[str] = []
        self.places: list[int] = []

    def chat(self) -> JsonDict:
        """Return the equivalent body of a chat."""
        fields = self._fields
        for name, why in _STATE.items():
            if name in fields and not (name == "background" and fields[name] is False):
                raise ApiError(
                    400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter"
                )
        body = part(ResponsesBody, "", fields)
        chat = body.common("stop", "parallel_tool_calls")
        chat["messages"] = self._messages(body)
        self._read_tools(chat, body)
        if body.max_output_tokens is not None:
            chat["max_tokens"] = body.max_output_tokens
        if body.text is not None:
            self._read_form(chat, body.text)
        if body.reasoning is not None:
            self.ignored += body.reasoning.others("reasoning.")
            if body.reasoning.effort is not None:
                chat["reasoning_effort"] = body.reasoning.effort
        self.ignored += body.others()
        return chat

    def echo(self, call: ChatCall) -> JsonDict:
        """Return the fields of the answer that repeat the request."""
        fields = self._fields
        params = call.work[0].params
        reasoning = fields.get("reasoning") or {}
        text = fields.get("text") or {}
        metadata = fields.get("metadata")
        return {
            "instructions": fields.get("instructions"),
            "max_output_tokens": call.max_tokens,
            "metadata": metadata if isinstance(metadata, dict) else {},
            "parallel_tool_calls": call.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": self._choice if self._choice is not None else "auto",
            "tools": [
                {"parameters": None, "strict": False, **tool, "type": "function"}
                for tool in self._tools
            ],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def _messages(self, body: ResponsesBody) -> list[JsonDict]:
        items = body.input
        messages = Messages()
        if body.instructions is not None:
            messages.system(body.instructions)
        if isinstance(items, str):
            messages.user(items)
        elif not items:
            what = missing_or(items)
            raise refuse("input", f"input is {what}; it must be a string, or a list of messages")
        else:
            for index, item in enumerate(entries("input", items, self._limits.messages)):
                self._item(f"input[{index}]", item, messages)
        if not messages.all:
            raise refuse(
                "input", "input has no item that this server can read; give at least one message"
            )
        return messages.finished()

    def _item(self, where: str, item: JsonObject, messages: Messages) -> None:
        kind = "message" if item.get("type") is None else string(f"{where}.type", item["type"])
        read: Open = part(_ITEMS.get(kind, Open), where, item)
        if isinstance(read, _Message):
            role = read.role
            text = self._text(f"{where}.content", read.content)
            if role not in _ROLES:
                raise refuse(
                    f"{where}.role",
                    f"{where}.role is {show(role)}; it must be one of {', '.join(_ROLES)}",
                )
            add = {"user": messages.user, "assistant": messages.answer}.get(role, messages.system)
            add(text)
        elif isinstance(read, _Call):
            arguments = self._arguments(f"{where}.arguments", read.arguments)
            messages.call(read.call_id, read.name, arguments)
        elif isinstance(read, _Output):
            messages.result(read.call_id, self._text(f"{where}.output", read.output))
        elif kind == "reasoning":
            name = "content" if item.get("content") else "summary"
            text = self._text(f"{where}.{name}", item.get(name) or "")
            if text:  # without text it is encrypted, by another server
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
        quiet = _QUIET if isinstance(read, _Message) else _QUIET | _CALL
        self.ignored += read.others("input[].", quiet)

    def _arguments(self, where: str, arguments: object) -> object:
        try:
            return read_arguments(where, arguments)
        except RequestError as error:
            raise from_request_error(error) from None

    def _text(self, where: str, content: object) -> str:
        if isinstance(content, str):
            return content
        texts = []
        for index, entry in enumerate(entries(where, content, self._limits.messages)):
            path = f"{where}[{index}]"
            kind = entry.get("type")
            if kind in get_args(_TextKind):
                texts.append(part(_Text, path, entry).text)
            elif kind == "refusal":
                texts.append(part(_Refusal, path, entry).refusal)
            else:
                why = "it must be input_text or output_text"
                if kind in _MEDIA:
                    why = "only text can be read"
                raise refuse(f"{path}.type", f"{path}.type is {show(kind)}; {why}")
        return "".join(texts)

    def _read_tools(self, chat: JsonDict, body: ResponsesBody) -> None:
        """Read the functions, and `tool_choice`."""
        if body.tools is not None:
            for index, tool in enumerate(entries("tools", body.tools, self._limits.tools)):
                if string(f"tools[{index}].type", tool.get("type")) != "function":
                    self.ignored.append(f"tools[].{tool['type']}")
                    continue
                known = ("name", "description", "parameters", "strict")
                self.ignored += [f"tools[].{name}" for name in tool if name not in (*known, "type")]
                self._tools.append(
                    {name: tool[name] for name in known if tool.get(name) is not None}
                )
                self.places.append(index)
        choice: object = body.tool_choice
        self._choice = choice
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "function":
                choice = {"type": "function", "function": {"name": choice.get("name")}}
            elif kind == "allowed_tools":
                choice = self._allowed(choice)
            else:  # the choice is of a tool that was left out
                self.ignored.append(f"tool_choice.{kind}")
                choice = self._choice = "auto"
        if self._tools:
            chat["tools"] = [{"type": "function", "function": tool} for tool in self._tools]
        if choice is not None:
            chat["tool_choice"] = choice

    def _allowed(self, choice: JsonObject) -> object:
        """Keep only the tools that may be called; returns the `tool_choice` for them."""
        where = "tool_choice.tools"
        names = [
            tool.get("name") for tool in entries(where, choice.get("tools"), self._limits.tools)
        ]
        places = [at for at, tool in enumerate(self._tools) if tool.get("name") in names]
        self._tools = [self._tools[at] for at in places]
        self.places = [self.places[at] for at in places]
        return choice.get("mode") or "auto"

    def _read_form(self, chat: JsonDict, text: _Format) -> None:
        self.ignored += text.others("text.")
        if text.format is None:
            return
        form = part(_AnyForm, "text.format", text.format)
        if form.type != "text":
            chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            schema = (form.model_extra or {}).get("schema")
            chat["response_format"]["json_schema"] = {"schema": schema}
