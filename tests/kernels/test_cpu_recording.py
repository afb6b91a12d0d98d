"""A recording repeats what was called, for what its inputs hold by then; what torch computed in
between forbids one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, Recorded, record
from freight.operands.activation import GatedActivation
from freight.operands.weight import Weight

SIZE = 64
LIBRARY = library.load()
PLAIN = CpuKernels(LIBRARY)
PACKED = PLAIN.pack(
    Weight(torch.randn(2 * SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16())
)
NORM = torch.rand(SIZE).bfloat16()


def layer(
    kernels: CpuKernels, x: Tensor, between: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    gated = kernels.gated(between(kernels.linear(x, PACKED)), GatedActivation.SILU)
    return kernels.add_rms_norm(x, gated, NORM, 1e-6)[1]


def inputs(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16()


def recorded(
    x: Tensor, arena: Arena, body: Callable[[CpuKernels, Tensor], Tensor] = layer
) -> Recorded:
    with torch.inference_mode():
        return record(LIBRARY, arena, lambda library: body(CpuKernels(library), x))


def test_recordings_that_share_memory_repeat_their_calls():
    arena, steps = Arena(5), []
    for rows in (1, 5, 3):
        x = inputs(rows, 0)
        found = recorded(x, arena)
        assert torch.equal(found.output, layer(PLAIN, x))
        steps.append((x, found.recording))
    for seed in (1, 2):
        for x, recording in steps:
            x.copy_(inputs(len(x), seed))
            assert torch.equal(recording.replay(), layer(PLAIN, x))


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.view(torch.int16).numpy().copy()).view(torch.bfloat16)


@pytest.mark.parametrize(
    "between",
    [
        *(in_place, through_numpy, torch.neg, torch.empty_like, torch.clone),
        lambda x: x.T.contiguous().T.contiguous(),
        lambda x: torch.cat([x[:1], x[1:]]),
        lambda x: x.T.reshape(2 * SIZE, -1).T,
        lambda x: x if x.sum() > 1e9 else x[:],
    ],
)
def test_an_operation_of_torch_forbids_a_recording(between):
    x = inputs(4, 0)
    found = recorded(x, Arena(4), lambda kernels, x: layer(kernels, x, between))
    assert found.recording is None
    assert found.obstacle.startswith("aten.")
    assert found.output.shape == x.shape  # the run itself goes through
    if between is not torch.empty_like:
        assert torch.equal(found.output, layer(PLAIN, x, between))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_result_that_no_call_made_forbids_a_recording():
    x = inputs(4, 0)
    assert recorded(x, Arena(4), lambda kernels, x: x).obstacle


def test_views_are_not_operations():
    x = inputs(4, 0)
    found = recorded(
        x, Arena(4), lambda k, x: layer(k, x, lambda y: y.view(4, 2, SIZE).flatten(1).contiguous())
    )
    assert torch.equal(found.recording.replay(), layer(PLAIN, x))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_raised_passes_and_leaves_nothing_on(error):
    def body(kernels: CpuKernels, x: Tensor) -> Tensor:
        kernels.linear(x, PACKED)
        raise error

    with pytest.raises(error):
        recorded(inputs(1, 0), Arena(1), body)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_memory_is_used_again_once_no_view_of_it_is_left():
    x, arena = inputs(2, 0), Arena(4)

    def deep(kernels: CpuKernels, x: Tensor) -> Tensor:
        for _ in range(20):
            x = layer(kernels, x)
        return x

    recorded(x, arena, deep)
    needed = arena.num_bytes
    assert needed <= 4 * SIZE * 2 * (
        2 + 1 + 2 + 2
    )  # gate and up, their product, and two pairs of sum and norm
    recorded(inputs(4, 0), arena, deep)
    assert arena.num_bytes == needed  # for any number of rows

    def kept(kernels: CpuKernels, x: Tensor) -> Tensor:
        first = kernels.linear(x, PACKED).view(-1)
        values = first.view(2, -1)
        del first
        return kernels.gated(
            kernels.linear(layer(kernels, x), PACKED) if values.numel() else values,
            GatedActivation.SILU,
        )

    assert torch.equal(recorded(x, Arena(2), kept).output, kept(PLAIN, x))


def test_recording_does_not_import_the_compiler_of_torch(monkeypatch):
    monkeypatch.delitem(
        sys.modules, "torch._dynamo", raising=False
    )  # another test may have imported it
    recorded(inputs(1, 0), Arena(1))
    assert "torch._dynamo" not in sys.modules
