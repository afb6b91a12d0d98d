"""A small tokenizer, a chat template and answers in harmony, for the tests of that format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.unit.server.joined_pieces import joined
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from freight.serve.answers.answer_format import AnswerFormat, answer_format
from freight.serve.answers.pieces import Piece
from freight.text.harmony import MARKERS
from freight.text.tokenizer import Tokenizer

# Reads, leaves out and refuses what gpt-oss's own template does.
TEMPLATE = """{%- for t in tools or [] %}{{ '<|start|>developer<|message|>' + t.function.name + '<|end|>' }}{% endfor %}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
  {%- if '<|channel|>final<|message|>' in (m.content or '') %}{{ raise_exception('channels in content') }}{% endif %}
  {%- if m.tool_calls %}
    {%- if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}
    {%- if m.content or m.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
    {%- endif %}
    {%- set last.name = m.tool_calls[0].function.name %}
    {{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
    {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
  {%- else %}
    {%- if m.thinking and loop.last and not add_generation_prompt %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {%- endif %}
{%- elif m.role == 'tool' %}
  {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
  {{- m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get-time"}},
]
CITY = '{"city":  "K\\u00f6ln", "days": 1.0}'  # not as json.dumps would write it
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def backend(special: Sequence[str] = (*MARKERS, "<|endoftext|>")) -> Backend:
    """One token per byte, besides the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


BACKEND = backend()
TOKENIZER = Tokenizer(BACKEND, {"eos_token": "<|return|>"}, TEMPLATE)
STOPS = sorted(BACKEND.token_to_id(text) for text in ("<|return|>", "<|call|>", "<|endoftext|>"))


def harmony() -> AnswerFormat:
    made = answer_format(TOKENIZER)
    assert made is not None
    return made


FORMAT = harmony()


def pieces(
    chunks: Sequence[str],
    complete: bool = True,
    prompt: str | None = PROMPT,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> list[Piece]:
    """The joined pieces of an answer."""
    parser = FORMAT.parser(prompt, tools)
    return joined(parser, chunks, complete)


CALL = " to=functions.get_weather <|constrain|>json<|message|>"
ANSWER = f"{ANALYSIS}hm{NEXT}<|channel|>commentary<|message|>See:{NEXT}<|channel|>commentary{CALL}{CITY}<|call|>"
