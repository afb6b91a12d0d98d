"""Observers against plain definitions: the order of pieces does not matter, NaN and infinities are
refused by name.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freight.errors import CheckpointError
from freight.fp8.cast import decode, encode, scale_from_amax
from freight.fp8.formats import Format, Granularity
from freight.kernels.reference import rotate
from freight.quantizer.observers import MSE_STEPS, PERCENTILE, by_group, make_observer, pair_norms
from freight.quantizer.plan import ObserverKind

KINDS = tuple(ObserverKind)


def draw(groups: int, count: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(groups, count, generator=generator).pow(3) * spread


def amax_of(kind: ObserverKind, *pieces: torch.Tensor) -> torch.Tensor:
    observer = make_observer(kind, "x", len(pieces[0]))
    for piece in pieces:
        observer.observe(piece)
    return observer.amax()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_in_any_order_give_what_the_whole_gives(kind: ObserverKind):
    values = draw(3, 4000)
    whole = amax_of(kind, values)
    assert torch.equal(whole, amax_of(kind, *values.split(700, 1)))
    assert torch.equal(whole, amax_of(kind, *reversed(values.split(700, 1))))


def test_absmax_is_exact_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = draw(2, 999).to(dtype)
        assert torch.equal(amax_of(ObserverKind.ABSMAX, values), values.abs().amax(1).float())


def test_percentile_lets_go_of_the_rarest_values():
    values = draw(2, 50_000)
    values[1, 123] = 1e6  # one outlier of 50 000
    got = amax_of(ObserverKind.PERCENTILE, values)
    exact = np.quantile(values.abs().numpy(), PERCENTILE, axis=1, method="inverted_cdf")
    assert np.all(got.numpy() >= exact)
    assert np.all(got.numpy() <= exact * (1 + 2**-6))
    assert got[1] < 100


def test_percentile_of_few_values_is_their_largest():
    values = draw(4, 50)
    assert torch.equal(amax_of(ObserverKind.PERCENTILE, values), values.abs().amax(1))


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_mse_is_within_noise_of_the_best_of_all_candidates(spread: float):
    values = draw(2, 20_000, spread=spread)
    values[1, 7] *= 1e3

    def error(amax: torch.Tensor) -> torch.Tensor:
        scale = scale_from_amax(amax, Format.E4M3FN)[:, None]
        return (decode(encode(values, scale, Format.E4M3FN), scale) - values).square().sum(1)

    largest = values.abs().amax(1)
    errors = torch.stack(
        [error(factor * largest) for factor in torch.linspace(1.0, 0.5, MSE_STEPS)]
    )
    got = amax_of(ObserverKind.MSE, values)
    assert torch.all(error(got) <= errors.amin(0) * 1.1)
    assert torch.all(got <= largest)
    assert torch.all(got >= largest / 2)


def test_mse_clips_one_large_value_where_all_others_fall_between_two_numbers():
    values = torch.full((1, 100_000), 1.06)
    values[0, 0] = 1.5
    assert amax_of(ObserverKind.MSE, values) < 0.75 * 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zero_and_nothing_else_does(kind: ObserverKind):
    values = draw(2, 1000)
    values[0] = 0.0
    got = amax_of(kind, values)
    assert got[0] == 0
    assert got[1] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_what_is_not_finite_is_refused_by_name(kind: ObserverKind, bad: float, word: str):
    observer = make_observer(kind, "layer 7: keys", 2)
    values = draw(2, 100)
    values[1, 50] = bad
    with pytest.raises(CheckpointError, match=f"layer 7: keys: {word}"):
        observer.observe(values)


def test_groups_are_what_shares_a_scale():
    values = torch.arange(2 * 3 * 4).view(2, 3, 4).float()  # tokens, heads, channels
    for granularity, dims in (
        (Granularity.TENSOR, (0, 1, 2)),
        (Granularity.HEAD, (0, 2)),
        (Granularity.CHANNEL, (0,)),
    ):
        grouped = by_group(values, granularity)
        assert len(grouped) == granularity.num_scales(3, 4)
        assert torch.equal(grouped.amax(1), values.amax(dims).flatten())


def test_a_rotation_exceeds_no_norm_of_its_pair():
    """Keys as rope turns them at any position, with channels that are not rotated behind."""
    keys = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0))
    norms = pair_norms(keys, 8)
    for position in range(0, 4000, 37):
        angles = position * torch.tensor([1.0, 0.1, 0.01, 0.001])
        turned = rotate(keys, angles.cos()[None], angles.sin()[None])
        assert bool((turned.abs() <= norms.abs() + 1e-6).all())
        torch.testing.assert_close(pair_norms(turned, 8), norms)
    assert torch.equal(norms[..., 8:], keys[..., 8:])
    assert torch.equal(pair_norms(keys, 0), keys)
