"""Tables of text and objects of JSON as data: a heading or a key, and what is read of a thing for it.

A column of a table is a format of the thing ("{0.perplexity:.3f}"), a key of an object the path of an
attribute ("spec.block_size"). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from freight.base.fields import JsonObject

Columns = Mapping[str, str]  # heading -> format of a thing


def text_rows(columns: Columns, things: Iterable[object]) -> list[list[str]]:
    """Return the headings, then a row of text for each of `things`."""
    rows = [list(columns)]
    for thing in things:
        rows.append(row_of(columns, thing))
    return rows


def row_of(columns: Columns, thing: object) -> list[str]:
    """Return the cells of one thing."""
    return [form.format(thing) for form in columns.values()]


def as_object(thing: object, paths: Mapping[str, str]) -> JsonObject:
    """Return an object of JSON: each key with the attribute of `thing` at its path, tuples as lists."""
    values = {}
    for key, path in paths.items():
        value = attrgetter(path)(thing)
        values[key] = list(value) if isinstance(value, tuple) else value
    return values


def scales_name(granularity: object, source: object, none: str = "none") -> str:
    """Return 'token, dynamic', or `none` for a cache without scales."""
    return f"{granularity}, {source}" if granularity else none


def plural(count: int, thing: str) -> str:
    """Return '1 request', or '1,024 requests'."""
    return f"{count:,} {thing}{'s' * (count != 1)}"
