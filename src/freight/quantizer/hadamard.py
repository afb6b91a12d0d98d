"""Normalized Hadamard matrices: entries of one size, rows orthogonal, so that a vector's outliers
spread over all of its channels.

The matrix of order n = 2^k m is the Kronecker product of Sylvester's of order 2^k and one of order
m by Paley (1933): m = q + 1 for a prime q = 3 mod 4, or m = 2 (q + 1) for a prime q = 1 mod 4.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from freight.errors import ConfigError

_LARGEST_FACTOR = 64  # of Sylvester's matrix: products with factors this small are cheap


def paley_order(order: int) -> int:
    """Return the m of order = 2^k m, 1 for a power of two, else the least that there is. Raises
    ConfigError if there is none.
    """
    assert order > 0
    paley = order & -order  # the largest power of two in it
    odd = order // paley
    if odd == 1:
        return 1
    paley = 4 * odd
    while order % paley == 0:
        if _paley_prime(paley):
            return paley
        paley *= 2
    raise ConfigError(
        f"no Hadamard matrix of order {order} is known here: it has to be 2^k * m with m from Paley's "
        "constructions (12, 20, 28, 36 and so on)"
    )


def hadamard_matrix(order: int) -> Tensor:
    """Return the normalized matrix, float64 [order, order]: H H^T is the identity."""
    return turned(torch.eye(order, dtype=torch.float64, device="cpu"), order)


def turned(x: Tensor, order: int) -> Tensor:
    """Return x H of each of the equal parts of `order` in the last dimension.

    The product goes by the Kronecker factors of H, so it takes `order` times the sum of their
    orders, not the square of `order`.
    """
    shape = x.shape
    factors = _factors(order)
    parts = x.reshape(-1, *(len(factor) for factor in factors))
    for dim, factor in enumerate(factors, 1):
        parts = torch.tensordot(parts, factor.to(x), dims=([dim], [0])).movedim(-1, dim)
    product: Tensor = parts.reshape(shape) * order**-0.5
    return product


def signs(order: int, seed: int | None) -> Tensor:
    """Return random signs, float64 [order], the same for the same seed; ones for None."""
    if seed is None:
        return torch.ones(order, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed)
    bits = torch.randint(0, 2, (order,), generator=generator, dtype=torch.int64, device="cpu")
    return 1.0 - 2.0 * bits.double()


@cache
def _factors(order: int) -> tuple[Tensor, ...]:
    """Return matrices of 1 and -1 whose Kronecker product has this order, float64."""
    paley = paley_order(order)
    factors = []
    left = order // paley
    while left > 1:
        size = min(left, _LARGEST_FACTOR)
        factors.append(_sylvester(size))
        left //= size
    if paley > 1:
        factors.append(_paley(paley))
    return tuple(factors) or (torch.ones(1, 1, dtype=torch.float64, device="cpu"),)


def _sylvester(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _paley_prime(order: int) -> int | None:
    """Return the prime of which Paley's constructions make a matrix of this order."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        return order - 1
    half = order // 2 - 1
    return half if half % 4 == 1 and _is_prime(half) else None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _paley(order: int) -> Tensor:
    """Return a Hadamard matrix of this order, which `_paley_prime` knows, float64."""
    prime = _paley_prime(order)
    assert prime is not None
    squares = {number * number % prime for number in range(1, prime)}
    character = torch.tensor(
        [0.0] + [1.0 if x in squares else -1.0 for x in range(1, prime)],
        dtype=torch.float64,
        device="cpu",
    )
    places = torch.arange(prime, dtype=torch.int64, device="cpu")
    jacobsthal = character[(places[:, None] - places) % prime]
    bordered = torch.zeros(prime + 1, prime + 1, dtype=torch.float64, device="cpu")
    bordered[1:, 1:] = jacobsthal
    bordered[0, 1:] = 1.0
    eye = torch.eye(prime + 1, dtype=torch.float64, device="cpu")
    if prime % 4 == 3:
        bordered[1:, 0] = -1.0
        return eye + bordered
    bordered[1:, 0] = 1.0  # symmetric
    block = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device="cpu")
    return torch.kron(bordered, block) + torch.kron(eye, diagonal)
