"""Routing: the choice of a token's experts from the logits of a router, and their weights. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scoring(StrEnum):
    """The function from a router's logits to scores."""

    SOFTMAX = "softmax"  # over all experts (Fedus et al. 2021)
    SIGMOID = "sigmoid"  # of each alone (DeepSeek-V3, arXiv 2412.19437)
    CHOSEN = (
        "chosen"  # over the chosen experts alone (gpt-oss; Mixtral's renormed softmax is the same)
    )


@dataclass(frozen=True)
class Routing:
    """A token goes to the `top_k` experts with the largest scores; of equal ones, to those with
    lower ids.

    scoring        makes scores of the float32 logits, and these are the weights of the experts
    normed         the weights of a token are divided by their sum
    factor         multiplies the weights after that
    num_groups, top_groups   experts are in groups of equal size, and a token chooses among the
                             `top_groups` whose best
                   scores have the largest sums
    group_best     how many of a group's best scores are summed: 2 (DeepSeek-V3), or 1 (DeepSeek-V2)
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normed: bool = True
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
