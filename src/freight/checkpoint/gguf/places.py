"""Where GGUF files are: beside other files of a folder, and on the hub. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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


def chosen_file(files: Sequence[str], wanted: str, name: str) -> str:
    """Return the GGUF file of a repository that `wanted` names: a file, or a part of its name such as
    Q4_K_M, as llama.cpp takes it, case ignored. `name` is what the user wrote.

    Where several fit, the one that has `wanted` between punctuation and the shortest name counts.
    Raises CheckpointError if there is none, or no such one.
    """
    if wanted in files:
        return wanted
    models = [str(path) for path in _first_parts(map(Path, files)) if path.suffix == ".gguf"]
    if not models:
        raise CheckpointError(f"{name}: the repository has no GGUF file")
    fitting = [model for model in models if wanted.lower() in model.lower()]
    if not fitting:
        raise CheckpointError(f"{name} fits none of its files: {listed(models, _NAMED)}; name one")
    whole = re.compile(rf"(^|[^A-Za-z0-9_]){re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.I)
    exact = [model for model in fitting if whole.search(model)] or fitting
    shortest = min(map(len, exact))
    exact = [model for model in exact if len(model) == shortest]
    if len(exact) > 1:
        raise CheckpointError(f"{name} fits several files: {listed(exact, _NAMED)}; name one")
    return exact[0]


def parts_of(file: str) -> str:
    """Return the pattern of a file and, of a split one, of its other parts."""
    split = _SPLIT.search(file)
    return file if split is None else file[: split.start()] + "-*.gguf"


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
