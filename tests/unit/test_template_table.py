"""Published chat templates in every form of messages: what users, tools and systems say arrives, or
is refused where the publisher's own rendering refuses it. docs/chat-templates.md is what its tool
prints."""

from __future__ import annotations

import pytest
import template_table
from template_table import (
    DOCUMENT,
    FOLDER,
    SITUATIONS,
    TOOLS,
    Cell,
    Situation,
    templates,
    tokenizer_of,
)
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

TEMPLATES = templates()


def refused_by_transformers(template: str, situation: Situation) -> bool:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(template).backend, chat_template=template
    )
    try:
        tokenizer.apply_chat_template(list(situation.messages), tools=TOOLS, tokenize=False)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost_and_only_the_publisher_refuses(name: str) -> None:
    template, _ = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    for situation in SITUATIONS.values():
        if template_table.cell(tokenizer, situation) is Cell.REFUSED:
            assert refused_by_transformers(template, situation)


def test_lost_words_and_refusals_are_seen() -> None:
    """The table's own check: a template that loses words is not "read"."""
    last = tokenizer_of("{{ messages[-1].content }}")
    with pytest.raises(AssertionError, match="Bonn"):
        template_table.cell(last, SITUATIONS["two calls"])
    alternating = tokenizer_of(
        "{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}"
    )
    assert template_table.cell(alternating, SITUATIONS["system within"]) is Cell.REFUSED


def test_the_page_is_what_its_tool_prints() -> None:
    assert DOCUMENT.read_text() == template_table.document(), (
        "python tools/template_table.py --write"
    )


def test_every_template_has_a_row() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.jinja")}
    assert files == set(TEMPLATES)
    text, _ = TEMPLATES["more/HuggingFaceTB-SmolVLM.jinja"]
    assert text == processing_smolvlm.DEFAULT_CHAT_TEMPLATE
