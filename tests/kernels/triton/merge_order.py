"""Print, as JSON, whether the merge of decode attention sums in the same order for every consumer
of its rows.

    python tests/kernels/triton/merge_order.py sm_90

The order of a sum follows from the layouts that Triton gives the tiles of a loop, and those may
depend on what a kernel does elsewhere. So what is compared is the loop over the splits in Triton's
own code, layouts written out.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import triton
from aot import OPTIONS, TARGETS, launches, source_of
from cases import attend

from freight.fp8.formats import Format
from freight.operands.weight import Activations

SHAPES = ((4, 128), (7, 64), (4, 256))  # query heads of a KV head, values of a head
CONSUMERS = {
    "none": None,
    "row": (False, Activations.DYNAMIC),
    "group": (True, Activations.DYNAMIC),
    "static": (False, Activations.STATIC),
}


def loop_of(code: str) -> list[str]:
    """The first loop of a kernel, its values without names and its layouts in place."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.M))
    lines = [re.sub(r" loc\(.*?\)", "", line) for line in code.splitlines()]
    begin = next(i for i, line in enumerate(lines) if "scf.for" in line)
    indent = re.match(r" *", lines[begin])[0]
    end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(indent + "}"))
    written = (
        re.sub(r"#\w+", lambda found: layouts.get(found[0], found[0]), line)
        for line in lines[begin:end]
    )
    return [re.sub(r"%[\w#:]+", "%", line) for line in written]


def main(name: str) -> None:
    target, gpu = TARGETS[name]
    for group, dim in SHAPES:
        loops = {}
        for consumer, to in CONSUMERS.items():
            call = partial(attend, Format.E4M3FN, "static", 8, group, dim, 64, None, target, to=to)
            (made,) = (one for one in launches(call) if one[0].fn.__name__ == "merge_kernel")
            options = {option: made[2][option] for option in OPTIONS if option in made[2]}
            loops[consumer] = loop_of(
                triton.compile(source_of(*made), target=gpu, options=options).asm["ttgir"]
            )
        different = [consumer for consumer, loop in loops.items() if loop != loops["none"]]
        print(
            json.dumps({"dim": dim, "operations": len(loops["none"]), "different": different}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
