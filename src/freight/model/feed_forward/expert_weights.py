"""The matrices of a layer's experts, read one at a time, as `KernelSet.pack_experts` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from freight.checkpoint.headers import Shape
from freight.errors import CheckpointError
from freight.model.sources import WeightSource
from freight.operands.weight import Weight


@dataclass(frozen=True)
class Read:
    """`Weights` that are read lazily, while they are iterated over."""

    count: int
    read: Callable[[], Iterator[Weight]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Weight]:
        return self.read()


def expert_matrices(
    source: WeightSource, shapes: Mapping[str, Shape], names: Sequence[Sequence[str]]
) -> Iterator[Weight]:
    """Yield the matrix of each expert, merged from its tensors in `names`. Raises CheckpointError
    where the experts are not quantized alike.
    """
    scales = [source.input_scale(name) for group in names for name in group]
    largest = max((scale for scale in scales if scale is not None), default=None)
    first = None
    for group in names:
        weights = [
            replace(source.weight(name, shapes[name]), input_scale=largest) for name in group
        ]
        first = first or replace(weights[0], data=weights[0].data[:0])
        if not Weight.mergeable(weights) or not Weight.alike([first, weights[0]]):
            raise CheckpointError(
                f"{names[0][0]} and the other experts of this layer are not quantized alike, or blocks of scales "
                f"span gate and up ({len(weights[0].data)} rows each): they cannot be computed together; quantize "
                "all of them in the same way, with a scale per row if their rows are no multiple of 128"
            )
        if weights[0].input_limit is not None:
            raise CheckpointError(
                f"{names[0][0]} and the other experts of this layer: config.json clips their inputs to "
                f"{weights[0].input_limit:g} (activation_scale_ub, activation_value_ub), which is not implemented "
                "for experts; quantize them without a limit"
            )
        merged = Weight.concat(weights)
        del weights
        yield merged
        del merged
