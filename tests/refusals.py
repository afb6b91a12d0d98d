"""How tests name an error: by its kind, and by what it names: the thing, the value, the way out.

Sentences are free to change; tests/test_messages.py reads them as they stand in the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_names(message: str, *parts: str) -> None:
    """Assert that `message` has each of `parts`, as whole words, whatever stands between them."""
    missing = [
        part for part in parts if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", message) is None
    ]
    assert not missing, f"{missing} not in {message!r}"


@contextmanager
def refuses(kind: type[Exception], *parts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that an exception of `kind` is raised whose message names all `parts`."""
    with pytest.raises(kind) as error:
        yield error
    assert_names(str(error.value), *parts)
