"""--state-every: after how many tokens a state stays behind. Imports no torch."""

from __future__ import annotations

from freight.errors import ConfigError
from freight.operands.tiles import STATE_TILE


def check_state_every(value: object, block_size: int) -> None:
    """None, or a power of two that is a multiple of the block size and of a state's tile. Raises ConfigError."""
    if value is None:
        return
    least = max(STATE_TILE, block_size)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or value & (value - 1):
        raise ConfigError(
            f"--state-every {value!r} must be a power of two, {least} or more: a multiple of {STATE_TILE} and "
            f"of --block-size {block_size}; give {least}, {2 * least} or {4 * least}, or omit it"
        )
