"""Translation of other APIs to a chat: their messages and fields become a chat's body.

`parse_chat` then checks the values, so that one value means the same in every API. Its errors are
renamed to the field that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as show
from typing import Any, Literal

from pydantic import ConfigDict, Field, SkipValidation

from freight.base.fields import JsonDict, JsonObject
from freight.serve.bodies import Nullable, present
from freight.serve.call import Served, Work
from freight.serve.limits import ServingLimits
from freight.serve.openai.chat_request import ChatCall, parse_chat
from freight.serve.openai.fields import missing_or, refuse
from freight.serve.openai.sampling_fields import CommonFields
from freight.serve.transport.errors import ApiError

Renamed = Sequence[tuple[str, str]]  # (pattern of a chat's field, its name in the API)


@dataclass(frozen=True)
class CallAsChat:
    """The part of a `Call` that is a chat. `ignored`: the API's own fields without effect."""

    chat: ChatCall
    ignored: tuple[str, ...]

    @property
    def stream(self) -> bool:
        return self.chat.stream

    @property
    def model(self) -> str:
        return self.chat.model

    @property
    def work(self) -> Sequence[Work]:
        return self.chat.work

    @property
    def request_id(self) -> str | None:
        return self.chat.request_id


class Open(Nullable):
    """An object whose unknown fields are kept, to be reported as ignored."""

    model_config = ConfigDict(extra="allow")

    def others(self, prefix: str = "", but: Collection[str] = ()) -> list[str]:
        """Return the names of its unknown fields, with `prefix`."""
        return [f"{prefix}{name}" for name in present(self.model_extra) if name not in but]


class LikeChat(CommonFields, Open):
    """A body that is read as a chat."""

    chat_template_kwargs: JsonDict | None = None

    def common(self, *more: str) -> JsonDict:
        """Return the fields that a chat has under the same name: those of CommonFields, and
        `more`.
        """
        names = (*CommonFields.model_fields, "chat_template_kwargs", *more)
        return present({name: getattr(self, name) for name in names})


def unlike(*kinds: str) -> Any:
    """Return the type of an object that is left out and reported as ignored: none of `kinds`."""
    return Field(json_schema_extra={"not": {"enum": [*kinds]}})


class JsonSchema(Open):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: SkipValidation[JsonDict | bool] = Field(alias="schema")


class Messages:
    """Messages for the chat template, built from those of another API.

    Instructions before the conversation become one system message: many templates take only one.
    Parts of one answer (reasoning, text, calls) become one message, in this order.
    """

    def __init__(self) -> None:
        self.all: list[JsonDict] = []

    def system(self, text: str) -> None:
        if len(self.all) == 1 and self.all[0]["role"] == "system":
            self.all[0]["content"] += f"\n\n{text}"
        else:
            self.all.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        self.all.append({"role": "user", "content": text})

    def reasoning(self, text: str) -> None:
        answer = self._answer("reasoning", "content", "tool_calls")
        answer["reasoning"] = answer.get("reasoning", "") + text

    def begin_answer(self) -> None:
        """Begin a new answer, for an API that marks where an answer begins."""
        self.all.append({"role": "assistant"})

    def answer(self, text: str, joined: bool = False) -> None:
        """Add text of the assistant. joined: it continues the text of the present answer; else it
        begins another answer.
        """
        answer = self._answer("tool_calls", *(() if joined else ("content",)))
        answer["content"] = answer.get("content", "") + text

    def call(self, call_id: str, name: str, arguments: object) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        self.all.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def finished(self) -> list[JsonDict]:
        """Return all messages, each with content, as templates need it."""
        for message in self.all:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return self.all

    def _answer(self, *ends: str) -> JsonDict:
        """Return the present answer, or a new one if it already has one of `ends`."""
        if (
            not self.all
            or self.all[-1]["role"] != "assistant"
            or any(name in self.all[-1] for name in ends)
        ):
            self.all.append({"role": "assistant"})
        return self.all[-1]


def chat_call(
    body: JsonObject, served: Served, limits: ServingLimits, renamed: Renamed
) -> ChatCall:
    """Parse a chat's body. Raises ApiError with the field names of the API that the body was made
    for.
    """
    try:
        call = parse_chat(dict(body), served, limits)
    except ApiError as error:
        raise with_renamed_field(error, renamed) from None
    work = tuple(
        replace(work_item, form_from=_rename(work_item.form_from, renamed))
        for work_item in call.work
    )
    return replace(call, work=work, ignored=tuple(_rename(name, renamed) for name in call.ignored))


def with_renamed_field(error: ApiError, renamed: Renamed) -> ApiError:
    """Return `error` with its field renamed, in `param` and at the beginning of the message."""
    param = error.param
    message = error.message
    if param is not None:
        name = _rename(param, renamed)
        if message.startswith(param):
            message = name + message[len(param) :]
        param = name
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def _rename(param: str, renamed: Renamed) -> str:
    """Replace the first pattern in `renamed` that `param` begins with."""
    for pattern, name in renamed:
        if (match := re.match(rf"{pattern}(?![\w])", param)) is not None:
            return match.expand(name) + param[match.end() :]
    return param


def entries(where: str, values: object, most: int) -> list[JsonDict]:
    """Return `values`, a list of objects. Raises ApiError for anything else, and for more than
    `most`.
    """
    if not isinstance(values, list):
        raise refuse(where, f"{where} is {show(values)}; it must be a list")
    if len(values) > most:
        raise refuse(where, f"{where} has {len(values)} entries; at most {most} are allowed")
    for index, entry in enumerate(values):
        if not isinstance(entry, dict):
            raise refuse(
                f"{where}[{index}]", f"{where}[{index}] is {show(entry)}; it must be an object"
            )
    return values


def string(where: str, value: object) -> str:
    """Return `value`, a string. Raises ApiError for anything else."""
    if not isinstance(value, str):
        raise refuse(where, f"{where} is {missing_or(value)}; it must be a string")
    return value
