"""Rows of data sets: of the Hugging Face hub by `owner/name`, and of .parquet files.

Both need the package `datasets`, or the pyarrow that it brings, which Freight does not install by
itself. Where they are missing, the error says how to get them and what works without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from freight.errors import ConfigError, first_line, install

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.]+)?")
_FILES = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".md", ".py")
_INSTALL = install("datasets")


def is_hub_id(name: str) -> bool:
    """Return whether `name` is `owner/name` or `owner/name:split`, and neither a file that is there
    nor the name of one.
    """
    there = Path(name).exists() or Path(name).parent.is_dir()
    return bool(_HUB_ID.fullmatch(name)) and not name.lower().endswith(_FILES) and not there


def hub_rows(where: str, name: str) -> Iterable[object]:
    """Return the rows of a data set of the hub: of the split that is named behind a colon, else of
    its training split.

    Raises ConfigError without `datasets`, for a data set that cannot be fetched, and for an unknown
    split.
    """
    repository, _, split = name.partition(":")
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{where}: there is no such file, and a data set of the hub needs the package datasets: {_INSTALL}, or "
            "give a local file (.jsonl, .parquet or text)"
        ) from None
    try:
        loaded: Any = datasets.load_dataset(repository)
    except Exception as error:  # the client's own errors, and whatever its network stack raises
        raise ConfigError(
            f"{where} is neither a file nor a data set that could be fetched from the hub; check the name and the "
            f"connection, or give a local file ({first_line(error)})"
        ) from error
    splits = sorted(loaded)
    chosen = split
    if not split and len(splits) == 1:
        chosen = splits[0]
    elif not split:
        chosen = next((name for name in splits if name.startswith("train")), "")
    if chosen not in splits:
        raise ConfigError(
            f"{where}: the data set has the splits {', '.join(splits)}; name one of them: {repository}:{splits[0]}"
        )
    rows: Iterable[object] = loaded[chosen]
    return rows


def parquet_rows(where: str, path: Path) -> Iterator[object]:
    """Yield the rows of a .parquet file, as objects. Raises ConfigError without pyarrow, and for a
    file that is none.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{where}: .parquet files are read by pyarrow, which comes with datasets: {_INSTALL}, or give .jsonl"
        ) from None
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{where} cannot be read as parquet: {error}") from None
