"""Lightning attention: its config, tensors and state. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from freight.fp8.formats import Format
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.spec import MixerParts, Projected, StateMixer, StatePart, matrix_parts


@dataclass(frozen=True)
class LightningNames:
    """Names of lightning attention within a layer. `qkv` has the rows of q, k and v head by head."""

    qkv: str = "self_attn.qkv_proj"
    output_gate: str = "self_attn.output_gate"
    norm: str = "self_attn.norm.weight"
    out: str = "self_attn.out_proj"


@dataclass(frozen=True)
class LightningConfig(StateMixer):
    """Lightning attention (MiniMax-01, 2025): linear attention with a fixed decay of each head.

    q, k and v go through SiLU. The result of all heads is normed together, and multiplied by a
    sigmoid of a gate, before it is projected.

    head_dim   channels of a head of q, k and v
    rates      of each head: a token multiplies its state by exp(-rate)
    eps        epsilon of the norm
    """

    head_dim: int
    rates: tuple[float, ...]
    eps: float = 1e-6

    @property
    def size(self) -> int:
        """Channels of q, over all heads; k and v have as many."""
        return len(self.rates) * self.head_dim

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(LightningNames)
        return MixerParts(
            module=names.out.rpartition(".")[0],
            projections={
                "qkv": Projected((names.qkv,), (3 * self.size,), hidden_size),
                "out": Projected((names.out,), (hidden_size,), self.size),
            },
            kept={names.output_gate: (self.size, hidden_size)},
            norms={names.norm: self.size},
            whole={names.qkv: (self.head_dim,)},
            made=len(self.rates),
        )

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state."""
        heads = len(self.rates)
        return matrix_parts(
            key_heads=heads,
            heads=heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            compute=compute,
            state=state,
        )


def lightning_rates(heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return the rates of the heads of layer `layer`: later layers remember more."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(factor * 2 ** (-8 * (head + 1) / heads) for head in range(heads))
