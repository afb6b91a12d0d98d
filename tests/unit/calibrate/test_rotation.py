"""A rotated model has the logits of the original, by transformers (`rewritten.py`), and what cannot
be rotated is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.covering import in_rotation
from tests.parity.variants import VARIANTS
from tests.unit.calibrate.rewritten import Original

from freight.errors import ConfigError
from freight.model.config.model import ForeignModel
from freight.quantizer.hadamard import hadamard_matrix, paley_order, signs, turned
from freight.quantizer.rotation import RotationPart, residual_refusal, rotation

BOUND = 3e-5
ALWAYS = (
    *("llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "gemma3", "phi3", "granite-biases"),
    *("qwen2-moe", "gpt-oss", "mixtral", "deepseek-v2", "nemotron-h-latent", "gemma4"),
    *("qwen3-next", "mimo-v2-flash", "granite-moe", "hy-v3-float32-head", "lfm2"),
)
REFUSED = (
    *("deepseek-v3", "deepseek-v3-without-q-lora", "ling", "ling-unbounded", "muse-glimmer"),
    *("muse-glimmer-windows", "afmoe", "afmoe-plain", "qwen3-5", "qwen3-5-moe", "minicpmv4-6"),
)


def changed_by(original: Original, seed: int | None, parts: tuple[RotationPart, ...]) -> float:
    """The error of the rotated model, as a share of the largest logit."""
    rotated = rotation(original.config, parts, seed)
    tensors = {}
    for name, change in rotated.changes.items():
        norm = None if change.norm is None else original.tensors[change.norm.weight]
        stored = original.tensors[change.reads]
        before = stored.clone()
        tensors[name] = rotated.tensor(name, stored, norm)
        assert torch.equal(stored, before)
        assert tensors[name].shape == stored.shape
    keys = {"tie_word_embeddings": False} if rotated.unties else {}
    return original.error_with(tensors, **keys)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in ALWAYS or in_rotation(name) else [pytest.mark.slow])
        for name in VARIANTS
        if name not in REFUSED
    ],
)
def test_a_rotated_model_has_the_same_logits(variant: str, tmp_path: Path):
    assert changed_by(Original(variant, tmp_path), 5, tuple(RotationPart)) <= BOUND


@pytest.mark.parametrize("part", RotationPart)
def test_each_part_alone_and_without_signs(part: RotationPart, tmp_path: Path):
    assert changed_by(Original("llama-tied", tmp_path), None, (part,)) <= BOUND


@pytest.mark.parametrize("variant", REFUSED)
def test_a_model_without_any_rotation_is_refused_with_its_reasons(variant: str, tmp_path: Path):
    config = Original(variant, tmp_path).config
    with pytest.raises(ConfigError, match=r"R1: .*; R2 of layer 0.*another method"):
        rotation(config)


@pytest.mark.parametrize(
    ("variant", "word"),
    [
        ("opt", "LayerNorm"),
        ("gemma3", "outputs|add"),
        ("olmo2", "outputs|add"),
        ("glm4-moe", "predict"),
        ("qwen2-vl", "pictures"),
    ],
)
def test_the_residual_stream_is_refused_by_name(variant: str, word: str, tmp_path: Path):
    rotated = rotation(Original(variant, tmp_path).config)
    assert rotated.parts == (RotationPart.VALUES,)
    assert not rotated.unties
    (refusal,) = rotated.refusals
    assert refusal.startswith("R1")
    assert any(part in refusal for part in word.split("|"))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("hidden_size", 92, "hidden_size = 92"),
        ("embedding_norm", True, "embedding"),
        ("position_offset", 2, "positions"),
        ("embedding_size", 32, "projections"),
        ("per_layer_vocab_size", 100, "embeddings"),
        ("final_norm", False, "no norm"),
    ],
)
def test_what_stands_in_the_way_of_the_residual_stream_is_named(
    key: str, value: object, word: str, tmp_path: Path
):
    config = Original("llama", tmp_path).config
    assert residual_refusal(config) is None
    reason = residual_refusal(replace(config, **{key: value}))
    assert reason is not None
    assert word in reason


def test_a_model_that_runs_through_transformers_is_refused(tmp_path: Path):
    config = Original("llama", tmp_path).config
    foreign = ForeignModel((), (), "wte.weight", "lm_head.weight", ())
    with pytest.raises(ConfigError, match=r"'llama'.*another method"):
        rotation(replace(config, foreign=foreign))


def test_the_norms_become_ones_or_zeros_where_1_is_added(tmp_path: Path):
    """Of a Llama; of a Qwen3-Next, whose norms add 1."""
    for variant, value in (("llama", 1.0), ("qwen3-next", 0.0)):
        original = Original(variant, tmp_path / variant)
        rotated = rotation(original.config)
        norms = [name for name, change in rotated.changes.items() if change.constant is not None]
        assert len(norms) == 2 * original.config.num_layers + 1
        for name in norms:
            assert torch.equal(
                rotated.tensor(name, original.tensors[name]),
                torch.full((original.config.hidden_size,), value),
            )


def test_an_outlier_spreads_over_all_channels(tmp_path: Path):
    original = Original("llama", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    stored = torch.zeros(64, 96)
    stored[3] = 8.0
    rotated = rotation(original.config, seed=1).tensor(name, stored)
    torch.testing.assert_close(rotated.abs(), torch.ones(64, 96))


# ---- matrices

ORDERS = (1, 2, 4, 12, 20, 24, 28, 36, 40, 44, 60, 64, 84, 96, 108, 180, 192, 576, 640, 896, 1536)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_orthogonal_and_entries_of_one_size(order: int):
    matrix = hadamard_matrix(order)
    assert matrix.shape == (order, order)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5))


@pytest.mark.parametrize(
    "order", [2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 5376, 6144, 7168, 8192, 12288]
)
def test_hidden_sizes_of_published_models_have_a_matrix(order: int):
    x = torch.randn(2, 3, order, generator=torch.Generator().manual_seed(0)).double()
    product = turned(x, order)
    torch.testing.assert_close(product.norm(dim=2), x.norm(dim=2))
    torch.testing.assert_close(product[0] @ product[1].T, x[0] @ x[1].T, rtol=1e-9, atol=1e-9)


def test_a_product_is_that_with_the_matrix():
    x = torch.randn(5, 3 * 36, generator=torch.Generator().manual_seed(0)).double()
    expected = x.view(5, 3, 36) @ hadamard_matrix(36)
    torch.testing.assert_close(turned(x.view(5, 3, 36), 36), expected)


@pytest.mark.parametrize("order", [3, 6, 18, 52, 92, 94, 100])
def test_an_order_without_a_matrix_is_refused_by_its_size(order: int):
    with pytest.raises(ConfigError, match=str(order)):
        paley_order(order)


def test_signs_follow_their_seed():
    assert torch.equal(signs(64, None), torch.ones(64, dtype=torch.float64))
    assert torch.equal(signs(64, 1), signs(64, 1))
    assert not torch.equal(signs(64, 1), signs(64, 2))
    assert set(signs(64, 1).tolist()) == {-1.0, 1.0}
