"""A form that an answer must have begins after the model's reasoning, which is free text.

The demo model knows no markup for reasoning. Its template here opens the reasoning at the end of the prompt, or leaves
it to the answer, and `logit_bias` makes the model end it: without that it would write text up to the limit.
"""

from __future__ import annotations

from tests.demo_chat import TEMPLATE

# Words of Hermes and of Qwen 3: the tags of reasoning are found in the template. The prompt ends within reasoning.
THINKS = TEMPLATE + "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}{# </think> #}"
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "grey"]}, "wind": {"type": "integer", "minimum": 0, "maximum": 12}},
    "required": ["sky", "wind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
