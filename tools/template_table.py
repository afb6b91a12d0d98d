"""Write docs/chat-templates.md: what published chat templates do with each form of messages.

    python tools/template_table.py            prints the document
    python tools/template_table.py --write    writes docs/chat-templates.md

Every cell is rendered, and its words are looked for in the prompt.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import freight
from freight.errors import RequestError
from freight.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/chat-templates.md"
FOLDER = ROOT / "tests/fixtures/templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
Message = dict[str, Any]
USER: Message = {"role": "user", "content": "Is it raining?"}
NEXT: Message = {"role": "user", "content": "And tomorrow?"}
SYSTEM: Message = {"role": "system", "content": "Be short."}
REMINDER: Message = {"role": "system", "content": "Plan mode is on."}
ANSWER: Message = {"role": "assistant", "content": "It rains."}
TEXT = """\
# Chat templates

`python tools/template_table.py --write` writes this page. `tests/unit/test_template_table.py` checks it.

A chat template is a program that comes with a model. None says which form of messages it reads. So Freight renders some
twenty short conversations with it, before the first one of a client, and looks which form's words arrive in the prompt:

- Content is a string, or a list with one text part for templates that read only parts. Each role has its own form.
- Arguments of an earlier call are an object, or text for templates that join text: then the text that the client sent.
  `""`, `null` and nothing are `{{}}`. Anything else that is no object is refused with its path.
- A message that has only calls has no content, or null, or `""`, whichever the template tests for. Where a template
  leaves out calls beside content, or content beside calls, these become two messages, if it takes them. So do two calls
  where it leaves one out, or refuses them.
- A system message stays where it is if the template writes it there. Else its text goes to the beginning of the next
  message of the user. If none follows, it goes to the end of the first system message.
- Calls that a template leaves out in every form are written as JSON in the content of the answer. Answers of tools that
  it leaves out become a message of the user.
- If the user's text arrives in neither form, the request gets status 400, which names the message. Give a template that
  reads it with `--chat-template`.

This holds for chats, responses, messages, batches, `/tokenize`, calibration data and `LLM.chat`.

## What was rendered

Each cell is a conversation, rendered with the template. *Read*: its text, arguments and answers of tools are in the
prompt. *Moved*: they are, in another message. *As text*: they are, in the content. *Left out*: the template leaves out
the reasoning of earlier turns, by the publisher's design. *Refused*: the template refuses such a conversation, in
transformers too.

{table}

Texts are the publishers' own where it says *published*; a *copy* may have been corrected by hand.
`tests/fixtures/templates/README.md` names the sources.
"""


class Cell(StrEnum):
    """What became of a situation's words."""

    READ = "read"
    MOVED = "moved"
    AS_TEXT = "as text"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True)
class Situation:
    """A conversation, and the words that must be in its prompt."""

    messages: tuple[Message, ...]
    words: tuple[str, ...]
    may_be_left_out: bool = False


def _called(arguments: object, count: int = 1, **others: object) -> tuple[Message, ...]:
    """An answer with `count` calls, and the answers of the tool."""
    calls = []
    results = []
    for index in range(count):
        call_id = f"call0000{index}"
        function = {"name": "get_weather", "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": f"drizzle {index}"})
    answer = {"role": "assistant", "content": None, **others, "tool_calls": calls}
    return (USER, answer, *results)


def _two_calls() -> tuple[Message, ...]:
    user, answer, *results = _called({"city": "Bonn"}, count=2)
    second = answer["tool_calls"][1]
    second["function"] = {"name": "get_weather", "arguments": '{"city": "Turin"}'}
    return (user, answer, *results)


_PARTS = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "raining?"}]
_REASONED = {"role": "assistant", "content": "It rains.", "reasoning": "Look outside."}
SITUATIONS: Mapping[str, Situation] = {
    "a string": Situation((USER,), ("Is it raining?",)),
    "text parts": Situation(({"role": "user", "content": _PARTS},), ("Is it raining?",)),
    "system first": Situation((SYSTEM, USER), ("Be short.", "Is it raining?")),
    "system within": Situation(
        (SYSTEM, USER, ANSWER, REMINDER, NEXT), ("Be short.", "Plan mode is on.", "And tomorrow?")
    ),
    "arguments: an object": Situation(_called({"city": "Bonn"}), ("get_weather", "city", "Bonn")),
    "arguments: its text": Situation(_called('{"city": "Bonn"}'), ("get_weather", "city", "Bonn")),
    'arguments: `""`': Situation(_called(""), ("get_weather", "drizzle 0")),
    "arguments: null": Situation(_called(None), ("get_weather", "drizzle 0")),
    "two calls": Situation(_two_calls(), ("Bonn", "Turin", "drizzle 0", "drizzle 1")),
    "answer of a tool": Situation(
        (*_called({"city": "Bonn"}), ANSWER, NEXT), ("drizzle 0", "It rains.", "And tomorrow?")
    ),
    "earlier reasoning": Situation((USER, _REASONED, NEXT), ("Look outside.",), True),
}


def templates() -> dict[str, tuple[str, str]]:
    """Return the file -> (its text, "published" or "copy"), as the README of the folder lists them."""
    rows = re.findall(
        r"^\| `(\S+\.jinja)` \|.*\| (\w+) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    return {name: ((FOLDER / name).read_text(), kind) for name, kind in rows}


def tokenizer_of(template: str) -> Tokenizer:
    """Return the demo model's tokenizer with `template`."""
    return Tokenizer.load(Path(freight.__file__).parent / "demo").with_chat_template(template)


def cell(tokenizer: Tokenizer, situation: Situation) -> Cell:
    """Render one situation. Raises AssertionError where words are lost."""
    calls = any("tool_calls" in message for message in situation.messages)
    values: dict[str, Any] = {"tools": TOOLS} if calls else {}
    try:
        text = tokenizer.render_chat(situation.messages, **values).text
    except RequestError:
        return Cell.REFUSED
    missing = [word for word in situation.words if not _is_in(word, text, calls)]
    if missing:
        assert situation.may_be_left_out, f"{missing} is not in {text!r}"
        return Cell.LEFT_OUT
    forms = tokenizer.chat_forms(calls)
    if calls and forms.left_out:
        return Cell.AS_TEXT
    system = SYSTEM in situation.messages
    within = REMINDER in situation.messages
    if (within and not forms.later_systems) or (system and forms.moves_first_system):
        return Cell.MOVED
    return Cell.READ


def _is_in(word: str, text: str, calls: bool) -> bool:
    """Return whether a word is in the conversation's part of a prompt: tools, which come first, name
    the function and its parameter too.
    """
    if calls:
        text = text[text.rfind("Is it raining?") :]
    return word in text


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| template | text | " + " | ".join(SITUATIONS) + " |",
        "|---" * (len(SITUATIONS) + 2) + "|",
    ]
    for name, (text, kind) in templates().items():
        tokenizer = tokenizer_of(text)
        cells: Sequence[str] = [cell(tokenizer, situation) for situation in SITUATIONS.values()]
        lines.append(f"| {Path(name).stem} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document() -> str:
    return TEXT.format(table=table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        DOCUMENT.write_text(document())
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
