"""Conversion of a GGUF file to a Hugging Face folder of 16-bit safetensors.

    convert_gguf(Path("model-q4_k_m.gguf"), Path("out"))

Matrices in blocks are decoded and rounded to the model's dtype; other tensors have it where it holds
all of their values, and are written in float32 otherwise. Tokenizer and generation defaults are made
from the file's metadata.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from freight.base.terminal import OnStage, unseen
from freight.checkpoint.gguf.reader import GGUFCheckpoint
from freight.checkpoint.writer import CheckpointWriter, require_new, require_space
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format


def convert_gguf(path: Path, out: Path, on_progress: OnStage = unseen) -> tuple[int, int]:
    """Write the model of a GGUF file into the new folder `out`. Returns how many tensors and bytes
    were written.

    Raises CheckpointError for a file that is not read, CapacityError for a full disk, ConfigError
    for `out`; whatever is raised, `out` is not there.
    """
    require_new(out)
    checkpoint = GGUFCheckpoint(path)
    format = checkpoint.stored_format or Format.BFLOAT16
    names = sorted(checkpoint.names)
    require_space(out, sum(checkpoint.num_values(name) for name in names) * format.bytes)
    files = checkpoint.other_files()  # first: an unknown tokenizer is refused before the work
    num_bytes = 0
    with CheckpointWriter(out) as writer:
        for done, name in enumerate(names):
            tensor = _rounded(checkpoint, name, torch_dtype(format))
            num_bytes += tensor.nbytes
            writer.add({name: tensor})
            on_progress("converting", done + 1, len(names))
        config = {**checkpoint.config, "dtype": str(format)}
        checkpoint.require_unchanged()
        writer.finish(config, path, files)
    return len(names), num_bytes


def _rounded(checkpoint: GGUFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    values = checkpoint.copy(name)
    rounded = values.to(dtype)
    if checkpoint.block_format(name) is None and not torch.equal(rounded.float(), values.float()):
        return values.float()
    return rounded
