"""Options behind `--` of a benchmark's command line, which go to the engine that it starts."""

from __future__ import annotations

from collections.abc import Sequence


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before `--`, and what stands behind it."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    place = own.index("--")
    return own[:place], own[place + 1 :]
