"""The transport over torch.distributed: gloo between CPUs, NCCL or RCCL between GPUs.

The group decides where bytes go; nothing here depends on its backend. Only bytes are gathered, so
every format has the same bits with every backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from freight.errors import RankError

# torch 2.13 renamed it, and warns of the name that earlier ones have
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Distributed:
    """One rank of a group of processes."""

    def __init__(self, group: Any, size: int) -> None:
        self._group, self._size = group, size

    @staticmethod
    def join(
        rank: int, size: int, address: str, port: int, timeout: float, backend: str = "gloo"
    ) -> Distributed:
        """Meet the other ranks at rank 0's `address` and `port`, within `timeout` seconds.

        Raises RankError if they do not come, or the port is taken.
        """
        try:
            store = TCPStore(address, port, size, rank == 0, timedelta(seconds=timeout))
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {rank} of {size} did not meet the others at {address}:{port}: {error}"
            ) from error
        return Distributed(dist.group.WORLD, size)

    def gather(self, part: Tensor) -> Tensor:
        """Return `Transport.gather`."""
        rows = len(part)
        own = part.contiguous().view(torch.uint8)
        parts = own.new_empty((self._size * rows, own.shape[1]))  # a rank's rows, then the next's
        try:
            _ALL_GATHER(parts, own, group=self._group)
        except RuntimeError as error:
            raise RankError(f"another rank has ended or does not answer: {error}") from error
        beside = parts.view(self._size, rows, -1).transpose(0, 1).reshape(rows, -1)
        return beside.view(part.dtype)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
