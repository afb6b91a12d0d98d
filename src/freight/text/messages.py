"""Messages of chat APIs in one form: each a mapping with `role` and `content`, a string.

The other forms of chat APIs are converted to this one; anything else is refused by position and
value. What a chat template needs beyond that, `template_forms` finds out and does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as show  # stays short for deeply nested values
from typing import TypeVar

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError, shown

T = TypeVar("T")
_REASONING = ("reasoning_content", "reasoning")


def read_messages(messages: object) -> list[JsonDict]:
    """Copy `messages` with string contents. What it returns, it returns unchanged.

    A list of text and refusal parts is joined, and a refusal beside the content is appended.
    `content` may be None in a message with `tool_calls`, and is then left out; with reasoning alone
    it is "". Arguments of tool calls are an object or the text of one: nothing, "" and null are {}.
    The role `developer` becomes `system`. `reasoning` and `reasoning_content` are two names of one
    thing, and a message with one gets both. Other fields that are None, and an empty list of tool
    calls, are left out: templates test whether a field is there. Raises RequestError for anything
    malformed, beginning with its path.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        type_name = type(messages).__name__
        if isinstance(messages, list | tuple):
            type_name = "empty"
        raise RequestError(
            f'messages must be a list like [{{"role": "user", "content": "Hello"}}], not {type_name}'
        )
    return _each(_message, "messages", messages)


def _each(read: Callable[[str, object], T], where: str, entries: Iterable[object]) -> list[T]:
    """Read each entry of a list; `read` gets its path too."""
    return [read(f"{where}[{index}]", entry) for index, entry in enumerate(entries)]


def check_unicode(text: str) -> None:
    """Raise RequestError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode: {error.reason} at character {error.start}"
        ) from error


def _message(where: str, message: object) -> JsonDict:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {show(message)}; it must have role and content")
    role = message.get("role")
    tool_calls = message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {show(role)}; it must be a string like 'user'")
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result |= _reasoning(where, message)
    if isinstance(tool_calls, list | tuple) and not tool_calls:
        del result["tool_calls"]
    elif tool_calls is not None:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", tool_calls)
    content = _whole_content(where, message)
    result.pop("refusal", None)
    result.pop("content", None)
    if content is not None:
        result["content"] = content
    check_unicode(role + (content or ""))
    return result


def _whole_content(where: str, message: JsonObject) -> str | None:
    """Return content and refusal as one text; None where calls stand alone."""
    content = message.get("content")
    refusal = message.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise RequestError(f"{where}.refusal is {show(refusal)}; it must be a string")
    if content is not None:
        return _content(f"{where}.content", content) + (refusal or "")
    if refusal:
        return refusal
    if message.get("tool_calls"):
        return None  # templates would write None as text, but handle missing content
    if any(message.get(name) for name in _REASONING):
        return ""
    return _content(f"{where}.content", content)


def _reasoning(where: str, message: JsonObject) -> dict[str, str]:
    """Return both names with the same text; empty without reasoning."""
    for name in _REASONING:
        text = message.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise RequestError(f"{where}.{name} is {show(text)}; it must be a string")
            check_unicode(text)
            return {"reasoning": text, "reasoning_content": text}
    return {}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where} is {show(content)}; it must be a string or a list of text parts"
        )
    return "".join(_each(_text_part, where, content))


def _text_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'{where} is {show(part)}; a part is like {{"type": "text", "text": "Hello"}}'
        )
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise RequestError(
            f"{where} is of type {show(kind)}; only parts of type 'text' can be read, and refusals"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} is {show(text)}; it must be a string")
    return text


def _tool_calls(where: str, calls: object) -> list[JsonDict]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is {show(calls)}; it must be a list of calls")
    return _each(_tool_call, where, calls)


def _tool_call(where: str, call: object) -> JsonDict:
    if not isinstance(call, Mapping):
        raise RequestError(
            f'{where} is {show(call)}; a call is like {{"function": {{"name": …, "arguments": …}}}}'
        )
    function = call.get("function")
    if function is None and "name" in call:  # without a wrapper, as some templates also take it
        call = {"type": "function", **call}
        function = {}
        for name in ("name", "arguments"):
            if name in call:
                function[name] = call.pop(name)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is {show(function)}; it must have name and arguments")
    arguments = read_arguments(f"{where}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_arguments(where: str, arguments: object) -> JsonDict | str:
    """Return the arguments of an earlier call: an object, or its JSON as it is given.

    Many clients and models write nothing for no arguments: None, "" and null are {}. Raises
    RequestError for all else, beginning with `where`.
    """
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if isinstance(arguments, str):
        if arguments.strip() in ("", "null"):
            return {}
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(arguments, parse_constant=_refuse), dict):
                return arguments
    value = show(arguments)
    if isinstance(arguments, str):
        value = shown(arguments)
    raise RequestError(
        f"{where} is {value}; it must be an object, or the JSON of one; without arguments, {{}}"
    )
