"""Occupancy: programs that a multiprocessor holds at a time, and how many a launch should have.

The registers of a kernel differ between versions of Triton, and between kinds of scales: on sm_90
decoding with static scales takes 156 a thread with 3.6 and 162 with 3.9, and with a scale per token
200 and 168, so 5 programs fit or 4. Therefore the driver is asked for the registers of the compiled
kernel. Only the number of programs that share the splits of a sequence follows from it; the splits
are the same on every device, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freight.kernels.triton.formats import Target

USUAL = 4  # programs per multiprocessor where the driver cannot tell: on AMD, in the interpreter
# Largest number of programs for each place, and for each piece of work if there are fewer places.
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Unit:
    """The resources of one multiprocessor of an NVIDIA GPU.

    registers   32-bit registers
    shared      bytes of shared memory
    warps       warps that it holds
    """

    registers: int
    shared: int
    warps: int

    @staticmethod
    def here() -> Unit:
        """Return those of the GPU that torch uses now."""
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        threads = facts.max_threads_per_multi_processor
        # Versions of torch that do not report registers: there have been 65536 since Kepler.
        registers = getattr(facts, "regs_per_multiprocessor", 65536)
        return Unit(registers, facts.shared_memory_per_multiprocessor, threads // 32)

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return how many programs fit, at least 1.

        A program has `warps` warps, `registers` registers per thread and `shared` bytes of shared
        memory. Each of four schedulers allocates a warp's registers in units of 256; the driver
        reserves 1024 bytes of shared memory per program.
        """
        of_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = self.registers // 4 // of_warp * 4 // warps
        return max(1, min(by_registers, self.shared // (shared + 1024), self.warps // warps, 32))


def programs_per_unit(
    target: Target, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]
) -> int:
    """Return how many programs of this launch a multiprocessor holds at a time.

    Compiles the kernel if it is not compiled yet.
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
    """Return the number of programs for each of `work` pieces, at most `most`.

    It is the smallest number that fills `places` best. One program too many doubles the time: 400
    programs in 396 places take two rounds.
    """

    def filled(count: int) -> float:
        rounds = -(-count * work // places)
        return round(count * work / (rounds * places), 2)

    largest = max(1, places // work, min(MOST_ROUNDS, MOST_ROUNDS * places // work))
    return max(range(1, min(most, largest) + 1), key=lambda count: (filled(count), -count))
