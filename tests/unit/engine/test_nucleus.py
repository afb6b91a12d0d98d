"""top_p against a sort and a running sum in plain Python, to the token, for flat and for peaked
distributions.
"""

from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples

from freight.engine import sampler
from freight.engine.sampler import SamplingRow, sample, uniforms
from freight.sampling import SamplingParams


def nucleus_draw(logits, params, seed, position):
    """The token that the definition draws from one row, with the nucleus found by a sort and a
    running sum.
    """
    p = ((logits - logits.max()) / params.temperature).softmax(-1).tolist()
    kept, mass = set(), 0.0
    for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
        kept.add(token)
        mass += p[token]
        if mass >= params.top_p:
            break
    sums, mass = [], 0.0
    for token in range(len(p)):
        mass += p[token] if token in kept else 0.0
        sums.append(mass)
    goal = min(float(uniforms([seed], [position])) * mass, math.nextafter(mass, 0.0))
    return next(token for token, total in enumerate(sums) if total > goal)


def in_two_steps(p, width):
    """`_largest` as on a GPU: the most likely 1024 first, then all of the rows that need more."""
    return p.topk(min(width, p.shape[-1])).values


@settings(max_examples=examples(40))
@given(
    largest=st.sampled_from([sampler._largest, in_two_steps]),
    vocab_size=st.sampled_from([900, 1024, 1025, 4096]),
    decimals=st.sampled_from([0, 1, 6]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, math.nextafter(1.0, 0.0)]),
    seed=st.integers(0, 2**63),
)
def test_a_nucleus_of_any_width_is_the_definition_s(
    largest, vocab_size, decimals, spread, top_p, seed
):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.round(
        torch.randn(3, vocab_size, generator=generator) * spread, decimals=decimals
    )
    params = [
        SamplingParams(top_p=top_p),
        SamplingParams(top_p=0.9, temperature=20.0),
        SamplingParams(top_p=top_p),
    ]
    rows = [SamplingRow(one, seed + i, (), range(i), frozenset()) for i, one in enumerate(params)]
    expected = [nucleus_draw(logits[i], one, seed + i, i) for i, one in enumerate(params)]
    with mock.patch.object(sampler, "_largest", largest):
        assert [one.token_id for one in sample(logits, rows)] == expected


def test_only_the_row_with_a_wide_nucleus_is_done_again(monkeypatch):
    shapes = []

    def recorded(p, width):
        shapes.append((p.shape[0], width))
        return in_two_steps(p, width)

    monkeypatch.setattr(sampler, "_largest", recorded)
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 8
    logits[2] = 0
    logits[4] = math.nan
    sample(
        logits, [SamplingRow(SamplingParams(top_p=0.9), i, (), (), frozenset()) for i in range(6)]
    )
    assert shapes == [(6, 1024), (1, 5000)]
