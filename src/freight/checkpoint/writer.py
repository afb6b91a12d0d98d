"""CheckpointWriter: writes a complete checkpoint, or nothing.

Everything is written into a hidden folder, config.json last, which takes the place of the output by
one rename when it is complete and on the disk (`partial.py`). An error, Ctrl-C or a full disk
removes all of it. A folder is overwritten in the same way, if Freight wrote it: whatever fails and
whenever, there is the old model or the new one, whole. After SIGKILL a hidden folder remains, which
the next run removes. Tensors go into shards in the order they are added, so memory holds one shard.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from freight.base.fields import JsonObject
from freight.base.files import FULL, outside
from freight.checkpoint.extras import WRITTEN
from freight.checkpoint.partial import (
    LOCK,
    Partial,
    remove_abandoned,
    signals_deferred,
    visible,
    workplace,
)
from freight.errors import CapacityError, CheckpointError, ConfigError, shown

SHARD_BYTES = 2 * 2**30
# Files of a model besides config.json and weights: tokenizer, generation defaults, chat template,
# processors of pictures and sound, licence; what sentence-transformers writes of how a model is pooled
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
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
# Folders of sentence-transformers' modules (1_Pooling), and their files
_MODULE = re.compile(r"[0-9]+_[A-Za-z]+")
_OF_MODULE = ("config.json", "model.safetensors")
REPORT = ("freight_quantization.json", "freight_quantization.md")  # on how a model was quantized
_WRITTEN = (
    "config.json",
    "freight_kv_scales.json",
    *REPORT,
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
        with signals_deferred():
            Partial.make(out).remove()  # raises for every other reason before any work is done
    except OSError as error:
        raise ConfigError(f"the output {out} cannot be written: {error}; name another") from error


def _foreign(out: Path) -> str | None:
    """Say what shows that Freight did not write all of `out`; None if it did."""
    if not out.is_dir():
        return "is not a folder"
    for name in sorted(visible(out)):
        path = out / name
        if _is_module(path) and not path.is_symlink() and _foreign_of_module(path) is None:
            continue
        known = any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_WRITTEN, *_COPIED))
        if not known or path.is_symlink() or not path.is_file():
            return f"holds {name}, which Freight did not write"
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    declared = config.get("freight") if isinstance(config, dict) else None
    ours = isinstance(declared, dict) and set(WRITTEN) <= set(declared)
    return None if ours else "holds no model that Freight wrote"


def _is_module(path: Path) -> bool:
    """Return whether this is the folder of a module of sentence-transformers, by its name."""
    return _MODULE.fullmatch(path.name) is not None and path.is_dir()


def _foreign_of_module(folder: Path) -> Path | None:
    """Return what is not of a module in its folder."""
    for path in _matching(folder, ("*",)):
        if path.name not in _OF_MODULE or path.is_symlink() or not path.is_file():
            return path
    return None


def _module_files(source: Path) -> list[Path]:
    """Return the files of the modules of sentence-transformers behind the model in `source`."""
    if not (source / "modules.json").is_file():
        return []
    folders = filter(_is_module, _matching(source, ("*",)))
    return [file for folder in folders for file in _matching(folder, _OF_MODULE)]


def require_own_files(source: Path) -> None:
    """Raise CheckpointError for a file of the model or adapter in `source` that is a link to a place
    outside of the folder: a folder from anybody would put files of this machine into the output.

    Whatever its name is: an index, and config.json, may name any. A link in a snapshot of the hub's
    cache to its blobs is inside (`files.outside`). A GGUF file has no other files.
    """
    if source.is_file():
        return
    try:
        files = _matching(source, ("*",)) + _module_files(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    for file in files:
        target = outside(source, file)
        if target is not None and not os.path.isdir(target):
            raise CheckpointError(
                f"{source}: {shown(file.name)} is a link to {shown(str(target))}, outside of the model's folder, and "
                "what is written has files of the folder alone: put a copy of the file in its place, or remove the link"
            )


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the entries of `folder` that match one of `patterns`, in order. Raises OSError, unlike
    Path.glob, for which a folder that cannot be read is empty.
    """
    names = os.listdir(folder)
    matching: set[str] = set()
    for pattern in patterns:
        matching.update(name for name in names if fnmatch.fnmatchcase(name, pattern))
    return [folder / name for name in sorted(matching)]


def require_space(out: Path, num_bytes: int) -> None:
    """Raise CapacityError unless the disk of `out` has room for `num_bytes`, and ConfigError where
    the disk does not say.
    """
    try:
        free = shutil.disk_usage(workplace(out)).free
    except OSError as error:
        raise ConfigError(f"the output {out} cannot be written: {error}; name another") from error
    if free < num_bytes:
        raise CapacityError(
            f"{out} needs {num_bytes:,} bytes, and its disk has {free:,} free; make room, or name another disk"
        )


class CheckpointWriter:
    """Writer of a checkpoint: `with CheckpointWriter(out) as writer: writer.add(…); …;
    writer.finish(…)`.

    Leaving without `finish` removes everything. Raises ConfigError if `out` is taken or cannot be
    made, CapacityError when the disk is full, CheckpointError for any other fault of writing; an
    OSError of the body becomes one of the last two.
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
        self._partial: Partial | None = None

    def __enter__(self) -> CheckpointWriter:
        require_new(self._out, self._overwrite)
        try:
            with signals_deferred():
                self._partial = Partial.make(self._out)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, OSError):
                raise self._fault(error) from error
            raise
        return self

    @property
    def _folder(self) -> Path:
        assert self._partial is not None, "the writer was entered"
        return self._partial.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._partial is None:
            return
        # Also what the system refuses of files that are read, or of processes: all is one writing
        fault = self._fault(error) if isinstance(error, OSError) else None
        self._partial.remove()
        if fault is not None:
            raise fault from error

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
        then publish `out`. Raises CheckpointError as `require_own_files`.
        """
        self._flush()
        require_own_files(source)
        self._name_shards()
        copied = _matching(source, _COPIED) if source.is_dir() else []
        for file in copied:
            if file.is_file():
                shutil.copyfile(file, self._folder / file.name)
        for file in _module_files(source) if source.is_dir() else []:
            (self._folder / file.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(file, self._folder / file.parent.name / file.name)
        for name, content in (files or {}).items():
            (self._folder / name).write_bytes(content)
        marked = {**config, "freight": {**WRITTEN, **config.get("freight", {})}}
        (self._folder / "config.json").write_text(
            json.dumps(marked, indent=2) + "\n", encoding="utf-8"
        )
        # safetensors makes its files readable by the owner alone
        for shard in _matching(self._folder, ("*.safetensors",)):
            shutil.copymode(self._folder / "config.json", shard)
        filled = self._out.is_dir() and bool(visible(self._out))
        if filled and (not self._overwrite or _foreign(self._out) is not None):
            raise CheckpointError(
                f"{self._out} was filled by another program meanwhile; nothing was changed there"
            )
        assert self._partial is not None, "the writer was entered"
        self._partial.replace(self._out)

    def _flush(self) -> None:
        if not self._pending:
            return
        try:
            save_file(
                self._pending,
                self._folder / _shard_name(len(self._shards), 0),
                metadata={"format": "pt"},
            )
        except SafetensorError as error:
            raise self._fault(error) from error
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0

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
        number = getattr(error, "errno", None)
        if match:
            number = int(match[1])
        left = "what was there is as it was" if self._overwrite else "nothing was left there"
        if self._partial is not None and self._partial.has_old_files:
            left = (
                f"its old files are in {self._partial.path}, and the next run of freight that reads or "
                f"writes {self._out} brings them back"
            )
        if number in FULL:
            return CapacityError(f"the disk of {self._out} is full: {error}; {left}")
        return CheckpointError(f"{self._out} cannot be written: {error}; {left}")


def _shard_name(index: int, count: int) -> str:
    """Return the shard's name in the ecosystem's numbering; `count` is 0 until it is known."""
    return f"model-{index + 1:05}-of-{count:05}.safetensors"
