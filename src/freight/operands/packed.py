"""Values that a set of kernels makes and models pass on unread: packed matrices, and rows quantized
for one.

Each set derives its classes from these, and asserts that the objects passed back to it are of these
classes: a model is built with one set, so an object of another set is a bug.
"""

from __future__ import annotations

from torch import Tensor


class PackedWeight:
    """The matrix of a Linear, as returned by `KernelSet.pack`. A set may return the `Weight`
    itself.
    """


class PackedExperts:
    """One matrix of each expert, with biases, as returned by `KernelSet.pack_experts`."""


class QuantizedRows:
    """Rows in the form that the product with one packed weight takes; only that product can use
    them.
    """


# the result of a norm, an activation or attention, for the next product: [rows, in_features]
Rows = Tensor | QuantizedRows

# x and the weight of its norm, or None (`KernelSet.join`)
JoinedPart = tuple[Tensor, Tensor | None]


def as_tensor(rows: Rows) -> Tensor:
    """Return the rows of an operation that had no `consumer` (`KernelSet`): always a tensor."""
    assert isinstance(rows, Tensor)
    return rows
