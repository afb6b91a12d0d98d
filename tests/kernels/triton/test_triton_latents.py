"""Attention over latents: keys in two parts, values inside them, and more heads than a program
takes.
"""

from __future__ import annotations

import pytest
import torch
from tests.covering import covered
from tests.kernels.triton.test_triton_attention import (
    CACHES,
    DECODES,
    MIXED,
    Case,
    assert_close,
    small,
)
from tests.layouts import apart, laid_out, latent

from freight.fp8.formats import Format
from freight.kernels.reference import Fp8Products
from freight.kernels.triton import paged
from freight.kernels.triton.formats import Target

__all__ = ["small"]  # a fixture, used by all tests here
STEPS = {"decode": DECODES, "mixed": [(5, 0), (1, 40), (9, 14)]}
STORED = [
    (Format.E4M3FN, "static"),
    (Format.E4M3FN, "token"),
    (Format.E5M2, "unit"),
    (Format.BFLOAT16, "unit"),
]


def latents(step, stored, device) -> Case:
    """576 channels, of which the last 512 are values. 17 heads are more than the 16 rows of a tile."""
    case = Case(STEPS[step], *stored, torch.bfloat16, 1, 17, 576, device, v_dim=512)
    case.pages = latent(case.pages, 64)
    return case


def run(case: Case, *arguments, **options) -> torch.Tensor:
    out = case.run(range(len(case.sequences)), *arguments, **options)
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize(("stored", "step"), covered(CACHES, STEPS))
def test_latents(stored, step, device):
    case = latents(step, stored, device)
    made = paged.constants(case.q[0], case.pages, None, None)
    assert (made["REST"], made["K_BLOCK"], made["INSIDE"]) == (64, 512, True)
    assert_close(run(case), run(case, None, torch.float32))


@pytest.mark.parametrize(("stored", "first", "step"), covered(STORED, [64, 0], STEPS))
def test_values_that_are_read_with_the_keys_have_the_bits_of_their_own(stored, first, step, device):
    case = Case(STEPS[step], *stored, torch.bfloat16, 1, 17, 576, device, v_dim=512)
    inside = latent(case.pages, first)
    found = []
    for pages in (inside, apart(inside)):
        case.pages = pages
        found.append(run(case))
        assert paged.constants(case.q[0], pages, None, None)["INSIDE"] == (
            pages is inside and first == 64
        )
    assert torch.equal(*found)


def test_fp8_products_over_latents(device):
    case = latents("mixed", (Format.E4M3FN, "static"), device)
    found = run(case, products=Fp8Products.BOTH)
    exact = run(case, None, torch.float32)
    assert 0.0 < (found - exact).norm() < 0.1 * exact.norm()
    case.pages = apart(case.pages)
    assert torch.equal(run(case, products=Fp8Products.BOTH), found)


@pytest.mark.parametrize("stored", [(Format.E4M3FN, "token"), (Format.BFLOAT16, "unit")])
def test_neither_other_sequences_nor_chunks_nor_programs_change_a_bit(stored, monkeypatch, device):
    case = latents("mixed", stored, device)
    together = run(case).split([rows for rows, _ in case.sequences])
    for programs in (1, 3):
        monkeypatch.setattr(paged, "programs_for", lambda *_, programs=programs: programs)
        for i, expected in enumerate(together):
            assert torch.equal(case.run([i]), expected)
    case.sequences = [(3, 0), *case.sequences[1:]]
    assert torch.equal(case.run([0]), together[0][:3])
    case.sequences = [(2, 3), *case.sequences[1:]]
    assert torch.equal(case.run([0]), together[0][3:])


@pytest.mark.parametrize("layout", ["heads", "blocks"])
def test_keys_in_two_parts_are_read_in_any_layout(layout, monkeypatch, device):
    """Also beside values of their own, of few channels: 40 = 8 + 32."""
    monkeypatch.setattr(paged, "WHOLE", 16)
    case = Case(MIXED, Format.E4M3FN, "token", torch.bfloat16, 2, 3, 40, device, v_dim=24)
    assert paged.constants(case.q[0], case.pages, None, None)["REST"] == 8
    expected = run(case)
    assert_close(expected, run(case, None, torch.float32))
    case.pages = laid_out(case.pages, layout)
    assert torch.equal(run(case), expected)


@pytest.mark.parametrize(
    ("group", "rows", "decoding", "prefill"),
    [
        (16, 16, 16, 16),
        (128, 16, 16, 16),
        (128, 32, 32, 32),
        (20, 16, 10, 5),
        (20, 32, 20, 10),
        (8, 32, 8, 8),
    ],
)
def test_heads_of_a_program(group, rows, decoding, prefill):
    assert paged.heads_taken(group, rows, 576, True) == decoding
    assert paged.heads_taken(group, rows, 576, False) == prefill
    assert paged.heads_taken(group, rows, 256, False) == group


def test_head_sizes_that_are_split():
    whole = (8, 16, 24, 64, 80, 96, 128, 256, 512)
    assert [paged.rest_of(size) for size in whole] == [0] * len(whole)
    assert [paged.rest_of(size) for size in (160, 192, 320, 576)] == [32, 64, 64, 64]


@pytest.mark.parametrize(
    "target", [Target("cuda", 80), Target("cuda", 89), Target("cuda", 90), Target("hip", "gfx942")]
)
def test_tiles_of_latents_hold_few_sums(target):
    for size in (1, 2, 4):
        tiles = [
            *(TILES[0](target, 576, size, False, stored) for stored in (1, 2)),
            *(TILES[1](target, 576, size, group) for group in (1, 128)),
            TILES[1](target, 576, size, 128, 2),
        ]
        assert all(tile.rows <= 8 * tile.warps and 64 % tile.keys == 0 for tile in tiles)
        assert all(tile.keys >= (32 if size == 1 else 16) for tile in tiles)


TILES = (paged.prefill_tile, paged.decode_tile)  # before `small` replaces them
