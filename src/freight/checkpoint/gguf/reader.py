"""GGUFCheckpoint: a GGUF file, read lazily as a folder of safetensors is.

Tensors have the names of the Hugging Face folder that the file was made from, and what llama.cpp's
converter did to them is undone as they are read (`names.py`). Matrices in blocks are taken as they
are stored (`take_blocks`), or decoded to float32 as readers of other checkpoints take them. One
tensor at a time is in memory: it is read from the file, and no file is mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from freight.base.fields import JsonDict
from freight.base.gguf import GGUFTensor, Value, read_gguf
from freight.base.gguf_tokenizer import end_of_generation, tokenizer_files
from freight.checkpoint.gguf.describe import (
    DECODED_BY_GGUF,
    PLAIN,
    GGUFModel,
    block_format,
    describe,
    read_bytes,
)
from freight.checkpoint.gguf.names import Change, Placed
from freight.checkpoint.headers import Shape, TensorEntry
from freight.checkpoint.reader import Checkpoint, file_state, part_of
from freight.errors import CheckpointError
from freight.fp8.block_formats import BlockFormat
from freight.fp8.blocks import decode, require_finite
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme


class GGUFCheckpoint(Checkpoint):
    """One opened GGUF file, or the parts of a split one."""

    def __init__(self, path: Path, model: GGUFModel | None = None) -> None:
        """Open FILE.gguf. Raises CheckpointError, naming file and fault, if it is damaged, or of a
        model that Freight does not read.

        `model`: of a file on the hub, from its header, which has no tensors to read.
        """
        self.path = path
        if model is None:
            model = describe(read_gguf(path))
        self._file = model.file
        self.config = model.described.config
        self.unread_metadata = model.described.unread
        self.generation_config = _generation_config(self._file.metadata)
        self.hf_quant_config = None
        self.scheme: Scheme = model.scheme
        self._stored = model.stored
        self._placed = dict(model.places.placed)
        self._entries = {}
        for name, placed in self._placed.items():
            self._entries[name] = self._entry(placed)
        files = {tensor.file for tensor in self._file.tensors.values()} | {path}
        self._states = {file: file_state(file) for file in sorted(files)}
        self._taken = set()
        self._skipped = dict(model.places.skipped)

    def _entry(self, placed: Placed) -> TensorEntry:
        """Return the entry of a tensor. Its dtype is llama.cpp's name of the type."""
        tensors = [self._file.tensors[name] for name in placed.sources]
        shape = _shape(placed, tensors)
        values = sum(math.prod(tensor.shape) for tensor in tensors)
        size = sum(tensor.size for tensor in tensors) * math.prod(shape) // max(1, values)
        return TensorEntry(tensors[0].file, tensors[0].type.name.upper(), shape, size)

    @property
    def stored_format(self) -> Format | None:
        """The dtype to compute in."""
        return self._stored

    def format_of(self, name: str) -> Format:
        """Return the tensor's format: float32 of matrices in blocks, which it holds exactly but for
        one rounding.
        """
        return PLAIN.get(self.entry(name).dtype.lower(), Format.FLOAT32)

    def block_format(self, name: str) -> BlockFormat | None:
        """Return the format of a matrix in blocks; None for all other tensors."""
        entry = self.entry(name)
        if entry.pieces or entry.index:
            return None
        return block_format(self._file.tensors, self._placed[entry.stored or name])

    def take_blocks(self, name: str) -> Tensor:
        """Return the blocks of a whole matrix that has a `block_format`, uint8 [outputs, bytes of a
        row], also where `narrow` has put a part of it in its place: a tied head is rows of it, the
        embedding columns.
        """
        placed = self._placed[self.entry(name).stored or name]
        assert block_format(self._file.tensors, placed) is not None
        self._taken.add(name)
        return self._rows(placed)

    def num_values(self, name: str) -> int:
        """Return how many values a tensor has."""
        return math.prod(self.shape_of(name))

    def other_files(self) -> dict[str, bytes]:
        """Return tokenizer and generation defaults as files. Raises CheckpointError for a tokenizer
        that is not read.
        """
        texts = tokenizer_files(self._file.metadata)
        files = {name: text.encode() for name, text in texts.items()}
        files["generation_config.json"] = json.dumps(self.generation_config, indent=2).encode()
        return files

    def _read_entry(self, entry: TensorEntry, name: str) -> Tensor:
        values = self._values(self._placed[entry.stored or name])
        return part_of(values, entry).contiguous()

    def _rows(self, placed: Placed) -> Tensor:
        """Return the rows of a tensor as bytes, uint8 [rows, bytes of a row], in the model's order.
        Its sources are of one type.
        """
        parts = [_stored_rows(self._file.tensors[name], placed.expert) for name in placed.sources]
        return _in_order(parts[0] if len(parts) == 1 else torch.cat(parts), placed.rows)

    def _values(self, placed: Placed) -> Tensor:
        """Return the values of a tensor in the model's form."""
        tensors = [self._file.tensors[name] for name in placed.sources]
        if placed.change is Change.JOIN_LATENTS:
            keys, values = (
                decoded(_stored_rows(tensor, None), tensor).view(tensor.shape) for tensor in tensors
            )
            return torch.cat((keys.float().mT, values.float()), 1).flatten(0, 1)
        if len({tensor.type.name for tensor in tensors}) == 1:
            rows = decoded(self._rows(placed), tensors[0])
        else:
            joined = [decoded(_stored_rows(tensor, placed.expert), tensor) for tensor in tensors]
            rows = _in_order(torch.cat([part.float() for part in joined]), placed.rows)
        if placed.columns is not None:
            rows = _in_order(rows.mT, placed.columns).mT
        if placed.change is Change.MINUS_ONE:
            rows = rows.float() - 1
        if placed.change is Change.NEGATIVE_LOG:
            rows = torch.log(-rows.float())
        return rows.reshape(_shape(placed, tensors))


def _generation_config(metadata: Mapping[str, Value]) -> JsonDict:
    """Return the tokens that end an answer. Of a tokenizer that is not read, config.json has those
    that the metadata names; it is refused where it is needed (`other_files`), for the user may have
    named another one.
    """
    try:
        ends = end_of_generation(metadata)
    except CheckpointError:
        return {}
    return {"eos_token_id": ends} if ends else {}


def _in_order(rows: Tensor, order: Sequence[int] | None) -> Tensor:
    """Return the rows of these indices; None: all of them."""
    if order is None:
        return rows
    if isinstance(order, range):
        return rows[order.start : order.stop]
    return rows[torch.tensor(order, dtype=torch.int64, device="cpu")]


def _shape(placed: Placed, tensors: list[GGUFTensor]) -> Shape:
    """Return the shape of a tensor in the model's form."""
    if placed.shape is not None:
        return placed.shape
    if placed.change is Change.JOIN_LATENTS:
        heads, latent, keys = tensors[0].shape
        return heads * (keys + tensors[1].shape[1]), latent
    shapes = [tensor.shape[placed.expert is not None :] for tensor in tensors]
    if placed.rows is not None:
        return len(placed.rows), *shapes[0][1:]
    if len(shapes) == 1:
        return shapes[0]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _stored_rows(tensor: GGUFTensor, expert: int | None) -> Tensor:
    """Return the rows of a tensor of the file, or of one of its experts, uint8 [rows, bytes of a
    row]. A vector, such as a bias, has a row for each value.
    """
    size = tensor.size
    offset = 0
    if expert is not None:
        size //= tensor.shape[0]
        offset = expert * size
    data = read_bytes(tensor, offset, size)
    is_vector = len(tensor.shape) <= 1 + (expert is not None) and tensor.type.inputs == 1
    inputs = 1 if is_vector else tensor.shape[-1]
    row_bytes = max(1, inputs // tensor.type.inputs * tensor.type.bytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes)


def decoded(rows: Tensor, tensor: GGUFTensor) -> Tensor:
    """Return rows of bytes as numbers, [rows, inputs]."""
    plain = PLAIN.get(tensor.type.name)
    if tensor.type.name in DECODED_BY_GGUF:
        import gguf

        kind = gguf.GGMLQuantizationType[tensor.type.name.upper()]
        return torch.from_numpy(gguf.dequantize(rows.contiguous().numpy(), kind))
    if plain is None:
        format = BlockFormat(tensor.type.name)
        require_finite(rows, format, f"{tensor.file}: {tensor.name}")
        return decode(rows, format)
    return rows.contiguous().view(torch_dtype(plain))
