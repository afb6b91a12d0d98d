"""The tensors of a model in the host's memory, while the device's is wanted for something else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freight.model.held_tensors import tensors_in


@dataclass(frozen=True)
class _Moved:
    """A storage whose device memory was given back, and its bytes."""

    storage: torch.UntypedStorage
    content: torch.UntypedStorage


class HostCopy:
    """Takes the tensors of `model` out of the device's memory. They are the same objects afterwards, so
    nothing that refers to them has to know; until `restore` they have no values.

    A tensor that shares its memory with others is moved once. What torch did not allocate stays.
    """

    def __init__(self, model: object) -> None:
        self._moved: list[_Moved] = []
        seen: set[int] = set()
        for tensor in tensors_in(model):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes() or not storage.resizable():
                continue
            seen.add(storage.data_ptr())
            on_host = storage.device.type == "cpu"
            self._moved.append(_Moved(storage, storage.clone() if on_host else storage.cpu()))
        try:
            for moved in self._moved:
                moved.storage.resize_(0)
        except BaseException:  # nobody would have the copy
            self.restore()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that were given back."""
        return sum(moved.content.nbytes() for moved in self._moved)

    def restore(self) -> None:
        """Put all back."""
        for moved in self._moved:
            moved.storage.resize_(moved.content.nbytes())
            moved.storage.copy_(moved.content)
