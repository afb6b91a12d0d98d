"""The best build that runs here is tested in full every time; with the next one a quarter of the
cases is, chosen by their names. The other cases, and the builds behind these two, are `slow`: `make
test-all` has them all."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from freight.kernels.cpu import library

SHARE = 4


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may set the number of threads: it is what it was behind each."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _, *others = library.runnable() or ("",)
    for item in items:
        callspec = getattr(item, "callspec", None)
        named = (
            set()
            if callspec is None
            else {one for one in callspec.params.values() if isinstance(one, str)}
        )
        if named & {*others[1:]} or (named & {*others} and zlib.crc32(item.name.encode()) % SHARE):
            item.add_marker(pytest.mark.slow)
