"""Heads that are trained for the demo and a small hybrid (tools/train_draft_heads.py) change no bit, and are
often right.
"""

from __future__ import annotations

from pathlib import Path

import measure_draft_heads
import pytest
import train_draft_heads
from measure_draft_heads import engine_of, measure, way_of
from train_draft_heads import HEADS, train_heads

pytestmark = pytest.mark.slow

TOKENS = 60


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_draft_heads, "LENGTH", 128)
    monkeypatch.setattr(measure_draft_heads, "PROMPTS", measure_draft_heads.PROMPTS[:2])


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_read_and_change_no_bit(name: str, tmp_path: Path) -> None:
    """After one step they are hardly ever right. The copies have the bits of their models."""
    train_heads(tmp_path, steps=1, rows=1, depth=2, vocabulary=300, names=[name])
    way = way_of(name, tmp_path)
    plain = measure(engine_of(way.alone, None), 0.8, TOKENS)
    assert plain.drafted == 0
    found = measure(engine_of(way.model, way.config), 0.8, TOKENS)
    assert found.answers == plain.answers


@pytest.mark.parametrize("name", HEADS)
def test_a_short_training_makes_drafts_that_are_right(name: str, tmp_path: Path) -> None:
    train_heads(tmp_path, steps=120, rows=4, depth=1, names=[name])
    way = way_of(name, tmp_path)
    plain = measure(engine_of(way.alone, None), 0.0, TOKENS)
    found = measure(engine_of(way.model, way.config), 0.0, TOKENS)
    assert found.answers == plain.answers
    assert found.accepted > 0.3 * found.drafted
    assert found.accepted > 0.1 * found.tokens
    assert found.steps < plain.steps
