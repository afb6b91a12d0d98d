"""FP8Cache with a config.json that Freight refuses: transformers computes the model, and ignores
such keys.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from freight.errors import CheckpointError
from freight.model.open import open_checkpoint
from freight.transformers import FP8Cache

BASE = Path(__file__).parents[2] / "fixtures" / "base_bf16"


@pytest.mark.parametrize(("source", "found"), [("auto", "dynamic"), ("0.5,0.25", "given")])
def test_keys_that_only_freight_would_refuse_are_no_obstacle(
    tmp_path: Path, source: str, found: str
) -> None:
    folder = shutil.copytree(BASE, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alibi": True, "clip_qkv": 8.0}))
    with pytest.raises(CheckpointError, match="alibi = True decides"):
        open_checkpoint(str(folder))
    config = LlamaConfig.from_pretrained(folder)
    assert config.alibi is True
    assert FP8Cache(config, kv_scales=source, model=folder).kv_cache.scale_source == found
