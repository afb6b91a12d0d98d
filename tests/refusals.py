"""How tests name an error: by its kind, and by what it names: the thing, the value, the way out.
Lines of output are named in the same way.

Sentences are free to change; tests/test_messages.py reads them as they stand in the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def _has(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def assert_names(message: str, *parts: str) -> None:
    """Assert that `message` has each of `parts`, as whole words, whatever stands between them."""
    missing = [part for part in parts if not _has(message, part)]
    assert not missing, f"{missing} not in {message!r}"


def line_naming(text: str, *parts: str) -> str:
    """The line of `text` that names all `parts`; there is one."""
    (line,) = [line for line in text.splitlines() if all(_has(line, part) for part in parts)]
    return line


@contextmanager
def refuses(kind: type[Exception], *parts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that an exception of `kind` is raised whose message names all `parts`."""
    with pytest.raises(kind) as error:
        yield error
    assert_names(str(error.value), *parts)
