"""Opening a model: which settings hold for it alone."""

from __future__ import annotations

import pytest
import torch

from freight.config.engine import EngineArgs
from freight.device import usable_cores
from freight.errors import ConfigError
from freight.models import open as opening
from freight.models.open import open_model


def test_threads_hold_while_weights_are_read_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []
    read = opening.load_model
    monkeypatch.setattr(opening, "load_model", lambda *args: inside.append(torch.get_num_threads()) or read(*args))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        opened = open_model(EngineArgs("demo", threads=1))
        opened.load(opened.resolve(opened.args))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert inside == [1]


def test_more_threads_than_cores_are_refused_before_weights_are_read() -> None:
    wanted = usable_cores() + 1
    opened = open_model(EngineArgs("demo", threads=wanted))
    with pytest.raises(ConfigError, match=rf"--threads {wanted}: this process may use .* from 1 to {wanted - 1}"):
        opened.resolve(opened.args)
