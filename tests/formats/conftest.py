"""A test that takes `form` runs for every form of forms.py."""

from __future__ import annotations

import pytest
from tests.formats.forms import FORMS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "form" in metafunc.fixturenames:
        metafunc.parametrize("form", FORMS.values(), ids=FORMS)
