"""Folded scales change no result, and follow the rules of SmoothQuant and AWQ.

The models are computed by transformers (`rewritten.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.covering import in_rotation
from tests.parity.variants import VARIANTS
from tests.unit.calibrate.rewritten import Original
from torch import Tensor

from freight.quantizer.folding import (
    DuoScaling,
    Folding,
    Rows,
    Sharing,
    awq_candidates,
    awq_scale,
    fold,
    foldings,
    smoothquant_scale,
    unfoldable,
    weight_means,
)
from freight.quantizer.modules import layer_modules
from freight.quantizer.normed import Norm

BOUND = 3e-5  # float32 rounds differently; the largest of all variants is 1.1e-5
ALWAYS = (
    *("llama", "llama-biases", "llama-1-head-each", "qwen2", "qwen3", "gemma3", "phi3", "opt"),
    *("qwen2-moe", "gpt-oss", "gemma4-moe", "deepseek-v3", "nemotron-h-latent", "laguna"),
    *("ernie4-5-vl-moe", "qwen3-5-text", "mimo-v2-flash"),
)
EVERY = [
    pytest.param(name, marks=[] if name in ALWAYS or in_rotation(name) else [pytest.mark.slow])
    for name in VARIANTS
]


def random_scale(
    folding: Folding, tensors: dict[str, Tensor], generator: torch.Generator
) -> Tensor:
    """Scales from about 1/8 to 8, equal where they have to be."""
    consumer = folding.consumers[0]
    size = tensors[consumer.tensor].shape[consumer.dim]
    scale = torch.exp(0.7 * torch.randn(size, generator=generator))
    return scale if folding.sharing is None else folding.sharing.largest(scale)


@pytest.mark.parametrize("variant", EVERY)
def test_a_scale_in_every_place_leaves_the_logits(variant: str, tmp_path: Path):
    original = Original(variant, tmp_path)
    generator = torch.Generator().manual_seed(3)
    tensors = dict(original.tensors)
    changed: dict[str, Tensor] = {}
    for index in range(original.config.num_layers):
        for folding in foldings(original.config, index):
            folded = fold(folding, random_scale(folding, tensors, generator), tensors)
            assert set(folded) == set(folding.tensors)
            for name, tensor in folded.items():
                assert tensor.dtype is torch.float32
                assert not torch.equal(tensor, tensors[name])
            tensors |= folded
            changed |= folded
    assert changed
    assert original.error_with(changed) <= BOUND


@pytest.mark.parametrize("variant", ["qwen2-moe", "llama-biases"])
def test_every_tensor_of_a_folding_is_needed(variant: str, tmp_path: Path):
    original = Original(variant, tmp_path)
    generator = torch.Generator().manual_seed(3)
    for folding in foldings(original.config, 1):
        scale = random_scale(folding, original.tensors, generator)
        folded = fold(folding, scale, original.tensors)
        for name in folding.tensors[:3] + folding.tensors[-3:]:
            if name.endswith("v_proj.bias") or ".experts." in name:
                continue  # a bias of all keys' values is small; few tokens choose an expert
            partly = {other: tensor for other, tensor in folded.items() if other != name}
            assert original.error_with(partly) > 10 * BOUND, name


@pytest.mark.parametrize("variant", EVERY)
def test_every_group_has_a_folding_or_a_reason(variant: str, tmp_path: Path):
    config = Original(variant, tmp_path).config
    for index, layer in enumerate(layer_modules(config)):
        folded = {module for folding in foldings(config, index) for module in folding.modules}
        reasons = {module for place in unfoldable(config, index) for module in place.group}
        assert not folded & reasons
        assert folded | reasons == {module for group in layer.groups for module in group}


def test_the_places_of_a_llama(tmp_path: Path):
    config = Original("llama", tmp_path).config
    layer = "model.layers.1."
    attention = layer + "self_attn."
    qkv, o, gate_up, down = foldings(config, 1)
    assert qkv.source == Norm(f"{layer}input_layernorm.weight", None, 0.0)
    assert qkv.modules == tuple(f"{attention}{part}_proj" for part in "qkv")
    assert o.source == Rows(f"{attention}v_proj.weight", None, 0, 32)
    assert o.sharing == Sharing(heads=2, repeats=2, size=16)
    assert o.modules == (f"{attention}o_proj",)
    assert gate_up.source == Norm(f"{layer}post_attention_layernorm.weight", None, 0.0)
    assert down.source == Rows(f"{layer}mlp.up_proj.weight", None, 0, 96)
    assert down.modules == (f"{layer}mlp.down_proj",)


def test_the_router_and_the_gate_of_shared_experts_take_part(tmp_path: Path):
    config = Original("qwen2-moe", tmp_path).config
    mlp = "model.layers.0.mlp."
    (folding,) = [
        place
        for place in foldings(config, 0)
        if place.source.weight == "model.layers.0.post_attention_layernorm.weight"
    ]
    assert {f"{mlp}gate.weight", f"{mlp}shared_expert_gate.weight"} < set(folding.tensors)
    assert f"{mlp}gate" not in folding.modules


@pytest.mark.parametrize(
    ("variant", "module", "word"),
    [
        ("olmo2", "self_attn.q_proj", "outputs"),
        ("opt-350m", "fc1", "residual"),
        ("arcee", "mlp.down_proj", "relu_squared"),
        ("gpt-oss", "mlp.experts.down_proj", "tensor"),
        ("gemma4", "self_attn.o_proj", "keys"),
        ("gemma4-plain", "self_attn.o_proj", "norm"),
        ("gemma4-shared", "self_attn.o_proj", "layer"),
    ],
)
def test_what_is_not_exact_is_absent_with_a_reason(
    variant: str, module: str, word: str, tmp_path: Path
):
    config = Original(variant, tmp_path).config
    last = config.num_layers - 1
    reasons = {place.group[0]: place.reason for place in unfoldable(config, last)}
    (reason,) = [reasons[name] for name in reasons if name.endswith(module)]
    assert word in reason


def test_a_scale_has_to_be_positive_and_shared(tmp_path: Path):
    original = Original("llama", tmp_path)
    _, o, *_ = foldings(original.config, 0)
    for scale in (torch.zeros(64), torch.full((64,), torch.inf), torch.arange(1.0, 65.0)):
        with pytest.raises(AssertionError):
            fold(o, scale, original.tensors)


# ---- scales


def inputs_and_weights() -> tuple[Tensor, list[Tensor]]:
    """300 tokens of 64 channels, some of them large, and two matrices."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(300, 64, generator=generator)
    x[:, ::9] *= 20
    return x, [torch.randn(rows, 64, generator=generator) for rows in (48, 24)]


def round_int4(weight: Tensor) -> Tensor:
    """INT4 in groups of 16."""
    groups = weight.unflatten(1, (-1, 16))
    scale = groups.abs().amax(2, keepdim=True) / 7.5
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


def test_smoothquant_evens_inputs_and_weights_out():
    """Equation 4 of the paper: with symmetric inputs and a strength of 0.5 both get one range."""
    x, weights = inputs_and_weights()
    x = torch.cat((x, -x))
    scale = smoothquant_scale(x.amax(0) - x.amin(0), weights)
    largest = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(scale, (x.abs().amax(0) / largest).sqrt())
    torch.testing.assert_close((x / scale).abs().amax(0), largest * scale)


def test_smoothquant_of_a_column_of_zeros_takes_the_range_and_of_silent_inputs_the_least():
    _, weights = inputs_and_weights()
    ranges = torch.full((64,), 3.0)
    ranges[1] = 0
    for weight in weights:
        weight[:, 2] = 0
    scale = smoothquant_scale(ranges, weights)
    assert scale[1] == pytest.approx(1e-5)
    assert scale[2] == 3


@pytest.mark.parametrize("unit", [(1, 16), (1, None), (None, None), (32, 16), (1, 24)])
def test_weight_means_are_those_of_weights_over_their_units_largest(
    unit: tuple[int | None, int | None],
):
    _, weights = inputs_and_weights()
    shares = []
    for weight in weights:
        height = unit[0] or len(weight)
        width = unit[1] or 64
        for row in range(len(weight)):
            first = row // height * height
            share = torch.empty(64)
            for column in range(64):
                left = column // width * width
                block = weight[first : first + height, left : left + width].abs()
                share[column] = weight[row, column].abs() / block.max()
            shares.append(share)
    expected = torch.stack(shares).mean(0)
    torch.testing.assert_close(weight_means(weights, unit).float(), expected, rtol=1e-4, atol=0)


def test_the_loss_from_the_hessian_is_the_squared_error_of_the_outputs():
    x, weights = inputs_and_weights()
    candidates = awq_candidates(weights, x.abs().mean(0), (1, 16))
    choice = awq_scale(weights, x.T @ x, candidates, round_int4)
    for candidate, loss in choice.losses:
        exact = 0.0
        for weight in weights:
            rounded = round_int4(weight * candidate.scale)
            outputs = (x / candidate.scale) @ rounded.T
            exact += float((outputs - x @ weight.T).double().square().sum())
        assert loss == pytest.approx(exact, rel=1e-3)
    least = min(loss for _, loss in choice.losses)
    assert (choice.chosen, least) in choice.losses
    assert least < 0.7 * choice.losses[0][1]  # the first is rounding without a scale
    assert torch.equal(choice.losses[0][0].scale, torch.ones(64))


@pytest.mark.parametrize(
    ("duo", "grid"),
    [
        (DuoScaling.ON, [(0, False)] + [(i / 18, True) for i in range(19)]),
        (DuoScaling.OFF, [(i / 19, False) for i in range(20)]),
        (DuoScaling.BOTH, [(i / 9, duo) for i in range(10) for duo in (False, True)]),
    ],
)
def test_the_candidates_are_those_of_llm_compressor(
    duo: DuoScaling, grid: list[tuple[float, bool]]
):
    x, weights = inputs_and_weights()
    magnitude = x.abs().mean(0)
    means = weight_means(weights, (1, 16)).float()
    candidates = awq_candidates(weights, magnitude, (1, 16), duo)
    assert [(candidate.ratio, candidate.duo) for candidate in candidates] == grid
    for candidate in candidates:
        scale = magnitude**candidate.ratio
        if candidate.duo:
            scale = scale / (means ** (1 - candidate.ratio) + 1e-4)
        expected = scale / (scale.max() * scale.min()).sqrt()
        torch.testing.assert_close(candidate.scale, expected)


def test_heads_that_share_values_get_one_scale():
    x, weights = inputs_and_weights()
    sharing = Sharing(heads=2, repeats=4, size=8)
    for candidate in awq_candidates(weights, x.abs().mean(0), (1, 16), sharing=sharing):
        by_head = candidate.scale.view(2, 4, 8)
        assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
        assert torch.equal(sharing.by_source(candidate.scale), by_head[:, 0].flatten())
