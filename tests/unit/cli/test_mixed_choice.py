"""A checkpoint whose layers have caches of different kinds: what the other verbs, and FP8Cache, do
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names, refuses
from transformers import AutoConfig

from freight.errors import ConfigError
from freight.transformers import FP8Cache

Run = Callable[..., Any]
OPTIONS = ("--weights", "none", "--kv-cache", "fp8", "--num-samples", "2", "--max-seq-len", "32")


@pytest.fixture
def mixed(freight: Run, tmp_path: Path) -> str:
    out = str(tmp_path / "mixed")
    answer = freight("quantize", "demo", out, *OPTIONS, "--kv-budget", "bits=11")
    assert answer.code == 0, answer.err
    return out


def test_a_mixed_choice_is_refused_by_name_where_one_cache_is_needed(
    freight: Run, mixed: str, tmp_path: Path
):
    """`freight scales` and FP8Cache name the layers and the way out; measured scales need no
    choice.
    """
    out = tmp_path / "out"
    for argv in (("export", mixed, str(out)), ("extract", mixed, "demo", str(out))):
        answer = freight("scales", *argv)
        assert answer.code != 0
        assert_names(
            answer.err, f"error: {mixed}", "by layer", "16 bits", "quantize the 16-bit model"
        )
        assert not out.exists()
    config = AutoConfig.from_pretrained(mixed)
    for scales in ("auto", "checkpoint"):
        with refuses(ConfigError, "layer", "16 bits", "--kv-scales dynamic"):
            FP8Cache(config, model=mixed, kv_scales=scales)
    assert FP8Cache(config, model=mixed, kv_scales="dynamic").kv_cache.layers is None
