"""Experts without a gate and latent experts on the Triton kernel set, beside transformers and the
reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.triton.test_triton_families import CHUNK, PROMPT, SHAPE, freight_logits
from tests.latent_experts import register, save
from tests.parity.random_models import tokens

from freight.fp8.formats import Format
from freight.settings.engine import KVCacheConfig

KV = KVCacheConfig(Format.FLOAT32, None, None, None)
WITHOUT_WINDOWS = {key: value for key, value in SHAPE.items() if key != "sliding_window"}
SMALL: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 4,
}


@pytest.mark.parametrize("latent", [20, None])
def test_logits_are_those_of_transformers(
    latent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    register(monkeypatch)
    groups = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    model = save(tmp_path, shape=WITHOUT_WINDOWS, moe_latent_size=latent, **SMALL, **groups)
    ids = tokens(PROMPT + CHUNK + 1)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, PROMPT:]
    assert expected.std() > 0.1
    got = freight_logits(tmp_path, ids, "triton", KV, device)
    assert (got - expected).abs().max() <= (1e-4 if device == "cpu" else 0.02)
