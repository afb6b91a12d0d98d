"""A grammar's mask in the sampler: where it stands in the definition, and that it changes nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import assert_names
from tests.shares import examples

from freight.engine.adjust import SamplingRow
from freight.engine.bad_words import BadWords
from freight.engine.grammar import Matcher
from freight.engine.sampler import sample
from freight.sampling import SamplingParams

VOCAB, END = 40, 3


class Fixed:
    """A grammar that permits the same tokens at every place."""

    def __init__(self, tokens: Collection[int], error: str = "") -> None:
        self.tokens, self.error = tokens, error

    def deep_copy(self) -> Fixed:
        return self

    def consume_token(self, token: int) -> bool:
        return True

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(64, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


def row(
    tokens: Collection[int] | None,
    output: Sequence[int] = (),
    error: str = "",
    seed: int = 7,
    bad: BadWords | None = None,
    **params: Any,
) -> SamplingRow:
    grammar = None if tokens is None else Matcher(Fixed(tokens, error), VOCAB, frozenset({END}))
    sampling = SamplingParams(**params)
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {END})
    return SamplingRow(sampling, seed, [1, 2], list(output), stops, grammar, bad)


def logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        count, VOCAB, dtype=torch.float32, generator=torch.Generator().manual_seed(seed)
    )


@settings(max_examples=examples(60))
@given(
    tokens=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    top_k=st.sampled_from([0, 3]),
)
def test_only_permitted_tokens_are_drawn(
    tokens: set[int], seed: int, temperature: float, top_p: float, top_k: int
):
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    x = logits(1, seed)
    masked = x.clone()
    masked[0, [token for token in range(VOCAB) if token not in tokens]] = -math.inf
    (drawn,) = sample(x, [row(tokens, seed=seed, **params)])
    assert drawn.token_id in tokens
    assert drawn.token_id == sample(masked, [row(None, seed=seed, **params)])[0].token_id


@settings(max_examples=examples(40))
@given(masked=st.lists(st.booleans(), min_size=2, max_size=8), seed=st.integers(0, 99))
def test_other_rows_keep_their_bits(masked: list[bool], seed: int):
    x = logits(len(masked), seed)
    before = x.clone()

    def rows(with_masks: bool) -> list[SamplingRow]:
        return [
            row(
                {5, 6, END} if own and with_masks else None,
                seed=i,
                logprobs=2,
                frequency_penalty=i % 2,
            )
            for i, own in enumerate(masked)
        ]

    plain, mixed = sample(x, rows(False)), sample(x, rows(True))
    assert [one for one, own in zip(plain, masked, strict=True) if not own] == [
        one for one, own in zip(mixed, masked, strict=True) if not own
    ]
    assert torch.equal(x, before)


def test_log_probabilities_are_those_of_the_raw_logits():
    x = logits(1)
    (drawn,) = sample(x, [row({5, 6}, temperature=0.0, logprobs=2)])
    raw = x.log_softmax(-1)[0]
    assert drawn.logprobs is not None
    assert {token: logprob for token, logprob, _ in drawn.logprobs} == {
        token: raw[token].item() for token in (*raw.topk(2).indices.tolist(), drawn.token_id)
    }


def test_min_tokens_and_ignore_eos_bar_the_end_until_nothing_else_may_come():
    x = logits(1)
    x[0, END] = 30
    for params in ({"min_tokens": 5}, {"ignore_eos": True}, {"min_tokens": 5, "ignore_eos": True}):
        assert sample(x, [row({8, END}, temperature=0.0, **params)])[0].token_id == 8
        assert sample(x, [row({END}, temperature=0.0, **params)])[0].token_id == END
    assert sample(x, [row({8, END}, temperature=0.0)])[0].token_id == END
    assert sample(x, [row({8, END}, [1] * 5, temperature=0.0, min_tokens=5)])[0].token_id == END
    barred = row({8, 9, END}, temperature=0.0, min_tokens=5, stop_token_ids=[9])
    assert sample(x, [barred])[0].token_id == 8
    only = row({9, END}, temperature=0.0, min_tokens=5, stop_token_ids=[9])
    assert sample(x, [only])[0].token_id == END


def test_a_grammar_s_end_may_come_where_other_parameters_leave_nothing_else():
    x = logits(1)
    x[0, 8] = 30
    bad = BadWords([[8]])

    def drawn(tokens: Collection[int], **params: Any) -> int:
        one = row(tokens, temperature=0.0, min_tokens=5, bad=bad, **params)
        return sample(x, [one])[0].token_id

    assert drawn({8, 9, END}) == 9
    assert drawn({8, END}) == END
    assert drawn({8, 9, END}, allowed_token_ids=[8, END]) == END
    assert drawn({8, 9, END}, allowed_token_ids=[8, 9]) == 9
    nothing = row({8, 9, END}, temperature=0.0, allowed_token_ids=[8], bad=bad)
    error = sample(x, [nothing])[0].error
    assert error is not None
    assert_names(error, "structured_outputs", "allowed_token_ids", "bad_words")


def test_bias_and_penalties_come_before_the_mask():
    x = logits(1)
    assert (
        sample(x, [row({8, 9}, temperature=0.0, logit_bias={20: 10**9, 8: -(10**9)})])[0].token_id
        == 9
    )


def test_a_row_without_a_token_fails_alone():
    x = logits(4)
    x[1, [5, 6]] = -math.inf
    x[2] = math.nan
    rows = [row({5}, seed=1), row({5, 6}), row({5}), row({5}, error="step limit exceeded")]
    alone = sample(x[:1], [row({5}, seed=1)])
    drawn = sample(x, rows)
    assert drawn[:1] == alone
    assert [one.token_id for one in drawn] == [5, -1, -1, -1]
    assert drawn[1].error is not None
    assert_names(drawn[1].error, "0 output tokens", "structured_outputs")
    assert drawn[2].error is not None
    assert "NaN" in drawn[2].error
    assert_names(
        drawn[3].error or "", "structured output", "repetitions, alternatives or rules fewer"
    )
