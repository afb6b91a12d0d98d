"""FAMILIES: the row of each model_type, from every file of `families/`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from freight.model.config.family import Family

# lists of model types begin with the best known families; the others follow by file name
_FIRST = ("llama", "mistral", "qwen")


def family_files() -> tuple[str, ...]:
    """Return the names of the modules in `families/`, in the order of FAMILIES."""
    names = sorted(path.stem for path in Path(__file__).with_name("families").glob("[a-z]*.py"))
    return (*_FIRST, *(name for name in names if name not in _FIRST))


def read_rows(names: Iterable[str]) -> dict[str, Family]:
    """Return the rows of these modules of `families/`, in their order."""
    families: dict[str, Family] = {}
    for name in names:
        rows: Mapping[str, Family] = import_module(f"freight.model.config.families.{name}").ROWS
        assert not families.keys() & rows.keys(), (
            f"families/{name}.py has model types that another file has"
        )
        families |= rows
    return families


FAMILIES = read_rows(family_files())
