"""CheckpointWriter: writes a complete checkpoint, or nothing.

Everything is written into a hidden folder, config.json last. If the output does not exist, the
hidden folder is next to it, and is renamed when complete. An existing empty folder may be a mount
point or a link, which a rename cannot replace; there the hidden folder is inside, and its files
move up at the end, config.json last. An error, Ctrl-C or a full disk removes all of it. A folder is
overwritten in the same way, if Freight wrote it, and the old files are removed when the new ones
are in place. After SIGKILL files remain, which nothing loads without a config.json; the next run
removes them (`partial.py`). Tensors go into shards in the order they are added, so memory holds one
shard.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from freight.checkpoint.extras import WRITTEN
from freight.checkpoint.partial import LOCK, PATTERN, REPLACED, Partial, remove_abandoned, workplace
from freight.config.fields import JsonObject
from freight.errors import CapacityError, CheckpointError, ConfigError

SHARD_BYTES = 2 * 2**30
# Files of a model besides config.json and weights: tokenizer, generation defaults, chat template,
# processors of pictures and sound, licence
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_WRITTEN = (
    "config.json",
    "freight_kv_scales.json",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    LOCK,  # remains where a run was killed just before it ended
)


def require_new(out: Path, overwrite: bool | None = None) -> None:
    """Raise ConfigError unless `out` is free (or an empty folder), in a folder that exists and can
    be written.

    Removes what killed runs left there. With `overwrite` it may also be a folder that Freight
    wrote, with nothing else in it. None: the caller has no such option, so the error does not offer
    it.
    """
    try:
        remove_abandoned(out)
        empty = out.is_dir() and not any(out.iterdir())
        if not empty and (out.exists() or out.is_symlink()):
            foreign = _foreign(out)
            if foreign is not None and overwrite:
                raise ConfigError(
                    f"the output {out} exists and {foreign}; only what Freight wrote is overwritten: remove it, or "
                    "name another"
                )
            if not overwrite:
                offered = foreign is None and overwrite is not None
                hint = ", or overwrite it (--overwrite, overwrite=True)" if offered else ""
                raise ConfigError(f"the output {out} exists; remove it, or name another{hint}")
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                f"the output {out} has no parent folder; make {out.absolute().parent} first"
            )
        Partial.make(out).remove()  # raises for every other reason before any work is done
    except OSError as error:
        raise ConfigError(f"the output {out} cannot be written: {error}; name another") from error


def _foreign(out: Path) -> str | None:
    """Say what shows that Freight did not write all of `out`; None if it did."""
    if not out.is_dir():
        return "is not a folder"
    for path in sorted(out.iterdir()):
        if fnmatch.fnmatchcase(path.name, PATTERN):
            continue
        known = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in (*_WRITTEN, *_COPIED))
        if not known or path.is_symlink() or not path.is_file():
            return f"holds {path.name}, which Freight did not write"
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    declared = config.get("freight") if isinstance(config, dict) else None
    ours = isinstance(declared, dict) and set(WRITTEN) <= set(declared)
    return None if ours else "holds no model that Freight wrote"


def require_space(out: Path, num_bytes: int) -> None:
    """Raise CapacityError unless the disk of `out` has room for `num_bytes`."""
    free = shutil.disk_usage(workplace(out)).free
    if free < num_bytes:
        raise CapacityError(
            f"{out} needs {num_bytes:,} bytes, and its disk has {free:,} free; make room, or name another disk"
        )


class CheckpointWriter:
    """Writer of a checkpoint: `with CheckpointWriter(out) as writer: writer.add(…); …;
    writer.finish(…)`.

    Leaving without `finish` removes everything. Raises ConfigError if `out` is taken or cannot be
    made, CapacityError when the disk is full, CheckpointError for any other fault of writing.
    """

    def __init__(
        self, out: Path, shard_bytes: int = SHARD_BYTES, overwrite: bool | None = None
    ) -> None:
        """Prepare to write `out`. With `overwrite` it may be a folder that Freight wrote; None as
        in `require_new`.
        """
        self._out = out.absolute()
        self._overwrite = overwrite
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []  # the names of each
        self._total = 0
        self._published: list[Path] = []
        self._replaced: list[Path] = []  # the old files, moved into the hidden folder

    def __enter__(self) -> CheckpointWriter:
        require_new(self._out, self._overwrite)
        try:
            self._partial = Partial.make(self._out)
        except OSError as error:
            raise self._fault(error) from error
        self._folder = self._partial.path
        self._finished = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            for file in reversed(self._published):
                file.unlink(missing_ok=True)
            for file in reversed(self._replaced):  # config.json last
                os.rename(self._folder / REPLACED / file.name, file)
            self._partial.remove()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors; those of one call go into one shard."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending |= {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._pending_bytes += size

    def next_shard(self) -> Path:
        """Return the path for a safetensors file that `adopt` takes as a shard."""
        self._flush()
        return self._folder / _shard_name(len(self._shards), 0)

    def adopt(self, sizes: Mapping[str, int]) -> None:
        """Take the file at `next_shard` as the next shard. sizes: the bytes of each of its tensors."""
        self._shards.append(list(sizes))
        self._total += sum(sizes.values())

    def finish(
        self, config: JsonObject, source: Path, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Write pending tensors, tokenizer and other files of `source`, `files` and config.json;
        then publish `out`.
        """
        self._flush()
        try:
            self._name_shards()
            for pattern in _COPIED:
                for file in source.glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, self._folder / file.name)
            for name, content in (files or {}).items():
                (self._folder / name).write_bytes(content)
            marked = {**config, "freight": {**WRITTEN, **config.get("freight", {})}}
            (self._folder / "config.json").write_text(
                json.dumps(marked, indent=2) + "\n", encoding="utf-8"
            )
            # safetensors makes its files readable by the owner alone
            for shard in self._folder.glob("*.safetensors"):
                shutil.copymode(self._folder / "config.json", shard)
            self._publish()
        except OSError as error:
            raise self._fault(error) from error
        self._finished = True

    def _publish(self) -> None:
        if self._folder.parent != self._out:
            self._partial.become(self._out)
            return
        old = [path for path in self._out.iterdir() if not fnmatch.fnmatchcase(path.name, PATTERN)]
        if old and (not self._overwrite or _foreign(self._out) is not None):
            raise CheckpointError(
                f"{self._out} was filled by another program meanwhile; nothing was changed there"
            )
        names = sorted(
            (file.name for file in self._folder.iterdir() if file.name != LOCK),
            key="config.json".__eq__,
        )
        if old:
            (self._folder / REPLACED).mkdir()
        # config.json first, so that no mixture of old and new loads
        for path in sorted(old, key=lambda path: path.name != "config.json"):
            self._replaced.append(path)
            os.rename(path, self._folder / REPLACED / path.name)
        for name in names:
            self._published.append(self._out / name)
            os.rename(self._folder / name, self._out / name)
        self._partial.remove()

    def _flush(self) -> None:
        if not self._pending:
            return
        try:
            save_file(
                self._pending,
                self._folder / _shard_name(len(self._shards), 0),
                metadata={"format": "pt"},
            )
        except (OSError, SafetensorError) as error:
            raise self._fault(error) from error
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            os.rename(self._folder / _shard_name(0, 0), self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            os.rename(
                self._folder / _shard_name(index, 0), self._folder / _shard_name(index, count)
            )
            weight_map |= dict.fromkeys(names, _shard_name(index, count))
        content = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(content, indent=2) + "\n"
        )

    def _fault(self, error: Exception) -> CapacityError | CheckpointError:
        match = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors reports the errno
        number = int(match[1]) if match else getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return CapacityError(
                f"the disk of {self._out} is full: {error}; nothing was left there"
            )
        return CheckpointError(f"{self._out} cannot be written: {error}")


def _shard_name(index: int, count: int) -> str:
    """Return the shard's name in the ecosystem's numbering; `count` is 0 until it is known."""
    return f"model-{index + 1:05}-of-{count:05}.safetensors"
