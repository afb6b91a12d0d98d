"""Windows, perplexity and divergence against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from freight.lab.evaluate.divergence import TILE, Reference, kl_divergence
from freight.lab.evaluate.measure import mean_perplexity
from freight.lab.evaluate.perplexity import cut_windows, of_targets


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
    chosen = of_targets(logprobs, torch.arange(10))
    assert mean_perplexity(chosen) == pytest.approx(64.0)


def plainly(
    first: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """In float64, by the definitions: log-probability of the target, KL, the same top token."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (first, other))
    return (
        q.gather(-1, targets[:, None])[:, 0],
        kl_divergence(p, q),
        first.argmax(-1) == other.argmax(-1),
    )


@pytest.mark.parametrize("shift", [0.0, 30.0, -500.0, 3e4], ids=str)
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 7), (5, 50), (2 * TILE // 4096 + 3, 4096), (2, 2 * TILE)], ids=str
)
@pytest.mark.parametrize("noise", [1e-2, 3.0])
def test_a_judgement_is_that_of_the_definitions(rows: int, size: int, noise: float, shift: float):
    """Whether or not the sum of exponentials needs the largest subtracted, and over several pieces."""
    torch.manual_seed(0)
    first = 3 * torch.randn(rows, size) + shift
    other = first + noise * torch.randn(rows, size)
    targets = torch.randint(0, size, (rows,))
    reference = Reference.of(first)
    logprobs, kl, same = reference.judge(other, targets)
    expected = plainly(first, other, targets)
    assert (logprobs.dtype, kl.dtype, same.dtype) == (torch.float32, torch.float32, torch.bool)
    assert torch.allclose(logprobs.double(), expected[0], rtol=1e-6, atol=2e-6)
    assert torch.allclose(kl.double(), expected[1], rtol=2e-6, atol=1e-6)
    assert torch.equal(same, expected[2])
    for found, exact in zip(
        reference.judge(first, targets), reference.itself(targets), strict=True
    ):
        assert torch.allclose(found.double(), exact.double(), rtol=1e-6, atol=5e-7)
    assert torch.allclose(
        reference.itself(targets)[0].double(), plainly(first, first, targets)[0], rtol=1e-6
    )


def test_a_judgement_with_impossible_tokens():
    p, q = torch.tensor([[0.5, 0.5, 0.0]] * 2).log(), torch.tensor([[0.25, 0.5, 0.25]] * 2).log()
    targets = torch.tensor([1, 2])
    for first, other in ((p, q), (q, p), (p, p)):
        logprobs, kl, same = Reference.of(first).judge(other, targets)
        expected = plainly(first, other, targets)
        assert torch.allclose(logprobs.double(), expected[0])
        assert torch.allclose(kl.double(), expected[1], atol=1e-6)
        assert torch.equal(same, expected[2])
