"""Forward passes that raise for a token of some requests, once what they keep of the tokens before
has been changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from freight.engine import compute
from freight.engine.compute import ChunkWork

ERROR = "its step failed: FloatingPointError: injected"


@dataclass
class Faults:
    """`at`: a prompt -> the position of the token that cannot be computed. `once`: it can, the next
    time.

    sizes   how many sequences each pass had
    armed   the pass that runs will raise: a test may raise within it
    """

    at: Mapping[tuple[int, ...], int]
    once: bool = False
    sizes: list[int] = field(default_factory=list)
    armed: bool = False

    def hits(self, work: Sequence[ChunkWork]) -> list[tuple[int, ...]]:
        chunks = [one.chunk for one in work]
        found = [(chunk, chunk.request.prompt_token_ids) for chunk in chunks]
        return [
            key
            for chunk, key in found
            if chunk.start <= self.at.get(key, -1) < chunk.start + chunk.num_tokens
        ]


def inject(
    monkeypatch: pytest.MonkeyPatch, at: Mapping[tuple[int, ...], int], once: bool = False
) -> Faults:
    """Until the test ends, passes over these tokens raise behind the last layer, if nothing raised
    before.
    """
    faults, run = Faults(dict(at), once), compute._compute

    def failing(runner: Any, work: Sequence[ChunkWork]) -> Any:
        faults.sizes.append(len(work))
        hits = faults.hits(work)
        faults.armed = bool(hits)
        try:
            results = run(runner, work)
        finally:
            faults.armed = False
            if once:
                faults.at = {
                    key: position for key, position in faults.at.items() if key not in hits
                }
        if hits:
            raise FloatingPointError("injected")
        return results

    monkeypatch.setattr(compute, "_compute", failing)
    return faults


def raising_behind(call: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    """`call`, which raises behind itself in a pass that is to raise."""

    def raising(self: Any, *args: Any) -> Any:
        result = call(self, *args)
        if faults.armed:
            raise FloatingPointError("injected")
        return result

    return raising
