"""How large keys and values are: against transformers' own cache, and what scales clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.evaluate.figures import _clipping
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.magnitudes import Magnitudes, sentences
from freight.settings.engine import EngineArgs, KVCacheConfig

DEMO = Path(__file__).parents[3] / "src" / "freight" / "demo"
TOKENS = [(17 * index * index + 5) % 4096 for index in range(96)]


def test_the_magnitudes_of_the_demo_are_those_that_transformers_stores() -> None:
    args = EngineArgs(model="demo", dtype="float32", kernels="reference")
    grid = GridArgs(caches=("unit",), window=48, speed=False)
    evaluation = evaluate_grid(args, [TOKENS], grid)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    begin = model.config.bos_token_id
    sides: dict[tuple[int, str], list[torch.Tensor]] = {}
    with torch.inference_mode():
        for start in range(0, len(TOKENS), 48):
            cache = DynamicCache()
            window = [begin, *TOKENS[start : start + 47]]
            model(torch.tensor([window]), past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                sides.setdefault((index, "k"), []).append(layer.keys[0])
                sides.setdefault((index, "v"), []).append(layer.values[0])
    assert len(evaluation.magnitudes) == model.config.num_hidden_layers
    edges = evaluation.magnitude_edges
    assert edges == (0, 1, 16, 32, 48)
    for entry in evaluation.magnitudes:
        for name in ("k", "v"):
            values = torch.cat(sides[entry["layer"], name], 1).abs()  # [heads, tokens, head_dim]
            channels = values.amax(1)
            figures = entry[name]
            assert figures["max"] == pytest.approx(float(channels.max()), rel=1e-4)
            assert figures["channel"] == pytest.approx(float(channels.median()), rel=1e-4)
            smallest = pytest.approx(float(channels.min()), rel=1e-4)
            assert figures["smallest_channel"] == smallest
            assert figures["heads"] == pytest.approx(channels.amax(1).tolist(), rel=1e-4)
            by_position = values.view(values.shape[0], 2, 48, -1)
            for bucket, largest in enumerate(figures["positions"]):
                part = by_position[:, :, edges[bucket] : edges[bucket + 1]]
                assert largest == pytest.approx(float(part.max()), rel=1e-4)
            share = float(((values < 2.0**-6) & (values > 0)).double().mean())
            assert figures["below_normal"] == pytest.approx(share, abs=2e-4)
    assert evaluation.runs[0].clipping is None  # not quantized
    assert evaluation.runs[1].clipping == []  # nothing of the demo exceeds 448


def _seen() -> Magnitudes:
    """Layer 3 of one head and two channels, whose largest keys are 500 and 1."""
    magnitudes = Magnitudes(4)
    keys = torch.tensor([[[2.0, 1.0]], [[-500.0, 0.5]], [[0.001, 0.0]]])
    magnitudes.see(3, [keys, keys / 100], torch.tensor([0, 1, 2]))
    return magnitudes


def test_what_a_scale_does_not_cover_is_named() -> None:
    magnitudes = _seen()
    of_unit = {3: LayerScales((1.0,), (1.0,), Granularity.TENSOR)}
    clipping = magnitudes.clipping(of_unit, Format.E4M3FN)
    assert clipping == [{"layer": 3, "side": "k", "channels": 1, "times": pytest.approx(500 / 448)}]
    assert magnitudes.clipping(of_unit, Format.E5M2) == []
    covers = {3: LayerScales((500 / 448, 0.5 / 448), (1.0, 1.0), Granularity.CHANNEL)}
    (entry,) = magnitudes.clipping(covers, Format.E4M3FN)
    assert (entry["side"], entry["channels"], entry["times"]) == ("k", 1, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("granularity", "scales", "clips"),
    [
        (Granularity.TENSOR, (1.0,), 4),
        (Granularity.HEAD, (2.0, 4.0), 0),
        (Granularity.HEAD, (4.0, 2.0), 2),
        (Granularity.CHANNEL, (2.0, 2.0, 4.0, 4.0), 0),
        (Granularity.CHANNEL, (2.0, 4.0, 2.0, 4.0), 1),
    ],
)
def test_scales_belong_to_their_heads_and_channels(
    granularity: Granularity, scales: tuple[float, ...], clips: int
) -> None:
    magnitudes = Magnitudes(2)
    keys = torch.tensor([[[896.0, 896.0], [1792.0, 1792.0]]])  # 448 times 2 and 4
    magnitudes.see(0, [keys, torch.ones(1, 2, 2)], torch.tensor([0]))
    layers = {0: LayerScales(scales, (1.0,) * len(scales), granularity)}
    clipping = magnitudes.clipping(layers, Format.E4M3FN)
    assert sum(entry["channels"] for entry in clipping) == clips


def test_caches_clip_in_the_layers_whose_scales_are_static() -> None:
    magnitudes = Magnitudes(2)
    keys = torch.tensor([[[896.0, 1.0]]])
    for layer in (0, 1):
        magnitudes.see(layer, [keys, keys], torch.tensor([0]))

    def clipped(kv: KVCacheConfig) -> list[tuple[int, str, float]] | None:
        clipping = _clipping(kv, magnitudes)
        if clipping is None:
            return None
        return [(entry["layer"], entry["side"], entry["times"]) for entry in clipping]

    unit = KVCacheConfig(Format.E4M3FN, Granularity.TENSOR, ScaleSource.UNIT, None)
    assert clipped(unit) == [(0, "k", 2.0), (0, "v", 2.0), (1, "k", 2.0), (1, "v", 2.0)]
    assert clipped(unit.skipping({0}, 2, Format.BFLOAT16)) == [(1, "k", 2.0), (1, "v", 2.0)]
    scales = (LayerScales((2.0,), (1.0,), Granularity.TENSOR), None)
    measured = replace(unit, scale_source=ScaleSource.CALIBRATED, scales=KVScales(scales))
    assert clipped(measured) == [(0, "v", 2.0)]
    centered = replace(scales[0], k_center=(0.0, 0.0))
    assert clipped(replace(measured, scales=KVScales((centered, None)))) is None
    assert clipped(replace(unit, scale_source=ScaleSource.DYNAMIC)) is None
    without_bias = _clipping(unit, magnitudes, [1])
    assert without_bias is not None
    sides = [(entry["layer"], entry["side"]) for entry in without_bias]
    assert sides == [(0, "k"), (0, "v"), (1, "v")]


def test_the_largest_value_of_the_format_is_not_beyond_it() -> None:
    magnitudes = Magnitudes(2)
    magnitudes.see(0, [torch.tensor([[[448.0, 2.0**-6]]])], torch.tensor([0]))
    figures = magnitudes.as_list()[0]["k"]
    assert (figures["beyond_448"], figures["below_normal"]) == (0.0, 0.0)


def test_what_stands_out_is_said() -> None:
    magnitudes = _seen()
    (entry,) = magnitudes.as_list()
    assert entry["k"]["positions"] == [2.0, 500.0]
    assert entry["k"]["beyond_448"] == pytest.approx(1 / 6)
    assert entry["k"]["below_normal"] == pytest.approx(1 / 6)
    says = " ".join(sentences(magnitudes.as_list()))
    assert "The largest key is 500, in layer 3" in says
    assert "A scale of 1.0 clips such keys in layers 3." in says
    assert "clips such values" not in says


def test_latents_have_keys_alone() -> None:
    magnitudes = Magnitudes(2)
    magnitudes.see(0, [torch.ones(2, 1, 4)], torch.tensor([0, 1]))
    assert magnitudes.as_list()[0]["v"] is None
    assert sentences(magnitudes.as_list())[0].startswith("The largest key is 1, in layer 0.")
