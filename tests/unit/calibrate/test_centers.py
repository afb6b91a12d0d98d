"""Centers: found where a mean outweighs what varies around it, and left out where they gain
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freight.fp8.formats import Granularity
from freight.quantizer.calibration import Calibration
from freight.quantizer.centers import WORTH, CenterWatch, Moments
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import open_unquantized

FIXTURES = Path(__file__).parents[2] / "fixtures"
IDS = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())["input_ids"]
BIAS = 64.0


def test_moments_are_those_of_all_that_was_seen():
    x = torch.randn(50, 3, 8, dtype=torch.float64) + torch.arange(8)
    moments = Moments()
    moments.observe(x[:20])
    moments.observe(x[20:])
    torch.testing.assert_close(moments.mean, x.mean(0))
    torch.testing.assert_close(moments.variance, x.var(0, correction=0))
    torch.testing.assert_close(moments.energy, x.square().mean(0))


def watch(q: torch.Tensor, k: torch.Tensor, rotary_dim: int | None = None) -> CenterWatch:
    seen = CenterWatch(q.shape[-1] if rotary_dim is None else rotary_dim)
    seen.see(q, k)
    return seen


def test_pairs_with_a_large_mean_are_centered_and_no_others():
    torch.manual_seed(0)
    q, k = torch.randn(4000, 4, 8), torch.randn(4000, 2, 8)
    k[:, 0, 5] += 10.0  # with channel 1, of which it becomes a pair
    k[:, 1, 2] += 0.5
    found = watch(q, k).centers()
    assert found.k is not None
    torch.testing.assert_close(found.k[0, [1, 5]], k[:, 0, [1, 5]].mean(0))
    assert int((found.k != 0).sum()) == 2
    assert found.k_gain == pytest.approx(1 + 100 / 16, rel=0.03)  # 16 channels of variance 1


def test_a_mean_that_no_query_looks_at_is_worth_nothing():
    torch.manual_seed(0)
    q, k = torch.randn(4000, 4, 8), torch.randn(4000, 2, 8)
    k[:, 0, 5] += 10.0
    q[:, :2, [1, 5]] *= 0.01  # the two query heads of KV head 0
    found = watch(q, k).centers()
    assert found.k is None
    assert found.k_gain < WORTH


@pytest.mark.parametrize("rotary_dim", [4, 0])
def test_channels_that_are_not_rotated_keep_their_mean(rotary_dim: int):
    torch.manual_seed(0)
    q, k = torch.randn(4000, 4, 8), torch.randn(4000, 2, 8)
    k[:, 0, 1] += 10.0  # with channel 3, of which it becomes a pair where 4 channels are rotated
    k[:, 1, 6] += 5.0
    found = watch(q, k, rotary_dim).centers()
    if rotary_dim == 0:
        assert found.k is None
        assert found.k_gain == 1.0
        return
    assert found.k is not None
    torch.testing.assert_close(found.k[0, [1, 3]], k[:, 0, [1, 3]].mean(0))
    assert int((found.k != 0).sum()) == 2
    assert found.k_gain == pytest.approx(
        (16 + 25 + 100) / (16 + 25), rel=0.03
    )  # 16 channels of variance 1


def biased(tmp_path: Path, bias: float) -> Path:
    """The fixture as a model with a key bias on channel 3 of every head."""
    tensors = {
        name: t.float()
        for name, t in load_file(FIXTURES / "base_bf16" / "model.safetensors").items()
    }
    said = json.loads((FIXTURES / "base_bf16" / "config.json").read_text())
    for index in range(said["num_hidden_layers"]):
        prefix = f"model.layers.{index}.self_attn."
        for part in "qkvo":
            weight = tensors[f"{prefix}{part}_proj.weight"]
            tensors[f"{prefix}{part}_proj.bias"] = torch.zeros(len(weight))
        tensors[f"{prefix}k_proj.bias"].view(said["num_key_value_heads"], -1)[:, 3] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"dtype": "float32", "attention_bias": True})
    )
    return tmp_path


def measure(folder: Path, **options: object) -> Calibration:
    opened = open_unquantized(str(folder))
    decided = plan(QuantizeArgs.from_options(weights="none", kv_cache="fp8", **options))
    return opened.calibrate(decided, IDS, ())


def test_scales_beside_centers_are_for_what_remains(tmp_path: Path):
    folder = biased(tmp_path, BIAS)
    found = measure(folder, kv_granularity="tensor", center=True)
    plain = measure(folder, kv_granularity="tensor")
    assert found.kv == plain.kv  # what other engines read
    assert found.kv_finer is not None
    assert plain.kv is not None
    for whole, rest in zip(plain.kv.layers, found.kv_finer.layers, strict=True):
        assert whole is not None
        assert rest is not None
        assert rest.granularity is Granularity.TENSOR
        assert rest.v == whole.v
        heads = torch.tensor(rest.k_center).view(-1, 64)
        assert (heads[:, 3] - BIAS).abs().max() < 0.1 * BIAS
        assert whole.k[0] * 448 > BIAS > 5 * rest.k[0] * 448


def test_progress_counts_both_turns(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    opened = open_unquantized(str(FIXTURES / "base_bf16"))
    decided = plan(QuantizeArgs(weights="none", kv_cache="fp8", center=True))
    opened.calibrate(decided, IDS, (), lambda what, done, total: seen.append((done, total)))
    total = 2 * opened.model.num_layers * sum(map(len, IDS))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
