"""AttentionCall: what every call of one layer's attention has in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The parameters of a layer's attention (`KernelSet.attention`), made once, when it is built.

    softmax_scale   multiplies q . k
    window          sliding window in tokens: keys at a distance < window are visible; None: all are
    causal          False: a row also sees the keys after its own, which needs the whole sequence in
                    one step; with a window, those at a distance < window on both sides
    soft_cap        a score s becomes soft_cap * tanh(s / soft_cap); None: scores are unbounded
    group           query heads of a KV head in the whole model, where ranks divide them; None: those
                    of q. Kernels that choose tiles by it choose those of one rank
    sinks           [num_heads] float32: an additional score of each row, which enters only the sum
                    of the softmax; None: there is none
    """

    softmax_scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    causal: bool = True
    group: int | None = None
