"""The argument of `--kv-budget`: the cost limit of a mixed KV cache. Imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from freight.errors import ConfigError


class BudgetKind(StrEnum):
    """The limited quantity: `KL` in nats per token, or `BITS` per stored value, scales per token
    included.
    """

    KL = "kl"
    BITS = "bits"


@dataclass(frozen=True)
class KVBudget:
    """A limit on one kind of cost; the quantizer minimizes the other kind."""

    kind: BudgetKind
    limit: float

    def __str__(self) -> str:
        return f"{self.kind}={self.limit:g}"


def parse_budget(text: str) -> KVBudget:
    """Parse 'kl=0.002' or 'bits=9'. Raises ConfigError for anything else, and for fewer than the 8
    bits of FP8.
    """
    match = re.fullmatch(r"\s*(kl|bits)\s*=\s*(\S+)\s*", text) if isinstance(text, str) else None
    try:
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit) or limit <= 0:
        raise ConfigError(
            f"--kv-budget {text!r}: write kl=0.002, the divergence in nats per token that the cache may add, or "
            "bits=9, the average bits per stored value; both above 0"
        )
    budget = KVBudget(BudgetKind(match[1]), limit)
    if budget.kind is BudgetKind.BITS and limit < 8:
        raise ConfigError(
            f"--kv-budget {budget}: the least that can be had is bits=8, FP8 with static scales in every layer; "
            "ask for 8 to 16"
        )
    return budget
