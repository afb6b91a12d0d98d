"""The kernels that calibration computes with."""

from __future__ import annotations

import pytest

import freight.quantizer.quantize
from freight.kernels.reference_set import REFERENCE


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freight.quantizer.quantize, "select_kernels", lambda *_: REFERENCE)
