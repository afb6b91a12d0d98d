"""What decode attention costs to issue, counted from its machine code: no GPU is needed, and
nothing is timed.

    python tests/kernels/triton/issue.py [CASE …]     one row of a table a case, for sm_90

A loop over tiles of keys is bound by memory only if its instructions fit into the cycles that the
tile's bytes take. `issue` is the share of them that is filled: the instructions of all warps for
one tile, one a cycle in each of a multiprocessor's four schedulers, divided by the cycles in which
its share of the bandwidth brings the tile's keys and values. Kernels of this kind issue in half to
two thirds of all cycles, so what is above about 0.6 limits the bandwidth.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import triton
from aot import OPTIONS, TARGETS, launches, source_of, usage
from cases import attend
from sass import dump, instructions, tile_loops

from freight.fp8.formats import Format

SCHEDULERS = 4
BYTES_PER_CYCLE = (
    4.3e12 / 132 / 1.86e9
)  # of one multiprocessor of an H200: copy bandwidth, units, clock
TARGET, GPU = TARGETS["sm_90"]

# name -> arguments of `attend`: the format and the scales of 8 KV heads with 4 queries each
DECODES = {
    "bf16": partial(attend, Format.BFLOAT16, "unit", 8, 4, 128, 64, None),
    "static": partial(attend, Format.E4M3FN, "static", 8, 4, 128, 64, None),
    "token": partial(attend, Format.E4M3FN, "token", 8, 4, 128, 64, None),
    "static, window": partial(attend, Format.E4M3FN, "static", 8, 4, 128, 64, 4096),
    "static, soft cap": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 64, None, soft_cap=50.0
    ),
    "static, dim 64": partial(attend, Format.E4M3FN, "static", 8, 8, 64, 64, None),
    "static, dim 80": partial(attend, Format.E4M3FN, "static", 8, 4, 80, 64, None),
    "static, dim 256": partial(attend, Format.E4M3FN, "static", 4, 2, 256, 64, None),
    "token, dim 256": partial(attend, Format.E4M3FN, "token", 4, 2, 256, 64, None),
    "E5M2": partial(attend, Format.E5M2, "unit", 8, 4, 128, 64, None),
}


def tile_instructions(code: dict[int, str]) -> int:
    """Instructions of one warp for one tile, in the loop over the tiles that need no mask, which
    comes first.
    """
    return sum(map(tile_loops(code)[0].has, code))


def measure(call: Any) -> dict[str, Any]:
    """Registers, spills, instructions a tile and `issue` of the decode kernel that `call` launches
    for sm_90.
    """
    (launch,) = (
        made for made in launches(lambda: call(TARGET)) if made[0].fn.__name__ == "decode_kernel"
    )
    options = {option: launch[2][option] for option in OPTIONS if option in launch[2]}
    compiled = triton.compile(source_of(*launch), target=GPU, options=options)
    count, known = tile_instructions(instructions(dump(compiled.asm["cubin"], "-sass"))), launch[2]
    num_bytes = known["KEYS"] * (known["K_DIM"] + known["V_DIM"]) * (1 if known["FORMAT"] else 2)
    issue = count * known["num_warps"] / SCHEDULERS / (num_bytes / BYTES_PER_CYCLE)
    tile = {name: known[name] for name in ("KEYS", "num_warps", "num_stages")}
    return tile | usage(compiled, GPU.backend) | {"instructions": count, "issue": round(issue, 2)}


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    print(
        "| | keys, warps, stages | registers | spills | … once a split | shared | instructions a tile | issue |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name in sys.argv[1:] or DECODES:
        found = measure(DECODES[name])
        keys, warps, stages, *rest = found.values()
        print(
            f"| {name} | {keys}, {warps}, {stages} |", " | ".join(map(str, rest)), "|", flush=True
        )
