"""Forms of tool calls with JSON arguments, as data: for checkpoints without a response template.

`call_families.py` has the other forms, and maps families to forms. The `field` of a form is the
entry `tool_calls` of a response template, in transformers' format; the other values serve to force
a call in the same form. White space around markup is not part of any pattern: `out.py` drops it for
every family, and patterns that begin with `\\s*` take quadratic time on long runs of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from freight.base.fields import JsonDict, JsonObject
from freight.serve.answers.listed_calls import ListedCalls
from freight.serve.answers.tagged_calls import Literal, TokenIn


class Syntax(Protocol):
    """A syntax of calls for which a response template is not enough."""

    def read(self, opening: str, body: str, tools: Sequence[JsonObject]) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the calls in a region. Raises ValueError and other
        Exceptions for malformed text.
        """

    def ends_within(self, text: str, is_open: bool) -> bool:
        """Return whether a call that goes on with `text` ends within a value that may contain any
        text; is_open: whether it does so before.
        """

    def part(self, function: JsonObject, literal: Literal, token_in: TokenIn) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for the arguments of `function`."""


@dataclass(frozen=True)
class CallForm:
    """The form of a family's tool calls: opening, calls joined by `between`, closing.

    A call is before_name, name, before_arguments, arguments, after_arguments. Arguments are JSON,
    or in `syntax`.

    field        the entry `tool_calls` of a response template
    syntax       parses the text of a region instead of `field`
    quoted       whether the name is a JSON string
    numbered     whether `:` and a number follow the name
    section_end  markup that may follow the last call, and is not content there
    markers      parts of the markup that may be special tokens
    most_calls   calls of a forced answer at most
    """

    field: JsonObject
    before_name: str
    before_arguments: str
    after_arguments: str
    syntax: Syntax | None = None
    opening: str = ""
    between: str = ""
    closing: str = ""
    quoted: bool = True
    numbered: bool = False
    section_end: str = ""
    markers: tuple[str, ...] = ()
    most_calls: int = 16


_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _named(opening: str, closing: str) -> JsonDict:
    """Build a field with JSON arguments between two patterns, the first of which has the group
    `name`.
    """
    return {
        "open_pattern": opening,
        "close_pattern": closing,
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }


HERMES = CallForm(  # Hermes, Qwen 2.5 and 3
    field={
        "open_pattern": r"<tool_call>(?=\s{0,16}[\[{])",
        "close_pattern": "</tool_call>",
        "repeats": True,
        "content": "text",
    },
    syntax=ListedCalls(),
    before_name='<tool_call>\n{"name": ',
    before_arguments=', "arguments": ',
    after_arguments="}\n</tool_call>",
    between="\n",
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3 = CallForm(  # a call from the first character of the answer, or from <|python_tag|>
    field={
        "open_pattern": r'<\|python_tag\|>|\A\s{0,16}(?=\{\s{0,16}"(?:name|type|function)"\s{0,16}:)',
        "repeats": True,
        "content": "text",
    },
    syntax=ListedCalls(implied=False),
    before_name='{"name": ',
    before_arguments=', "parameters": ',
    after_arguments="}",
    most_calls=1,
)
MISTRAL_LIST = CallForm(  # the tokenizers v2 to v7
    field={
        "open": "[TOOL_CALLS]",
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
        "transform_each": True,
    },
    opening="[TOOL_CALLS][",
    before_name='{"name": ',
    before_arguments=', "arguments": ',
    after_arguments="}",
    between=", ",
    closing="]",
    markers=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = CallForm(  # the tokenizers from v11 on
    field=_named(
        r"\[TOOL_CALLS\]\s{0,4}(?P<name>[^\[\]{}\s]{1,256})(?:\[CALL_ID\][^\[\]{}\s]{1,64})?"
        r"(?:\[ARGS\]|(?=\{))",  # models omit [ARGS]
        r"(?=\[TOOL_CALLS\])",
    ),
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    quoted=False,
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
DEEPSEEK_V3 = CallForm(  # DeepSeek V3 and R1
    field=_named(
        r"(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        r"(?P<name>[^\s<]{1,256})\s{0,4}```json",
        r"```\s{0,4}<｜tool▁call▁end｜>",
    ),
    opening="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```<｜tool▁call▁end｜>",
    between="\n",
    closing="<｜tool▁calls▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    quoted=False,
    markers=_DEEPSEEK_MARKERS,
)
DEEPSEEK_V31 = CallForm(
    field=_named(
        r"(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>"
        r"(?P<name>[^\s<]{1,256})<｜tool▁sep｜>",
        r"<｜tool▁call▁end｜>",
    ),
    opening="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    quoted=False,
    markers=_DEEPSEEK_MARKERS,
)
KIMI_K2 = CallForm(  # a number follows the name of a call; a number alone is not a name
    field=_named(
        r"(?:<\|tool_calls_section_begin\|>\s{0,64})?<\|tool_call_begin\|>\s{0,4}(?:functions\.)?"
        r"(?P<name>(?!\d{1,9}\s{0,4}<)[^\s<:]{1,256})(?::\d{1,9})?\s{0,4}<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
    ),
    opening="<|tool_calls_section_begin|>",
    before_name="<|tool_call_begin|>functions.",
    numbered=True,
    before_arguments="<|tool_call_argument_begin|>",
    after_arguments="<|tool_call_end|>",
    closing="<|tool_calls_section_end|>",
    section_end="<|tool_calls_section_end|>",
    quoted=False,
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)
