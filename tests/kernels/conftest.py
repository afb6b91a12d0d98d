"""The two best builds that run here are tested every time; those behind them, as `slow`, by `make test-all`."""

from __future__ import annotations

import pytest

from freight.kernels.cpu import library

ALWAYS = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    behind = {*library.runnable()[ALWAYS:]}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and any(isinstance(one, str) and one in behind for one in callspec.params.values()):
            item.add_marker(pytest.mark.slow)
