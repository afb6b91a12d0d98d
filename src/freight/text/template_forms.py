"""The forms of messages that a chat template reads, and conversations in these forms.

Templates differ: content is a string or a list of parts, arguments of calls are an object or JSON
text, a system message stands anywhere or only at the beginning. No template says so, and each can be
spelled in many ways, so `find_forms` renders small conversations and looks which form's words
arrive. Guarantee: text of users and systems, arguments of calls and answers of tools that the
template leaves out in one place or form are written in another, or refused by their path. None is
dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, product
from typing import TypeVar

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError
from freight.text.harmony import single_calls
from freight.text.messages import read_messages

Message = JsonDict
Rendered = TypeVar("Rendered")
# Renders a conversation; None where the template refuses it.
Render = Callable[[Sequence[Message]], str | None]

# Words that no template has: letters, so that they are no numbers, lower case and short of markup.
_USER = "q7413user"
_NEXT = "q7413next"
_OTHER = "q7413other"
_SYSTEM = "q7413system"
_ANSWER = "q7413answer"
_RESULT = "q7413result"
_NAME = "q7413name"
_ARGUMENTS = {"q7413key": "q7413value"}
_CALL_ID = "q7413call"  # nine letters and digits, which Mistral's templates ask for
_OTHER_ID = "q7413more"
_ARGUMENTS_WRITTEN = 8  # parts of a score
_RESULT_WRITTEN = 4
# Offered while forms are found for a conversation with tools: a folder may have another template
# for these.
PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Finds out.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class NoContent(StrEnum):
    """How a message that has only calls says that it has no content."""

    ABSENT = "absent"
    NULL = "null"
    EMPTY = "empty"


class Treatment(StrEnum):
    """What a template does with a message of one role."""

    WRITTEN = "written"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True)
class TemplateForms:
    """What one chat template reads.

    parts  roles whose content is a list with one text part; that of others is a string
    arguments_as_text  arguments of calls are JSON text; else the object
    no_content    content of a message that has only calls
    empty_content  in such a message "" will also do
    calls_apart   content and calls of one answer are two messages: in one, some is left out
    single_calls  each call of an answer is a message: of two in one, one is left out or refused
    system        a system message at the beginning
    more_systems  another one after it is written
    later_systems  one within the conversation is written
    left_out      of "tool" and "tool_calls": what the template leaves out in every form; "user" if
                  it has shown no user's text, maybe for want of values
    """

    parts: frozenset[str] = frozenset()
    arguments_as_text: bool = False
    no_content: NoContent = NoContent.ABSENT
    empty_content: bool = True
    calls_apart: bool = False
    single_calls: bool = False
    system: Treatment = Treatment.WRITTEN
    more_systems: bool = True
    later_systems: bool = True
    left_out: frozenset[str] = frozenset()

    @property
    def shows_users(self) -> bool:
        return "user" not in self.left_out

    @property
    def moves_first_system(self) -> bool:
        return self.system is Treatment.LEFT_OUT

    def with_parts(self, role: str) -> TemplateForms:
        return replace(self, parts=self.parts | {role})

    def with_left_out(self, what: str) -> TemplateForms:
        return replace(self, left_out=self.left_out | {what})


PLAIN = TemplateForms()


def to_template_messages(messages: object, forms: TemplateForms = PLAIN) -> list[Message]:
    """Read `messages` by `read_messages` and return them as a template with `forms` reads them.
    Raises RequestError, beginning with a path, for malformed messages.
    """
    return in_forms(read_messages(messages), forms)


def in_forms(messages: Sequence[Message], forms: TemplateForms) -> list[Message]:
    """Return `messages`, from `read_messages`, as a template with `forms` reads them."""
    conversation = list(messages)
    if "tool_calls" in forms.left_out:
        conversation = list(map(_with_calls_as_text, conversation))
    if forms.single_calls:
        conversation = single_calls(conversation)
    if "tool" in forms.left_out:
        conversation = _with_results_as_user(conversation)
    result: list[Message] = []
    for message in _systems_placed(conversation, forms):
        for part in _answer_parts(message, forms):
            result.append(_in_form(part, forms))
    return result


def _with_calls_as_text(message: Message) -> Message:
    """Return an answer whose calls are JSON in its content, a line each."""
    if "tool_calls" not in message:
        return message
    lines = [message.get("content")]
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        written = {"name": function.get("name"), "arguments": arguments}
        lines.append(json.dumps(written, ensure_ascii=False))
    return {**_without_calls(message), "content": "\n".join(filter(None, lines))}


def _without_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _with_results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with answers of tools as messages of the user: one for those that
    follow each other, because many templates want roles to alternate.
    """
    result: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            result.append(_with_text(_user(), *_contents(group)))
        else:
            result += group
    return result


def _contents(messages: Iterable[Message]) -> list[str]:
    return [message["content"] for message in messages]


def _systems_placed(messages: Sequence[Message], forms: TemplateForms) -> list[Message]:
    """Return the conversation with system messages only where the template takes them.

    The text of others goes to the beginning of the next user's message; at the end of a
    conversation, where none follows, to the first system message.
    """
    begin = 0
    while begin < len(messages) and messages[begin]["role"] == "system":
        begin += 1
    leading = list(messages[:begin])
    if begin > 1 and not forms.more_systems:
        leading = [_with_text(leading[0], *_contents(leading))]
    pending: list[str] = []
    if forms.moves_first_system:
        pending = _contents(leading)
        leading = []
    later: list[Message] = []
    for message in messages[begin:]:
        if message["role"] == "system" and not forms.later_systems:
            pending.append(message["content"])
            continue
        if message["role"] == "user" and pending:
            message = _with_text(message, *pending, message["content"])
            pending = []
        later.append(message)
    return _with_pending(leading, later, pending, forms)


def _with_pending(
    leading: list[Message], later: list[Message], pending: list[str], forms: TemplateForms
) -> list[Message]:
    """Add system texts that no user's message follows: to the last leading system message, or a new
    one, else to the first user's message.
    """
    if not pending:
        return [*leading, *later]
    text = _paragraphs(pending)
    if leading:
        last = leading[-1]
        return [*leading[:-1], _with_text(last, last["content"], text), *later]
    users = _users(later)
    if forms.system is Treatment.WRITTEN or not users:
        return [_system(text), *later]
    user = later[users[0]]
    later[users[0]] = _with_text(user, text, user["content"])
    return later


def _users(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "user"]


def _with_text(message: Message, *texts: str) -> Message:
    """Return `message` with other content: these paragraphs."""
    return {**message, "content": _paragraphs(texts)}


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _answer_parts(message: Message, forms: TemplateForms) -> list[Message]:
    if not (forms.calls_apart and message.get("tool_calls") and message.get("content")):
        return [message]
    calls = {"role": message["role"], "tool_calls": message["tool_calls"]}
    return [_without_calls(message), calls]


def _in_form(message: Message, forms: TemplateForms) -> Message:
    result = dict(message)
    if "tool_calls" in message:
        result["tool_calls"] = [_call_in_form(call, forms) for call in message["tool_calls"]]
        _set_no_content(result, forms)
    content = result.get("content")
    if message["role"] in forms.parts and content is not None:
        result["content"] = [{"type": "text", "text": content}]
    return result


def _set_no_content(message: Message, forms: TemplateForms) -> None:
    content = message.get("content")
    keeps = forms.empty_content and forms.no_content is NoContent.ABSENT
    if content or (content == "" and keeps):
        return
    message.pop("content", None)
    if forms.no_content is NoContent.NULL:
        message["content"] = None
    elif forms.no_content is NoContent.EMPTY:
        message["content"] = ""


def _call_in_form(call: JsonObject, forms: TemplateForms) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    if forms.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not forms.arguments_as_text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def either_content_form(
    messages: Sequence[Message],
    forms: TemplateForms,
    render: Callable[[list[Message]], Rendered],
    text_of: Callable[[Rendered], str],
) -> Rendered:
    """Render `messages` in the content form that shows them, for a template that has shown no
    user's text without the values of this conversation.

    Raises RequestError where neither form shows the last user's text.
    """
    users = _users(messages)
    for tried in (forms, forms.with_parts("user")):
        rendered = render(in_forms(messages, tried))
        if not users or messages[users[-1]]["content"].strip() in text_of(rendered):
            return rendered
    raise RequestError(
        f"messages[{users[-1]}].content cannot be read: the model's chat template writes no user's text, neither of a "
        "string nor of a list of parts; start with another template (--chat-template)"
    )


def find_forms(render: Render) -> TemplateForms:
    """Find the forms of a template. `render` is called with some twenty short conversations."""
    forms = _with_content_forms(render)
    forms = _with_call_forms(render, forms)
    return _with_system_places(render, forms)


def _user(text: str = _USER) -> Message:
    return {"role": "user", "content": text}


def _system(text: str = _SYSTEM) -> Message:
    return {"role": "system", "content": text}


def _answer(text: str = _ANSWER) -> Message:
    return {"role": "assistant", "content": text}


def _call(**fields: str) -> Message:
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", **fields, "tool_calls": [call]}


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT}


def _with_content_forms(render: Render) -> TemplateForms:
    """A string is taken where the template writes one, and where it writes no form at all."""
    forms = PLAIN
    conversations = (
        ("user", [_user()], _USER),
        ("system", [_system(), _user()], _SYSTEM),
        # Some templates, of models that judge an answer, write only the last one
        ("assistant", [_user(), _answer()], _ANSWER),
        ("assistant", [_user(), _answer(), _user(_NEXT)], _ANSWER),
    )
    for role, messages, word in conversations:
        as_text = render(in_forms(messages, forms))
        if _has(as_text, word):
            continue
        with_parts = forms.with_parts(role)
        if _shows(render, with_parts, messages, word):
            forms = with_parts
        elif role == "user":
            forms = forms.with_left_out("user")
        elif role == "system":
            treatment = Treatment.LEFT_OUT
            if as_text is None:
                treatment = Treatment.REFUSED
            forms = replace(forms, system=treatment)
    return forms


def _has(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text.lower() for word in words)


def _shows(render: Render, forms: TemplateForms, messages: Sequence[Message], *words: str) -> bool:
    return _has(render(in_forms(messages, forms)), *words)


def _with_call_forms(render: Render, forms: TemplateForms) -> TemplateForms:
    """Choose the forms of calls and of tools' answers that show most; the first of several."""
    scores: dict[TemplateForms, int] = {}
    messages = [_user(), _call(), _result()]
    for tool_parts, as_text, no_content in product((False, True), (False, True), NoContent):
        tried = replace(forms, arguments_as_text=as_text, no_content=no_content)
        if tool_parts:
            tried = tried.with_parts("tool")
        scores[tried] = _score(render(in_forms(messages, tried)), tried)
    chosen = max(scores, key=lambda tried: scores[tried])
    best = scores[chosen]
    if best < 0:  # refused in every form: the template says why
        return chosen
    with_empty = scores[replace(chosen, no_content=NoContent.EMPTY)]
    chosen = replace(chosen, empty_content=with_empty == best)
    if not best & _RESULT_WRITTEN:
        chosen = chosen.with_left_out("tool")
    if not best & _ARGUMENTS_WRITTEN:
        return chosen.with_left_out("tool_calls")
    return _with_single_calls(render, _with_calls_apart(render, chosen))


def _with_calls_apart(render: Render, forms: TemplateForms) -> TemplateForms:
    """Say whether content beside calls needs a message of its own."""
    begun = [_user(), _call(content=_OTHER), _result()]
    conversations = (begun, [*begun, _answer(), _user(_NEXT)])

    def reads(tried: TemplateForms) -> bool:
        return all(
            _shows(render, tried, messages, _OTHER, *_ARGUMENTS) for messages in conversations
        )

    separate = replace(forms, calls_apart=True)
    if not reads(forms) and reads(separate):
        return separate
    return forms


def _with_single_calls(render: Render, forms: TemplateForms) -> TemplateForms:
    """Say whether each of several calls needs a message of its own."""
    first = _call()
    function = {"name": _NAME, "arguments": {"q7413key": _OTHER}}
    second = {**first["tool_calls"][0], "id": _OTHER_ID, "function": function}
    several = {**first, "tool_calls": [*first["tool_calls"], second]}
    messages = [_user(), several, _result(), {**_result(), "tool_call_id": _OTHER_ID}]
    single = replace(forms, single_calls=True)
    words = (*_ARGUMENTS.values(), _OTHER)
    for tried in (forms, single):
        if _shows(render, tried, messages, *words):
            return tried
    return forms


def _score(text: str | None, forms: TemplateForms) -> int:
    """Return how much of a call and its answer a template has written, and how well."""
    if text is None:
        return -1
    arguments = _has(text, *_ARGUMENTS, *_ARGUMENTS.values())
    if forms.arguments_as_text:
        well = json.dumps(_ARGUMENTS) in text
    else:
        well = arguments and repr(_ARGUMENTS) not in text  # Python's notation is a slip
    result = _has(text, _RESULT)
    return (
        _ARGUMENTS_WRITTEN * arguments
        + _RESULT_WRITTEN * result
        + 2 * well
        + ("None" not in text)  # a content of None, written as text
    )


def _with_system_places(render: Render, forms: TemplateForms) -> TemplateForms:
    two = [_system(_OTHER), _system(), _user()]
    within = [_user(), _answer(), _system(), _user(_NEXT)]
    after_first = [_system(_OTHER), *within]
    more = _shows(render, forms, two, _SYSTEM, _OTHER)
    later = _shows(render, forms, within, _SYSTEM)
    later = later and _shows(render, forms, after_first, _SYSTEM, _OTHER)
    return replace(forms, more_systems=more, later_systems=later)
