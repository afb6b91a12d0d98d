"""What `--activations` decides, and where it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.settings.device import DeviceFacts, DeviceKind
from freight.settings.engine import EngineArgs
from freight.settings.hardware import int8_activations
from freight.settings.resolve import check

CPU = DeviceFacts(DeviceKind.CPU, "a CPU", Format.E4M3FN, 2**30, 2**30, 2)
GPU = DeviceFacts(DeviceKind.CUDA, "a GPU", Format.E4M3FN, 2**30, 2**30, 2)
ROWS = [
    # option, four bits, device, kernels -> whether inputs are rounded
    ("auto", True, CPU, "auto", True),
    ("auto", True, CPU, "reference", True),
    ("auto", False, CPU, "auto", False),
    ("auto", True, GPU, "auto", False),
    ("auto", True, GPU, "reference", True),
    ("int8", True, CPU, "auto", True),
    ("bfloat16", True, CPU, "auto", False),
    ("bfloat16", False, GPU, "auto", False),
]


@pytest.mark.parametrize(("option", "four", "device", "kernels", "rounds"), ROWS)
def test_which_products_round_their_inputs(option, four, device: DeviceFacts, kernels, rounds):
    args = EngineArgs(activations=option, kernels=kernels)
    assert int8_activations(args, four, device) is rounds


def test_refusals_name_the_way_out():
    args = EngineArgs(activations="int8")
    with refuses(ConfigError, "--activations int8", "--quantization int4"):
        int8_activations(args, False, CPU)
    with refuses(ConfigError, "--activations int8", GPU.name, "--device cpu"):
        int8_activations(args, True, GPU)
    with refuses(ConfigError, "--activations 'fp8'", "auto, int8 or bfloat16"):
        check(replace(args, activations="fp8"))
