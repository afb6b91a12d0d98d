"""The arguments of `--budget` and `--kv-budget`: the cost limit of weights, or a KV cache, chosen by
layer. Imports no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from freight.errors import ConfigError


class BudgetKind(StrEnum):
    """The limited quantity: `KL` in nats per token, or `BITS` per stored value, with scales per token
    and scales of weights.
    """

    KL = "kl"
    BITS = "bits"


@dataclass(frozen=True)
class Budget:
    """A limit on one kind of cost; the quantizer minimizes the other kind."""

    kind: BudgetKind
    limit: float

    def __str__(self) -> str:
        return f"{self.kind}={self.limit:g}"


def parse_budget(text: str) -> Budget:
    """Parse 'kl=0.002' or 'bits=9' of a KV cache. Raises ConfigError for anything else, and for fewer
    than the 8 bits of FP8.
    """
    budget = _parse(
        "--kv-budget",
        text,
        "kl=0.002, the divergence in nats per token that the cache may add, or bits=9, the average bits per stored "
        "value",
    )
    if budget.kind is BudgetKind.BITS and budget.limit < 8:
        raise ConfigError(
            f"--kv-budget {budget}: the least that can be had is bits=8, FP8 with static scales in every layer; "
            "ask for 8 to 16"
        )
    return budget


def parse_weight_budget(text: str) -> Budget:
    """Parse 'kl=0.01' or 'bits=4.5' of weights. Raises ConfigError for anything else, and for fewer
    than 4 bits.
    """
    budget = _parse(
        "--budget",
        text,
        "kl=0.01, the divergence in nats per token that the model may have from itself in 16 bits, or bits=4.5, the "
        "average bits of a weight of its Linear modules",
    )
    if budget.kind is BudgetKind.BITS and budget.limit <= 4:
        raise ConfigError(
            f"--budget {budget}: the least that can be had is INT4 with its scales, a little more than 4 bits; ask for "
            "4.2 to 16"
        )
    return budget


def _parse(flag: str, text: str, forms: str) -> Budget:
    match = None
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(kl|bits)\s*=\s*(\S+)\s*", text, re.IGNORECASE)
    try:
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit) or limit <= 0:
        raise ConfigError(f"{flag} {text!r}: write {forms}; both above 0")
    return Budget(BudgetKind(match[1].lower()), limit)
