"""Compiled kernels in another process, such as an emulator: their C functions for
`library.Library`.

The arguments are those of the functions of interface.py, addresses included. The memory that an
address means is found among the live tensors and ctypes structures, sent along, and written back
where the call changed it. driver.cpp has the other end and the format.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import struct
import subprocess
import threading
from collections.abc import Iterable
from typing import Any

import torch

from freight.kernels.cpu import interface
from freight.kernels.cpu.library import Library

MANY_OBJECTS = 30_000  # that are searched for every call


def is_memory(x: object) -> bool:
    """A tensor, a structure, or an array of structures or numbers."""
    return issubclass(type(x), torch.Tensor | ctypes.Structure | ctypes.Array)


class Function:
    """One C function; its integers and pointers go to the other process."""

    def __init__(
        self,
        name: str,
        kinds: Iterable[Any],
        result: Any,
        process: subprocess.Popen[bytes],
        lock: Any,
    ):
        self.__name__ = name
        self.kinds, self.result = tuple(kinds), result
        self.process, self.lock = process, lock

    def __call__(self, *values: Any) -> Any:
        request = Request()
        arguments = [
            request.argument(kind, value) for kind, value in zip(self.kinds, values, strict=True)
        ]
        with self.lock:
            answer = ctypes.c_int64(request.send(self.__name__, arguments, self.process)).value
        if self.__name__ in interface.COMPUTE:
            return interface._require_success(ctypes.c_int32(answer).value, self, values)
        return None if self.result is None else self.result(answer).value


class Request:
    def __init__(self) -> None:
        self.regions: dict[int, int] = {}  # address -> bytes
        self.tensors: set[int] = set()  # the addresses of those that are tensors' memory
        self.pointers: list[int] = []  # addresses of pointers inside regions
        self.live: list[Any] = []

    def argument(self, kind: Any, value: Any) -> tuple[int, int]:
        """(whether it is an address, what is passed)"""
        if kind is ctypes.c_void_p:
            self.add(value)
            return 1, value or 0
        if isinstance(value, ctypes.Structure):
            self.add(ctypes.addressof(value))
            return 1, ctypes.addressof(value)
        return 0, int(value) & (2**64 - 1)

    def add(self, address: int | None) -> None:
        """The region that `address` is in; of a structure, those that its pointers are in as well."""
        if not address or any(
            start <= address < start + size for start, size in self.regions.items()
        ):
            return
        found = self.find(address)
        if isinstance(found, torch.Tensor):
            memory = found.untyped_storage()
            self.regions[memory.data_ptr()] = memory.nbytes()
            self.tensors.add(memory.data_ptr())
            return
        self.regions[ctypes.addressof(found)] = ctypes.sizeof(found)
        for structure in found if isinstance(found, ctypes.Array) else (found,):
            if isinstance(structure, ctypes.Structure):
                self.follow(structure)

    def follow(self, structure: ctypes.Structure) -> None:
        """Add the regions of a structure's pointers, and of the structures that are part of it."""
        for name, kind in structure._fields_:
            value = getattr(structure, name)
            if isinstance(value, ctypes.Structure):  # its memory is that of `structure`
                self.follow(value)
            elif kind is ctypes.c_void_p and value:
                place = ctypes.addressof(structure) + getattr(type(structure), name).offset
                self.pointers.append(place)
                self.add(value)

    def find(self, address: int) -> Any:
        for attempt in range(2):
            if attempt:
                gc.unfreeze()  # among all objects, not only those since the last freeze
            if attempt or not self.live:
                objects = gc.get_objects()
                self.live = [x for x in objects if is_memory(x)]
                if len(objects) > MANY_OBJECTS:
                    gc.freeze()
            for x in self.live:
                if isinstance(x, ctypes.Structure | ctypes.Array):
                    start, size = ctypes.addressof(x), ctypes.sizeof(x)
                elif x.device.type == "cpu":
                    start, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
                else:
                    continue
                if start <= address < start + size:
                    return getattr(x, "_b_base_", None) or x  # of an element, its array
        raise LookupError(f"no tensor and no structure holds the address {address:#x}")

    def send(
        self, name: str, arguments: list[tuple[int, int]], process: subprocess.Popen[bytes]
    ) -> int:
        """What the function returns; tensors are as it left them."""
        assert process.stdin is not None
        assert process.stdout is not None
        before = [ctypes.string_at(start, size) for start, size in self.regions.items()]
        numbers = [len(arguments), len(self.regions), len(self.pointers)]
        numbers += [
            number for pair in (*arguments, *self.regions.items()) for number in pair
        ] + self.pointers
        header = struct.pack(f"32s{len(numbers)}Q", name.encode(), *numbers)
        try:
            process.stdin.write(b"".join((header, *before)))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # said below
        expected = 8 + sum(self.regions.values())
        answer = process.stdout.read(expected)
        if len(answer) < expected:
            raise RuntimeError(f"{name}: the other process ended with status {process.wait()}")
        position = 8
        for (start, size), old in zip(self.regions.items(), before, strict=True):
            new = answer[position : position + size]
            position += size
            if start in self.tensors and new != old:
                ctypes.memmove(start, new, size)
        return int.from_bytes(answer[:8], "little")


class Functions:
    """All functions of interface.py, in a process that `command` starts."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(
            self.process.__exit__, None, None, None
        )  # closes its input, which ends it, and waits
        lock = threading.Lock()
        for name, kinds in interface.COMPUTE.items():
            setattr(self, name, Function(name, kinds, ctypes.c_int32, self.process, lock))
        for name, (result, *kinds) in interface.OTHERS.items():
            setattr(self, name, Function(name, kinds, result, self.process, lock))


def remote_library(build: str, command: list[str]) -> Library:
    """The library of a driver that `command` starts; its threads are its own."""
    functions: Any = Functions(command)
    assert functions.freight_abi() == interface.ABI
    functions.freight_init(None)
    return Library(build, functions)
