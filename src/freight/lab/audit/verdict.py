"""The verdict in a sentence: is the FP8 cache of this engine safe with this checkpoint, and why.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.lab.audit.effects import EngineView
from freight.lab.evaluate.safety import within_bounds


@dataclass(frozen=True)
class Cost:
    """Perplexity, KL against 16 bits in nats per token, and the share of equal top tokens, of one
    cache.
    """

    perplexity: float
    kl_mean: float
    same_top: float


def is_safe(cost: Cost) -> bool:
    """Say whether `cost` keeps the bounds of `freight evaluate` on the text that was measured."""
    return within_bounds(cost.kl_mean, cost.same_top)


def sentence(view: EngineView, cost: Cost | None, plain: Cost | None, dynamic: Cost | None) -> str:
    """Write one sentence. Costs are None where nothing was measured."""
    if view.refusal:
        return f"{view.title} does not load this checkpoint: {view.refusal}."
    if view.unknown:
        return f"{view.title}: not known: {view.unknown[0].why}."
    does = f"{view.title} with an FP8 cache {_does(view)}"
    if cost is None or plain is None or dynamic is None:
        return f"{does}; not measured."
    figures = f"perplexity {plain.perplexity:.2f} becomes {cost.perplexity:.2f}, mean KL {cost.kl_mean:.5f}"
    if is_safe(cost):
        but = f"; {view.caveat}" if view.caveat else ""
        return f"{does}: safe on this text ({figures}){but}."
    least = f"a scale per token has {dynamic.kl_mean:.5f}"
    return f"{does}: not safe on this text ({figures}; {least})."


def _does(view: EngineView) -> str:
    count = len(view.layers)
    unit = len(view.unit)
    lost = len(view.lost)
    layers = "layers"
    if count != view.num_layers:
        layers = "layers with attention"
    if not unit:
        if count == 1:
            return f"uses the stored scales of {layers.replace('layers', 'the one layer')}"
        return f"uses the stored scales of all {count} {layers}"
    if lost:
        where = f"in all {layers}"
        if lost < count:
            where = f"in {lost} of {count} {layers} ({_numbers(view.lost)})"
        if unit > lost:
            where += f", finds none in {unit - lost} more,"
        return f"drops stored scales {where} and divides by 1.0 there"
    if unit == count:
        return f"finds no scales and divides by 1.0 in every {layers.replace('layers', 'layer')}"
    return f"finds no scales in {unit} of {count} {layers} ({_numbers(view.unit)}) and divides by 1.0 there"


def _numbers(layers: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, layers[:8]))
    if len(layers) > 8:
        numbers += ", …"
    return f"layer{'s' * (len(layers) > 1)} {numbers}"
