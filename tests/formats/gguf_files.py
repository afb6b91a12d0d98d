"""What llama.cpp's converter makes of tiny models: the files of `fixtures/gguf`, read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.checkpoint.gguf.config import GGUFConfig, config_of
from freight.checkpoint.gguf.names import Change, Placed

FOLDER = Path(__file__).parents[1] / "fixtures" / "gguf"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Converted:
    """One file. `benchmarks/peers/make_gguf_fixtures.py` says what the parts are."""

    config: dict[str, Any]
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, list[float]]
    marks: dict[str, Tensor]

    def read(self, **changes: Any) -> GGUFConfig:
        """The config of the file with some of its metadata changed; None leaves a key out."""
        metadata = self.metadata | changes
        metadata = {key: value for key, value in metadata.items() if value is not None}
        return config_of(metadata, self.shapes, self.values.__getitem__)


def converted(name: str) -> Converted:
    parts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Converted(
        config=parts["config"],
        metadata=parts["metadata"],
        shapes={tensor: tuple(shape) for tensor, shape in parts["shapes"].items()},
        values=parts["values"],
        marks={tensor: _numbers(runs) for tensor, runs in parts["marks"].items()},
    )


def _numbers(runs: Sequence[Sequence[float]]) -> Tensor:
    return torch.cat(
        [first + step * torch.arange(count).to(torch.float64) for first, step, count in runs]
    ).float()


def undone(place: Placed, tensors: Mapping[str, Tensor]) -> Tensor:
    """The Hugging Face tensor at `place`, of the values of a file."""
    sources = [tensors[name] for name in place.sources]
    if place.expert is not None:
        sources = [source[place.expert] for source in sources]
    if place.change is Change.JOIN_LATENTS:
        k, v = sources
        return torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1)
    values = torch.cat(sources)
    if place.rows is not None:
        values = values[list(place.rows)]
    if place.columns is not None:
        values = values[:, list(place.columns)]
    changes: dict[Change, Callable[[Tensor], Tensor]] = {
        Change.NONE: lambda x: x,
        Change.MINUS_ONE: lambda x: x - 1,
        Change.NEGATIVE_LOG: lambda x: torch.log(-x),
    }
    values = changes[place.change](values)
    return values if place.shape is None else values.reshape(place.shape)
