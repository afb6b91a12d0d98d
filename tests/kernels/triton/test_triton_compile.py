"""Every kernel compiles to machine code for GPUs that are not here, uses their matrix units, and
fits their registers.

`aot.py` compiles and reports; it runs in its own processes, without the interpreter. That takes
minutes of two cores: `make test-all` runs it, and `make test` does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
AOT = Path(__file__).parent / "aot.py"
# Bytes of shared memory that a program may have; a launch with more is refused.
SHARED = {
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
TARGETS = tuple(SHARED)
# A multiprocessor's registers, and how many decoding programs they should hold at least, or one
# less with a scale per token. Those of the pinned Triton; the launchers ask the compiled kernel (occupancy.py).
UNIT_REGISTERS, DECODE_PROGRAMS = 65536, 4
# Registers a thread may have so that 1 program of 256 threads fits, or 2 of 128.
REGISTERS = {target: 512 if target.startswith("gfx") else 255 for target in TARGETS}
# Accesses to local memory outside loops over tiles, by target and kernel: addresses of a program's
# results.
SPILLS_ONCE = {
    ("sm_80", "decode_kernel"): 6,
    ("sm_89", "decode_kernel"): 2,
    ("sm_90", "decode_kernel"): 2,
    ("sm_80", "convolve_kernel"): 2,
    ("sm_89", "prefill_kernel"): 3,
    ("sm_100", "products_kernel"): 4,
}
# Tiles that were measured on an H100, and are faster than those that spill nothing (paged.py).
MEASURED = {("sm_90", "prefill_kernel"): 500, ("sm_90", "decode_kernel"): 120}
FP8_PRODUCT = {
    "sm_89": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "sm_90": "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    "sm_100": "kind::f8f6f4",
    "gfx950": "v_mfma_f32_32x32x64_f8f6f4",
}
# What prefill and decoding multiply with under `--attention-compute fp8`.
FP8_ATTENTION = {
    "sm_90": (["f16.f16", "e4m3.e4m3"], ["f16.f16"]),
    "sm_100": (["kind::f8f6f4"], ["f16.f16"]),
    "sm_89": (["e4m3.e4m3"], ["e4m3.e4m3"]),
    "gfx942": (["fp8_fp8"], ["fp8_fp8"]),
    "gfx950": (["f8f6f4"], ["f8f6f4", "fp8_fp8"]),
}
PRODUCTS = ("prefill_kernel", "decode_kernel", "matmul_kernel", "experts_kernel", "heads_kernel")
PREFILL_PRODUCT = {
    "sm_80": "mma.sync",
    "sm_89": "mma.sync",
    "sm_90": "wgmma",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma_f32_32x32",
    "gfx950": "v_mfma_f32_32x32",
}


def compiled(
    request: pytest.FixtureRequest, folder: Path, *extent: str
) -> dict[str, list[dict[str, Any]]]:
    """What aot.py reports of the selected tests' targets; as many processes at a time as there are
    cores.
    """
    selected = {
        item.callspec.params.get("target")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    targets = [target for target in TARGETS if target in selected]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}

    def report(target: str) -> list[dict[str, Any]]:
        command = [sys.executable, AOT, target, *extent]
        printed = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900
        ).stdout
        return [json.loads(line) for line in printed.splitlines()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(targets, pool.map(report, targets), strict=True))


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return compiled(request, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def large(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return compiled(request, tmp_path_factory.mktemp("large"), "large")


def fits(report: dict[str, Any], target: str) -> bool:
    """Whether the launch compiles, spills nothing in a loop that was not measured with it, and is
    not refused for its memory or its registers.
    """
    spills = MEASURED.get((target, report["kernel"]), 0)
    return (
        "error" not in report
        and report["spills"] <= spills
        and report["spills_once"] <= max(spills, SPILLS_ONCE.get((target, report["kernel"]), 0))
        and report["registers"] <= REGISTERS[target]
        and report["shared"] <= SHARED[target]
    )


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_shapes_fit(large, target):
    """Heads of 512 dims, latents, keys with a center, experts of 2880: each may be the only one
    that does not fit.
    """
    assert large[target]
    assert [report for report in large[target] if not fits(report, target)] == []


@pytest.mark.parametrize("target", TARGETS)
def test_registers(reports, target):
    names = {report["kernel"] for report in reports[target]}
    assert names == {
        *(
            "rotate_store_kernel",
            "prefill_kernel",
            "decode_kernel",
            "merge_kernel",
            "quantize_kernel",
            "matmul_kernel",
        ),
        *("add_rms_norm_kernel", "activation_kernel", "activation_row_kernel"),
        *("sort_kernel", "experts_kernel", "weigh_kernel", "choose_kernel", "heads_kernel"),
        *(
            "products_kernel",
            "channel_products_kernel",
            "recurrence_kernel",
            "convolve_kernel",
            "decays_kernel",
        ),
        *("gated_norm_kernel", "gated_norm_row_kernel"),
        *("adapter_sums_kernel", "adapter_outputs_kernel"),
    }
    for report in reports[target]:
        assert fits(report, target), report
        if report["kernel"] == "decode_kernel" and not target.startswith("gfx"):
            programs = DECODE_PROGRAMS - (report["case"] == "attention fp8 token")
            registers = report["registers"] * 32 * report["num_warps"]
            assert registers * programs <= UNIT_REGISTERS, report


@pytest.mark.parametrize("target", TARGETS)
def test_matrix_units(reports, target):
    """Tiles of prefill and of large products go to the widest unit there is; FP8 is multiplied as
    FP8 where it can.
    """
    for report in reports[target]:
        if (
            report["kernel"] in PRODUCTS and report["case"] != "route"
        ):  # a router multiplies float32
            assert report["products"], report
        if report["kernel"] == "prefill_kernel":
            assert all(PREFILL_PRODUCT[target] in product for product in report["products"]), report
    matmul = {
        r["case"]: " ".join(r["products"])
        for r in reports[target]
        if r["kernel"] == "matmul_kernel"
    }
    if target in FP8_PRODUCT:
        assert FP8_PRODUCT[target] in matmul["linear fp8"]
        assert FP8_PRODUCT[target] in matmul["linear fp8 blocks"]
        experts = [r["products"] for r in reports[target] if r["kernel"] == "experts_kernel"]
        assert all("e4m3" in " ".join(found) or "f8f6f4" in " ".join(found) for found in experts)
    assert ("fp8_fp8" in matmul["linear fnuz"]) == (target == "gfx942")


@pytest.mark.parametrize("target", FP8_ATTENTION)
def test_attention_in_fp8_multiplies_fp8(reports, target):
    """With static scales over the format that the target has."""
    for kernel, expected in zip(
        ("prefill_kernel", "decode_kernel"), FP8_ATTENTION[target], strict=True
    ):
        (found,) = (
            r["products"]
            for r in reports[target]
            if (r["case"], r["kernel"]) == ("attention fp8 compute", kernel)
        )
        assert len(found) == len(expected)
        assert all(any(kind in product for product in found) for kind in expected), found


ISSUE = {"static": 0.4, "token": 0.5}


def test_decode_attention_leaves_cycles_to_the_memory(tmp_path):
    """Instructions of the inner loop against the cycles that its bytes take: `issue.py`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, AOT.with_name("issue.py"), *ISSUE]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:]
        for line in printed.splitlines()
    }
    for name, limit in ISSUE.items():
        _, _, spills, once, _, _, issue = rows[name]
        assert int(spills) == 0
        assert int(once) <= SPILLS_ONCE["sm_90", "decode_kernel"]
        assert 0.1 < float(issue) <= limit, name
