"""The dtype of weights that are not quantized, from the headers of a folder or of a hub model.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from freight.checkpoint.headers import FORMAT_NAMES, read_header
from freight.errors import CheckpointError
from freight.fp8.formats import COMPUTE_FORMATS, Format

HUB_SECONDS = 20.0  # for all requests; afterwards the dtype counts as unknown
# Shards whose header is read at most; the first decides, unless it has no tensor that counts
_HUB_FILES = 3

Size = tuple[str, str, int]  # a tensor's name, its dtype as safetensors names it, its bytes

_OTHER = re.compile(  # scales, buffers, and parts other than the text model
    r"(scale|zero_point|inv_freq)[^.]*$|(^|\.)(vision|visual|audio|image|sound|mm_|multi_modal)"
)
_QUANTIZED = ("F4", "F6", "F8", "I8", "U8")  # U8: codes of MXFP4


def stored_format(tensors: Iterable[Size]) -> Format | None:
    """Return the dtype of the weights that are not quantized, bfloat16, float16 or float32: that of
    the most bytes.

    Scales do not count, nor do tensors of vision and audio models. Next to quantized weights
    float32 counts only if nothing is in 16 bits: routers and their biases are often in float32
    there, and can outweigh norms. None: no tensor is in one of these dtypes.
    """
    sizes = Counter[Format]()
    quantized = False
    for name, dtype, size in tensors:
        quantized |= dtype.startswith(_QUANTIZED)
        format = FORMAT_NAMES.get(dtype)
        if format in COMPUTE_FORMATS and not _OTHER.search(name):
            sizes[format] += size
    if quantized and len(sizes) > 1:
        del sizes[Format.FLOAT32]
    return max(sizes, key=lambda format: sizes[format], default=None)


def safetensors_in(folder: Path) -> list[Path]:
    """Return the files of weights in `folder`: consolidated*.safetensors hold the same ones again."""
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def stored_in_folder(folder: Path) -> Format | None:
    """Return `stored_format` of the safetensors files in `folder`; None also for files that cannot
    be read.
    """
    try:
        tensors: list[Size] = []
        for file in safetensors_in(folder):
            for name, entry in read_header(file).items():
                tensors.append((name, entry.dtype, entry.size))
    except CheckpointError:
        return None  # loading reports the fault
    return stored_format(tensors)


def stored_on_hub(
    model: str, revision: str | None = None, seconds: float = HUB_SECONDS
) -> Format | None:
    """Return `stored_format` of a hub model, from the header of one weight file, read by range
    requests.

    None if it cannot be read: no network, no safetensors, or more than `seconds`.
    """
    formats: list[Format] = []

    def read() -> None:
        # the client's errors, and whatever its network stack raises
        with contextlib.suppress(Exception):
            formats.extend(filter(None, _hub_formats(model, revision)))

    # A daemon thread, so that a hanging request does not keep the process alive
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return next(iter(formats), None)


def _hub_formats(model: str, revision: str | None) -> Iterator[Format | None]:
    """Yield the dtype of each file that was read; the first that is there is the last."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        yield _in_hub_file(model, revision, "model.safetensors")
    except EntryNotFoundError:
        for file in _shards(model, revision)[:_HUB_FILES]:
            format = _in_hub_file(model, revision, file)
            yield format
            if format is not None:
                return


def _in_hub_file(model: str, revision: str | None, file: str) -> Format | None:
    from huggingface_hub import parse_safetensors_file_metadata

    header = parse_safetensors_file_metadata(model, file, revision=revision).tensors
    tensors: list[Size] = []
    for name, entry in header.items():
        begin, stop = entry.data_offsets
        tensors.append((name, entry.dtype, stop - begin))
    return stored_format(tensors)


def _shards(model: str, revision: str | None) -> list[str]:
    """Return the weight files, the one with the embedding first: few checkpoints have it quantized."""
    from huggingface_hub import hf_hub_download

    index = Path(hf_hub_download(model, "model.safetensors.index.json", revision=revision))
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = dict.fromkeys(sorted(places.values()))
    embeddings = {
        file: None for name, file in places.items() if name.endswith("embed_tokens.weight")
    }
    return list(embeddings | files)
