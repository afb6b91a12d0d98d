"""What parameters change in logits: to the bit as defined, however the output grew and whatever was
interrupted.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.shares import examples

from freight.engine import adjust as module
from freight.engine.adjust import SamplingRow, adjust
from freight.engine.bad_words import BadWords
from freight.sampling import SamplingParams

VOCAB = 23


def definition(logits, row):
    """The definition of bias, penalties and min_tokens for one row, from the whole prompt and
    output.
    """
    x, params, prompt, output = (
        logits.clone(),
        row.params,
        row.prompt_token_ids,
        row.output_token_ids,
    )
    for token, bias in params.logit_bias.items():
        x[token] += torch.tensor(bias)
    penalty = torch.tensor(params.repetition_penalty)
    for token in {*prompt, *output}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(output).items():
        x[token] -= torch.tensor(params.presence_penalty + params.frequency_penalty * count)
    if len(output) < params.min_tokens:
        for token in row.stop_token_ids:
            if token < VOCAB:
                x[token] = -math.inf
    words = [] if row.bad_words is None else row.bad_words.words
    for token in range(VOCAB):
        text = [*output, token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
        if any(text[-len(word) :] == word for word in words):
            x[token] = -math.inf
    return x


class Words(BadWords):
    """Some words, which the definition reads as they were given."""

    def __init__(self, words):
        super().__init__(words)
        self.words = words


def bits(x):
    return x.view(torch.int32).tolist()


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.sampled_from([0.0, -0.0, -1e-60, 0.3, -0.7, 2.0, 1e-8]) | st.floats(-2, 2)
rows = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.6, 1 + 1e-9, 1 - 1e-9, 0.01, 100.0])
    | st.floats(0.01, 100),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-1e9, 1e9), max_size=4),
    min_tokens=st.integers(0, 6),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB),
)
few = st.lists(st.integers(0, 3), max_size=12)  # of few tokens, so that words are begun and ended
words = st.none() | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4).map(
    Words
)
logits = st.lists(
    st.floats(width=32, allow_nan=False)
    | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -math.inf]),
    min_size=VOCAB,
    max_size=VOCAB,
).map(lambda values: torch.tensor(values, dtype=torch.float32))


@settings(max_examples=examples(200))
@given(params=rows, x=logits, prompt=tokens, growth=st.lists(tokens | few, max_size=4), bad=words)
@example(
    bad=None,
    params=SamplingParams(presence_penalty=-0.0),
    x=torch.full((VOCAB,), -0.0, dtype=torch.float32),
    prompt=[],
    growth=[[17]],
)
def test_a_growing_output_gives_the_bits_of_the_definition(params, x, prompt, growth, bad):
    output = []
    row = SamplingRow(params, 1, tuple(prompt), output, frozenset({3, 4, 99}), bad_words=bad)
    for fresh in ([], *growth):
        output += fresh
        before = x.clone()
        adjusted = adjust(x[None], [row])
        assert bits(adjusted[0]) == bits(definition(x, row))
        assert bits(x) == bits(before)


@settings(max_examples=examples(60))
@given(params=rows, x=logits, prompt=tokens, output=tokens, ahead=tokens | few, bad=words)
def test_a_fork_goes_on_alone(params, x, prompt, output, ahead, bad):
    row = SamplingRow(params, 1, tuple(prompt), output, frozenset({3, 4, 99}), bad_words=bad)
    adjust(x[None], [row])  # what it keeps is made
    own = list(output)
    fork = row.fork(own)
    for token in ahead:
        own.append(token)
        assert fork.position == len(own)
        assert bits(adjust(x[None], [fork])[0]) == bits(definition(x, fork))
    assert bits(adjust(x[None], [row])[0]) == bits(definition(x, row))
    output += ahead[:2]
    assert bits(adjust(x[None], [row])[0]) == bits(definition(x, row))


@settings(max_examples=examples(100))
@given(params=rows, x=logits, prompt=tokens, parts=st.lists(tokens | few, max_size=3), bad=words)
def test_rows_along_an_output_give_the_bits_of_the_definition(params, x, prompt, parts, bad):
    """The output comes in parts, as in several steps; each part is taken at once."""
    stops = frozenset({3, 4, 99})
    row = SamplingRow(params, 1, tuple(prompt), [], stops, bad_words=bad)
    output = []
    for part in parts:
        first = len(output)
        output += part
        along = row.along(output, len(part))
        found = adjust(x.expand(len(part), -1).contiguous(), along)
        for length, one in enumerate(along, first):
            alone = SamplingRow(params, 1, tuple(prompt), output[:length], stops, bad_words=bad)
            assert (one.position, list(one.output_token_ids)) == (length, output[:length])
            assert bits(found[length - first]) == bits(definition(x, alone))
    assert bits(adjust(x[None], [row])[0]) == bits(definition(x, row))


class Interrupt(BaseException):
    """As Ctrl-C would raise it."""


def raise_at_line(count):
    """A trace function that raises Interrupt before the count-th line run in adjust.py, and at no
    later one.
    """

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count -= 1
            if count == 0:
                raise Interrupt
        return trace

    return trace


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_an_exception_at_any_line_leaves_a_row_usable(num_before):
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 2.0},
        allowed_token_ids=range(1, VOCAB),
    )
    bad = Words([[4], [2, 2], [7, 0, 9]])
    x = torch.linspace(-2, 2, VOCAB)[None]
    pieces = ([], [2, 2], [2, 7, 7, 0], [9], [9, 2])
    outer, lines, interrupted = sys.gettrace(), 0, True
    while interrupted:  # until there are fewer lines than that
        lines += 1
        output = []
        row = SamplingRow(params, 1, (0, 5), output, frozenset(), bad_words=bad)
        for i, fresh in enumerate(pieces):
            output += fresh
            if i == num_before:
                try:
                    sys.settrace(raise_at_line(lines))
                    adjust(x, [row])
                    interrupted = False
                except Interrupt:
                    pass
                finally:
                    sys.settrace(outer)
            if i != num_before or lines % 2:  # a retry at once, or with more tokens
                assert bits(adjust(x, [row])[0]) == bits(definition(x[0], row))
    assert lines > 20


def test_a_step_sends_only_the_tokens_that_are_new(monkeypatch):
    output = list(range(20)) * 50
    params = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.25, logit_bias=dict.fromkeys(range(20), 1.0)
    )
    row = SamplingRow(params, 1, tuple(range(20)) * 50, output, frozenset())
    x = torch.zeros(1, VOCAB)
    adjust(x, [row])
    sent, send = [], module.send

    def recorded(values, dtype, device):
        sent.append(len(values))
        return send(values, dtype, device)

    monkeypatch.setattr(module, "send", recorded)
    for _ in range(3):
        output.append(21)
        adjust(x, [row])
    assert sent == [1] * 6


def test_a_row_without_changes_gives_the_logits_themselves():
    x = torch.zeros(2, VOCAB)
    row = SamplingRow(SamplingParams(min_tokens=2), 1, (1,), [1, 2], frozenset({3}))
    assert adjust(x, [row, row]) is x


def test_a_row_follows_the_logits_to_another_vocabulary_size():
    row = SamplingRow(SamplingParams(repetition_penalty=2.0), 1, (1,), [2], frozenset())
    assert adjust(torch.ones(1, 4), [row])[0].tolist() == [1, 0.5, 0.5, 1]
    assert adjust(torch.ones(1, 3), [row])[0].tolist() == [1, 0.5, 0.5]
