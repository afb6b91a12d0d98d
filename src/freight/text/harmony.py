"""Harmony, the chat format of gpt-oss: control tokens, and conversations for its chat template.

A message is `<|start|>`, a header, `<|message|>`, its text, and one of `<|end|>`, `<|call|>` and
`<|return|>`. A header has a role, a channel (`analysis`, `commentary`, `final`), the recipient of a
call (`to=functions.NAME`) and a type.

`to_harmony_messages` changes what gpt-oss's template would leave out or refuse: the template reads
reasoning under the name `thinking`, refuses a call together with both content and reasoning, and
writes only the first call of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.base.fields import JsonDict, JsonObject

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)


def is_harmony(chat_template: str) -> bool:
    """Return whether a chat template, in Jinja, writes harmony."""
    return all(marker in chat_template for marker in (START, CHANNEL, MESSAGE))


def to_harmony_messages(messages: Sequence[JsonObject]) -> list[JsonDict]:
    """Convert `messages`, from `to_template_messages`, for a template that writes harmony. No text
    is lost.

    Reasoning is also given as `thinking`. In a message with a call, content is appended to the
    reasoning. Calls are divided by `single_calls`.
    """
    return single_calls(list(map(_with_thinking, messages)))


def single_calls(messages: Sequence[JsonObject]) -> list[JsonDict]:
    """Divide each message with several calls into one message per call, each before its results:
    those with its `tool_call_id`, else the next one.
    """
    result: list[JsonDict] = []
    at = 0
    while at < len(messages):
        message = dict(messages[at])
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        result += _one_call_each(message, messages[at:end])
        at = end
    return result


def _with_thinking(message: JsonObject) -> JsonDict:
    result = dict(message)
    if result["role"] != "assistant":
        return result
    thinking = result.get("thinking") or result.get("reasoning_content")
    if thinking:
        result["thinking"] = thinking
        if result.get("tool_calls") and result.get("content"):
            result["thinking"] = f"{thinking}\n\n{result.pop('content')}"
    return result


def _one_call_each(message: JsonObject, results: Sequence[JsonObject]) -> list[JsonDict]:
    """Split `message` into one message per call, each followed by the tool messages that answer it."""
    calls = message["tool_calls"]
    ids = [call.get("id") for call in calls]
    of_call: list[list[JsonObject]] = [[] for _ in calls]
    unnamed = []
    for result in results:
        owner = result.get("tool_call_id")
        if owner is not None and owner in ids:
            of_call[ids.index(owner)].append(result)
        else:
            unnamed.append(result)
    for result in unnamed:  # goes to the first call that has no result yet
        next(filter(_is_empty, of_call), of_call[-1]).append(result)
    before = {name: value for name, value in message.items() if name != "tool_calls"}
    written: list[JsonDict] = []
    for call, answers in zip(calls, of_call, strict=True):
        written += [{**before, "tool_calls": [call]}, *map(dict, answers)]
        before = {"role": message["role"]}
    return written


def _is_empty(results: Sequence[JsonObject]) -> bool:
    return not results
