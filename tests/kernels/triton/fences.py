"""The memory operations of the gather between GPUs in machine code, in their order, for a GPU that is
not there.

    python tests/kernels/triton/fences.py sm_90 | gfx942      one JSON object for each of CHANGES

The first is of the kernel as it is; of the others one fence each is weaker. `code` has what matters
for the order of stores and loads, as the assembler has it, and `ptx` of it for NVIDIA what Triton
wrote.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from aot import OPTIONS, TARGETS, launches, source_of
from cases import LARGE_CASES
from sass import dump, instructions
from triton.runtime.jit import JITFunction

from freight.kernels.triton import push

SYSTEM = 'scope="sys"'
# name -> a function of push.py, what is replaced in it, and by what
CHANGES = {
    "": ("_wait", "", ""),
    "release for one GPU": ("_set_flags", SYSTEM, 'scope="gpu"'),
    "no release": ("_set_flags", 'sem="release"', 'sem="relaxed"'),
    "acquire for one GPU": ("_wait", SYSTEM, 'scope="gpu"'),
    "no acquire": ("_wait", 'sem="acquire"', 'sem="relaxed"'),
}
ORDERING = {
    "cuda": r"\b(?:STG|LDG|ATOMG|MEMBAR|CCTL|BAR|ST|LD|ATOM|RED)\b",
    "hip": r"\b(?:global_\w+|flat_(?:load|store|atomic)\w*|buffer_\w+|s_waitcnt|s_barrier|wave barrier)\b",
}


def code_of(compiled: Any, backend: str) -> list[str]:
    """The instructions that move or order what is in memory."""
    lines = (
        list(instructions(dump(compiled.asm["cubin"], "-sass")).values())
        if backend == "cuda"
        else compiled.asm["amdgcn"].splitlines()
    )
    return [" ".join(line.split()) for line in lines if re.search(ORDERING[backend], line)]


def report(target_name: str, change: str) -> dict[str, Any]:
    target, gpu = TARGETS[target_name]
    name, have, want = CHANGES[change]
    function = getattr(push, name)
    source = function.src
    assert have in source
    ((kernel, args, kwargs),) = launches(lambda: LARGE_CASES["push"](target))
    try:
        _replace(function, source.replace(have, want) if have else source)
        options = {option: kwargs[option] for option in OPTIONS if option in kwargs}
        compiled = triton.compile(source_of(kernel, args, kwargs), target=gpu, options=options)
    finally:
        _replace(function, source)
    atomics = re.findall(r"\b(?:atom|fence|membar)[\w.:]+", compiled.asm.get("ptx", ""))
    return {"change": change, "code": code_of(compiled, gpu.backend), "ptx": atomics}


def _replace(function: JITFunction, source: str) -> None:
    """Give a function another source; who calls it is compiled anew."""
    function._unsafe_update_src(source)
    for other in vars(push).values():
        if isinstance(other, JITFunction):
            other.hash = None


if __name__ == "__main__":
    for change in CHANGES:
        print(json.dumps(report(sys.argv[1], change)), flush=True)
