"""What is known of a layer once it is quantized: the tokens that its inputs had, and what rounding
takes of its outputs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freight.base.fields import JsonObject


@dataclass(frozen=True)
class RoundingError:
    """What rounding takes of the outputs of a group: the error's share of their squared size over the
    calibration data (`gptq.output_error`).

    nearest   of plain rounding with the same scales
    final     of what is written; the same where the method rounds to nearest
    """

    nearest: float
    final: float


@dataclass(frozen=True)
class GroupRecord:
    """Of the modules that share an input.

    num_tokens   that reached them: all, or for an expert those that were sent to it
    errors       by the name of the numbers (`candidates.Candidate.name`); empty where none were
                 measured
    """

    modules: tuple[str, ...]
    num_tokens: int
    errors: Mapping[str, RoundingError]

    def content(self) -> JsonObject:
        """Return it as JSON."""
        errors = {}
        for name, error in self.errors.items():
            errors[name] = {"nearest": error.nearest, "final": error.final}
        return {"modules": list(self.modules), "num_tokens": self.num_tokens, "errors": errors}

    @staticmethod
    def read(content: Mapping[str, Any]) -> GroupRecord:
        """Return what `content` made."""
        errors = {name: RoundingError(**error) for name, error in content["errors"].items()}
        return GroupRecord(tuple(content["modules"]), content["num_tokens"], errors)
