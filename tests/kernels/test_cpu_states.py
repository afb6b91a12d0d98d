"""The compiled operations that keep a state: every build that runs here against the reference, and
its bits.

Rounding to a format may fall to the other side where the float32 value before it differs in its
last bits; a state of 8 or 16 bits then differs by a step in single values, which all later rows
see. So rows are compared with the reference by what a step costs, and a call that continues from
the reference's own blocks tightly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.state_cases import STATE_FORMATS, Layer, in_calls, sequences, token_by_token
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.formats import Format
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.batch import Sequences
from freight.operands.recurrence import Convolution, DecayParameters, GatedNorm, RecurrenceRule
from freight.operands.states import States
from freight.operands.tiles import LEAST_DECAY

BUILDS = library.runnable()
BLOCKS = (3, 1, 4, 2, 0)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYERS = {
    "delta": Layer(),
    "mamba2": Layer(delta=False),
    "odd": Layer(key_heads=1, heads=3, k_dim=37, v_dim=21),
    "odd mamba2": Layer(key_heads=3, heads=3, k_dim=5, v_dim=130, delta=False),
    "wide": Layer(key_heads=1, heads=2, k_dim=128, v_dim=128),
    "channels": Layer(by_channel=True),
    "odd channels": Layer(key_heads=1, heads=3, k_dim=37, v_dim=21, by_channel=True),
    "wide channels": Layer(key_heads=2, heads=2, k_dim=128, v_dim=128, by_channel=True),
    "channels without delta": Layer(delta=False, by_channel=True),
}
KINDS = {"delta": Layer(), "mamba2": Layer(delta=False), "channels": Layer(by_channel=True)}


@pytest.fixture(params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(library.load(request.param))


def agrees(out: Tensor, expected: Tensor, units: float) -> bool:
    """Within `units` in the last place of the dtype, of the largest value of a row."""
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    largest = expected.float().abs().amax(-1, keepdim=True)
    error = (out.float() - expected.float()).abs()
    return bool((error <= units * torch.finfo(out.dtype).eps * largest).all())


def among_other_columns(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same q, k and v as columns of one matrix, at odd offsets."""
    parts = [inputs[name] for name in ("q", "k", "v")]
    rows = len(parts[0])
    matrix = torch.full(
        (rows, 3 + sum(one.shape[1] + 1 for one in parts)), torch.nan, dtype=parts[0].dtype
    )
    views, at = {}, 3
    for name, part in zip(("q", "k", "v"), parts, strict=True):
        views[name] = matrix[:, at : at + part.shape[1]]
        views[name].copy_(part)
        at += part.shape[1] + 1
    return {**inputs, **views}


def run(
    kernels: KernelSet,
    layer: Layer,
    inputs: dict[str, Tensor],
    cuts: tuple[int, ...],
    states: States | None = None,
) -> tuple[Tensor, States]:
    states = states or layer.states(6)
    out = in_calls(
        lambda part, where: kernels.recurrence(
            **{name: x[part] for name, x in inputs.items()},
            states=states,
            sequences=where,
            rule=layer.rule,
        ),
        len(inputs["v"]),
        cuts,
        BLOCKS,
    )
    return out, states


def copied(states: States) -> States:
    return replace(states, parts={name: part.clone() for name, part in states.parts.items()})


def same_bits(a: States, b: States, blocks: list[int]) -> bool:
    return all(
        torch.equal(part.view(torch.uint8)[blocks], b.parts[name].view(torch.uint8)[blocks])
        for name, part in a.parts.items()
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("half_life", [0.01, 1.0, 1000.0])
def test_a_recurrence_is_the_references(kernels, name, half_life):
    """In float32; a half-life of 0.01 leaves nothing of a state, and decays by e ** -1000 and more.

    A row whose sums cancel has 58 units between two orders of summation (portable), 77 (NEON), and
    with three heads of 37 channels 319 (532 with NEON), where the reference itself is 309 from the
    sum in float64. The median row has 1.
    """
    layer = LAYERS[name]
    inputs = layer.inputs(70, half_life=half_life)
    wanted, theirs = run(REFERENCE, layer, inputs, (70,))
    found, own = run(kernels, layer, among_other_columns(inputs), (70,))
    assert agrees(found, wanted, 640)
    for part in ("state", "k", "u", "decay"):
        blocks = torch.tensor([3, 1])
        assert agrees(
            own.parts[part][blocks].flatten(1), theirs.parts[part][blocks].flatten(1), 64
        ), part


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("name", ["delta", "mamba2", "odd", "channels", "odd channels"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_a_stored_state_a_tile_is_the_references(kernels, name, format, dtype):
    """Rows 32 to 46 from the reference's blocks: rows of one tile, behind a state that it advances
    and stores.
    """
    layer = replace(LAYERS[name], format=format, dtype=DTYPES[dtype])
    inputs = among_other_columns(layer.inputs(47))
    _, states = run(REFERENCE, layer, {name: x[:32] for name, x in inputs.items()}, (32,))
    last, where = {name: x[32:] for name, x in inputs.items()}, sequences([(32, 15, BLOCKS)])
    own = copied(states)
    wanted = REFERENCE.recurrence(**last, states=states, sequences=where, rule=layer.rule)
    found = kernels.recurrence(**last, states=own, sequences=where, rule=layer.rule)
    steps = {1: 2 ** -(3 if format.is_e4m3 else 7), 2: 2**-7, 4: 0.0}[
        states.parts["state"].itemsize
    ]
    assert agrees(
        found,
        wanted,
        4 + 0.02 * steps / torch.finfo(wanted.dtype).eps + (64 if dtype == "float32" else 0),
    )
    state, expected = (one.parts["state"][1].float() for one in (own, states))
    assert (state != expected).float().mean() < 0.01 or format is Format.FLOAT32
    assert (
        (state - expected).abs() <= 1.01 * expected.abs() * steps + (format is Format.INT8) + 1e-4
    ).all()
    if "scale" in states.parts:
        assert agrees(own.parts["scale"][1], states.parts["scale"][1], 1)
    for one in (own, states):  # what is not the sequence's stays
        assert one.parts["decay"][[0, 2, 4, 5]].isnan().all()


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_cut_into_calls_changes_a_bit(kernels, format, kind, dtype):
    layer = replace(KINDS[kind], format=format, dtype=dtype, v_dim=40)
    inputs = among_other_columns(layer.inputs(100))
    whole, states = run(kernels, layer, inputs, (100,))
    assert whole.isfinite().all()
    for cuts in ((1,), (7,), (16,), (33,), (1, 31, 5)):
        torch.set_num_threads(1 + cuts[0] % 3)
        parts, kept = run(kernels, layer, inputs, cuts)
        assert torch.equal(whole, parts), cuts
        assert same_bits(states, kept, [3, 1, 4]), cuts


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("format", [Format.INT8, Format.FLOAT32])
def test_sequences_of_a_call_do_not_see_each_other(kernels, format, by_channel):
    """One of the two has a NaN; a third, not in the call, goes on from the first one's full block."""
    layer = Layer(
        heads=8, k_dim=128, v_dim=128, format=format, dtype=torch.bfloat16, by_channel=by_channel
    )
    first, second = layer.inputs(40, 1), layer.inputs(21, 2)
    second["v"][5] = torch.nan
    states, torch_threads = layer.states(6), torch.get_num_threads()
    both = {name: torch.cat((first[name], second[name])) for name in first}
    together = sequences([(0, 40, (3, 1)), (0, 21, (2,))])
    torch.set_num_threads(3)
    found = kernels.recurrence(**both, states=states, sequences=together, rule=layer.rule)
    torch.set_num_threads(torch_threads)
    alone = layer.states(6)
    assert torch.equal(
        found[:40],
        kernels.recurrence(
            **first, states=alone, sequences=sequences([(0, 40, (3, 1))]), rule=layer.rule
        ),
    )
    assert found[40:45].isfinite().all()
    assert found[45:].isnan().all(1).all()
    before = copied(states)
    last = {name: x[32:] for name, x in first.items()}
    hit = kernels.recurrence(
        **last, states=states, sequences=sequences([(32, 8, (3, 5))]), rule=layer.rule
    )
    assert torch.equal(hit, found[32:40])
    assert same_bits(before, states, [0, 1, 2, 3, 4])
    assert same_bits(
        states,
        replace(states, parts={n: x[[0, 1, 2, 3, 4, 1]] for n, x in states.parts.items()}),
        [5],
    )


@pytest.mark.parametrize("decay", [-1e5, -1e30, -torch.inf])
@pytest.mark.parametrize("which", ["reference", "compiled"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_what_a_row_forgets_entirely_costs_the_rows_behind_no_digit(
    kernels, which, decay, by_channel
):
    """exp(-104) is 0 in float32 as exp(-inf) is: rows from there on have the result of a sequence
    that begins there.
    """
    layer = Layer(by_channel=by_channel)
    inputs = layer.inputs(40)
    inputs["log_decay"][21] = decay
    out, _ = run(kernels if which == "compiled" else REFERENCE, layer, inputs, (40,))
    alone = {name: x[21:] for name, x in inputs.items()}
    wanted, _ = run(REFERENCE, layer, alone, (19,))
    assert agrees(out[21:], wanted, 300)


@pytest.mark.parametrize("decay", [0.0, -80.0, LEAST_DECAY, -torch.inf])
@pytest.mark.parametrize("which", ["reference", "compiled"])
def test_a_channel_that_is_forgotten_leaves_the_others_what_they_know(kernels, which, decay):
    """Every second channel decays by so much at each token: with 0, none does; else those channels
    know one token.
    """
    layer, which = Layer(by_channel=True, v_dim=40), kernels if which == "compiled" else REFERENCE
    inputs = layer.inputs(40, half_life=1000.0)
    inputs["log_decay"][:, :, 1::2] = decay
    out, _ = run(which, layer, inputs, (40,))
    assert torch.equal(out, run(which, layer, inputs, (1, 6))[0])
    assert out.isfinite().all()
    wanted = token_by_token(layer, inputs)
    assert (out.double() - wanted).abs().max() < 2e-6 * wanted.abs().max() * 40


def test_a_nan_among_decays_of_channels_stays_in_its_head(kernels):
    layer = Layer(by_channel=True)
    inputs = layer.inputs(40)
    inputs["log_decay"][20, 1, 5] = torch.nan
    out, _ = run(kernels, layer, inputs, (40,))
    wanted = torch.zeros(40, 128, dtype=torch.bool)
    wanted[20:, 32:64] = True
    assert torch.equal(out.isnan(), wanted)


def test_a_nan_in_a_state_stays_in_its_column(kernels):
    for format in (Format.INT8, Format.E4M3FN, Format.E4M3FNUZ):
        layer = Layer(format=format, delta=False)
        inputs = layer.inputs(18)
        inputs["v"][3, 40] = torch.nan  # head 1, column 8
        for cuts in ((18,), (1,)):
            out, _ = run(kernels, layer, inputs, cuts)
            wanted = torch.zeros(18, 128, dtype=torch.bool)
            wanted[3:, 40] = True
            assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("channels", [1, 24, 300])
def test_a_convolution_is_the_references_in_any_cut(kernels, channels, width, dtype):
    generator = torch.Generator().manual_seed(width)
    matrix, weight = (
        torch.randn(*shape, generator=generator).to(DTYPES[dtype])
        for shape in ((50, channels + 5), (channels, width))
    )
    x, bias = matrix[:, 3 : channels + 3], matrix[0, :channels].clone()

    def convolved(which: KernelSet, cuts: tuple[int, ...], silu: bool) -> tuple[Tensor, Tensor]:
        columns = torch.full((6, width - 1, channels), torch.nan, dtype=x.dtype)
        states = States({"columns": columns}, 16)

        def call(part: slice, where: Sequences) -> Tensor:
            return which.convolve(
                x[part], Convolution(weight, None if silu else bias, silu), states, where
            )

        return in_calls(call, 50, cuts, BLOCKS), columns

    wanted, columns = convolved(REFERENCE, (50,), False)
    with_silu = convolved(REFERENCE, (50,), True)[0]
    whole = convolved(kernels, (50,), True)[0]
    units = 8 if dtype == "float32" else 1
    torch.testing.assert_close(whole, with_silu, rtol=units * torch.finfo(x.dtype).eps, atol=1e-7)
    for cuts in ((50,), (1,), (7,), (2, 33)):
        torch.set_num_threads(1 + cuts[0] % 3)
        found, kept = convolved(kernels, cuts, False)
        assert torch.equal(found, wanted)  # the same sums in the same order
        assert torch.equal(kept[[3, 1, 4, 2]], columns[[3, 1, 4, 2]])
        assert kept[5].isnan().all()
        assert torch.equal(convolved(kernels, cuts, True)[0], whole)


def test_a_convolution_goes_on_from_another_sequences_block(kernels):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((40, 20), (20, 4)))
    states = States({"columns": torch.full((6, 3, 20), torch.nan)}, 16)
    whole = kernels.convolve(
        x, Convolution(weight, None, True), states, sequences([(0, 40, (3, 1, 4))])
    )
    before = states.parts["columns"].clone()
    both = torch.cat((x[32:33], x[16:]))
    found = kernels.convolve(
        both,
        Convolution(weight, None, True),
        states,
        sequences([(32, 1, (3, 1, 5)), (16, 24, (3, 2, 0))]),
    )
    assert torch.equal(found, torch.cat((whole[32:33], whole[16:])))
    after = states.parts["columns"]
    assert torch.equal(after[[1, 3, 4]], before[[1, 3, 4]])
    assert torch.equal(after[[2, 0]], before[[1, 4]])
    assert torch.equal(
        after[5, [0, 1, 2]], x[[30, 31, 32]]
    )  # those at 30 and 31 came from the block before


@pytest.mark.parametrize("dtype", DTYPES)
def test_decays_are_the_references(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    matrix = (torch.randn(9, 80, generator=generator) * 8).to(DTYPES[dtype])
    a, b = matrix[:, 3:40], matrix[:, 41:78]
    a_log, dt_bias = (torch.randn(37, generator=generator) * 4 for _ in range(2))
    for arguments in ((b,), (None,), (None, (0.1, 2.0))):
        other, *limits = arguments
        found = kernels.decays(a, other, DecayParameters(a_log, dt_bias, *limits))
        for one, wanted in zip(
            found, REFERENCE.decays(a, other, DecayParameters(a_log, dt_bias, *limits)), strict=True
        ):
            torch.testing.assert_close(
                one, wanted, rtol=4e-6, atol=1e-37
            )  # a + dt_bias is rounded to float32
        again = kernels.decays(
            a[4:5], None if other is None else b[4:5], DecayParameters(a_log, dt_bias, *limits)
        )
        assert all(torch.equal(one, whole[4:5]) for one, whole in zip(again, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
def test_decays_of_channels_are_the_references(kernels, dtype, bound):
    """Three heads of 37 channels."""
    generator = torch.Generator().manual_seed(0)
    matrix = (torch.randn(9, 120, generator=generator) * 8).to(DTYPES[dtype])
    a, b = matrix[:, 3:114], matrix[:, 115:118]
    a_log, dt_bias = (torch.randn(count, generator=generator) * 3 for count in (3, 111))
    found = kernels.decays(a, b, DecayParameters(a_log, dt_bias, bound=bound))
    assert [one.shape for one in found] == [(9, 3), (9, 3, 37)]
    for one, wanted in zip(
        found, REFERENCE.decays(a, b, DecayParameters(a_log, dt_bias, bound=bound)), strict=True
    ):
        torch.testing.assert_close(
            one, wanted, rtol=1e-5, atol=1e-37
        )  # a + dt_bias is rounded to float32
    again = kernels.decays(a[4:5], b[4:5], DecayParameters(a_log, dt_bias, bound=bound))
    assert all(torch.equal(one, whole[4:5]) for one, whole in zip(again, found, strict=True))


def test_every_decay(kernels):
    """Of all 65536 values of bfloat16, alone; infinities and NaN too."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)[:, None]
    beta, decay = kernels.decays(x, x, DecayParameters(torch.zeros(1), torch.zeros(1)))
    exact = F.softplus(x.double(), threshold=700)
    torch.testing.assert_close(
        beta.double(), x.double().sigmoid(), rtol=1e-6, atol=1e-37, equal_nan=True
    )
    torch.testing.assert_close(decay.double(), -exact, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "groups"), [(128, 4), (32, 3), (21, 5), (1, 7), (300, 1)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_norms_are_the_references(kernels, norm_first, group, groups, dtype):
    generator = torch.Generator().manual_seed(group)
    size = group * groups
    matrix = torch.randn(7, 2 * size + 3, generator=generator).to(DTYPES[dtype])
    x, gate = matrix[:, 1 : size + 1], matrix[:, size + 2 : 2 * size + 2] * 4
    x[3] = 0.0
    for weight in (
        torch.rand(size, generator=generator).to(x.dtype),
        torch.rand(group, generator=generator),
    ):
        wanted = REFERENCE.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, norm_first))
        found = kernels.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, norm_first))
        assert found.dtype == x.dtype
        units = 16 if dtype == "float32" else 2
        torch.testing.assert_close(found, wanted, rtol=units * torch.finfo(x.dtype).eps, atol=1e-7)
        assert torch.equal(
            kernels.gated_norm(x[4:5], gate[4:5], GatedNorm(weight, 1e-5, group, norm_first)),
            found[4:5],
        )


def test_a_recording_follows_lengths_and_tables() -> None:
    """A layer's four operations, recorded with the first token and replayed for the others, over
    two sequences.
    """
    own = library.load()
    layer = Layer(format=Format.INT8, dtype=torch.bfloat16, every=16)
    size = layer.key_heads * layer.k_dim
    parts = [layer.inputs(40, seed) for seed in (1, 2)]
    conv = torch.randn(2 * size, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, logs = torch.linspace(0.5, 1.0, layer.v_dim), torch.zeros(layer.heads)
    mixed = torch.stack(
        [torch.cat((one["q"], one["k"], one["v"], one["beta"].bfloat16()), 1) for one in parts], 1
    )

    def step(kernels: CpuKernels, x: Tensor, states: States, where: Any) -> Tensor:
        q_k = kernels.convolve(x[:, : 2 * size], Convolution(conv, None, True), states, where)
        v, b = x[:, 2 * size : -layer.heads], x[:, -layer.heads :]
        beta, decay = kernels.decays(b, b, DecayParameters(logs, logs))
        rule = RecurrenceRule(delta=True, norm=True)
        out = kernels.recurrence(q_k[:, :size], q_k[:, size:], v, beta, decay, rule, states, where)
        return kernels.gated_norm(out, v, GatedNorm(weight, 1e-6, layer.v_dim, True))

    def states() -> States:
        blocks = layer.states(8)
        return replace(
            blocks,
            parts={**blocks.parts, "columns": torch.zeros(8, 3, 2 * size, dtype=torch.bfloat16)},
        )

    tables = ((3, 1, 4), (6, 0, 7))
    plain, kept, recorded = CpuKernels(own), states(), states()
    where = sequences([(0, 1, table) for table in tables])
    x = mixed[0].clone()
    with torch.inference_mode():
        found = record(own, Arena(2), lambda library: step(CpuKernels(library), x, recorded, where))
    assert found.recording is not None, found.obstacle
    for token in range(40):
        wanted = step(plain, mixed[token], kept, sequences([(token, 1, table) for table in tables]))
        if token:
            x.copy_(mixed[token])
            where.context_lens.fill_(token + 1)
            found.recording.replay()
        assert torch.equal(found.output, wanted), token
    assert same_bits(kept, recorded, [3, 1, 6, 0])


def test_a_short_context_another_format_and_a_wide_convolution_are_refused(kernels):
    layer = Layer()
    inputs, states = layer.inputs(4), layer.states(2)
    where = sequences([(0, 4, (0,))])
    where.context_lens.fill_(3)
    with pytest.raises(KernelError, match="more queries than keys"):
        kernels.recurrence(**inputs, states=states, sequences=where, rule=layer.rule)
    where.context_lens.fill_(4)
    half = {name: part.half() if name == "state" else part for name, part in states.parts.items()}
    with pytest.raises(KernelError, match="freight_recurrence"):  # 16 bits are bfloat16 alone
        kernels.recurrence(
            **inputs, states=replace(states, parts=half), sequences=where, rule=layer.rule
        )
    assert states.parts["decay"].isnan().all()
    where.context_lens.fill_(3)
    x = torch.zeros(4, 8)
    for width, words in ((4, "more queries than keys"), (9, "a width of 2 to 8, not 9")):
        columns = States({"columns": torch.zeros(2, width - 1, 8)}, 16)
        with pytest.raises(KernelError, match=words):
            kernels.convolve(x, Convolution(torch.zeros(8, width), None, True), columns, where)
