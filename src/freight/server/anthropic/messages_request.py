"""`POST /v1/messages` and its `count_tokens`: a body becomes a MessagesCall.

The conversation and the fields become those of a chat. What has no meaning here is left out and
named in `x-freight-ignored`; images are refused. As in Anthropic's API a request that does not ask
for thinking gets none, as far as the model's template can turn it off, and a last message of the
assistant is continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from freight.server.anthropic.errors import error_body
from freight.server.anthropic.messages_reply import MessagesReply
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
from freight.server.openai.fields import named, refuse
from freight.server.transport.errors import ApiError

# Fields with the same name and meaning in a chat.
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", *OURS)
_READ = frozenset(
    {
        *_SAME,
        "messages",
        "system",
        "tools",
        "tool_choice",
        "stop_sequences",
        "thinking",
        "output_config",
    }
)
# A block of `system` that differs in every request, before all else: it would leave nothing of the
# prefix to reuse.
_BILLING = "x-anthropic-billing-header"
MEDIA = ("image", "document")
# What blocks have without effect here: clients send answers back as they were.
_QUIET = frozenset(
    {"type", "text", "id", "name", "input", "tool_use_id", "content", "thinking", "signature"}
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class MessagesCall(CallAsChat):
    """A request for a message that was understood."""

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """The answer to come. Raises ApiError when the prompt leaves no room for an answer.

        A max_tokens that is more than there is room for is no error: it is a required field, and
        agents send one value to every model. The answer's stop_reason says which limit it reached.
        """
        check_context(len(work[0].token_ids), None, served.max_model_len, "messages")
        return MessagesReply(head, served, work[0], self.chat.tools.tools, self.chat.parallel)

    def failure_body(self, error: ApiError) -> object:
        return error_body(error)


def parse_messages(body: object, served: Served, limits: ServingLimits) -> MessagesCall:
    """The call that `body`, parsed JSON, asks for.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    given = _given(body, limits)
    if "max_tokens" not in given:
        raise refuse(
            "max_tokens", "max_tokens is missing; give the most tokens that the answer may have"
        )
    most = given["max_tokens"]
    if isinstance(most, int) and most < 1:
        raise refuse("max_tokens", f"max_tokens is {show(most)}; it must be 1 or more")
    return _parse(given, served, limits)


def parse_count(body: object, served: Served, limits: ServingLimits) -> MessagesCall:
    """The call whose prompt is to be counted. Raises ApiError as `parse_messages` does."""
    return _parse(_given(body, limits), served, limits)


def _given(body: object, limits: ServingLimits) -> dict[str, Any]:
    return {name: value for name, value in check_body(body, limits).items() if value is not None}


def _parse(given: dict[str, Any], served: Served, limits: ServingLimits) -> MessagesCall:
    reader = _Reader(given, limits)
    chat = reader.chat()
    renamed = [
        (r"stop", "stop_sequences"),
        (r"response_format\.json_schema", "output_config.format"),
        (r"response_format", "output_config.format"),
        (r"reasoning_effort", "output_config.effort"),
        (r"tools\[\]\.function\.parameters", "tools[].input_schema"),
        *(
            pair
            for at, index in enumerate(reader.places)
            for pair in (
                (rf"tools\[{at}\]\.function\.parameters", f"tools[{index}].input_schema"),
                (rf"tools\[{at}\]\.function", f"tools[{index}]"),
            )
        ),
    ]
    call = chat_call(chat, served, limits, renamed)
    return MessagesCall(call, named((*reader.ignored, *call.ignored)))


class _Reader:
    """Reads one body. `ignored` and `places` are complete after `chat`.

    places  of each tool of the chat its place in the request
    """

    def __init__(self, given: dict[str, Any], limits: ServingLimits) -> None:
        self._given = given
        self._limits = limits
        self.ignored: list[str] = []
        self.places: list[int] = []

    def chat(self) -> dict[str, Any]:
        """The same as a chat's body."""
        given = self._given
        chat = {name: given[name] for name in _SAME if name in given}
        messages = Messages()
        self._system(messages)
        last = self._messages(messages)
        chat["messages"] = messages.finished()
        if last:
            chat["continue_final_message"] = True
        self._read_tools(chat)
        if "stop_sequences" in given:
            stops = given["stop_sequences"]
            if not isinstance(stops, list):
                raise refuse(
                    "stop_sequences",
                    f"stop_sequences is {show(stops)}; it must be a list of strings",
                )
            chat["stop"] = stops
        self._read_form(chat)
        self._read_thinking(chat)
        self.ignored += [name for name in given if name not in _READ]
        return chat

    def _system(self, messages: Messages) -> None:
        system = self._given.get("system")
        if system is None:
            return
        if isinstance(system, list):
            blocks = entries("system", system, self._limits.messages)
            kept = [
                block for block in blocks if not str(block.get("text", "")).startswith(_BILLING)
            ]
            self.ignored += ["system[]"] * (len(kept) < len(blocks))
            system = self._text("system", kept)
        if string("system", system):
            messages.system(system)

    def _messages(self, messages: Messages) -> bool:
        """Read the conversation; returns whether its last message is an answer to continue."""
        given = self._given.get("messages")
        if not given:
            what = "missing" if given is None else show(given)
            raise refuse(
                "messages",
                f'messages is {what}; it must be like [{{"role": "user", "content": "Hello"}}]',
            )
        for index, message in enumerate(entries("messages", given, self._limits.messages)):
            where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
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

    def _user(self, where: str, blocks: Sequence[Mapping[str, Any]], messages: Messages) -> None:
        texts: list[Mapping[str, Any]] = []
        for index, block in enumerate(blocks):
            if block.get("type") != "tool_result":
                texts.append(block)
                continue
            path = f"{where}[{index}]"
            result = "" if block.get("content") is None else block["content"]
            if not isinstance(result, str):
                result = self._text(
                    f"{path}.content", entries(f"{path}.content", result, self._limits.messages)
                )
            messages.result(string(f"{path}.tool_use_id", block.get("tool_use_id")), result)
            self._name_others(block)
        if texts or not blocks:
            messages.user(self._text(where, texts))

    def _assistant(
        self, where: str, blocks: Sequence[Mapping[str, Any]], messages: Messages
    ) -> None:
        messages.begin_answer()
        for index, block in enumerate(blocks):
            path, kind = f"{where}[{index}]", block.get("type")
            if kind == "thinking":
                messages.reasoning(string(f"{path}.thinking", block.get("thinking")))
            elif kind == "text":
                messages.answer(string(f"{path}.text", block.get("text")), joined=True)
            elif kind == "tool_use":
                arguments = mapping(f"{path}.input", block.get("input", {}))
                name = string(f"{path}.name", block.get("name"))
                messages.call(string(f"{path}.id", block.get("id")), name, arguments)
            else:
                self._skip(path, kind)
                continue
            self._name_others(block)

    def _text(self, where: str, blocks: Sequence[Mapping[str, Any]]) -> str:
        """The text of blocks, each on lines of its own."""
        texts = []
        for index, block in enumerate(blocks):
            if block.get("type") == "text":
                texts.append(string(f"{where}[{index}].text", block.get("text")))
                self._name_others(block)
            else:
                self._skip(f"{where}[{index}]", block.get("type"))
        return "\n".join(texts)

    def _skip(self, where: str, kind: object) -> None:
        if kind in MEDIA or not isinstance(kind, str):
            raise refuse(f"{where}.type", f"{where}.type is {show(kind)}; only text can be read")
        self.ignored.append(f"content[].{kind}")

    def _name_others(self, block: Mapping[str, Any]) -> None:
        self.ignored += [
            f"content[].{name}" for name, value in block.items() if name not in _QUIET and value
        ]

    def _read_tools(self, chat: dict[str, Any]) -> None:
        """Functions, and which of them has to be called."""
        given, tools = self._given, []
        if "tools" in given:
            for index, tool in enumerate(entries("tools", given["tools"], self._limits.tools)):
                made_by = (
                    "custom"
                    if tool.get("type") is None
                    else string(f"tools[{index}].type", tool["type"])
                )
                if made_by != "custom":  # one that Anthropic's servers run
                    self.ignored.append(f"tools[].{made_by}")
                    continue
                function = {
                    name: tool[name] for name in ("name", "description", "strict") if name in tool
                }
                schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
                tools.append({"type": "function", "function": function | schema})
                known = ("type", "name", "description", "strict", "input_schema")
                self.ignored += [f"tools[].{name}" for name in tool if name not in known]
                self.places.append(index)
        if tools:
            chat["tools"] = tools
        if "tool_choice" not in given:
            return
        choice = mapping("tool_choice", given["tool_choice"])
        kind = choice.get("type")
        if kind == "tool":
            name = string("tool_choice.name", choice.get("name"))
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif isinstance(kind, str) and kind in _CHOICES:
            chat["tool_choice"] = _CHOICES[kind]
        else:
            raise refuse(
                "tool_choice.type",
                f"tool_choice.type is {show(kind)}; it must be auto, any, tool or none",
            )
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False

    def _read_form(self, chat: dict[str, Any]) -> None:
        config = mapping("output_config", self._given.get("output_config", {}))
        self.ignored += [
            f"output_config.{name}" for name in config if name not in ("format", "effort")
        ]
        if "effort" in config:
            chat["reasoning_effort"] = config["effort"]
        if "format" in config:
            form = mapping("output_config.format", config["format"])
            if form.get("type") != "json_schema":
                path = "output_config.format.type"
                raise refuse(path, f"{path} is {show(form.get('type'))}; it must be 'json_schema'")
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"schema": form.get("schema")},
            }

    def _read_thinking(self, chat: dict[str, Any]) -> None:
        thinking = mapping("thinking", self._given.get("thinking", {"type": "disabled"}))
        kind = thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise refuse(
                "thinking.type",
                f"thinking.type is {show(kind)}; it must be enabled, adaptive or disabled",
            )
        self.ignored += [f"thinking.{name}" for name in thinking if name != "type"]
        values = mapping("chat_template_kwargs", chat.get("chat_template_kwargs", {}))
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **values}
