"""Rows that are computed and then taken back, as drafts that do not come true: those computed at their
positions have the bits of a sequence without them, and so has the state. Triton's kernels:
`triton/test_triton_states.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.state_cases import (
    STATE_FORMATS,
    Layer,
    check_convolution_taken_back,
    check_recurrence_taken_back,
)

from freight.fp8.formats import Format
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE

KINDS = {
    "delta": Layer(),
    "mamba2": Layer(delta=False),
    "channels": Layer(by_channel=True),
}


@pytest.fixture(params=["reference", *library.runnable()])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    if request.param == "reference":
        return REFERENCE
    return CpuKernels(library.load(request.param))


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_takes_rows_back_within_their_tile(
    kernels: KernelSet, kind: str, format: Format
) -> None:
    layer = replace(KINDS[kind], format=format, dtype=torch.bfloat16)
    check_recurrence_taken_back(kernels, layer, 100, "cpu")


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("most", [1, 5, 15])
def test_a_convolution_takes_back_as_many_rows_as_it_keeps_more(
    kernels: KernelSet, most: int, width: int
) -> None:
    check_convolution_taken_back(kernels, most, width, "cpu")
