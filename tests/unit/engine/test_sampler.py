"""The sampler against its definition in plain Python, by χ²; ties, seeds, batch invariance,
log-probabilities.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples

from freight.engine import sampler
from freight.engine.sampler import (
    Sampled,
    SamplingRow,
    _first_by_mask,
    _most_likely,
    _ranks,
    _ranks_on_device,
    highest,
    prompt_logprobs,
    sample,
    sibling_seed,
    uniforms,
)
from freight.sampling import SamplingParams

DRAWS = 3000


def make_row(params, seed=1, position=0, prompt=(), output=(), stops=()):
    return SamplingRow(
        params, seed, tuple(prompt), list(output) or range(position), frozenset(stops)
    )


def draw(logits, params, count=DRAWS, seed=1, first=0, prompt=(), output=()):
    """Tokens of `count` rows at positions first … or, where an output is given, with seeds of their
    own.
    """
    if output:
        rows = [
            make_row(params, sibling_seed(seed, i), prompt=prompt, output=output)
            for i in range(count)
        ]
    else:
        rows = [make_row(params, seed, first + i, prompt) for i in range(count)]
    return [one.token_id for one in sample(logits.expand(count, -1), rows)]


def definition(logits, params, prompt=(), output=()):
    """The probability of every token id, computed with Python floats from the docstring's
    definition.
    """
    x = list(logits)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty
            if x[token] > 0
            else x[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    x = [(value - max(x)) / params.temperature for value in x]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.min_p:
        order = [token for token in order if math.exp(x[token]) >= params.min_p]
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp(x[token]) for token in order}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for token in order:
        kept[token] = weights[token] / total
        mass += kept[token]
        if mass >= params.top_p and params.top_p < 1:
            break
    return [kept.get(token, 0.0) / mass for token in range(len(x))]


def chi_squared_fits(observed, expected):
    """Whether counts fit, at p = 1e-4 (Wilson–Hilferty); bins that expect fewer than 5 are merged."""
    large = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= 5]
    small = [(o, e) for o, e in zip(observed, expected, strict=True) if e < 5]
    if sum(e for _, e in small) > 0:
        large.append((sum(o for o, _ in small), sum(e for _, e in small)))
    elif any(o for o, _ in small):
        return False  # something that cannot be drawn was
    freedom = len(large) - 1
    statistic = sum((o - e) ** 2 / e for o, e in large)
    return (
        statistic <= freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    )


LOGITS = (torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2).round(
    decimals=1
)  # rounded: there are ties
PROMPT = (0, 5, 5, 11)
OUTPUT = (2, 2, 2, 7, 20)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        pytest.param({"temperature": 3.0}, marks=pytest.mark.slow),
        pytest.param({"top_k": 2}, marks=pytest.mark.slow),
        {"top_k": 7},
        pytest.param({"top_k": 1000}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.5}, marks=pytest.mark.slow),
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"logit_bias": {0: 3.0, 4: -100.0, 9: 1.5}},
        {"repetition_penalty": 1.7},
        pytest.param({"repetition_penalty": 0.6}, marks=pytest.mark.slow),
        pytest.param({"presence_penalty": 1.5}, marks=pytest.mark.slow),
        pytest.param({"frequency_penalty": 0.7}, marks=pytest.mark.slow),
        {"frequency_penalty": -0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {
            "temperature": 2.0,
            "min_p": 0.02,
            "top_k": 9,
            "top_p": 0.8,
            "presence_penalty": 1.0,
            "logit_bias": {3: 2.0},
        },
    ],
    ids=str,
)
def test_draws_follow_the_definition(options):
    params = SamplingParams(**options)
    tokens = Counter(draw(LOGITS, params, prompt=PROMPT, output=OUTPUT))
    expected = definition(LOGITS.tolist(), params, PROMPT, OUTPUT)
    assert {token for token, p in enumerate(expected) if p == 0}.isdisjoint(tokens)
    assert chi_squared_fits([tokens[i] for i in range(24)], [p * DRAWS for p in expected])


def test_the_chi_squared_test_tells_neighbours_apart():
    tokens = Counter(draw(LOGITS, SamplingParams(temperature=1.15)))
    expected = definition(LOGITS.tolist(), SamplingParams())
    assert not chi_squared_fits([tokens[i] for i in range(24)], [p * DRAWS for p in expected])


@pytest.mark.parametrize(
    ("options", "first"), [({"top_k": 1}, 2), ({"top_p": 0.4}, 2), ({"logit_bias": {0: -1e9}}, 1)]
)
def test_the_least_random_number_draws_no_token_without_probability(monkeypatch, options, first):
    monkeypatch.setattr(
        sampler, "uniforms", lambda seeds, positions, device: torch.zeros(len(seeds)).double()
    )
    [drawn] = sample(
        torch.tensor([[1.0, 1.0, 2.0]]), [make_row(SamplingParams(temperature=1.0, **options))]
    )
    assert drawn.token_id == first


def test_every_random_row_of_a_mixed_batch_follows_its_own_definition():
    kinds = [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
    ]
    kinds += [SamplingParams(temperature=0), SamplingParams(top_k=5, top_p=0.7, temperature=2.0)]
    rows = [make_row(kinds[i % len(kinds)], seed=9, position=i) for i in range(6 * 1500)]
    tokens = [one.token_id for one in sample(LOGITS.expand(len(rows), -1), rows)]
    for start, params in enumerate(kinds):
        counts = Counter(tokens[start :: len(kinds)])
        if params.greedy:
            assert counts == {int(LOGITS.argmax()): 1500}
        else:
            expected = definition(LOGITS.tolist(), params)
            assert chi_squared_fits([counts[i] for i in range(24)], [p * 1500 for p in expected])


@pytest.mark.parametrize("step", ["position", "seed"])
def test_neighbouring_draws_are_independent(step):
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5])
    p = definition(logits.tolist(), SamplingParams())
    rows = [make_row(SamplingParams(), **{step: i}) for i in range(6001)]
    tokens = [one.token_id for one in sample(logits.expand(len(rows), -1), rows)]
    pairs = Counter(zip(tokens[0:6000:2], tokens[1:6001:2], strict=True))
    observed = [pairs[a, b] for a in range(4) for b in range(4)]
    assert chi_squared_fits(observed, [3000 * p[a] * p[b] for a in range(4) for b in range(4)])


def test_uniforms_are_splitmix64():
    mask = 2**64 - 1

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 12345]
    positions = [0, 1, 2, 3, 1000, 10**6, 2**31, 7]
    expected = [
        (mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask) >> 11) * 2.0**-53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert uniforms(seeds, positions).tolist() == expected


def test_siblings_have_seeds_of_their_own():
    seeds = {sibling_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(128)}
    assert len(seeds) == 3 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sibling_seed(-1, 3) == sibling_seed(2**64 - 1, 3)
    assert (
        len(
            {
                tuple(draw(LOGITS, SamplingParams(), 16, sibling_seed(7, index)))
                for index in range(8)
            }
        )
        == 8
    )


def test_same_seed_same_tokens_and_another_seed_others():
    assert draw(LOGITS, SamplingParams(), 64, seed=5) == draw(LOGITS, SamplingParams(), 64, seed=5)
    assert draw(LOGITS, SamplingParams(), 64, seed=5) != draw(LOGITS, SamplingParams(), 64, seed=6)
    assert draw(LOGITS, SamplingParams(), 64)[10:] == draw(LOGITS, SamplingParams(), 54, first=10)


def test_ties_take_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0, 2.0]])
    assert draw(logits[0], SamplingParams(temperature=0), 1) == [1]
    assert draw(logits[0], SamplingParams(temperature=0, logit_bias={5: 1.0}), 1) == [1]
    assert set(draw(logits[0], SamplingParams(top_k=1), 50)) == {1}
    assert set(draw(logits[0], SamplingParams(top_k=2), 200)) == {1, 3}
    assert set(draw(torch.zeros(8), SamplingParams(top_p=0.5), 400)) == {0, 1, 2, 3}
    assert set(draw(torch.zeros(8), SamplingParams(top_k=6, top_p=1e-9), 50)) == {0}


def test_a_nucleus_wider_than_the_first_candidates():
    logits = torch.zeros(4096)
    logits[:2] = 4.0
    params = SamplingParams(top_p=0.75)
    weight = 2 * math.exp(4.0)
    kept = 2 + math.ceil(0.75 * (weight + 4094) - weight)
    tokens = draw(logits, params, 1500)
    assert max(tokens) < kept + 1
    assert abs(sum(token < 2 for token in tokens) / 1500 - weight / (weight + kept - 2)) < 0.02
    alone = [sample(logits[None], [make_row(params, position=i)])[0].token_id for i in range(20)]
    assert alone == tokens[:20]


def test_min_tokens_bars_stop_ids_until_then():
    logits = torch.tensor([[5.0, 1.0, 0.0]] * 2)
    params = SamplingParams(temperature=0, min_tokens=3)
    rows = [make_row(params, position=position, stops=[0, 99]) for position in (2, 3)]
    assert [one.token_id for one in sample(logits, rows)] == [1, 0]
    found = sample(logits, [make_row(params, stops=[0, 1, 2]), make_row(params, stops=[1, 2])])
    assert found[1] == Sampled(0, None)
    assert (found[0].token_id, found[0].logprobs) == (-1, None)
    assert "min_tokens=3" in found[0].error


def test_logits_of_the_caller_are_not_changed():
    logits = LOGITS[None].clone()
    sample(
        logits,
        [
            make_row(
                SamplingParams(
                    logit_bias={0: 1.0}, min_p=0.1, top_k=3, top_p=0.5, repetition_penalty=2.0
                )
            )
        ],
    )
    assert torch.equal(logits, LOGITS[None])


def test_extreme_values_stay_finite():
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf]])
    for params in (
        SamplingParams(temperature=1e-5, logit_bias={2: -1e9}),
        SamplingParams(temperature=1e9, top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=5e-324),
    ):
        assert draw(logits[0], params, 4) == [0] * 4
    certain = torch.tensor([-math.inf, 0.0, -math.inf])
    assert draw(certain, SamplingParams(top_k=2, top_p=0.99), 8) == [1] * 8


def test_a_penalty_that_overflows_is_named():
    logits = torch.tensor([[3e38, 1.0], [2.0, 1.0]])
    rows = [make_row(SamplingParams(repetition_penalty=0.01, logprobs=1), prompt=(0, 1))] * 2
    found = sample(logits, rows)
    assert (found[0].token_id, found[0].logprobs) == (-1, None)
    assert "repetition_penalty=0.01" in found[0].error
    assert found[1] == sample(logits[1:], rows[1:])[0]
    assert found[1].error is None


OPTIONS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 4},
    {},
    {"temperature": 0.7, "top_k": 40},
    {"top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.99, "temperature": 30.0},
    {"top_k": 1500, "top_p": 0.95, "logprobs": 0},
    {"min_p": 0.1, "logprobs": 20},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
]


@settings(max_examples=examples(25))
@given(
    kinds=st.lists(st.sampled_from(range(len(OPTIONS))), min_size=1, max_size=24),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_has_the_same_bits_in_every_batch(kinds, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = (
        torch.randn(len(kinds), 5003, generator=generator) * 3
    )  # odd: rows lie at every alignment
    rows = [
        make_row(
            SamplingParams(**OPTIONS[kind]),
            seed + i,
            i,
            prompt=(1, 2, 3),
            output=(4, 4, 5),
            stops=(6,),
        )
        for i, kind in enumerate(kinds)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == sample(logits.flip(0), rows[::-1])[::-1]


def spoil(row, kind):
    """A copy of a row of logits with NaN or infinities."""
    row = row.clone()
    if kind == "one nan":
        row[len(row) // 2] = math.nan
    elif kind == "some nan":
        row[::3] = math.nan
    elif kind == "one inf":
        row[-1] = math.inf
    elif kind == "nan and inf":
        row[0], row[1], row[2:] = math.nan, math.inf, -math.inf
    else:
        row[:] = float(kind)
    return row


BAD = ["one nan", "some nan", "one inf", "nan and inf", "nan", "inf", "-inf", "barred"]


@settings(max_examples=examples(40))
@given(
    kinds=st.lists(st.sampled_from(range(len(OPTIONS))), min_size=1, max_size=10),
    bad=st.dictionaries(st.integers(0, 9), st.sampled_from(BAD), max_size=9),
    vocab_size=st.sampled_from([3, 700, 2003]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_bad_row_fails_alone(kinds, bad, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(len(kinds), vocab_size, generator=generator) * 3
    rows = []
    for i, kind in enumerate(kinds):
        params, stops = SamplingParams(**OPTIONS[kind]), ()
        if vocab_size < 8 and params.logit_bias:
            params = dataclasses.replace(params, logit_bias={2: 1.5})
        if bad.get(i) == "barred":
            params, stops = dataclasses.replace(params, min_tokens=16), range(vocab_size)
        elif i in bad:
            logits[i] = spoil(logits[i], bad[i])
        rows.append(make_row(params, seed + i, i, (1, 2), [0, 2, 2], stops))
    good = [i for i in range(len(kinds)) if i not in bad]
    found = sample(logits, rows)
    assert [found[i] for i in good] == sample(logits[good], [rows[i] for i in good])
    for i, one in enumerate(found):
        assert (one.error is not None) == (i in bad)
        if i in bad:
            assert (one.token_id, one.logprobs) == (-1, None)
            assert (
                "barred by min_tokens=16" if bad[i] == "barred" else "NaN or infinite"
            ) in one.error
    spoiled = {i for i in bad if bad[i] != "barred"}
    targets = torch.arange(len(kinds)) % vocab_size
    for i in range(len(kinds)):
        assert (prompt_logprobs(logits[i : i + 1], targets[i : i + 1], 3) is None) == (i in spoiled)
    assert (prompt_logprobs(logits, targets, 3) is None) == any(
        i in spoiled for i in range(len(kinds))
    )


def test_logprobs_are_of_the_model_and_by_rank():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])
    expected = logits.log_softmax(-1)[0].tolist()
    params = SamplingParams(
        temperature=0, logprobs=3, logit_bias={4: 100.0}, repetition_penalty=1.3
    )
    (one,) = sample(logits, [make_row(params, prompt=(1,))])
    assert one.token_id == 4
    assert one.logprobs == (
        (1, expected[1], 1),
        (3, expected[3], 2),
        (2, expected[2], 3),
        (4, expected[4], 5),
    )
    (one,) = sample(logits, [make_row(SamplingParams(temperature=0, logprobs=3))])
    assert one.logprobs == ((1, expected[1], 1), (3, expected[3], 2), (2, expected[2], 3))
    (one,) = sample(logits, [make_row(SamplingParams(temperature=0, logprobs=0))])
    assert one.logprobs == ((1, expected[1], 1),)
    (one,) = sample(logits, [make_row(SamplingParams(temperature=0, logprobs=20))])
    assert [entry[0] for entry in one.logprobs] == [1, 3, 2, 0, 4]
    (one,) = sample(logits, [make_row(SamplingParams(temperature=0))])
    assert one.logprobs is None


def test_prompt_logprobs_have_the_same_form_and_bits():
    logits = torch.randn(70, 301, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    targets = torch.arange(70) * 4
    found = list(prompt_logprobs(logits, targets, 5))
    for row, target, entries in zip(logits, targets.tolist(), found, strict=True):
        order = sorted(range(301), key=lambda token: (-float(row[token]), token))
        wanted = list(dict.fromkeys([*order[:5], target]))
        exact = row.log_softmax(-1).tolist()
        assert entries == tuple((token, exact[token], order.index(token) + 1) for token in wanted)
    assert found == [
        next(iter(prompt_logprobs(logits[i : i + 1], targets[i : i + 1], 5))) for i in range(70)
    ]
    assert [len(entries) for entries in prompt_logprobs(logits, targets, 0)] == [1] * 70
    assert len(prompt_logprobs(logits[:0], targets[:0], 5)) == 0


@given(
    logits=st.lists(
        st.lists(st.sampled_from([-math.inf, -0.5, 0.0, -0.0, 1.0, 2.0]), min_size=7, max_size=7)
    )
)
def test_numpy_and_torch_agree_on_the_most_likely_and_on_ranks(logits):
    x = torch.tensor([*logits, [0.0] * 7])
    for count in range(1, 8):
        assert torch.equal(
            _most_likely(x, count), _first_by_mask(x, x.topk(count).values[:, -1:], count)
        )
    for token in range(7):
        tokens = torch.full((len(x),), token)
        assert torch.equal(_ranks(x, tokens), _ranks_on_device(x, tokens))


def test_the_highest_is_the_first_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, -2.0], [0.0, torch.nan, 5.0]])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(highest(x.to(dtype)), torch.tensor([1, 2, 1]))
        assert torch.equal(highest(x.to(dtype)), x.argmax(-1))
