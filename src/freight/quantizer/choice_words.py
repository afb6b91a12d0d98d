"""What `freight quantize --budget` chose, as JSON and for people. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from freight.base.fields import JsonObject

if TYPE_CHECKING:
    from freight.quantizer.weight_budget import WeightChoice


def choice_content(choice: WeightChoice) -> JsonObject:
    """Return the choice of a budget as JSON. KL in nats per token; `kl` of a layer is what each
    candidate costs there alone.
    """
    layers = []
    for index, layer in enumerate(choice.layers):
        layers.append(
            {"layer": index, "weights": layer.name, "bytes": layer.num_bytes, "kl": dict(layer.kl)}
        )
    return {
        "kind": choice.budget.kind,
        "limit": choice.budget.limit,
        "layers": layers,
        "bits": choice.bits,
        "bytes": choice.num_bytes,
        "bytes_unquantized": choice.bytes_unquantized,
        "predicted_kl": choice.predicted_kl,
        "kl_chosen": choice.kl_chosen,
        "kl_verified": choice.kl_verified,
        "num_tokens_measured": choice.num_measured,
        "num_tokens_chosen": choice.num_chosen,
        "num_tokens_verified": choice.num_verified,
    }


def choice_lines(choice: WeightChoice) -> Iterator[str]:
    """Yield sentences about the choice as a whole."""
    yield (
        f"weights within {choice.budget}: {choice.bits:.2f} bits a weight of Linear modules, "
        f"{choice.num_bytes:,} bytes of {choice.bytes_unquantized:,}"
    )
    yield (
        f"KL from the model in 16 bits: {choice.predicted_kl:.3g} predicted by the sum of the layers, "
        f"{choice.kl_chosen:.3g} measured on the {choice.num_chosen:,} tokens that it was chosen by, "
        f"{choice.kl_verified:.3g} on {choice.num_verified:,} others"
    )


def runs(names: Sequence[str]) -> Iterator[range]:
    """Yield the indices of equal names that follow each other."""
    begin = 0
    for index in range(1, len(names) + 1):
        if index == len(names) or names[index] != names[begin]:
            yield range(begin, index)
            begin = index


def span(indices: range) -> str:
    """Return what a table calls layers in a row."""
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"


def least_and_most(values: Sequence[float], format: str = ".2g") -> str:
    """Return the span of values in a cell of a table; empty without any."""
    if not values:
        return ""
    ends = dict.fromkeys((f"{min(values):{format}}", f"{max(values):{format}}"))
    return " to ".join(ends)
