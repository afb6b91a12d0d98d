"""Compile what the kernels' own launchers would launch on a GPU that is not there, down to machine
code, and report.

    python tests/kernels/triton/aot.py sm_90 | gfx942 | … [large | all]     one JSON object a line
    python tests/kernels/triton/aot.py sm_90 launches                        the same, not compiled

A launcher is called with tensors that have shapes and no memory; every launch is recorded instead of run, and compiled
for the target that the launcher was told. So tiles, warps and element types are those that would run there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from cases import CASES, LARGE_CASES, MORE_CASES
from latent_cases import LATENT_CASES
from sass import dump, instructions, spills
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from freight.kernels.triton.formats import Target

TARGETS = {
    "sm_80": (Target("cuda", 80), GPUTarget("cuda", 80, 32)),
    "sm_89": (Target("cuda", 89), GPUTarget("cuda", 89, 32)),
    "sm_90": (Target("cuda", 90), GPUTarget("cuda", 90, 32)),
    "sm_100": (Target("cuda", 100), GPUTarget("cuda", 100, 32)),
    "gfx942": (Target("hip", "gfx942"), GPUTarget("hip", "gfx942", 64)),
    "gfx950": (Target("hip", "gfx950"), GPUTarget("hip", "gfx950", 64)),
}
LARGE = LARGE_CASES | LATENT_CASES
EXTENTS = {"": CASES, "large": LARGE} | dict.fromkeys(
    ("all", "launches"), CASES | MORE_CASES | LARGE
)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2: "*fp8e5",
}


def launches(
    call: Callable[[], object],
) -> list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]:
    """The launches that `call` would make."""
    made = []
    run = JITFunction.run

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:  # asks for a kernel that is launched afterwards
            made.append((kernel, args, kwargs))

    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = run
    return made


def source_of(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    """What Triton would compile for this launch: 1, None and constants by value, multiples of 16
    known as such.
    """
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        n: v for n, v in kwargs.items() if n not in OPTIONS
    }
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        known = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (known and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = (
            POINTERS[value.dtype]
            if isinstance(value, Tensor)
            else "fp32"
            if isinstance(value, float)
            else "i32"
        )
        if isinstance(value, Tensor) or (known and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def usage(compiled: Any, backend: str) -> dict[str, int]:
    """Registers per thread, `sass.spills` (AMD: all registers spilled), and shared memory in bytes."""
    shared = compiled.metadata.shared
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        vector, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        return {"registers": vector, "spills": spilled, "spills_once": 0, "shared": shared}
    cubin = compiled.asm["cubin"]
    registers = int(re.search(r"REG:(\d+)", dump(cubin, "-res-usage"))[1])
    repeated, once = spills(instructions(dump(cubin, "-sass")))
    return {"registers": registers, "spills": repeated, "spills_once": once, "shared": shared}


def products(compiled: Any, backend: str) -> list[str]:
    """The matrix instructions in the machine code's assembly."""
    if backend == "hip":
        return sorted(set(re.findall(r"v_mfma\w+", compiled.asm["amdgcn"])))
    return sorted(
        set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]+", compiled.asm["ptx"]))
    )


def report(target_name: str, extent: str = "") -> Iterator[dict[str, Any]]:
    """A case that does not compile has an `error`, and the others are reported all the same."""
    target, gpu = TARGETS[target_name]
    for name, call in EXTENTS[extent].items():
        for kernel, args, kwargs in launches(lambda call=call: call(target)):
            options = {option: kwargs[option] for option in OPTIONS if option in kwargs}
            launched = {"target": target_name, "case": name, "kernel": kernel.fn.__name__} | options
            if extent == "launches":
                yield launched | {
                    key: str(value) for key, value in kwargs.items() if key not in options
                }
                continue
            try:
                compiled = triton.compile(
                    source_of(kernel, args, kwargs), target=gpu, options=options
                )
            except Exception as error:
                yield launched | {"error": str(error)[-400:]}
                continue
            yield (
                launched
                | usage(compiled, gpu.backend)
                | {"products": products(compiled, gpu.backend)}
            )


if __name__ == "__main__":
    for line in report(*sys.argv[1:]):
        print(json.dumps(line), flush=True)
