"""Where GGUF files are: beside other files of a folder, and on the hub. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from freight.errors import CheckpointError, listed

_SPLIT = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_MAGIC = b"GGUF"
_NAMED = 5  # files that a message names


def is_gguf(file: Path) -> bool:
    """Return whether a file is a GGUF file, by its name or its first bytes."""
    if file.suffix == ".gguf":
        return True
    try:
        with file.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no config.json; None for any other folder.

    Raises CheckpointError for several models.
    """
    if (folder / "config.json").exists():
        return None
    models = _first_parts(folder.glob("*.gguf"))
    if len(models) > 1:
        names = [model.name for model in models]
        raise CheckpointError(
            f"{folder} has several models: {listed(names, _NAMED)}; name one of them"
        )
    return models[0] if models else None


def gguf_patterns(file: str) -> tuple[str, ...]:
    """Return the patterns of what is fetched from a hub repository for 'OWNER/NAME:FILE': a file's
    name, or a part of it such as Q4_K_M, as llama.cpp takes it.
    """
    if not file.endswith(".gguf"):
        return (f"*{file}*.gguf", f"*{file.lower()}*.gguf")
    split = _SPLIT.search(file)
    if split is None:
        return (file,)
    return (file[: split.start()] + "-*.gguf",)


def one_gguf(folder: Path, file: str, name: str) -> Path:
    """Return the fetched file that the user named `name`. Raises CheckpointError if there is none,
    or several.
    """
    if (folder / file).is_file():
        return folder / file
    models = _first_parts(folder.rglob("*.gguf"))
    models = [model for model in models if file.lower() in model.name.lower()]
    if len(models) == 1:
        return models[0]
    if not models:
        raise CheckpointError(
            f"{name}: the repository has no GGUF file {file!r}; name one of its files"
        )
    names = [model.name for model in models]
    raise CheckpointError(f"{name} fits several files: {listed(names, _NAMED)}; name one of them")


def _first_parts(files: Iterable[Path]) -> list[Path]:
    """Return the files, sorted, without the later parts of a split one, and without projectors of
    pictures, which are no models.
    """
    models = []
    for file in sorted(files):
        split = _SPLIT.search(file.name)
        is_later = split is not None and int(split[1]) > 1
        if not is_later and not file.name.startswith("mmproj"):
            models.append(file)
    return models
