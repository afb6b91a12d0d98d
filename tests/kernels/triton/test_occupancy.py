"""Programs per multiprocessor follow from the compiled kernel, and the programs of a launch from
those.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.kernels.triton import occupancy
from freight.kernels.triton.formats import Target
from freight.kernels.triton.occupancy import Unit, programs_for, programs_per_unit

H200 = Unit(65536, 233472, 64)
LIKE_AN_L4 = Unit(65536, 102400, 48)


@pytest.mark.parametrize(
    ("unit", "registers", "shared", "warps", "expected"),
    [
        (H200, 128, 40960, 4, 4),
        (H200, 139, 40960, 4, 3),
        (H200, 168, 40960, 4, 3),
        (H200, 255, 1024, 4, 2),
        (H200, 64, 90000, 4, 2),  # shared memory
        (H200, 16, 0, 4, 16),  # warps
        (H200, 16, 0, 1, 32),  # programs
        (H200, 255, 232448, 8, 1),
        (LIKE_AN_L4, 40, 1024, 4, 12),
        (LIKE_AN_L4, 128, 40960, 4, 2),
        (H200, 255, 10**6, 16, 1),  # that does not fit is for the launch to say
    ],
)
def test_programs_that_fit(unit, registers, shared, warps, expected):
    assert unit.programs(registers, shared, warps) == expected


@pytest.mark.parametrize(
    ("work", "places", "most", "expected"),
    [
        (8, 396, 256, 49),  # 50 would be 400 programs, in two rounds
        (8, 528, 256, 66),
        (512, 528, 16, 1),
        (512, 396, 16, 3),  # one each would leave the second round nearly empty
        (512, 396, 2, 2),
        (8, 396, 4, 4),
        (10000, 396, 16, 1),
        (4, 4, 1, 1),
    ],
)
def test_programs_of_a_launch(work, places, most, expected):
    assert programs_for(work, places, most) == expected


@given(st.integers(1, 5000), st.integers(1, 2000), st.integers(1, 300))
def test_programs_fill_one_round_or_few(work, places, most):
    count = programs_for(work, places, most)
    assert 1 <= count <= most
    assert count * work <= max(work, occupancy.MOST_ROUNDS * places)


class Kernel:
    """Compiles to a kernel of some registers, and counts how often it is asked."""

    def __init__(self, registers: int) -> None:
        self.fn, self.registers, self.asked = (
            SimpleNamespace(__name__="decode_kernel"),
            registers,
            0,
        )

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
        self.asked += 1
        compiled = SimpleNamespace(metadata=SimpleNamespace(shared=40960))
        compiled._init_handles = lambda: setattr(compiled, "n_regs", self.registers)
        return compiled if self.registers else None


def test_the_compiled_kernel_is_asked_once_for_each_kind_of_launch(monkeypatch):
    monkeypatch.setattr(Unit, "here", staticmethod(lambda: H200))
    target, kernel, x = Target("cuda", 90), Kernel(139), torch.zeros(1)
    constants = {"KEYS": 32, "num_warps": 4}
    assert programs_per_unit(target, kernel, (x, None), constants) == 3
    assert programs_per_unit(target, kernel, (x + 1, None), constants) == 3
    assert kernel.asked == 1
    kernel.registers = 96
    assert programs_per_unit(target, kernel, (x, x), constants) == 5
    assert programs_per_unit(target, kernel, (x, None), constants | {"KEYS": 64}) == 5
    assert kernel.asked == 3


@pytest.mark.parametrize(
    "target", [Target("hip", "gfx942"), Target("cuda", 0, 1), Target("cuda", 90)]
)
def test_without_a_compiled_kernel_it_is_the_usual_number(target):
    assert programs_per_unit(target, Kernel(0), (), {"num_warps": 4}) == occupancy.USUAL
    assert target.fits == {}
