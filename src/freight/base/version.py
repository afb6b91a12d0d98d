"""The version of Freight that runs."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("freight")
    except metadata.PackageNotFoundError:  # run from source, without an installation
        return "0+source"
