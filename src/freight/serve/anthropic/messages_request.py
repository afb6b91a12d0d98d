"""`POST /v1/messages` and its `count_tokens`: a body becomes a MessagesCall.

The conversation and the fields become those of a chat. Fields that have no meaning here are left
out and listed in `x-freight-ignored`; images are refused. As in Anthropic's API a request that does
not ask for thinking gets none, if the model's template can turn it off, and a last message of the
assistant is continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from freight.base.fields import JsonDict, JsonObject
from freight.sampling import LARGEST_WHOLE
from freight.serve.anthropic.errors import error_body
from freight.serve.anthropic.messages_reply import MessagesReply
from freight.serve.bodies import MOST, Stop, checked_later, present, sampled, says
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
from freight.serve.openai.chat_request import Effort
from freight.serve.openai.fields import missing_or, named, part, refuse
from freight.serve.openai.tool_fields import ToolName
from freight.serve.transport.errors import ApiError

# The start of a `system` block that clients put first and that differs in every request: with it
# no prefix could be reused.
_BILLING = "x-anthropic-billing-header"
MEDIA = ("image", "document")
# Fields of blocks that are not reported as ignored: clients send answers back unchanged.
_QUIET = frozenset(
    {"type", "text", "id", "name", "input", "tool_use_id", "content", "thinking", "signature"}
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Text(Open):
    type: Literal["text"]
    text: str


class _NoText(Open):
    type: Annotated[str, unlike("text", *MEDIA)]


_Blocks = str | Annotated[list[_Text | _NoText], Field(max_length=MOST.messages)]


class _Thought(Open):
    type: Literal["thinking"]
    thinking: str


class _Use(Open):
    type: Literal["tool_use"]
    input: JsonDict = Field(default={})
    name: str
    id: str


class _Result(Open):
    type: Literal["tool_result"]
    content: _Blocks | None = checked_later()
    tool_use_id: str


class _NoAnswer(Open):
    type: Annotated[str, unlike("text", "thinking", "tool_use", *MEDIA)]


class _NoUser(Open):
    type: Annotated[str, unlike("text", "tool_result", *MEDIA)]


class _User(Open):
    role: Literal["user"]
    content: str | Annotated[list[_Text | _Result | _NoUser], Field(max_length=MOST.messages)]


class _System(Open):
    role: Literal["system"]
    content: _Blocks


class _Assistant(Open):
    role: Literal["assistant"]
    content: (
        str | Annotated[list[_Text | _Thought | _Use | _NoAnswer], Field(max_length=MOST.messages)]
    )


class _Tool(Open):
    type: str | None = Field(default=None, json_schema_extra={"enum": ["custom", None]})
    name: SkipValidation[ToolName]
    description: Any = None
    strict: Any = None
    input_schema: JsonDict | None = checked_later()


class _Another(Open):
    type: Annotated[str, unlike("custom")]


class _Choice(Open):
    type: Annotated[Literal["auto", "any", "tool", "none"], says("must be auto, any, tool or none")]
    name: Any = None
    disable_parallel_tool_use: Any = None


class _Thinking(Open):
    type: Annotated[
        Literal["enabled", "adaptive", "disabled"], says("must be enabled, adaptive or disabled")
    ]
    budget_tokens: int | None = sampled("thinking_token_budget", checked=False, minimum=0)


class _Form(JsonSchema):
    type: Annotated[Literal["json_schema"], says("must be 'json_schema'")]


class _Config(Open):
    format: _Form | None = None
    effort: Effort | None = checked_later()


class CountBody(LikeChat):
    """The body of count_tokens. `_Reader` checks the lists."""

    messages: SkipValidation[
        Annotated[list[_User | _System | _Assistant], Field(min_length=1, max_length=MOST.messages)]
    ]
    system: _Blocks | None = checked_later()
    tools: Annotated[list[_Tool | _Another], Field(max_length=MOST.tools)] | None = checked_later()
    tool_choice: _Choice | None = None
    stop_sequences: (
        Annotated[
            list[SkipValidation[Stop]],
            Field(json_schema_extra={"maxItems": MOST.sampling.stop}),
            says("must be a list of strings"),
        ]
        | None
    ) = None
    output_config: _Config | None = None
    thinking: _Thinking | None = None
    max_tokens: int | None = sampled("max_tokens", checked=False, minimum=1)


class MessagesBody(CountBody):
    """The body of a request for a message."""

    max_tokens: SkipValidation[Annotated[int, Field(ge=1, le=LARGEST_WHOLE)]]


@dataclass(frozen=True)
class MessagesCall(CallAsChat):
    """A parsed request for a message."""

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """Return the empty reply. Raises ApiError if the prompt leaves no room for an answer.

        A max_tokens larger than the remaining room is no error: the field is required, and agents
        send one value to every model. The answer's stop_reason tells which limit it reached.
        """
        check_context(len(work[0].token_ids), None, served.max_model_len, "messages")
        return MessagesReply(head, served, work[0], self.chat.tools.tools, self.chat.parallel)

    def failure_body(self, error: ApiError) -> object:
        return error_body(error)


def parse_messages(body: object, served: Served, limits: ServingLimits) -> MessagesCall:
    """Build the call from `body`, decoded JSON.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    fields = present(check_body(body, limits))
    if "max_tokens" not in fields:
        raise refuse(
            "max_tokens", "max_tokens is missing; give the most tokens that the answer may have"
        )
    most = fields["max_tokens"]
    if isinstance(most, int) and most < 1:
        raise refuse("max_tokens", f"max_tokens is {show(most)}; it must be 1 or more")
    return _parse(fields, served, limits)


def parse_count(body: object, served: Served, limits: ServingLimits) -> MessagesCall:
    """Build the call whose prompt is to be counted. Raises ApiError as `parse_messages` does."""
    return _parse(present(check_body(body, limits)), served, limits)


def _parse(fields: JsonDict, served: Served, limits: ServingLimits) -> MessagesCall:
    reader = _Reader(fields, limits, served.thinking_tags is not None)
    chat = reader.chat()
    renamed = [
        (r"stop", "stop_sequences"),
        (r"response_format\.json_schema", "output_config.format"),
        (r"response_format", "output_config.format"),
        (r"reasoning_effort", "output_config.effort"),
        (r"tools\[\]\.function\.parameters", "tools[].input_schema"),
    ]
    if fields.get("thinking_token_budget") is None:
        renamed.append((r"thinking_token_budget", "thinking.budget_tokens"))
    for at, index in enumerate(reader.places):
        renamed.append((rf"tools\[{at}\]\.function\.parameters", f"tools[{index}].input_schema"))
        renamed.append((rf"tools\[{at}\]\.function", f"tools[{index}]"))
    call = chat_call(chat, served, limits, renamed)
    return MessagesCall(call, named((*reader.ignored, *call.ignored)))


class _Reader:
    """Reads one body. `ignored` and `places` are complete after `chat`.

    places  for each tool of the chat, its index in the request
    """

    def __init__(self, fields: JsonDict, limits: ServingLimits, ends_thoughts: bool) -> None:
        """ends_thoughts: whether the thoughts of the model can have a budget."""
        self._fields = fields
        self._ends_thoughts = ends_thoughts
        self._body = part(CountBody, "", fields)
        self._limits = limits
        self.ignored: list[str] = []
        self.places: list[int] = []

    def chat(self) -> JsonDict:
        """Return the equivalent body of a chat."""
        body = self._body
        chat = body.common("max_tokens")
        messages = Messages()
        self._system(messages)
        last = self._messages(messages)
        chat["messages"] = messages.finished()
        if last:
            chat["continue_final_message"] = True
        self._read_tools(chat)
        if body.stop_sequences is not None:
            chat["stop"] = body.stop_sequences
        config = body.output_config or _Config()
        thinking = body.thinking or _Thinking(type="disabled")
        self.ignored += config.others("output_config.") + thinking.others("thinking.")
        if config.effort is not None:
            chat["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        self._read_budget(chat)
        values = present(body.chat_template_kwargs)
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"} | values
        self.ignored += body.others()
        return chat

    def _read_budget(self, chat: JsonDict) -> None:
        """Give thoughts their budget: none at all where they are disabled. It is ignored where their
        tags are not known, as agents send it to every model.
        """
        thinking = self._body.thinking
        if thinking is None or "thinking_token_budget" in chat:
            return
        budget = thinking.budget_tokens
        if thinking.type == "disabled" and self._ends_thoughts:
            chat["thinking_token_budget"] = 0
        elif budget is not None and self._ends_thoughts:
            chat["thinking_token_budget"] = budget
        elif budget is not None:
            self.ignored.append("thinking.budget_tokens")

    def _system(self, messages: Messages) -> None:
        system = self._body.system
        if isinstance(system, list):
            blocks = entries("system", system, self._limits.messages)
            read = [
                block for block in blocks if not str(block.get("text", "")).startswith(_BILLING)
            ]
            self.ignored += ["system[]"] * (len(read) < len(blocks))
            system = self._text("system", read)
        if system is not None and string("system", system):
            messages.system(system)

    def _messages(self, messages: Messages) -> bool:
        """Read the conversation; returns whether its last message is an answer to continue."""
        conversation = self._fields.get("messages")
        if not conversation:
            raise refuse(
                "messages",
                f'messages is {missing_or(conversation)}; it must be like [{{"role": "user", "content": "Hello"}}]',
            )
        for index, message in enumerate(entries("messages", conversation, self._limits.messages)):
            where = f"messages[{index}]"
            role = message.get("role")
            content = message.get("content")
            if role not in ("user", "assistant", "system"):
                raise refuse(
                    f"{where}.role",
                    f"{where}.role is {show(role)}; it must be 'user' or 'assistant'",
                )
            blocks = content
            if isinstance(content, str):
                blocks = [{"type": "text", "text": content}]
            blocks = entries(f"{where}.content", blocks, self._limits.messages)
            if role == "system":
                messages.system(self._text(f"{where}.content", blocks))
            elif role == "user":
                self._user(f"{where}.content", blocks, messages)
            else:
                self._assistant(f"{where}.content", blocks, messages)
            self.ignored += [
                f"messages[].{name}" for name in message if name not in ("role", "content")
            ]
        last = messages.all[-1] if messages.all else {}
        return (
            last.get("role") == "assistant"
            and "tool_calls" not in last
            and bool(last.get("content"))
        )

    def _user(self, where: str, blocks: Sequence[JsonObject], messages: Messages) -> None:
        texts: list[JsonObject] = []
        for index, block in enumerate(blocks):
            if block.get("type") != "tool_result":
                texts.append(block)
                continue
            path = f"{where}[{index}]"
            result = part(_Result, path, block)
            text = "" if result.content is None else result.content
            if not isinstance(text, str):
                path = f"{path}.content"
                text = self._text(path, entries(path, text, self._limits.messages))
            messages.result(result.tool_use_id, text)
            self._name_others(result)
        if texts or not blocks:
            messages.user(self._text(where, texts))

    def _assistant(self, where: str, blocks: Sequence[JsonObject], messages: Messages) -> None:
        messages.begin_answer()
        for index, block in enumerate(blocks):
            path = f"{where}[{index}]"
            kind = block.get("type")
            read: Open
            if kind == "thinking":
                read = thought = part(_Thought, path, block)
                messages.reasoning(thought.thinking)
            elif kind == "text":
                read = text = part(_Text, path, block)
                messages.answer(text.text, joined=True)
            elif kind == "tool_use":
                read = use = part(_Use, path, block)
                messages.call(use.id, use.name, present(use.input))
            else:
                self._skip(path, kind)
                continue
            self._name_others(read)

    def _text(self, where: str, blocks: Sequence[JsonObject]) -> str:
        """Return the texts of blocks, joined by newlines."""
        texts = []
        for index, block in enumerate(blocks):
            if block.get("type") == "text":
                text = part(_Text, f"{where}[{index}]", block)
                texts.append(text.text)
                self._name_others(text)
            else:
                self._skip(f"{where}[{index}]", block.get("type"))
        return "\n".join(texts)

    def _skip(self, where: str, kind: object) -> None:
        if kind in MEDIA or not isinstance(kind, str):
            raise refuse(f"{where}.type", f"{where}.type is {show(kind)}; only text can be read")
        self.ignored.append(f"content[].{kind}")

    def _name_others(self, block: Open) -> None:
        self.ignored += [
            f"content[].{name}"
            for name, value in (block.model_extra or {}).items()
            if name not in _QUIET and value
        ]

    def _read_tools(self, chat: JsonDict) -> None:
        """Read the functions, and `tool_choice`."""
        tools = []
        listed = [] if self._body.tools is None else self._body.tools
        known = _Tool.model_fields
        for index, entry in enumerate(entries("tools", listed, self._limits.tools)):
            tool = part(_Tool, f"tools[{index}]", entry)
            if tool.type not in (None, "custom"):  # one that Anthropic's servers run
                self.ignored.append(f"tools[].{tool.type}")
                continue
            function = {
                name: entry[name] for name in ("name", "description", "strict") if name in entry
            }
            schema = {"parameters": entry["input_schema"]} if "input_schema" in entry else {}
            tools.append({"type": "function", "function": function | schema})
            self.ignored += [f"tools[].{name}" for name in entry if name not in known]
            self.places.append(index)
        if tools:
            chat["tools"] = tools
        choice = self._body.tool_choice
        if choice is None:
            return
        chat["tool_choice"] = _CHOICES.get(choice.type)
        if choice.type == "tool":
            name = string("tool_choice.name", choice.name)
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
