"""Operations that keep a state, in Triton: against the reference, and the same bits in any cut into
calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.state_cases import (
    STATE_FORMATS,
    Layer,
    check_convolution_taken_back,
    check_recurrence_taken_back,
    in_calls,
    sequences,
    token_by_token,
)
from tests.kernels.triton.test_triton_elementwise import assert_close
from torch import Tensor

from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.kernels.triton.formats import current_target
from freight.kernels.triton.rows import quantize
from freight.kernels.triton.triton_set import TritonKernels
from freight.operands.batch import Sequences
from freight.operands.recurrence import Convolution, DecayParameters, GatedNorm, RecurrenceRule
from freight.operands.states import States
from freight.operands.tiles import LEAST_DECAY, STATE_TILE
from freight.operands.weight import Activations, Weight

BLOCKS = (3, 1, 4, 2, 0)
TRITON = TritonKernels(current_target())
SMALL = Layer(key_heads=1, heads=1, k_dim=24, v_dim=20)
DTYPES = [torch.float32, torch.bfloat16]


def moved(states: States, device: str) -> States:
    return States({name: part.to(device) for name, part in states.parts.items()}, states.every)


def where(parts: Sequence[tuple[int, int, Sequence[int]]], device: str) -> Sequences:
    made = sequences(parts)
    return Sequences(
        made.query_starts.to(device), made.context_lens.to(device), made.block_tables.to(device)
    )


def on(device: str, rule: RecurrenceRule) -> RecurrenceRule:
    return rule if rule.skip is None else replace(rule, skip=rule.skip.to(device))


def run(
    kernels: Any,
    layer: Layer,
    rows: int,
    cuts: tuple[int, ...],
    device: str,
    half_life: float = 20.0,
) -> tuple[Tensor, States]:
    inputs, states = layer.inputs(rows, half_life=half_life), moved(layer.states(6), device)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    rule = on(device, layer.rule)

    def call(part: slice, of: Sequences) -> Tensor:
        lengths = Sequences(
            of.query_starts.to(device), of.context_lens.to(device), of.block_tables.to(device)
        )
        return kernels.recurrence(
            **{n: x[part] for n, x in inputs.items()}, states=states, sequences=lengths, rule=rule
        )

    return in_calls(call, rows, cuts, BLOCKS), states


def written(states: States, tokens: int) -> dict[str, Tensor]:
    """All that means something in the states of `tokens` tokens in BLOCKS, but for rows of tiles
    that are over.
    """
    blocks = BLOCKS[: -(-tokens // states.every)]  # torch 2.9 does not index FP8 by a list
    parts = {
        name: torch.stack([part[block] for block in blocks]) for name, part in states.parts.items()
    }
    for name in ("k", "u", "decay"):
        if tokens % states.every:
            parts[name][-1, (tokens - 1) % STATE_TILE + 1 :] = 0
    return {name: part.view(torch.uint8) for name, part in parts.items()}


def bits(states: States, name: str, block: int) -> Tensor:
    return states.parts[name][block].contiguous().view(torch.uint8)


def assert_near(found: Tensor, wanted: Tensor, share: float) -> None:
    """Within this share of the largest value."""
    assert found.dtype == wanted.dtype
    assert found.isfinite().all()
    assert (found.float() - wanted.float()).abs().max() <= share * wanted.float().abs().max()


CUTS = {
    Format.FLOAT32: (1,), Format.BFLOAT16: (7,), Format.INT8: (16, 3), Format.E4M3FN: (33, 1), Format.E4M3FNUZ: (5,)
}  # fmt: skip
# in every run, each with one cut; the others, and all cuts of all, are slow
OFTEN = [
    (True, torch.float32, Format.FLOAT32),
    (True, torch.bfloat16, Format.INT8),
    (False, torch.bfloat16, Format.BFLOAT16),
    (False, torch.float32, Format.E4M3FN),
    ("channels", torch.float32, Format.FLOAT32),
    ("channels", torch.bfloat16, Format.INT8),
]


@pytest.mark.parametrize(
    ("delta", "dtype", "format", "cuts"),
    [
        *((*case, (CUTS[case[2]],)) for case in OFTEN),
        *(
            pytest.param(*case, tuple(CUTS.values()), marks=pytest.mark.slow)
            for case in itertools.product((True, False, "channels"), DTYPES, STATE_FORMATS)
        ),
    ],
    ids=str,
)
def test_a_recurrence_is_the_reference_in_any_cut(delta, dtype, format, cuts, device):
    layer, rows = (
        replace(
            SMALL, delta=bool(delta), by_channel=delta == "channels", format=format, dtype=dtype
        ),
        34,
    )
    whole, states = run(TRITON, layer, rows, (rows,), device)
    wanted, kept = run(REFERENCE, layer, rows, (rows,), device)
    rounding = 2e-6 if dtype is torch.float32 else 2**-7
    if format is Format.FLOAT32:
        assert_near(whole, wanted, rounding)
    else:  # a sum in another order may round to the value beside it, which all later rows see
        assert_near(whole, wanted, max(rounding, 2e-3))
        assert ((whole - wanted).abs() <= rounding * wanted.abs().max()).float().mean() > 0.95
        ours, theirs = (one.parts["state"].float()[[3, 1]] for one in (states, kept))
        assert (ours != theirs).float().mean() < 0.02
    for cut in cuts:
        parts, again = run(TRITON, layer, rows, cut, device)
        assert torch.equal(whole, parts), cut
        for name, part in written(states, rows).items():
            assert torch.equal(part, written(again, rows)[name]), (cut, name)


def test_a_decay_beyond_float32_forgets_what_was_before(device):
    found, _ = run(TRITON, SMALL, 18, (18,), device, half_life=1e-42)
    wanted, _ = run(REFERENCE, SMALL, 18, (18,), device, half_life=1e-42)
    assert_near(found, wanted, 2e-6)


@pytest.mark.parametrize("decay", [0.0, -80.0, LEAST_DECAY, -torch.inf])
def test_a_channel_that_is_forgotten_leaves_the_others_what_they_know(decay, device):
    layer = replace(SMALL, by_channel=True)
    inputs = layer.inputs(19, half_life=1000.0)
    inputs["log_decay"][:, :, 1::2] = decay
    inputs = {name: x.to(device) for name, x in inputs.items()}
    states = moved(layer.states(2), device)
    found = TRITON.recurrence(
        **inputs, states=states, sequences=where([(0, 19, (1,))], device), rule=layer.rule
    )
    assert_near(
        found.cpu().double(), token_by_token(layer, {n: x.cpu() for n, x in inputs.items()}), 1e-5
    )


@pytest.mark.parametrize("by_channel", [False, True])
def test_sequences_of_a_batch_do_not_see_each_other(by_channel, device):
    """One that goes on in its tile and beyond it, one whose block begins, a new one with NaN, and
    padding; q, k and v are columns of one tensor, and two value heads share a key head."""
    layer = replace(
        SMALL, key_heads=2, heads=4, format=Format.INT8, dtype=torch.bfloat16, by_channel=by_channel
    )
    history, filled = layer.inputs(32, 1), layer.states(6)
    for part, blocks in ((slice(0, 15), (3,)), (slice(0, 32), (1,))):
        of = {name: x[part] for name, x in history.items()}
        lengths = sequences([(0, part.stop, blocks)])
        REFERENCE.recurrence(**of, states=filled, sequences=lengths, rule=layer.rule)
    inputs = layer.inputs(7, 2)
    inputs["v"][4:6] = torch.nan
    sizes = [inputs[name].shape[1] for name in ("q", "k", "v")]
    wide = torch.cat([inputs[name] for name in ("q", "k", "v")], 1).to(device)
    columns = dict(zip(("q", "k", "v"), wide.split(sizes, 1), strict=True))
    ours = {name: x.to(device) for name, x in inputs.items()} | columns

    def call(
        kernels: Any, parts: Any, of: slice, given: dict[str, Tensor]
    ) -> tuple[Tensor, States]:
        states = moved(
            States({name: part.clone() for name, part in filled.parts.items()}, layer.every), device
        )
        rows = {name: x[of].to(device) for name, x in given.items()}
        return kernels.recurrence(
            **rows, states=states, sequences=where(parts, device), rule=layer.rule
        ), states

    parts = [(15, 3, (3,)), (32, 1, (1, 4)), (0, 2, (2,))]
    out, states = call(TRITON, [*parts, (-1, 1, (0,))], slice(0, 7), ours)
    wanted, kept = call(REFERENCE, parts, slice(0, 6), inputs)
    assert_near(out[:4], wanted[:4], 2**-7)
    assert out[4:6].isnan().all()
    for name in states.parts:  # the source of another block, and the block that padding names
        for block in (1, 0):
            assert torch.equal(bits(states, name, block), bits(filled, name, block).to(device)), (
                name
            )
    for name in ("state", "scale"):
        assert (bits(states, name, 3) == bits(kept, name, 3)).float().mean() > 0.98
    alone, again = call(TRITON, parts[:1], slice(0, 3), inputs)
    assert torch.equal(out[:3], alone)
    assert all(torch.equal(bits(states, name, 3), bits(again, name, 3)) for name in states.parts)


@pytest.mark.parametrize(
    ("width", "biased", "dtype"),
    [(2, False, torch.float32), (4, True, torch.bfloat16), (8, True, torch.float32)],
)
def test_a_convolution_is_the_reference_in_any_cut(width, biased, dtype, device):
    """Inputs are columns of a larger tensor; blocks of 16 tokens begin inside calls."""
    torch.manual_seed(0)
    x, rows, channels = torch.randn(34, 2 * 72).to(dtype).to(device)[:, 7:79], 34, 72
    weight, bias = (
        torch.randn(channels, width).to(dtype).to(device),
        torch.randn(channels).to(dtype).to(device),
    )
    found = []
    for kernels, cuts in (
        (REFERENCE, (34,)),
        (TRITON, (34,)),
        (TRITON, (1,)),
        (TRITON, (7, 1, 2)),
        (TRITON, (33,)),
    ):
        columns = torch.full((6, width - 1, channels), torch.nan).to(dtype).to(device)
        states = States({"columns": columns}, 16)

        def call(
            part: slice, of: Sequences, kernels: Any = kernels, states: States = states
        ) -> Tensor:
            lengths = Sequences(
                of.query_starts.to(device), of.context_lens.to(device), of.block_tables.to(device)
            )
            return kernels.convolve(
                x[part], Convolution(weight, bias if biased else None, biased), states, lengths
            )

        found.append((in_calls(call, rows, cuts, BLOCKS), columns[list(BLOCKS[:3])]))
    (wanted, kept), (whole, _), *_ = found
    assert_close(whole, wanted)
    for out, columns in found[1:]:
        assert torch.equal(out, whole)
        assert torch.equal(columns, kept)


def test_convolutions_of_a_batch_and_padding(device):
    """Of one row each, and of more: the same bits."""
    torch.manual_seed(0)
    channels, width = 20, 4
    x, weight = torch.randn(9, channels).to(device), torch.randn(channels, width).to(device)
    filled = torch.randn(6, width - 1, channels).to(device)

    def call(kernels: Any, parts: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        columns = filled.clone()
        states = States({"columns": columns}, 16)
        return kernels.convolve(
            rows, Convolution(weight, None, True), states, where(parts, device)
        ), columns

    many = [(0, 3, (3,)), (15, 2, (1, 4)), (32, 1, (5, 5, 2))]
    out, columns = call(TRITON, [*many, (-1, 1, (0,))], x[:7])
    wanted, kept = call(REFERENCE, many, x[:6])
    assert_close(out[:6], wanted)
    assert torch.equal(columns, kept)
    single = [(2, 1, (3,)), (16, 1, (1, 4)), (-1, 1, (0,))]
    out, columns = call(TRITON, single, x[:3])
    wanted, kept = call(REFERENCE, single[:2], x[:2])
    assert_close(out[:2], wanted)
    assert torch.equal(columns, kept)


@pytest.mark.parametrize(
    "layer", [Layer(), pytest.param(Layer(delta=False, format=Format.INT8), marks=pytest.mark.slow)]
)
def test_a_recurrence_takes_rows_back_within_their_tile(layer, device):
    check_recurrence_taken_back(TRITON, replace(layer, dtype=torch.bfloat16), 34, device)


@pytest.mark.parametrize(("most", "width"), [(15, 4), (1, 8)])
def test_a_convolution_takes_back_as_many_rows_as_it_keeps_more(most, width, device):
    check_convolution_taken_back(TRITON, most, width, device)


@pytest.mark.parametrize("limits", [None, (0.1, 2.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decays(dtype, limits, device):
    torch.manual_seed(0)
    ab = (torch.randn(9, 12) * 4).to(dtype)
    a_log, dt_bias = torch.randn(5), torch.tensor([-30.0, -4.0, 0.0, 1.0, 30.0])
    for b in (ab[:, 6:11], None):
        more = () if limits is None else (limits,)
        wanted = REFERENCE.decays(ab[:, :5], b, DecayParameters(a_log, dt_bias, *more))
        moved_ab = ab.to(device)
        own_b = None if b is None else moved_ab[:, 6:11]
        found = TRITON.decays(
            moved_ab[:, :5], own_b, DecayParameters(a_log.to(device), dt_bias.to(device), *more)
        )
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype is torch.float32
            torch.testing.assert_close(ours.cpu(), theirs, rtol=4e-6, atol=1e-37)


@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decays_of_channels(dtype, bound, device):
    """Three heads of seven channels."""
    torch.manual_seed(0)
    ab, a_log, dt_bias = (
        (torch.randn(9, 26) * 4).to(dtype).to(device),
        torch.randn(3),
        torch.randn(21) * 4,
    )
    wanted = REFERENCE.decays(
        ab[:, 1:22].cpu(), ab[:, 23:].cpu(), DecayParameters(a_log, dt_bias, bound=bound)
    )
    found = TRITON.decays(
        ab[:, 1:22], ab[:, 23:], DecayParameters(a_log.to(device), dt_bias.to(device), bound=bound)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("groups", "group", "repeated"),
    [(3, 40, True), (3, 40, False), (2, 128, True), (1, 200, False)],
)
def test_gated_norms(groups, group, repeated, norm_first, dtype, device):
    torch.manual_seed(0)
    size = groups * group
    x, gate = (
        (torch.randn(5, 2 * size) * 3).to(dtype).to(device)[:, part]
        for part in (slice(size), slice(size, None))
    )
    weight = torch.rand(group if repeated else size).to(dtype).to(device)
    found = TRITON.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, norm_first))
    wanted = REFERENCE.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, norm_first))
    assert found.dtype is dtype
    # rsqrt and exp may differ in their last bits, which moves what is rounded twice by as many
    # steps
    bound = 3 * torch.finfo(dtype).eps * wanted.float().abs() + 1e-6
    assert ((found.float() - wanted.float()).abs() <= bound).all()


@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.STATIC])
@pytest.mark.parametrize(("groups", "group"), [(3, 40), (2, 128), (1, 200)])
def test_gated_norms_are_quantized_for_their_consumer(groups, group, activations, device):
    torch.manual_seed(0)
    size = groups * group
    x, gate = torch.randn(2, 3, size).bfloat16().to(device)
    weight = torch.rand(group).bfloat16().to(device)
    codes, scales = torch.zeros(8, size, dtype=torch.float8_e4m3fn), torch.ones(8)
    static = 0.01 if activations is Activations.STATIC else None
    consumer = Weight(codes.to(device), scales.to(device), activations, static)
    found = TRITON.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, True), consumer)
    wanted = quantize(
        TRITON.target, TRITON.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, True)), consumer
    )
    assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)
