"""GPTQ: rounding a matrix one input at a time, with the error of each spread over the inputs that are
still to be rounded (Frantar et al., GPTQ, arXiv 2210.17323).

The error of a Linear's outputs over calibration inputs X [tokens, inputs], with the rounded matrix Q
in the place of W, is tr((W - Q) H (W - Q)^T) with H = X^T X. Once input i is rounded, the change of
the later inputs that makes up for most of its error e is -e U[i, i+1:] / U[i, i], where U is the
upper factor of H^-1 = U^T U. Scales are those of the matrix as it was; so they are in llm-compressor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.quantizer.grid import Grid

BLOCK = 128  # inputs whose errors reach later blocks as one product
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
_MORE = 10.0  # by what damping grows where a Hessian still has no factor
_TRIES = 12

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class Spread:
    """The factor of a Hessian by which errors are spread.

    upper   float32 [inputs, inputs], upper triangular, in the order of `order`
    order   int64 [inputs]: inputs in the order in which they are rounded
    dead    bool [inputs], in their own order: inputs that were always zero
    """

    upper: Tensor
    order: Tensor
    dead: Tensor


def by_activation(hessian: Tensor) -> Tensor:
    """Return the inputs in the order of falling diagonal of H: those whose error costs most are
    rounded first, while most others can make up for it (act-order).
    """
    return torch.argsort(torch.diagonal(hessian), descending=True, stable=True)


def spread(hessian: Tensor, order: Tensor, damping: float, name: str) -> Spread:
    """Factor H, float32 [inputs, inputs], symmetric; it is not changed. `name` is for messages.

    A Hessian that has no factor in float32, as with few tokens, is factored in float64, and then with
    more damping.
    """
    diagonal = torch.diagonal(hessian)
    dead = diagonal == 0
    damped = hessian[order][:, order]
    of_damped = torch.diagonal(damped)
    of_damped[dead[order]] = 1.0
    mean = of_damped.mean()
    dtype = torch.float32
    for _ in range(_TRIES):
        of_damped.add_(damping * mean)
        upper = _factor(damped.to(dtype))
        if upper is not None:
            return Spread(upper.float(), order, dead)
        if dtype is torch.float64:
            logger.warning(
                "%s: its Hessian has no factor with damping %g; tried with %g",
                name,
                damping,
                damping * (1 + _MORE),
            )
            damping *= _MORE
        dtype = torch.float64
    # Errors are not spread at all
    identity = torch.eye(len(hessian), dtype=torch.float32, device=hessian.device)
    return Spread(identity, order, dead)


def _factor(hessian: Tensor) -> Tensor | None:
    """Return U, upper, with H^-1 = U^T U; None if H has none.

    With the inputs reversed H = L L^T, so that H = R R^T with R = L reversed in rows and columns,
    which is upper, and U = R^-1.
    """
    reversed_lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if failed or not reversed_lower.isfinite().all():
        return None
    eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    upper = torch.linalg.solve_triangular(reversed_lower.flip(0, 1), eye, upper=True)
    return upper if bool(upper.isfinite().all()) else None


def compensated(
    weight: Tensor,
    grid: Grid,
    spread: Spread,
    on_block: Callable[[int], None] = lambda inputs: None,
) -> Tensor:
    """Return the matrix, float32 [rows, inputs], that becomes GPTQ's when `grid` rounds each number to
    nearest: every input as it was when its turn came, with the errors of those before it.

    Inputs that were always zero become zero. `on_block` is called with the inputs that are done.
    """
    order = spread.order
    work = weight.float().masked_fill(spread.dead, 0.0)[:, order]
    inputs = work.shape[1]
    result = torch.empty_like(work)
    for begin in range(0, inputs, BLOCK):
        end = min(begin + BLOCK, inputs)
        block = work[:, begin:end].t().contiguous()  # a row for each input: contiguous
        upper = spread.upper[begin:end, begin:end]
        errors = torch.empty_like(block)
        for index in range(end - begin):
            column = block[index]
            result[:, begin + index] = column
            rounded = grid.column(column, int(order[begin + index]))
            error = (column - rounded) / upper[index, index]
            block[index + 1 :].addr_(upper[index, index + 1 :], error, alpha=-1)
            errors[index] = error
        work[:, end:].addmm_(errors.t(), spread.upper[begin:end, end:], alpha=-1)
        on_block(end)
    restored = torch.empty_like(result)
    restored[:, order] = result
    return restored


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Return tr((W - Q) H (W - Q)^T) over tr(W H W^T): the share of the outputs' squared size that
    rounding takes.
    """
    difference = weight.float() - rounded
    error = ((difference @ hessian) * difference).sum()
    size = ((weight.float() @ hessian) * weight.float()).sum()
    return float(error / size.clamp(min=torch.finfo(torch.float32).tiny))
