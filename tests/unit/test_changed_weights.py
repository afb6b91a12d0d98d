"""tools/changed_weights.py: a model whose weights differ a little, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import changed_weights
import torch
from safetensors import safe_open

FIXTURE = Path(__file__).parents[1] / "fixtures" / "base_bf16"


def test_every_weight_changes_a_little_and_nothing_else_does(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("first", "again", "other")]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        shutil.copy(FIXTURE / "model.safetensors", file)
        changed_weights.change(file, 0.01, seed)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    with (
        safe_open(FIXTURE / "model.safetensors", "pt") as before,
        safe_open(files[0], "pt") as after,
    ):
        assert after.metadata() == before.metadata()
        assert sorted(after.keys()) == sorted(before.keys())
        for name in before.keys():  # noqa: SIM118, no dict
            old, new = before.get_tensor(name), after.get_tensor(name)
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
            change = (new.float() - old.float()).norm() / old.float().norm()
            assert 0.005 < change < 0.02
            assert torch.isfinite(new).all()
