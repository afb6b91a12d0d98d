"""Tags: what models write around their thoughts, as data, and which of them a model has.

A family is recognized by words in its chat template. Of harmony, gpt-oss's format, a thought is a
message in the channel `analysis` that is no call: its header begins right behind `assistant`.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freight.text.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START, is_harmony
from freight.text.tokenizer import Tokenizer

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a response template


@dataclass(frozen=True)
class Tags:
    """The delimiters of reasoning. All are recognized; a forced answer uses the first of each."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]

    @property
    def pair(self) -> tuple[str, str]:
        """The first of each."""
        return self.opens[0], self.closes[0]


THINK = Tags(("<think>",), ("</think>",))
THINK_MISTRAL = Tags(("[THINK]",), ("[/THINK]",))
THINK_SEED = Tags(("<seed:think>",), ("</seed:think>",))
THINK_HY3 = Tags(("<think:opensource>",), ("</think:opensource>",))
THINK_GEMMA4 = Tags(("<|channel>thought\n",), ("<channel|>",))
THINK_GRANITE = Tags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
THINK_HARMONY = Tags((f"assistant{CHANNEL}analysis{MESSAGE}",), (END, CALL, RETURN))
# Words in a chat template -> the tags around reasoning. The first entry whose words all occur
# applies.
REASONING: tuple[tuple[tuple[str, ...], Tags], ...] = (
    (("</seed:think>",), THINK_SEED),
    (("</think{}>", ":opensource"), THINK_HY3),
    (("</think{}>",), THINK),
    (("<|channel>thought",), THINK_GEMMA4),
    (("</think>",), THINK),
    (("[THINK]",), THINK_MISTRAL),
    (("Here is my thought process:",), THINK_GRANITE),
)


def tags_of(chat_template: str) -> Tags | None:
    """Return the reasoning tags of a model with this chat template; None if they are not known."""
    for words, tags in REASONING:
        if all(word in chat_template for word in words):
            return tags
    return None


def written_tags(field: object) -> tuple[str, str] | None:
    """Return the opening and the closing text of a field of a response template, or None if either
    is a pattern.
    """
    if not isinstance(field, Mapping):
        return None
    opening = field.get("open")
    closing = field.get("close")
    if isinstance(opening, str) and isinstance(closing, str):
        return opening, closing
    return None


def with_variants(pair: tuple[str, str]) -> Tags:
    """Return the known tags of which `pair` is the first of each, or `pair` alone."""
    known = (THINK_HARMONY, *(tags for _, tags in REASONING))
    return next((tags for tags in known if tags.pair == pair), Tags((pair[0],), (pair[1],)))


def model_tags(tokenizer: Tokenizer) -> Tags | None:
    """Return the tags of the model with this tokenizer: those of its response template, else of its
    chat template; None if they are not known.
    """
    source = tokenizer.chat_template_source
    if is_harmony(source) and tokenizer.special_texts.issuperset((START, CHANNEL, MESSAGE, END)):
        return THINK_HARMONY
    fields = (tokenizer.response_template or {}).get("fields")
    if isinstance(fields, Mapping):
        for name in REASONING_FIELDS:
            if (pair := written_tags(fields.get(name))) is not None:
                return with_variants(pair)
    return tags_of(source)
