"""Texts of a file, one a line: what is embedded, or compared. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from freight.base.files import DATA_LIMIT, read_text, reading, unique_names
from freight.errors import ConfigError, shown


def read_lines(path: Path, named: str, field: str = "text") -> list[str]:
    """Return the text of each line of `path`: of a `.jsonl` file that of an object's `field`, of any
    other the line itself. named: the file, as errors name it.

    Raises ConfigError for what cannot be read, an empty file, and a line without a text.
    """
    with reading(named):
        content = read_text(path, "utf-8-sig", DATA_LIMIT)
    lines = content.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise ConfigError(f"{named} has no line; give one text a line")
    texts: list[str] = []
    for number, line in enumerate(lines, 1):
        where = f"{named}, line {number}"
        text = _text_of(where, line, field) if path.suffix == ".jsonl" else line.removesuffix("\r")
        if not text:
            raise ConfigError(f"{where} is empty; take it out, or write what stands for it")
        texts.append(text)
    return texts


def _text_of(where: str, line: str, field: str) -> str:
    try:
        entry = json.loads(line, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); write one object a line") from None
    if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
        names = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ConfigError(
            f"{where}: there is no text {field} in {shown(names)}; name it with --field"
        )
    text: str = entry[field]
    return text
