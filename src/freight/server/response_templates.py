"""How families of models write reasoning and tool calls, as data: for checkpoints that bring no response template.

A family is recognised by what its chat template contains. Its `field` is the entry `tool_calls` of a response template,
in transformers' format; its other values say how to force a call in the same form. White space around markup is not
part of any pattern: `server/tools.py` treats it the same for every family, and patterns that begin with `\\s*` take
quadratic time on long runs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """How a family writes tool calls: opening, calls with `between` between two, closing.

    A call is before_name, name, before_arguments, arguments as JSON, after_arguments.

    field        the entry `tool_calls` of a response template
    quoted       whether the name is a JSON string
    markers      parts of the markup that may be special tokens
    most_calls   how many a forced answer may have
    """

    field: Mapping[str, Any]
    before_name: str
    before_arguments: str
    after_arguments: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    quoted: bool = True
    markers: tuple[str, ...] = ()
    most_calls: int = 16


_FUNCTION = {"type": "function", "function": "{content}"}

HERMES = CallForm(  # Hermes, Qwen 2.5 and 3
    field={
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    },
    before_name='<tool_call>\n{"name": ',
    before_arguments=', "arguments": ',
    after_arguments="}\n</tool_call>",
    between="\n",
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3 = CallForm(  # an answer that is a call from its first character, or from <|python_tag|>
    field={
        "open_pattern": r'<\|python_tag\|>|\A\s{0,16}(?=\{\s{0,16}"(?:name|type|function)"\s{0,16}:)',
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
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
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
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
    field={
        "open_pattern": r"\[TOOL_CALLS\]\s{0,4}(?P<name>[^\[\]{}\s]{1,256})(?:\[CALL_ID\][^\[\]{}\s]{1,64})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    quoted=False,
    markers=("[TOOL_CALLS]", "[ARGS]"),
)

# What a chat template contains -> the form. The first whose words are all there counts.
CALL_FORMS: tuple[tuple[tuple[str, ...], CallForm | None], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<tool_call>", "<function="), None),  # calls as XML (Qwen3-Coder): not read, and not what HERMES reads
    (("<tool_call>", "</tool_call>"), HERMES),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
    (("<|python_tag|>",), LLAMA3),
)
# What a chat template contains -> the tags around reasoning.
REASONING: tuple[tuple[str, tuple[str, str]], ...] = (
    ("</think>", ("<think>", "</think>")),
    ("[THINK]", ("[THINK]", "[/THINK]")),
)
# What stands before an answer in a prompt.
ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "[/INST]",
    "<｜Assistant｜>",
    "<|assistant|>\n",
    "<start_of_turn>model\n",
)


def response_template(form: CallForm | None, reasoning: tuple[str, str] | None) -> dict[str, Any]:
    """A response template, in transformers' format, for calls and reasoning of a family."""
    fields: dict[str, Any] = {}
    if reasoning is not None:
        fields["reasoning_content"] = {"open": reasoning[0], "close": reasoning[1], "content": "text"}
    if form is not None:
        fields["tool_calls"] = dict(form.field)
    fields["content"] = {"content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": list(ANCHORS), "fields": fields}


def family_of(chat_template: str) -> tuple[CallForm | None, tuple[str, str] | None]:
    """The form of calls and the tags of reasoning in the answers of a model with this chat template."""
    forms = (form for words, form in CALL_FORMS if all(word in chat_template for word in words))
    tags = (pair for word, pair in REASONING if word in chat_template)
    return next(forms, None), next(tags, None)
