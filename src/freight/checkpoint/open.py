"""Open a checkpoint of any form that is read: a folder of safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from freight.checkpoint.gguf.reader import GGUFCheckpoint
from freight.checkpoint.layouts import read_scheme
from freight.checkpoint.reader import Checkpoint
from freight.fp8.scheme import Scheme


def open_files(path: Path) -> Checkpoint:
    """Open what `resolve_model` returned. Raises CheckpointError for files that are damaged."""
    return GGUFCheckpoint(path) if path.is_file() else Checkpoint(path)


def scheme_of(checkpoint: Checkpoint) -> Scheme:
    """Return how a checkpoint says that it is quantized. Raises CheckpointError for what is not
    implemented.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.scheme
    return read_scheme(checkpoint.config, checkpoint.hf_quant_config)
