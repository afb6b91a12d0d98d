"""Stages: how many devices divide the layers of a model, and how many layers each has
(`--pipeline-parallel-size`, `--pp-layers`). Imports no torch.
"""

from __future__ import annotations

from freight.base.fields import is_integer
from freight.errors import ConfigError

MOST_STAGES = 64


def check_stages(size: int, layers: str | None) -> None:
    """Raise ConfigError for a number of stages, or a --pp-layers, that no model could have."""
    if not is_integer(size) or not 1 <= size <= MOST_STAGES:
        raise ConfigError(
            f"--pipeline-parallel-size {size!r} must be an integer from 1 to {MOST_STAGES}"
        )
    if layers is None:
        return
    if not isinstance(layers, str):
        raise ConfigError(f"pp_layers is {layers!r}; write a text like '20,20'")
    if size == 1:
        raise ConfigError(
            f"--pp-layers {layers!r} is for several stages: add --pipeline-parallel-size, or omit it"
        )
    listed_counts(layers, size)


def listed_counts(value: str, size: int) -> tuple[int, ...]:
    """Return --pp-layers as numbers. Raises ConfigError for a value that is no list of `size`
    positive numbers.
    """
    counts: tuple[int, ...] = ()
    parts = [part.strip() for part in value.split(",")]
    if all(
        part.isascii() and part.isdigit() for part in parts
    ):  # int() takes '1_0' and '+1' as well
        counts = tuple(map(int, parts))
    if len(counts) != size or min(counts) < 1:
        example = ",".join(["20"] * max(size, 2))
        raise ConfigError(
            f"--pp-layers {value!r} must give the layers of each of the {size} stages of --pipeline-parallel-size, as "
            f"in {example}"
        )
    return counts
