"""Memory of a GPU that other processes of its host open, by the runtime's functions for that (CUDA IPC,
and HIP's of the same names).

torch's allocator is not asked: its memory may be of a kind that has no handles, and on AMD other GPUs
see stores to it only at a kernel's end. Nothing but `open_peers` knows of handles and addresses.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freight.errors import RankError
from freight.parallel.peers import Layout, Peers

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, and HIP's
_HIP_UNCACHED = 3  # hipDeviceMallocUncached: other GPUs see stores while a kernel runs


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _Runtime:
    """The library that torch has loaded, whose functions return 0 or the number of an error."""

    def __init__(self) -> None:
        self._is_hip = torch.version.hip is not None
        self._prefix = "hip" if self._is_hip else "cuda"
        self._library = ctypes.CDLL(_loaded("libamdhip64.so" if self._is_hip else "libcudart.so"))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, self._prefix + name)(*arguments)
        if status:
            raise RankError(f"{self._prefix}{name} failed with error {status}")

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        length = ctypes.c_size_t(size)
        if self._is_hip:
            flags = ctypes.c_uint(_HIP_UNCACHED)
            self._call("ExtMallocWithFlags", ctypes.byref(address), length, flags)
        else:
            self._call("Malloc", ctypes.byref(address), length)
        assert address.value
        return address.value

    def free(self, address: int) -> None:
        self._call("Free", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call(
            "IpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        assert address.value
        return address.value

    def close(self, address: int) -> None:
        self._call("IpcCloseMemHandle", ctypes.c_void_p(address))

    def has_atomics(self, device: int, other: int) -> bool:
        """Return whether one GPU's atomics reach the other's memory: over NVLink and xGMI."""
        value = ctypes.c_int()
        kind = 2 if self._is_hip else 3  # …DevP2PAttrNativeAtomicSupported
        self._call("DeviceGetP2PAttribute", ctypes.byref(value), kind, device, other)
        return bool(value.value)


class _Bytes:
    """Bytes at an address of a GPU, as torch takes them without a copy."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def open_peers(
    rank: int, layout: Layout, device: torch.device, exchange: Callable[[bytes], list[bytes]]
) -> Peers:
    """Return this rank's buffer, and those of the others, opened. All ranks call it.

    exchange: hands bytes to all ranks and returns those of all. Raises RankError where a buffer
    cannot be made or opened: then on this rank alone, after it has exchanged what the others wait for.
    """
    opened: list[int] = []
    made = 0
    said = b""
    reason = ""
    with torch.cuda.device(device):
        try:
            runtime = _Runtime()
            made = runtime.allocate(layout.total)
            own = torch.as_tensor(_Bytes(made, layout.total), dtype=torch.uint8, device=device)
            own.zero_()
            torch.cuda.synchronize(device)  # before any other rank writes
            said = json.dumps([_name(device), runtime.handle(made).hex()]).encode()
        except RankError as error:
            reason = str(error)
        of_all = exchange(said)

        def close() -> None:
            for address in opened:
                runtime.close(address)
            if made:
                runtime.free(made)

        try:
            if reason or b"" in of_all:
                raise RankError(reason or f"rank {of_all.index(b'')} has no buffer to push into")
            addresses = []
            for other, described in enumerate(of_all):
                if other == rank:
                    addresses.append(made)
                    continue
                name, handle = json.loads(described)
                _check_reach(runtime, device, name)
                address = runtime.open(bytes.fromhex(handle))
                opened.append(address)
                addresses.append(address)
        except RankError:
            close()
            raise
    page = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
    places = torch.tensor([*addresses, page.data_ptr()], dtype=torch.int64, device=device)
    return Peers(own, places, page, close)


def _check_reach(runtime: _Runtime, device: torch.device, name: str) -> None:
    """Raise RankError unless `device` reaches the memory of the GPU of this name, atomics too."""
    names = [_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if name not in names:
        raise RankError(f"GPU {name} of another rank is not visible to this process")
    own = names.index(_name(device))
    other = names.index(name)
    if own == other:
        raise RankError(f"two ranks are on GPU {name}: a kernel of one would wait for the other's")
    if not torch.cuda.can_device_access_peer(own, other):
        raise RankError(f"GPU {own} does not reach the memory of GPU {other}")
    if not runtime.has_atomics(own, other):
        raise RankError(f"there are no atomics from GPU {own} to GPU {other}: no NVLink or xGMI")


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _loaded(name: str) -> str:
    """Return the path of a library that this process has loaded. Raises RankError if it has not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(name):
            return f"/{path}"
    raise RankError(f"torch has not loaded {name}")
