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

from freight.text.tokenizer import Tokenizer

TEMPLATES = templates()


def refused_by_transformers(own: Tokenizer, situation: Situation) -> bool:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own.backend, chat_template=own.chat_template
    )
    try:
        tokenizer.apply_chat_template(list(situation.messages), tools=TOOLS, tokenize=False)
    except Exception:
        return True
    return False


def test_lost_words_and_refusals_are_seen() -> None:
    """The table's own check: a template that loses words is not "read"."""
    last = tokenizer_of("{{ messages[-1].content }}")
    with pytest.raises(AssertionError, match="Bonn"):
        template_table.cell(last, SITUATIONS["two calls"])
    alternating = tokenizer_of(
        "{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}"
    )
    assert template_table.cell(alternating, SITUATIONS["system within"]) is Cell.REFUSED


def test_the_page_is_what_its_tool_prints_and_only_the_publisher_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A template that loses words raises AssertionError."""
    refused = []
    cell = template_table.cell

    def recorded(tokenizer: Tokenizer, situation: Situation) -> Cell:
        state = cell(tokenizer, situation)
        if state is Cell.REFUSED:
            refused.append((tokenizer, situation))
        return state

    monkeypatch.setattr(template_table, "cell", recorded)
    assert DOCUMENT.read_text() == template_table.document(), (
        "python tools/template_table.py --write"
    )
    assert all(refused_by_transformers(*case) for case in refused)


def test_every_template_has_a_row() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.jinja")}
    assert files == set(TEMPLATES)
    text, _ = TEMPLATES["more/HuggingFaceTB-SmolVLM.jinja"]
    assert text == processing_smolvlm.DEFAULT_CHAT_TEMPLATE
