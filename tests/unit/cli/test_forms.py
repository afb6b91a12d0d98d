"""`freight generate` with a form that cannot be compiled: refused before any weight is read."""

from __future__ import annotations

import pytest

from freight.cli.generate import generate
from freight.engine.build import EngineArgs
from freight.errors import RequestError
from freight.models.open import OpenModel
from freight.sampling import SamplingParams


def test_a_form_that_cannot_be_compiled_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(OpenModel, "load", load)
    with pytest.raises(RequestError, match=r"structured_outputs\.regex cannot be compiled"):
        generate(EngineArgs(model="demo"), SamplingParams(), prompt=["Hello"], regex="(?=a)b")
    with pytest.raises(AssertionError, match="weights are read"):
        generate(EngineArgs(model="demo"), SamplingParams(), prompt=["Hello"], regex="b")
