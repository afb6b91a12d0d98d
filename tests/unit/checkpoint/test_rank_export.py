"""read_rank_export: a damaged, incomplete or contradictory export names its file, and the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.rank_exports import SCALES, ammo_json, tensorrt_llm_json, write_export, write_rank
from tests.refusals import refuses

from freight.checkpoint.rank_export import read_rank_export
from freight.errors import CheckpointError

FACTOR = "transformer.layers.0.attention.kv_cache_scaling_factor"


def another(name: str) -> Callable[[Path], object]:
    """Put a copy of rank 0 beside it, as `name`."""
    return lambda folder: (folder / name).write_bytes((folder / "rank0.safetensors").read_bytes())


def one_tensor(tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: save_file({FACTOR: tensor}, folder / "rank0.safetensors")


def described(**more: object) -> Callable[[Path], object]:
    content = tensorrt_llm_json(**more)

    def write(folder: Path) -> None:
        (folder / "llama_tp1.json").unlink()
        (folder / "config.json").write_text(json.dumps(content))

    return write


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (another("consolidated.safetensors"), r"consolidated\.safetensors has no rank in its name"),
        (
            another("llama_rank0.safetensors"),
            r"llama_rank0\.safetensors and rank0\.saf.* of rank 0",
        ),
        (one_tensor(torch.ones(2)), r"shape \[2\]; a scale has one number"),
        (lambda folder: write_rank(folder, 0, dict(enumerate((*SCALES, 1.0)))), "layer 2, but 2"),
        (described(num_hidden_layers=2.5), r"num_hidden_layers is 2\.5, not a whole number"),
        (described(mapping={"tp_size": 0}), r"mapping\.tp_size is 0, not a whole number"),
        (described(num_hidden_layers=10**9), r"num_hidden_layers = 1000000000 must be at most"),
        (described(mapping={"tp_size": 10**9}), r"mapping\.tp_size = 1000000000 must be at most"),
        (described(architecture=""), "architecture is '', not the name of a decoder"),
        (
            described(quantization={"kv_cache_quant_algo": "INT8"}),
            'the KV cache is "INT8"; only the scales of an FP8',
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = write_export(tmp_path / "export")
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as error:
        read_rank_export(folder)
    assert str(folder) in str(error.value)


def test_an_export_without_scales_has_a_cache_of_16_bits(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    write_rank(folder, 0, {})
    export = read_rank_export(folder)
    assert export.scales.layers == (None, None)
    assert export.description.endswith("KV cache 16 bits")


def test_ranks_that_differ_need_the_number_of_their_heads(tmp_path: Path) -> None:
    """Where they agree, no head has to be known."""
    config = ammo_json(ranks=2)
    del config["layers"][0]["num_kv_heads"]
    folder = write_export(tmp_path / "export", ranks=2, config=config)
    scales = read_rank_export(folder).scales.layers
    assert [layer.k for layer in scales if layer is not None] == [(scale,) for scale in SCALES]
    write_rank(folder, 1, {0: SCALES[0], 1: 0.5})
    with refuses(CheckpointError, "KV scale of layer 1", "differ"):
        read_rank_export(folder)
