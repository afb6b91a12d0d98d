"""Messages in the form of chat templates: each a mapping with `role` and `content`, a string.

The other forms of chat APIs are converted to this one; anything else is refused by position and
value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as show  # stays short for deeply nested values
from typing import Any

from freight.errors import RequestError


def to_template_messages(messages: object) -> list[dict[str, Any]]:
    """Copy `messages` with string contents.

    A list of text parts is joined. `content` may be None in a message with `tool_calls`, and is
    then left out. Arguments of tool calls that are the JSON of an object become that object,
    because templates write it as JSON once more. The role `developer` becomes `system`. `reasoning`
    and `reasoning_content` are two names of one thing, and a message with one gets both. Other
    fields that are None, and an empty list of tool calls, are left out: templates test whether a
    field is there. Raises RequestError for anything malformed.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        given = "empty" if isinstance(messages, list | tuple) else type(messages).__name__
        raise RequestError(
            f'messages must be a list like [{{"role": "user", "content": "Hello"}}], not {given}'
        )
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_unicode(text: str) -> None:
    """Raise RequestError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode: {error.reason} at character {error.start}"
        ) from error


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {show(message)}; it must have role and content")
    role, tool_calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {show(role)}; it must be a string like 'user'")
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result |= _reasoning(where, message)
    if isinstance(tool_calls, list | tuple) and not tool_calls:
        del result["tool_calls"]
    elif tool_calls is not None:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", tool_calls)
    if message.get("content") is None and tool_calls:
        # Templates would write None as text, but handle missing content
        result.pop("content", None)
    else:
        result["content"] = _content(f"{where}.content", message.get("content"))
    check_unicode(role + result.get("content", ""))
    return result


def _reasoning(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    """Return both names with the same text; empty without reasoning."""
    for name in ("reasoning_content", "reasoning"):
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
    return "".join(_text_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'{where} is {show(part)}; a part is like {{"type": "text", "text": "Hello"}}'
        )
    if part.get("type") != "text":
        raise RequestError(
            f"{where} is of type {show(part.get('type'))}; only parts of type 'text' can be read"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is {show(text)}; it must be a string")
    return text


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is {show(calls)}; it must be a list of calls")
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(
            f'{where} is {show(call)}; a call is like {{"function": {{"name": …, "arguments": …}}}}'
        )
    function = call.get("function")
    if function is None:
        return dict(call)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is {show(function)}; it must have name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = {**function, "arguments": _parsed(arguments)}
    return {**call, "function": function}


def _parsed(arguments: str) -> object:
    """Return the object whose JSON `arguments` is, else `arguments`: a model may have written
    anything.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
