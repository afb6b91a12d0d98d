"""Windows, perplexity and divergence against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from freight.evaluate.divergence import kl_divergence, same_top
from freight.evaluate.perplexity import cut_windows, perplexity, target_logprobs


@given(count=st.integers(2, 200), length=st.integers(2, 40))
def test_with_a_begin_token_every_token_is_judged_once(count: int, length: int):
    windows = cut_windows(range(count), length, bos_token_id=999)
    assert [target for window in windows for target in window.targets] == list(range(count))
    for window in windows:
        assert len(window.token_ids) == len(window.targets) <= length
        assert window.token_ids == [999, *window.targets[:-1]]


@given(count=st.integers(2, 200), length=st.integers(2, 40))
def test_without_one_only_the_first_of_a_text_is_not_judged(count: int, length: int):
    windows = cut_windows(range(count), length, bos_token_id=None)
    assert [target for window in windows for target in window.targets] == list(range(1, count))
    assert all(window.token_ids == [t - 1 for t in window.targets] for window in windows)
    assert all(len(window.token_ids) < length for window in windows)


def test_kl_divergence_is_torch_s_and_zero_for_equals():
    torch.manual_seed(0)
    p, q = (torch.randn(9, 50).log_softmax(-1) for _ in range(2))
    expected = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(kl_divergence(p, q), expected, atol=1e-6)
    assert (kl_divergence(p, p) == 0).all()


def test_kl_divergence_of_impossible_tokens():
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert kl_divergence(p, q).item() == pytest.approx(0.5 * math.log(2))
    assert kl_divergence(q, p).item() == math.inf


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    logprobs = torch.zeros(10, 64).log_softmax(-1)
    chosen = target_logprobs(logprobs, torch.arange(10))
    assert perplexity(float(chosen.sum()), 10) == pytest.approx(64.0)


def test_same_top():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 5.0], [1.0, 2.0]])
    assert same_top(a, b).tolist() == [True, False]
