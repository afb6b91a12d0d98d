"""GGUF files of tiny models that transformers saved: metadata and names are those that llama.cpp's
converter gave the same model (`fixtures/gguf`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tests.formats.gguf_files import Converted, converted
from tests.gguf_files import FLOAT32, INT32, STRING, Stored, gguf_bytes
from tests.gguf_files import Tensor as FileTensor
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from freight.checkpoint.gguf.names import Change, Placed, tensor_names
from freight.fp8.block_formats import BlockFormat
from freight.model.architectures import tensor_names as names_of_model
from freight.model.feed_forward.expert_names import separate
from freight.model.open import open_checkpoint

F32 = 0
TYPES = {BlockFormat.Q4_0: 2, BlockFormat.Q8_0: 8}
# tensors that llama.cpp's quantizer leaves in float32, beside vectors
WHOLE = ("norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
Choose = Callable[[str], BlockFormat | None]


def config_of(name: str) -> PretrainedConfig:
    """The config of a fixture's model."""
    content = {**converted(name).config, "dtype": "float32"}
    if (content.get("pad_token_id") or 0) >= content["vocab_size"]:
        content["pad_token_id"] = 0
    return AutoConfig.for_model(**content)


def write_gguf(
    name: str,
    folder: Path,
    file: Path,
    choose: Choose = lambda name: None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the model in `folder`, of the config of fixture `name`, into a GGUF file.

    choose: for the name of a matrix in the file, the format of its blocks. One whose rows they do
        not divide stays in float32.
    metadata: added to that of the fixture.
    """
    fixture = converted(name)
    tensors = {key: torch.tensor(values) for key, values in fixture.values.items()}
    tensors |= converted_tensors(fixture, folder)
    values = {**fixture.metadata, **metadata}
    entries = {key: _entry(key, tensor, choose) for key, tensor in tensors.items()}
    assert entries.keys() == fixture.shapes.keys()
    file.write_bytes(gguf_bytes({key: _stored(value) for key, value in values.items()}, entries))


def converted_tensors(fixture: Converted, folder: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file, float32, from those of a folder."""
    opened = open_checkpoint(str(folder))
    if names_of_model(opened.model).interleaved:
        separate(opened.checkpoint, opened.model)
    placed = tensor_names(fixture.read(), fixture.shapes).placed
    tensors: dict[str, Tensor] = {}
    for name, place in placed.items():
        for source in place.sources:
            tensors.setdefault(source, torch.empty(fixture.shapes[source]))
        sources = [tensors[source] for source in place.sources]
        if place.expert is not None:
            sources = [source[place.expert] for source in sources]
        _put(opened.checkpoint.copy(name).float(), place, sources)
    return tensors


def _put(values: Tensor, place: Placed, sources: Sequence[Tensor]) -> None:
    """Write what the sources of a place have of it: the reverse of what `Placed` says."""
    if place.change is Change.JOIN_LATENTS:
        k, v = sources
        keys, rest = values.view(len(k), -1, k.shape[1]).split([k.shape[2], v.shape[1]], 1)
        k.copy_(keys.mT)
        v.copy_(rest)
        return
    changes: dict[Change, Callable[[Tensor], Tensor]] = {
        Change.NONE: lambda x: x,
        Change.MINUS_ONE: lambda x: x + 1,
        Change.NEGATIVE_LOG: lambda x: -torch.exp(x),
    }
    values = changes[place.change](values)
    if place.columns is not None:
        values = torch.empty_like(values).index_copy_(1, torch.tensor(place.columns), values)
    joined = torch.cat(list(sources))
    rows = slice(None) if place.rows is None else torch.tensor(place.rows)
    joined[rows] = values.view(joined[rows].shape)
    parts = joined.split([len(source) for source in sources])
    for source, part in zip(sources, parts, strict=True):
        source.copy_(part)


def _stored(value: Any) -> Any:
    if not isinstance(value, list):
        return Stored(INT32, value) if isinstance(value, int) and value < 0 else value
    kinds: Mapping[type, int] = {str: STRING, float: FLOAT32}
    return Stored(kinds.get(type(value[0]), INT32), value)


def _entry(name: str, values: Tensor, choose: Choose) -> FileTensor:
    shape = tuple(values.shape)
    format = None
    if len(shape) > 1 and name.endswith(".weight") and not name.endswith(WHOLE):
        format = choose(name)
    if format is None or shape[-1] % format.inputs:
        return FileTensor(F32, shape, values.contiguous().numpy().tobytes())
    return FileTensor(TYPES[format], shape, rounded(values, format).numpy().tobytes())


def rounded(values: Tensor, format: BlockFormat) -> Tensor:
    """The blocks of a matrix, uint8 [blocks, bytes]."""
    blocks = values.reshape(-1, format.inputs)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest.abs() / 127 if format is BlockFormat.Q8_0 else largest / -8
    scale = scale.half()
    codes = (blocks / scale.float()).nan_to_num().round()
    if format is BlockFormat.Q8_0:
        stored = codes.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        nibbles = (codes + 8).clamp(0, 15).to(torch.uint8)
        stored = nibbles[:, :16] | nibbles[:, 16:] << 4
    return torch.cat((scale.view(torch.uint8), stored), 1)
