"""`freight generate` with a form that cannot be compiled: refused before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from freight.errors import CheckpointError
from freight.model.open import OpenModel


def test_a_form_that_cannot_be_compiled_is_refused_before_weights_are_read(
    freight: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise CheckpointError("weights are read")

    monkeypatch.setattr(OpenModel, "load", load)
    refused = freight("generate", "--prompt", "Hello", "--regex", "(?=a)b")
    assert refused.code != 0
    assert "structured_outputs.regex cannot be compiled" in refused.err
    assert "weights are read" in freight("generate", "--prompt", "Hello", "--regex", "b").err
