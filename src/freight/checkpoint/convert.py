"""Conversion of a checkpoint of pickled files, or of a GGUF file (`gguf/convert.py`), to one of
safetensors.

    convert("./opt-125m", Path("out"))

Each pytorch_model*.bin is read by a separate process (`unpickle.py`), one at a time, which writes
it as safetensors into the writer's hidden folder. The result is then read like any other
safetensors file: its header is checked against its size. An unreadable file, a deadline or Ctrl-C
leaves nothing at the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from freight.base.descent import with_parent
from freight.base.fields import JsonObject
from freight.base.terminal import OnStage, unseen
from freight.checkpoint.gguf.convert import convert_gguf
from freight.checkpoint.headers import TensorEntry, read_header
from freight.checkpoint.reader import PICKLED, indexed_shards, read_json, resolve_model
from freight.checkpoint.writer import (
    CheckpointWriter,
    require_new,
    require_own_files,
    require_space,
)
from freight.errors import CapacityError, CheckpointError, ConfigError, shown
from freight.model.config.parse import parse_model_config

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
# The deadline of a file: SECONDS, and one second more per BYTES_PER_SECOND. A busy machine takes a
# minute to import torch alone.
SECONDS = 600.0
BYTES_PER_SECOND = 2**24


@dataclass(frozen=True)
class ConvertResult:
    """The result of a conversion. `tied`: names of tensors that were not written, because they
    share another tensor's memory.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    tied: Mapping[str, str]


def deadline(size: int) -> float:
    """Return the seconds that a file of `size` bytes may take."""
    return SECONDS + size / BYTES_PER_SECOND


def convert(
    model: str,
    out: Path,
    revision: str | None = None,
    on_progress: OnStage = unseen,
) -> ConvertResult:
    """Write the pickled checkpoint `model`, a folder or a hub id, or a GGUF file, as safetensors into
    the new folder `out`.

    config.json, tokenizer and the other files of the model are copied. Raises CheckpointError for
    files that are not tensors alone or that contradict their index, CapacityError for a full disk,
    ConfigError for `out`; whatever is raised, `out` is not there.
    """
    require_new(out)
    source = resolve_model(model, revision, PICKLED)
    if source.is_file():
        num_tensors, num_bytes = convert_gguf(source, out, on_progress)
        return ConvertResult(out, num_tensors, num_bytes, len(list(out.glob("*.safetensors"))), {})
    require_own_files(source)
    config = read_json(source / "config.json")
    if config is None:
        raise CheckpointError(f"{source} has no config.json, so it is not a model folder")
    shards = _shards(source)
    sizes = [file.stat().st_size for file in shards]
    require_space(out, sum(sizes))
    untied = _untied(config)
    tied: dict[str, str] = {}
    written: dict[str, TensorEntry] = {}
    with CheckpointWriter(out) as writer:
        begin = 0
        for (file, names), size in zip(shards.items(), sizes, strict=True):

            def moved(done: int, total: int, start: int = begin, size: int = size) -> None:
                on_progress("converting", start + size * done // max(1, total), sum(sizes))

            begin += size
            shard = writer.next_shard()
            where = str(source / INDEX) if names else ""
            gone = _convert_file(file, shard, (where, file.name, *untied), moved)
            entries = read_header(shard)
            _require_all(file, names, {*entries, *gone})
            writer.adopt({name: entry.size for name, entry in entries.items()})
            tied |= gone
            written |= entries
        writer.finish(config, source)
    num_bytes = sum(entry.size for entry in written.values())
    return ConvertResult(out, len(written), num_bytes, len(shards), tied)


def _shards(source: Path) -> dict[Path, list[str]]:
    """Return the pickled files with the tensors that the index names in each; none for a single
    file without an index.
    """
    if any(source.glob("*.safetensors")):
        raise ConfigError(
            f"{source} has safetensors already, which Freight reads: there is nothing to convert"
        )
    if (source / SINGLE).is_file():
        return {source / SINGLE: []}
    if read_json(source / INDEX) is None:
        raise CheckpointError(
            f"{source} has neither {SINGLE} nor {INDEX}: there is nothing to convert"
        )
    shards = indexed_shards(source / INDEX)
    if not shards:
        raise CheckpointError(
            f"{source / INDEX}: weight_map is missing, or does not give a file for every tensor"
        )
    for file in shards:
        if not file.is_file():
            raise CheckpointError(
                f"{source}: the shard {shown(file.name)}, which {INDEX} names, is missing"
            )
    return shards


def _untied(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the tensors to write although they share memory: the head, where config.json says that
    it is not tied.
    """
    try:
        tied = parse_model_config(config).tie_word_embeddings
    except CheckpointError:  # a model that Freight does not run
        tied = config.get("tie_word_embeddings") is not False
    return () if tied else ("lm_head.weight",)


def _require_all(file: Path, names: list[str], present: set[str]) -> None:
    """Raise CheckpointError unless the file holds what the index names there. What else it holds is
    not written.
    """
    missing = set(names) - present
    if missing:
        raise CheckpointError(
            f"{file}: {INDEX} places {shown(min(missing))} there, and it does not hold it; fetch it again"
        )


def _convert_file(
    file: Path, out: Path, options: tuple[str, ...], on_progress: Callable[[int, int], None]
) -> dict[str, str]:
    """Run a process that writes `file` as safetensors into `out`; return the names that are tied to
    others. `options` are those of `unpickle.main`.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "freight.checkpoint.unpickle",
        str(file.resolve()),
        str(out),
        *options,
    ]
    seconds = deadline(file.stat().st_size)
    last: JsonObject = {}
    late = threading.Event()
    with subprocess.Popen(
        command,
        env=with_parent(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # a line cut short by the end of the process
                    last = json.loads(line)
                if "done" in last:
                    on_progress(last["done"], last["total"])
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if isinstance(last.get("tied"), dict) and status == 0:
        return dict(last["tied"])
    if "full" in last:
        raise CapacityError(
            f"the disk of {out.parent} is full: {last['full']}; nothing was left there"
        )
    reason = str(last.get("refused", f"the process that read it ended with status {status}"))
    if late.is_set():
        reason = f"reading it took more than {seconds:.0f} seconds"
    raise CheckpointError(
        f"{file} was not converted: {reason}. Use a copy of the model in safetensors"
    )
