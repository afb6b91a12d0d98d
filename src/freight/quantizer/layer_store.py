"""The layers that are quantized already, in a folder beside the output, so that a run that was killed
goes on where it was.

`run.json` says what they were made from; the folder of another run is emptied. Each layer is a file,
written whole. The folder is removed once the output is there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from freight.base.fields import JsonObject
from freight.base.files import FULL, read_object, write_whole
from freight.errors import CapacityError, ConfigError
from freight.quantizer.layer_record import GroupRecord
from freight.quantizer.rounding import RoundedMatrix

_RUN = "run.json"
_LOCK = "lock"
_GROUPS = "groups"  # in the metadata of a file

logger = logging.getLogger("freight")


class LayerStore:
    """The layers of one output that are done: their matrices, and scales that are moved within them.

    As a context manager it removes its folder once the body, which writes the output, is through.
    After an error the folder stays if there is anything in it.
    """

    def __init__(self, out: Path, run: JsonObject) -> None:
        """Open the folder of `out`. `run` is everything that decides what the layers become.

        Raises ConfigError where the folder cannot be written, or another run has it, CapacityError
        for a full disk.
        """
        target = Path(os.path.realpath(out))
        self.folder = target.parent / f".freight.{target.name}.layers"
        self._file_of: dict[str, Path] = {}  # of a tensor in the folder
        self._lock = self._locked(out)
        if self._stored_run() != run:
            self._empty()
            self._write(_RUN, json.dumps(run, indent=1).encode())
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            self._know(path)
        done = len(set(self._file_of.values()))
        if done:
            logger.warning(
                "%d layers are quantized already, by a run that was ended: %s", done, self.folder
            )

    def has(self, index: int) -> bool:
        """Return whether layer `index` is done."""
        return self._path(index) in self._file_of.values()

    def add(
        self,
        index: int,
        matrices: Mapping[str, RoundedMatrix],
        groups: Sequence[GroupRecord] = (),
    ) -> None:
        """Keep layer `index`: its matrices by module, and what was measured of its inputs. Raises as
        `__init__`.
        """
        tensors: dict[str, Tensor] = {}
        for module, matrix in matrices.items():
            tensors |= matrix.fields(module)
        path = self._path(index)
        self._write(path.name, save(tensors, _metadata(groups)))
        self._know(path)

    def add_scales(
        self, index: int, scales: Sequence[Tensor], groups: Sequence[GroupRecord] = ()
    ) -> None:
        """Keep the scales that are moved between the tensors of layer `index`, and what was measured of
        its inputs. Raises as `__init__`.
        """
        named = {str(place): scale.contiguous() for place, scale in enumerate(scales)}
        self._write(self._scales(index).name, save(named, _metadata(groups)))

    def groups(self, index: int) -> list[GroupRecord]:
        """Return what was measured of the inputs of layer `index`; nothing of a layer that is not here."""
        for path in (self._path(index), self._scales(index)):
            if not path.exists():
                continue
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
            except (SafetensorError, OSError) as error:
                raise self._damaged(path, error) from error
            return [GroupRecord.read(group) for group in json.loads(metadata.get(_GROUPS, "[]"))]
        return []

    def scales(self, index: int) -> list[Tensor] | None:
        """Return the scales of layer `index`; None if they are not known yet."""
        path = self._scales(index)
        if not path.exists():
            return None
        try:
            named = load_file(path)
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, error) from error
        return [named[str(place)] for place in range(len(named))]

    def matrix(self, module: str) -> RoundedMatrix | None:
        """Return the matrix of a module; None if it has none here."""
        if f"{module}:codes" not in self._file_of:
            return None
        parts = {}
        for part in RoundedMatrix.names():
            name = f"{module}:{part}"
            if name in self._file_of:
                parts[part] = self._read(name)
        return RoundedMatrix(**parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        done = list(self.folder.glob("*.safetensors"))
        if kind is None or not done:
            self.remove()
            return
        self.close()
        logger.warning(
            "what is done stays in %s: the same command goes on from there; remove it if you do not want that",
            self.folder,
        )

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Remove the folder, whose output is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:05}.safetensors"

    def _scales(self, index: int) -> Path:
        return self.folder / f"scales-{index:05}.safetensors"

    def _damaged(self, path: Path, error: Exception) -> ConfigError:
        return ConfigError(
            f"{path} is damaged ({error}); remove {self.folder}, and all layers are quantized anew"
        )

    def _locked(self, out: Path) -> int:
        try:
            self.folder.mkdir(exist_ok=True)
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"the output {out}: {self.folder} cannot be written: {error.strerror}; name another output"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"another run quantizes into {out} ({self.folder}): wait for it, or name another output"
            ) from None
        except OSError:
            pass  # a file system without flock
        return lock

    def _stored_run(self) -> JsonObject | None:
        try:
            return read_object(self.folder / _RUN)
        except (OSError, ValueError):
            return None

    def _empty(self) -> None:
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_whole(self.folder / name, content)
        except OSError as error:
            kind = CapacityError if error.errno in FULL else ConfigError
            raise kind(f"{self.folder / name} cannot be written: {error.strerror}") from error

    def _know(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    self._file_of[name] = path
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, error) from error

    def _read(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _metadata(groups: Sequence[GroupRecord]) -> dict[str, str]:
    return {_GROUPS: json.dumps([group.content() for group in groups])}
