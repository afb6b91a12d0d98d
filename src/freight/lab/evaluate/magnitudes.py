"""How large keys and values are: by layer, head, channel and position, as the first setting stores
them.

What a scale has to cover. A static scale clips what is larger than its format's largest value
times the scale; a scale of 1.0 clips beyond 448 (E4M3FN), and below 2 ** -6 it has fewer digits
than the format has. So the largest magnitude of each channel of a layer is measured: where one
channel is far above the others, a single scale for all of them is too coarse for most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.base.fields import JsonDict, JsonObject
from freight.cache.pages import expand_scale
from freight.fp8.formats import Format
from freight.fp8.scheme import LayerScales
from freight.lab.evaluate.statistics import position_edges

SMALLEST_NORMAL = 2.0**-6  # of E4M3FN; each halving below costs a digit
_NAMES = ("k", "v")


@dataclass
class Side:
    """Keys or values of one layer.

    channels   largest magnitude of each, float32 [num_kv_heads, head_dim]
    positions  largest magnitude in each bucket of positions, float32 [buckets]
    counts     int64 [3]: values, those beyond E4M3FN's largest, those below its smallest normal and
               not 0
    """

    channels: Tensor
    positions: Tensor
    counts: Tensor

    @staticmethod
    def empty(like: Tensor, num_buckets: int) -> Side:
        device = like.device
        return Side(
            torch.zeros(like.shape[1:], dtype=torch.float32, device=device),
            torch.zeros(num_buckets, dtype=torch.float32, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        )

    def see(self, values: Tensor, buckets: Tensor) -> None:
        """Take `values` [rows, num_kv_heads, head_dim], each row in its bucket of `buckets` [rows]."""
        size = values.abs().float()
        self.channels = torch.maximum(self.channels, size.amax(0))
        self.positions.scatter_reduce_(0, buckets, size.amax((1, 2)), "amax")
        beyond = (size > Format.E4M3FN.max).sum()
        coarse = ((size < SMALLEST_NORMAL) & (size > 0)).sum()
        total = torch.tensor(size.numel(), dtype=torch.int64, device=size.device)
        self.counts += torch.stack((total, beyond, coarse))

    @property
    def largest(self) -> float:
        return float(self.channels.max())

    def as_object(self) -> JsonObject:
        """Return the figures; `channel` is the median over channels of their largest magnitude."""
        total, beyond, coarse = self.counts.tolist()
        return {
            "max": self.largest,
            "channel": float(self.channels.median()),
            "smallest_channel": float(self.channels.min()),
            "heads": self.channels.amax(1).tolist(),
            "positions": self.positions.tolist(),
            "beyond_448": beyond / total,
            "below_normal": coarse / total,
        }


@dataclass
class Magnitudes:
    """What has been seen so far; windows have at most `length` tokens. `layers` has keys, and
    values where they are apart from keys.
    """

    length: int
    layers: dict[int, tuple[Side, ...]] = field(default_factory=dict)
    # bounds of the buckets of positions: 0 alone, and then those of other figures
    edges: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.edges = [0, 1, *position_edges(max(2, self.length))[1:]]

    def see(self, layer: int, sides: Sequence[Tensor], positions: Tensor) -> None:
        """Take the stored keys, and the values where they are apart, of `positions` [rows]."""
        edges = torch.tensor(self.edges[1:-1], dtype=torch.int64, device=positions.device)
        buckets = torch.bucketize(positions.long(), edges, right=True)
        if layer not in self.layers:
            count = len(self.edges) - 1
            self.layers[layer] = tuple(Side.empty(values, count) for values in sides)
        for side, values in zip(self.layers[layer], sides, strict=True):
            side.see(values, buckets)

    def as_list(self) -> list[JsonObject]:
        """By layer: `layer`, `k` and `v` (None where values are part of keys)."""
        listed: list[JsonObject] = []
        for layer, sides in sorted(self.layers.items()):
            figures = [side.as_object() for side in sides]
            values = figures[1] if len(figures) > 1 else None
            listed.append({"layer": layer, "k": figures[0], "v": values})
        return listed

    def clipping(self, scales: Mapping[int, LayerScales], format: Format) -> list[JsonDict]:
        """The layers in which static scales clip: `layer`, `side`, in how many of its channels, and
        `times` the largest value exceeds what its channel's scale covers.
        """
        clipping: list[JsonDict] = []
        for layer, sides in sorted(self.layers.items()):
            if layer not in scales:
                continue
            stored = (scales[layer].k, scales[layer].v)
            for name, side, numbers in zip(_NAMES, sides, stored, strict=False):
                covered = expand_scale(numbers, *side.channels.shape) * format.max
                times = side.channels / covered.to(side.channels.device)
                count = int((times > 1.0).sum())
                if count:
                    entry = {
                        "layer": layer,
                        "side": name,
                        "channels": count,
                        "times": float(times.max()),
                    }
                    clipping.append(entry)
        return clipping


def sentences(listed: Sequence[JsonObject]) -> list[str]:
    """What stands out, for a reader who has not met FP8."""
    says = []
    for side, word in (("k", "key"), ("v", "value")):
        layers = [entry for entry in listed if entry[side] is not None]
        if not layers:
            continue
        largest = max(layers, key=_of(side, "max"))
        uneven = max(layers, key=_ratio(side))
        says.append(
            f"The largest {word} is {largest[side]['max']:.4g}, in layer {largest['layer']}. In layer "
            f"{uneven['layer']} the largest channel reaches {_ratio(side)(uneven):.0f} times what the median "
            "channel does."
        )
        beyond = [entry for entry in layers if entry[side]["beyond_448"]]
        if beyond:
            where = ", ".join(str(entry["layer"]) for entry in beyond)
            says.append(f"A scale of 1.0 clips such {word}s in layers {where}.")
        coarse = max(layers, key=_of(side, "below_normal"))
        if coarse[side]["below_normal"] >= 0.01:
            says.append(
                f"With a scale of 1.0 up to {coarse[side]['below_normal']:.0%} of a layer's {word}s (layer "
                f"{coarse['layer']}) lie below 2⁻⁶, where E4M3 has fewer digits."
            )
        first = max(layers, key=_of_first(side))
        if _of_first(side)(first) >= 4:
            says.append(
                f"The first token of a window has the largest {word}s of layer {first['layer']}: "
                f"{_of_first(side)(first):.0f} times those of all later ones."
            )
    return says


def _of(side: str, name: str) -> Callable[[JsonObject], float]:
    return lambda entry: float(entry[side][name])


def _ratio(side: str) -> Callable[[JsonObject], float]:
    """Largest channel by the median one."""
    return lambda entry: entry[side]["max"] / max(entry[side]["channel"], math.ulp(0.0))


def _of_first(side: str) -> Callable[[JsonObject], float]:
    """Largest magnitude at position 0 by the largest at any other."""

    def times(entry: JsonObject) -> float:
        first, *others = entry[side]["positions"]
        return float(first / max(*others, math.ulp(0.0)))

    return times
