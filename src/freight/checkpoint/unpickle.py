"""The process that reads one pickled file: `python -P -m freight.checkpoint.unpickle FILE OUT`.

It is the only part of Freight that reads pickle. `torch.load(weights_only=True)` rebuilds tensors
and plain containers and refuses everything else, so code in the file does not run. A malicious file
can still exhaust memory or never end. Therefore this is a separate process, which limits its memory
and which its parent (`convert.py`) ends at a deadline.

It writes OUT as safetensors, one tensor at a time, so that memory holds the mapped file and one
copy of one tensor. It prints one JSON object per line: {"done": bytes, "total": bytes} for
progress, then {"tied": {name: written name}}, or {"refused": reason}, or {"full": reason} if the
disk is full.
"""

from __future__ import annotations

from freight.base.descent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before imports that take long

import json
import re
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from freight.base.files import FULL
from freight.checkpoint.headers import FORMAT_NAMES
from freight.fp8.cast import torch_dtype

# Times the file's size: the file, mapped or read, and a copy of its largest tensor
MEMORY_FACTOR = 2
MEMORY_MORE = 2**30  # bytes in addition
HEAD = "lm_head.weight"  # the tensor of a tied pair that is not written

_DTYPES = {torch_dtype(format): name for name, format in FORMAT_NAMES.items()} | {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class RefusedError(Exception):
    """The file is not a dict of ordinary tensors, or claims more than it holds."""


def limit_memory(size: int) -> None:
    """Allow this process `MEMORY_FACTOR` × `size` + `MEMORY_MORE` bytes of address space beyond
    what it has now.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():  # where it does not exist, the system does not limit address space either
        now = int(pages.read_text().split()[0]) * resource.getpagesize()
        limit = now + MEMORY_FACTOR * size + MEMORY_MORE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def read(file: Path) -> Mapping[str, Tensor]:
    """Read the tensors of `file` by name. Raises RefusedError for anything but a dict of ordinary
    tensors.
    """
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "_use_new_zipfile_serialization" not in str(error):
                raise
            # The format before torch 1.6, which cannot be mapped
            content = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RefusedError(_reason(error)) from error
    if not isinstance(content, dict) or not content:
        raise RefusedError(f"it holds {type(content).__name__}, not tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RefusedError(f"{name!r} in it is {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _DTYPES:
            raise RefusedError(
                f"{name} in it is a tensor of {tensor.dtype}, {tensor.layout}, which is not implemented"
            )
    return content


def _reason(error: Exception) -> str:
    text = str(error)
    asked = re.search(r"(?i:unsupported (?:(?:global:? )+|class ))`?([\w.]+)", text)
    if asked:
        return f"it asks for {asked[1]}, which is no part of a tensor; nothing of it was run"
    # Without torch's advice to allow code
    lines = [line.strip() for line in text.splitlines() if "weights_only" not in line]
    first = next(filter(None, lines), "")
    return f"it cannot be read ({type(error).__name__}: {first[:200]})"


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name: written name} of tensors that share the memory of another one; a tied head is
    the one not written.
    """
    places: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            places.setdefault(place, []).append(name)
    tied = {}
    for names in places.values():
        written, *names = sorted(names, key=lambda name: name.endswith(HEAD))
        tied.update(dict.fromkeys(names, written))
    return tied


def write(
    tensors: Mapping[str, Tensor], stream: BinaryIO, on_written: Any = lambda done: None
) -> None:
    """Write `tensors` as safetensors: the length of the header in 8 bytes, the header, the tensors
    without gaps.
    """
    # By falling item size, so that each tensor is aligned to its own
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for name in names:
        tensor = tensors[name].detach().contiguous().reshape(-1)
        if len(tensor):
            stream.write(tensor.view(torch.uint8).numpy().data)
        done += tensor.nbytes
        on_written(done)


def convert_file(
    file: Path, out: Path, untied: Iterable[str], index: str = "", shard: str = ""
) -> dict[str, str]:
    """Write the tensors of `file` into the new safetensors file `out`; return `ties`. Those in
    `untied` are copied. With the path of an index, only those that it places in `shard` are written.

    Raises RefusedError, MemoryError, and OSError of `out`.
    """
    size = file.stat().st_size
    tensors = read(file)
    if index:
        places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        tensors = {name: tensor for name, tensor in tensors.items() if places.get(name) == shard}
    tied = ties(tensors)
    for name in untied:
        tied.pop(name, None)
    written = {name: tensor for name, tensor in tensors.items() if name not in tied}
    total = sum(tensor.nbytes for tensor in written.values())
    if total > MEMORY_FACTOR * size + MEMORY_MORE:
        raise RefusedError(
            f"its tensors claim {total:,} bytes, more than its {size:,} bytes can hold"
        )
    with out.open("xb") as stream:
        write(written, stream, lambda done: say(done=done, total=total))
    return tied


def say(**content: object) -> None:
    """Print one message for the parent, as a line of JSON."""
    print(json.dumps(content), flush=True)


def main(file: str, out: str, index: str, shard: str, *untied: str) -> None:
    """Convert `file` into `out` and report the outcome on standard output."""
    limit_memory(Path(file).stat().st_size)
    try:
        say(tied=convert_file(Path(file), Path(out), untied, index, shard))
    except RefusedError as error:
        say(refused=str(error))
    except MemoryError:
        say(
            refused=f"it needs more memory than {MEMORY_FACTOR} times its size and {MEMORY_MORE:,} bytes"
        )
    except OSError as error:
        kind = "full" if error.errno in FULL else "refused"
        say(**{kind: str(error)})


if __name__ == "__main__":
    main(*sys.argv[1:])
