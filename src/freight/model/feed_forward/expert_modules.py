"""The modules of a mixture's experts that take adapters, by the names of separate matrices. Imports no
torch.

Where a checkpoint has a tensor of all experts (`TensorNames.interleaved`), the modules have the names
of families whose files have separate ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.config.tensor_names import TensorNames

_COMMON = TensorNames()


@dataclass(frozen=True)
class ExpertModules:
    """The modules of one expert, by their names within the layer: those before the activation, and
    the one after it.
    """

    gate_up: tuple[str, ...]
    down: str


def expert_modules(names: TensorNames, num_experts: int) -> list[ExpertModules]:
    """Return the modules of each expert."""
    prefix = _COMMON.expert if names.interleaved else names.expert
    gate_up = _COMMON.expert_gate_up if names.interleaved else names.expert_gate_up
    modules = []
    for expert in range(num_experts):
        own = prefix.format(expert)
        modules.append(
            ExpertModules(tuple(own + part for part in gate_up), own + names.expert_down)
        )
    return modules
