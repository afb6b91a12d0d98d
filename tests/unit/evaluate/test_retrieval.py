"""The retrieval task: what its contexts hold, and where the records lie that are asked about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.lab.evaluate.retrieval import (
    KEY,
    Question,
    Vocabulary,
    depths,
    make_contexts,
    vocabulary,
)
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

WORDS = Vocabulary(range(10, 300), begin=[0], equals=[1], end=[2])
RECORD = 6  # tokens


def place(token_ids: list[int], question: Question) -> list[int]:
    """Where the question and its value stand in a context."""
    wanted = [*question.key, *question.value, *WORDS.end]
    return [i for i in range(len(token_ids)) if token_ids[i : i + len(wanted)] == wanted]


@given(length=st.integers(64, 3000), questions=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_record_that_is_asked_is_there_once_at_its_depth(
    length: int, questions: int, seed: int
):
    contexts = make_contexts(WORDS, length, 2, questions, seed)
    for own, other in (contexts, contexts[::-1]):
        assert own.token_ids[0] == 0
        assert {question.depth for question in own.questions} == set(depths(length))
        assert length - 2 * RECORD < len(own.token_ids) <= length - RECORD
        for question in own.questions:
            (at,) = place(own.token_ids, question)
            away = abs(len(own.token_ids) - at - question.depth)
            assert away <= questions * RECORD + (RECORD if question.depth < length else 2 * RECORD)
            assert place(other.token_ids, question) == []
            assert len(own.token_ids) + len(question.key) + len(question.value) <= length


def test_a_seed_gives_one_task():
    first, again, other = (make_contexts(WORDS, 500, 3, 4, seed) for seed in (7, 7, 8))
    assert first == again != other


def test_keys_get_longer_where_words_are_few():
    few = Vocabulary(range(10, 14), begin=[0], equals=[1], end=[2])
    contexts = make_contexts(few, 400, 4, 2)
    keys = [tuple(question.key) for context in contexts for question in context.questions]
    assert len(keys[0]) > KEY + 1
    assert all(len(context.token_ids) + len(keys[0]) + 2 <= 400 for context in contexts)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (1024, [128, 256, 512, 1024]),
        (8192, [1024, 2048, 4096, 8192]),
        (10000, [1024, 2048, 4096, 8192, 10000]),
    ],
)
def test_depths_double_from_1024(context: int, expected: list[int]):
    assert depths(context) == expected


def test_a_context_without_room_is_refused():
    with refuses(ConfigError, "16 tokens", "at least 48"):
        make_contexts(WORDS, 16, 2, 1)


def test_words_are_words_where_a_tokenizer_has_them():
    opened = open_model(EngineArgs("demo"))
    tokenizer = opened.load_tokenizer()
    assert tokenizer is not None
    found = vocabulary(tokenizer, opened.model.vocab_size, 0)
    assert len(found.words) > 500
    assert all(tokenizer.token_text(token).strip().isalpha() for token in found.words)
    assert tokenizer.decode([*found.equals, *found.end]) == " =\n"
    assert list(vocabulary(None, 50, 3).words) == [token for token in range(50) if token != 3]
