"""--picture FILE.svg: checked before anything is measured, and written when that was printed."""

from __future__ import annotations

from pathlib import Path

from freight.base.files import write_whole, writing
from freight.errors import ConfigError


def check_picture(path: Path | None) -> None:
    """Raises ConfigError for a picture that is not a new SVG file, before anything is measured."""
    if path is None:
        return
    if path.suffix != ".svg":
        raise ConfigError(
            f"--picture {path}: the picture is SVG, so name it {path.with_suffix('.svg')}"
        )
    if path.exists() or not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: name a new file in a folder that exists")


def write_picture(path: Path, svg: str) -> None:
    """Write the picture whole, or not at all: after what it shows was printed. Raises ConfigError."""
    with writing("--picture"):
        write_whole(path, svg)
