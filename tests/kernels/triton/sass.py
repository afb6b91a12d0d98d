"""What can be read in a kernel's machine code for NVIDIA GPUs (SASS): its loops, and its accesses
to local memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def dump(cubin: bytes, option: str) -> str:
    """What `cuobjdump` prints of a compiled kernel: with "-sass" its instructions, with
    "-res-usage" its registers.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True
        ).stdout


@dataclass(frozen=True)
class Loop:
    """The instructions from `first` to `last`, addresses; the last jumps to the first."""

    first: int
    last: int

    def has(self, address: int) -> bool:
        return self.first <= address <= self.last

    def contains(self, other: Loop) -> bool:
        return self != other and self.has(other.first) and self.has(other.last)


def instructions(sass: str) -> dict[int, str]:
    """Each instruction by its address."""
    return {
        int(address, 16): text
        for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)
    }


def loops(code: dict[int, str]) -> list[Loop]:
    """All loops, in the order of their addresses."""
    found = []
    for address, text in code.items():
        jump = re.search(r"\bBRA(?:\.\w+)*\s.*?0x([0-9a-f]+)", text)
        if (
            jump and int(jump[1], 16) < address
        ):  # a kernel ends in an instruction that jumps to itself
            found.append(Loop(int(jump[1], 16), address))
    return sorted(found, key=lambda loop: loop.first)


def tile_loops(code: dict[int, str]) -> list[Loop]:
    """The loops over tiles: those that multiply matrices, and have no other such loop in them."""
    products = [address for address, text in code.items() if "MMA" in text]
    multiplying = [loop for loop in loops(code) if any(map(loop.has, products))]
    return [loop for loop in multiplying if not any(map(loop.contains, multiplying))]


def spills(code: dict[int, str]) -> tuple[int, int]:
    """Accesses to local memory: how many repeat, and how many run once a program, or once a split
    of keys.

    Loops around loops over tiles go over splits; what is in any other loop repeats. So does
    everything in a kernel that has no loop: its programs are small and many.
    """
    tiles, every = tile_loops(code), loops(code)
    repeating = [loop for loop in every if not any(map(loop.contains, tiles))]
    accesses = [address for address, text in code.items() if re.search(r"\b(?:LDL|STL)\b", text)]
    repeated = [
        address for address in accesses if not every or any(loop.has(address) for loop in repeating)
    ]
    return len(repeated), len(accesses) - len(repeated)
