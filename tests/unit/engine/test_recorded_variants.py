"""Every family and variant of the parity tests: its decode step is recorded, and the recording has
the ordinary bits.

A variant whose step is not recorded must stand in `NOT_RECORDED` with the operation that prevents
it, so that none falls back to single calls unseen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.variants import VARIANTS
from tests.unit.engine.test_recordings import Batch, build, recordings_of, tensors_of
from transformers import PretrainedConfig

NOT_RECORDED: dict[str, str] = {}  # variant -> the obstacle's operation


def as_written(config: PretrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if value is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decode_step_is_recorded(variant):
    recorded, plain = build(as_written(VARIANTS[variant]), "fp8_e4m3fn")
    batch = Batch.of(recorded)
    steps = [batch.advance((0,), 3), batch.advance((1,), 30)]
    steps += [batch.advance((0, 1)), batch.advance((0, 1)), batch.advance((0, 1))]
    for step in steps:
        assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())
    for ours, theirs in zip(tensors_of(recorded.pool), tensors_of(plain.pool), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    obstacle = recordings_of(recorded).obstacle
    assert obstacle.startswith(NOT_RECORDED[variant]) if variant in NOT_RECORDED else obstacle == ""


def test_every_reason_belongs_to_a_variant():
    assert set(NOT_RECORDED) <= set(VARIANTS)
