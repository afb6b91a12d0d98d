"""`freight bench latency --text`: the answers are the texts, and drafts are compared with none."""

from __future__ import annotations

from typing import Any

import pytest

from freight.errors import ConfigError
from freight.lab.bench.drafts import measure_drafts, texts_of
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_memory": "16MiB"}


def test_an_edited_file_has_most_of_its_prompt() -> None:
    texts = texts_of("edit", 4096)
    assert len(texts) == 3
    for one in texts:
        assert len(set(one.answer) & set(one.prompt)) > 0.5 * len(set(one.answer))
        assert one.answer != one.prompt


# of the long answers the first tokens: what is compared is a step, not an answer
@pytest.mark.parametrize(("text", "length"), [("edit", 160), ("code", 120), ("random", None)])
def test_drafts_shorten_the_text_that_repeats_itself(text: str, length: int | None) -> None:
    opened = open_model(EngineArgs(speculate=6, **OPTIONS))
    found = measure_drafts(opened, "demo", text, batch_size=1, repeats=1, output_len=length)
    assert found["output_len"] == (length or 256)
    assert found["most_drafts"] == 6
    assert 0 <= found["accepted_fraction"] <= 1
    assert found["speedup"] > 0
    assert found["drafted_by"].keys() <= {"text"}
    assert sum(found["accepted_by"].values()) <= sum(found["drafted_by"].values())
    if text == "edit":
        assert found["accepted_by"]["text"] > 0
        assert found["tokens_per_step"] > 2.5
    elif text == "random":
        assert found["tokens_per_step"] == pytest.approx(1, abs=0.02)


def test_a_batch_has_answers_that_are_cut() -> None:
    opened = open_model(EngineArgs(speculate=6, **OPTIONS))
    found = measure_drafts(opened, "demo", "code", batch_size=3, repeats=2, output_len=20)
    # each of the two runs times what is left when the last sequence has its first token
    assert 2 * 3 * 15 < found["tokens"] <= 2 * 3 * 19
    assert (found["output_len"], found["most_drafts"]) == (20, 6)
    assert found["spread"]["speedup"]["count"] == 2
    assert 1 <= found["tokens_per_step"] < 2
    with pytest.raises(ConfigError, match="raise --output-len"):
        measure_drafts(opened, "demo", "code", batch_size=8, repeats=1, output_len=1)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --speculate"):
        measure_drafts(open_model(EngineArgs(**OPTIONS)), "demo", "random", 1, 1)
    with pytest.raises(ConfigError, match="take a model with more"):
        texts_of("code", 100)
