"""Stages: the runs of layers that lie on devices of their own, one after the other. Imports no torch.

A stage computes its layers as one device with all of them does: by the same kernels, over whole
weights. So results for any number of stages are those of one, bit for bit, and what a device holds
is its layers' weights and pages. The first stage has the embedding as well, the last one the norm
behind the layers and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from freight.errors import ConfigError
from freight.model.config.model import ModelConfig
from freight.settings.stages import listed_counts


@dataclass(frozen=True)
class Stage:
    """Layers first … end - 1, on `device`, in torch's words: 'cpu', 'cuda:1'."""

    device: str
    first: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


def joined_layers(model: ModelConfig) -> frozenset[int]:
    """Return the layers that cannot begin a stage: a layer from them on reads pages of one before
    them.
    """
    joined: set[int] = set()
    for index, mixer in model.paged.items():
        if mixer.kv_from is not None:
            joined.update(range(mixer.kv_from + 1, index + 1))
    return frozenset(joined)


def require_stages(model: ModelConfig, size: int) -> None:
    """Raise ConfigError, with the numbers that fit, for a model that `size` stages cannot divide."""
    if size == 1:
        return
    if model.foreign is not None:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: the modules of transformers ({model.architecture}) are not divided over "
            "devices; omit it"
        )
    most = model.num_layers - len(joined_layers(model))
    if size > most:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: the {model.num_layers} layers of this model can be divided into {most} "
            f"stages at most; use up to {most}"
        )


def checked_counts(value: str, model: ModelConfig, size: int) -> tuple[int, ...]:
    """Return --pp-layers for `model`. Raises ConfigError where they are not its layers, or part those
    that share pages.
    """
    counts = listed_counts(value, size)
    if sum(counts) != model.num_layers:
        raise ConfigError(
            f"--pp-layers {value} are {sum(counts)} layers, and the model has {model.num_layers}"
        )
    joined = joined_layers(model)
    for first in accumulate(counts[:-1]):
        if first in joined:
            raise ConfigError(
                f"--pp-layers {value}: a stage cannot begin with layer {first}, because from there on a layer reads "
                "keys and values that one before it stores; omit --pp-layers, or move the stage's begin"
            )
    return counts


@dataclass(frozen=True)
class StageCosts:
    """Bytes of the weights of each layer, and what the first and the last stage have besides."""

    layers: tuple[int, ...]
    embedding: int = 0
    head: int = 0

    def of(self, layers: range) -> int:
        """Return the bytes of a stage with these layers."""
        total = sum(self.layers[layers.start : layers.stop])
        if layers.start == 0:
            total += self.embedding
        if layers.stop == len(self.layers):
            total += self.head
        return total


def balanced_counts(costs: StageCosts, size: int, joined: Collection[int]) -> tuple[int, ...]:
    """Return how many layers each of `size` stages has, so that the largest stage is as small as can
    be, and of such divisions the one with the smallest sum of squares. joined: layers that no stage
    begins with.
    """
    smallest = _best_ends(costs, size, joined, max)
    largest = max(costs.of(range(*bounds)) for bounds in pairwise((0, *smallest)))
    ends = _best_ends(costs, size, joined, lambda squares, own: squares + own * own, largest)
    return tuple(end - begin for begin, end in pairwise((0, *ends)))


def _best_ends(
    costs: StageCosts,
    size: int,
    joined: Collection[int],
    total: Callable[[int, int], int],
    largest: int | None = None,
) -> tuple[int, ...]:
    """Return where each of `size` stages ends, so that their `total` is the least; of equal ones the
    first ends, so that it is always the same. largest: bytes that no stage exceeds.
    """
    number = len(costs.layers)
    # by the layers that are divided so far: the total, and the ends
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(size):
        left = size - stage - 1
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (before, ends) in best.items():
            for end in range(begin + 1, number - left + 1):
                if end in joined or (end < number) == (left == 0):
                    continue
                own = costs.of(range(begin, end))
                if largest is not None and own > largest:
                    continue
                known = (total(before, own), (*ends, end))
                if end not in following or known < following[end]:
                    following[end] = known
        best = following
    return best[number][1]


def stage_counts(
    model: ModelConfig, costs: StageCosts, size: int, value: str | None
) -> tuple[int, ...]:
    """Return how many layers each of `size` stages has: those of --pp-layers (`value`), else so that
    the bytes of `costs` are divided well. Raises ConfigError as `checked_counts`.
    """
    if value is not None:
        return checked_counts(value, model, size)
    return balanced_counts(costs, size, joined_layers(model))


def devices_of(stages: Sequence[Stage], device: str) -> tuple[str, ...]:
    """Return the devices of a model's stages, each once, the first stage's first; `device` for a model
    without stages.
    """
    return tuple(dict.fromkeys(stage.device for stage in stages)) or (device,)


def layers_by_device(stages: Sequence[Stage]) -> dict[str, frozenset[int]]:
    """Return the layers of each device, which may have several stages."""
    layers: dict[str, frozenset[int]] = {}
    for stage in stages:
        layers[stage.device] = layers.get(stage.device, frozenset()) | {*stage.layers}
    return layers


def stages_of(counts: Sequence[int], devices: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of so many layers each, on these devices."""
    bounds = pairwise((0, *accumulate(counts)))
    return tuple(
        Stage(device, begin, end) for device, (begin, end) in zip(devices, bounds, strict=True)
    )
