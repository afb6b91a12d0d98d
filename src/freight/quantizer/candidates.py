"""The numbers that a budget chooses from, layer by layer.

INT4 in groups of 128, 64 and 32, E4M3 with a scale per output row and inputs in 16 bits, and 16
bits. Of E4M3 it is the form with inputs in 16 bits: it takes the same bytes as the one with rounded
inputs, with a smaller error. MXFP4 has larger errors than INT4 of as many bits, and NVFP4 those of
INT4 in groups of 32, once GPTQ rounds both (SmolLM2-135M, outputs in two layers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from freight.fp8.scheme import INT4_GROUPS
from freight.quantizer.plan import WEIGHT_ONLY, QuantizePlan, WeightObserver, WeightScheme

SIXTEEN_BITS = "16 bits"


@dataclass(frozen=True)
class Candidate:
    """Numbers that the modules of a layer may have, and the plan that has them in every layer."""

    name: str
    plan: QuantizePlan

    def fits(self, columns: Collection[int]) -> bool:
        """Return whether its groups divide matrices of these numbers of inputs."""
        if self.plan.weights is not WeightScheme.INT4:
            return True
        return all(count % self.plan.group_size == 0 for count in columns)


def candidates(plan: QuantizePlan) -> tuple[Candidate, ...]:
    """Return what a budget chooses from beside 16 bits, the fewest bytes first."""
    alone = replace(plan, budget=None)
    offered = []
    for size in sorted(INT4_GROUPS, reverse=True):
        offered.append(Candidate(f"int4-{size}", replace(alone, group_size=size)))
    in_rows = replace(alone, weights=WeightScheme.CHANNEL, weight_observer=WeightObserver.MINMAX)
    return (*offered, Candidate(WEIGHT_ONLY, in_rows))


def named_in(name: str, module: str) -> str:
    """Return how a store of layers calls the matrix of a module in the numbers `name`."""
    return f"{name}|{module}"


def fitting(
    offered: Sequence[Candidate], shapes: Mapping[str, Sequence[int]], modules: Sequence[str]
) -> list[Candidate]:
    """Return the candidates that all of these modules can have. shapes: of their matrices, by tensor."""
    columns = {shapes[f"{module}.weight"][-1] for module in modules}
    return [candidate for candidate in offered if candidate.fits(columns)]
