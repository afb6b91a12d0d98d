"""Heads that are trained for the demo (tools/train_draft_heads.py) change no bit, and are often right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import measure_draft_heads
import pytest
import train_draft_heads
from measure_draft_heads import engine_of, measure
from train_draft_heads import EAGLE, PREDICTING, train_heads

pytestmark = pytest.mark.slow

TOKENS = 60


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_draft_heads, "LENGTH", 128)
    monkeypatch.setattr(measure_draft_heads, "PROMPTS", measure_draft_heads.PROMPTS[:2])


def heads_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    eagle = {"method": "eagle3", "model": str(folder / EAGLE)}
    return [("demo", eagle), (str(folder / PREDICTING), {"method": "mtp"})]


def test_heads_are_read_and_change_no_bit(tmp_path: Path) -> None:
    """After one step they are hardly ever right. The MiMo copy has the demo's bits."""
    train_heads(tmp_path, steps=1, rows=1, depth=2, vocabulary=300)
    plain = measure(engine_of("demo", None), 0.8, TOKENS)
    assert plain.drafted == 0
    for model, config in heads_in(tmp_path):
        found = measure(engine_of(model, config), 0.8, TOKENS)
        assert found.answers == plain.answers


def test_a_short_training_makes_drafts_that_are_right(tmp_path: Path) -> None:
    train_heads(tmp_path, steps=120, rows=4, depth=1)
    plain = measure(engine_of("demo", None), 0.0, TOKENS)
    for model, config in heads_in(tmp_path):
        found = measure(engine_of(model, config), 0.0, TOKENS)
        assert found.answers == plain.answers
        assert found.accepted > 0.3 * found.drafted
        assert found.accepted > 0.1 * found.tokens
        assert found.steps < plain.steps
