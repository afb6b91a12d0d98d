"""Sizes of grids and tiles, on the host.

Triton's own functions of these names can be called by kernels, too, and therefore take microseconds
each: with them a layer's launches took a tenth longer.
"""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
