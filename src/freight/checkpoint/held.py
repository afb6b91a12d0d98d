"""Tensors in memory as a checkpoint: those of a trainer, in place of the files of a folder.

They have the names and shapes that the folder's files would have, and the folder's config.json. Each
is copied as it is read, so a trainer may write into its tensors once the weights are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from freight.checkpoint.headers import FORMAT_NAMES, TensorEntry
from freight.checkpoint.reader import Checkpoint, part_of
from freight.errors import CheckpointError, shown
from freight.fp8.cast import torch_dtype

_DTYPES = {torch_dtype(format): name for name, format in FORMAT_NAMES.items()} | {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 24  # bytes of a tensor that are hashed at a time


class HeldCheckpoint(Checkpoint):
    """A checkpoint of tensors in memory, with the declarations of `folder`."""

    def __init__(self, folder: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises CheckpointError for a name that comes twice, and a dtype that no file has."""
        self.path = folder.path
        self.config = folder.config
        self.generation_config = folder.generation_config
        self.hf_quant_config = folder.hf_quant_config
        self._held: dict[str, Tensor] = {}
        self._entries = {}
        place = Path("the tensors given")
        for pair in tensors:
            name, tensor = _pair(pair)
            if name in self._held:
                raise CheckpointError(f"the tensor {shown(name)} comes twice; give each once")
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"the tensor {shown(name)} is {tensor.dtype}, which no checkpoint has; give it as torch.bfloat16"
                )
            self._held[name] = tensor.detach()
            self._entries[name] = TensorEntry(
                place, _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes
            )
        self._digest = digest_of(self._held)
        self._states = {}
        self._taken = set()
        self._skipped = {}

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"the tensors given: {what}")

    def digest(self) -> str:
        """Return a digest of all names and values."""
        return self._digest

    def release(self) -> None:
        """Refer to the tensors no longer: nothing is read from now on."""
        self._held = {}

    def _read_entry(self, entry: TensorEntry, name: str) -> Tensor:
        tensor = part_of(self._held[entry.stored or name], entry)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return copy.copy_(tensor)


def _pair(pair: object) -> tuple[str, Tensor]:
    """Return a name and its tensor. Raises CheckpointError for anything else."""
    match pair:
        case (str() as name, Tensor() as tensor):
            return name, tensor
    raise CheckpointError(
        f"{shown(str(pair)[:60])} is no pair of a name and a tensor, as weights are"
    )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, dtypes, shapes and values, in any order."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.cpu().contiguous().flatten()
        if flat.numel():
            for piece in flat.view(torch.uint8).split(_PIECE):
                state.update(piece.numpy())
    return state.hexdigest()
