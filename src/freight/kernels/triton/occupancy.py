"""How many programs of a kernel a multiprocessor holds at a time, and how many to launch so that
none waits for long.

Registers differ between versions of Triton, and between scales: on sm_90 decoding over static ones
takes 124 a thread with 3.6 and 104 with 3.9, and over one per token 138 and 140, so 4 programs fit
or 3. Therefore they are those of the kernel that was compiled, as the driver tells them. Only the
number of programs that share the splits of a sequence follows from it; the splits are the same on
every device, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freight.kernels.triton.formats import Target

USUAL = 4  # where no compiled kernel can be asked: on AMD GPUs and in the interpreter
MOST_ROUNDS = (
    4  # programs for each place, and for each piece of work that has fewer places, at most
)


@dataclass(frozen=True)
class Unit:
    """What a multiprocessor of an NVIDIA GPU has: 32-bit registers, bytes of shared memory, and
    places for warps.
    """

    registers: int
    shared: int
    warps: int

    @staticmethod
    def here() -> Unit:
        """Of the GPU that torch uses now."""
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        threads = facts.max_threads_per_multi_processor
        registers = getattr(
            facts, "regs_per_multiprocessor", 65536
        )  # that many since Kepler, where torch is silent
        return Unit(registers, facts.shared_memory_per_multiprocessor, threads // 32)

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Programs that fit, 1 at least: of `warps` warps, `registers` a thread and `shared` bytes.

        A warp's registers are given out in 256s by one of four schedulers; 1024 bytes of shared
        memory a program are the driver's.
        """
        of_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = self.registers // 4 // of_warp * 4 // warps
        return max(1, min(by_registers, self.shared // (shared + 1024), self.warps // warps, 32))


def programs_per_unit(
    target: Target, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]
) -> int:
    """Programs of this launch that a multiprocessor holds at a time. Compiles the kernel if it is
    not yet.
    """
    if target.backend != "cuda" or not target.arch:
        return USUAL
    types = (value.dtype if isinstance(value, Tensor) else value is None for value in arguments)
    key = (
        kernel.fn.__name__,
        *types,
        *sorted((name, str(value)) for name, value in constants.items()),
    )
    if key not in target.fits:
        compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **constants)
        if compiled is None:  # launches are recorded, for a GPU that is not there
            return USUAL
        compiled._init_handles()  # loads it, which a launch would do next
        target.fits[key] = Unit.here().programs(
            compiled.n_regs, compiled.metadata.shared, constants["num_warps"]
        )
    return target.fits[key]


def programs_for(work: int, places: int, most: int) -> int:
    """How many programs to give each of `work` pieces, `most` at most: the fewest that fill
    `places` best.

    With one that does not fit all others run twice as long as need be: 400 programs in 396 places
    take two rounds.
    """

    def filled(count: int) -> float:
        rounds = -(-count * work // places)
        return round(count * work / (rounds * places), 2)

    largest = max(1, places // work, min(MOST_ROUNDS, MOST_ROUNDS * places // work))
    return max(range(1, min(most, largest) + 1), key=lambda count: (filled(count), -count))
