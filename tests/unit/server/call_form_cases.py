"""For the tests of forms of calls: chat templates, tools, and tokenizers with markup as tokens and
as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from freight.serve.answers import call_families, response_templates
from freight.serve.answers.parsing import markup_of
from freight.serve.answers.response_templates import CallForm
from freight.serve.answers.tools import MessageFormat, parser_for
from freight.text.thinking import Tags
from freight.text.tokenizer import Tokenizer

FORMS = {
    name: value
    for module in (response_templates, call_families)
    for name, value in vars(module).items()
    if isinstance(value, CallForm)
}
TAGS = {name: value for name, value in vars(call_families).items() if isinstance(value, Tags)}
TEMPLATES = {
    path.stem: path.read_text()
    for path in (Path(__file__).parents[2] / "fixtures" / "templates").glob("*.jinja")
}
# Shortened templates of models whose licences do not let us keep the published ones: what they
# write of an assistant.
TEMPLATES["short-Hy3"] = """{%- set HYTK = ':opensource' %}
{%- set open, sep = '<tool_call{}>'.format(HYTK), '<tool_sep{}>'.format(HYTK) %}
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{- '<｜hy_Assistant{}｜>'.format(HYTK) }}
{{- '<think{}>'.format(HYTK) + m.reasoning_content + '</think{}>'.format(HYTK) }}
{{- '<tool_calls{}>'.format(HYTK) + '\n' }}{% for c in m.tool_calls %}{{- open + c.function.name + sep + '\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key{}>'.format(HYTK) + k + '</arg_key{}>'.format(HYTK) + '\n<arg_value{}>'.format(HYTK) }}
{{- (v if v is string else v | tojson) + '</arg_value{}>'.format(HYTK) + '\n' }}{% endfor %}
{{- '</tool_call{}>'.format(HYTK) + '\n' }}{% endfor %}{{- '</tool_calls{}>'.format(HYTK) }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<｜hy_Assistant{}｜>'.format(HYTK) }}{% endif %}"""
TEMPLATES[
    "short-Nemotron-Nano-v2"
] = """{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}
{{- '<think>' + m.reasoning_content + '</think>\n\n<TOOLCALL>[' }}{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}
{{- '' if loop.last else ', ' }}{% endfor %}]</TOOLCALL>{% endif %}{% endfor %}"""
# DeepSeek V4.1 writes a blank behind the marker of each tag, as its published encoding does.
TEMPLATES["short-DeepSeek-V4.1"] = (
    TEMPLATES["deepseek-ai-DeepSeek-V4"]
    .replace("tool_calls>", " calls>")
    .replace("invoke", " invoke")
    .replace("parameter ", " parameter ")
    .replace("parameter>", " parameter>")
)
ENDS = (  # what ends the answers of these models: special tokens, which are stripped
    *(
        "<|im_end|>",
        "<|end_of_text|>",
        "<seed:eos>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
        "<|eos|>",
        "<turn|>",
    ),
    *("<|tool_response>", "<|end|>", "<｜Assistant｜>"),
)
CITY = 'Köln "am" <Rhein>\nDom </'
ARGUMENTS: dict[str, Any] = {
    "city": CITY,
    "days": 2,
    "units": [{"a": 1.5, "b": [True, None, "x > y"]}],
    "at": {"x": {}},
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "description": "How many."},
        "units": {"type": "array", "items": {"type": "object"}, "description": "In what."},
        "at": {"anyOf": [{"type": "object"}, {"type": "null"}], "description": "When."},
    },
    "required": ["city"],
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "description": "Which."}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "What it does.", "parameters": parameters},
    }
    for name, parameters in (("get_weather", WEATHER), ("get_time", TIME))
]


def backend(special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Backend:
    """One token per byte, besides these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*ENDS, *special])
    made.add_tokens(list(added))
    return made


def tokenizer(
    template: str, special: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend((*special, "<s>"), added), names, template)


class NamedFormat(MessageFormat):
    """With its tokenizer."""

    tokenizer: Tokenizer


def named_format(
    name: str, tags: str | None = None, markers: str = "text", model: Tokenizer | None = None
) -> NamedFormat:
    """How answers in the form of this name are read. markers: "special" or "added" tokens, or
    "text".
    """
    form = FORMS[name]
    kinds = {kind: form.markers if kind == markers else () for kind in ("special", "added")}
    model = model or tokenizer("", **kinds)
    reasoning = None if tags is None else TAGS[tags]
    pair = None if reasoning is None else (reasoning.opens[0], reasoning.closes[0])
    markup = markup_of(model, call_families.response_template(form, reasoning), form)
    made = NamedFormat(model, markup, form, pair)
    made.tokenizer = model
    return made


def format_of(template: str) -> MessageFormat:
    """How answers of the model with this chat template are read."""
    made = parser_for(tokenizer(template))
    assert made is not None
    return made


def large_tools(count: int) -> list[dict[str, Any]]:
    """`tool_0`, `tool_1`, …: each with nine described parameters and a list of objects of them."""
    properties = {
        f"{kind}_{index}": {
            "type": kind,
            "description": f"What the {kind} number {index} is for. " * 4,
        }
        for index in range(3)
        for kind in ("string", "integer", "boolean")
    }
    nested = {
        "type": "array",
        "items": {"type": "object", "properties": properties},
        "maxItems": 20,
    }
    schema = {
        "type": "object",
        "properties": {**properties, "edits": nested},
        "required": ["string_0", "edits"],
    }
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "parameters": schema}}
        for index in range(count)
    ]
