"""Routing: the choice of a token's experts from the logits of a router, and their weights. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scoring(StrEnum):
    """The function from a router's logits to scores."""

    SOFTMAX = "softmax"  # softmax over all experts (Fedus et al. 2021)
    SIGMOID = "sigmoid"  # of each expert separately (DeepSeek-V3, arXiv 2412.19437)
    # softmax over the chosen experts only (gpt-oss; the same as Mixtral's renormed softmax)
    CHOSEN = "chosen"


@dataclass(frozen=True)
class Routing:
    """The parameters of a router. A token goes to the `top_k` experts with the largest scores; of
    equal scores, those of lower ids win.

    scoring        function from float32 logits to scores, which are also the weights of the experts
    normed         whether the weights of a token are divided by their sum
    factor         multiplies the weights after that
    num_groups     groups of equal size that the experts form
    top_groups     groups that a token chooses from: those with the largest sums of best scores
    group_best     number of best scores summed per group: 2 (DeepSeek-V3), or 1 (DeepSeek-V2)
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normed: bool = True
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
