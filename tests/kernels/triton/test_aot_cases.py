"""The launches that are compiled ahead of time leave out no kernel, and no kind of operand that a
family has.

`aot.py` lists them in a process of its own, without the interpreter, and compiles nothing: seconds,
not minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freight.fp8.formats import ScaleKind
from freight.kernels.triton import paged
from freight.operands.activation import Activation, GatedFunction, GateFunction
from freight.operands.routing import Scoring

AOT = Path(__file__).parent / "aot.py"
HEADS = {64, 80, 96, 128, 192, 256, 512, 576}  # k_dim of the families in docs/models.md
ATTENTION = ("prefill_kernel", "decode_kernel")


@pytest.fixture(scope="module")
def launched() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, AOT, "sm_90", "launches"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return [json.loads(line) for line in printed.splitlines()]


def values(launched: list[dict[str, Any]], name: str, *kernels: str) -> set[str]:
    """All that a compile-time constant is, in launches of these kernels, or of all."""
    return {
        made[name]
        for made in launched
        if name in made and (not kernels or made["kernel"] in kernels)
    }


def test_every_kernel_is_compiled(launched):
    sources = Path(paged.__file__).parent.glob("*.py")
    kernels = {
        name
        for source in sources
        for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.M)
    }
    assert len(kernels) >= 16
    assert {made["kernel"] for made in launched} == kernels


def test_every_kind_of_operand_is_compiled(launched):
    assert values(launched, "ACTIVATION", "activation_kernel") == {*GatedFunction, *Activation}
    assert values(launched, "FUNCTION") == set(GateFunction)
    assert values(launched, "SCORING") == set(Scoring)
    assert values(launched, "OUT_SCALES") == {"", "static", "group", "row"}
    assert values(launched, "SCALES", "quantize_kernel") >= {"group", "row"}
    for kernel in ("add_rms_norm_kernel", "add_layer_norm_kernel"):
        assert values(launched, "SCALES", kernel) >= {"", "row"}
    assert values(launched, "FORMAT", "recurrence_kernel") == {"", "int8", "fp8_e4m3fn"}
    assert values(launched, "DELTA", "recurrence_kernel") == {"True", "False"}
    assert values(launched, "BY_CHANNEL", "recurrence_kernel") == {"True", "False"}
    assert {int(dim) for dim in values(launched, "K_DIM", "recurrence_kernel")} >= {
        64,
        128,
        192,
        256,
    }
    for kernel in ATTENTION:
        assert values(launched, "SCALES", kernel) == {
            str(int(kind)) for kind in ScaleKind if kind is not ScaleKind.GROUP
        }
        assert {int(dim) for dim in values(launched, "K_DIM", kernel)} >= HEADS
        for branch in ("WINDOWED", "CENTERED", "CAPPED", "INSIDE"):
            assert values(launched, branch, kernel) == {"True", "False"}
