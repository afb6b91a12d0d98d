"""`freight evaluate layers`: shares of layers, against a cache in which a single layer is
quantized.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales
from freight.lab.evaluate.documents import Part, cut_documents
from freight.lab.evaluate.layer_kl import first_windows, layer_kl
from freight.lab.evaluate.perplexity import Window
from freight.lab.evaluate.report import cache_run, load_for, plain_config, run_caches
from freight.lab.evaluate.sensitivity import PerLayer, as_table, per_layer
from freight.model.open import open_model
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.resolve import mixed_cache

TEXT = [*range(300, 363), 7]
ARGS = EngineArgs(max_model_len=64)


@pytest.fixture(scope="module")
def found() -> PerLayer:
    return per_layer(ARGS, [TEXT])


def one_layer(index: int) -> KVCacheConfig:
    mixed = tuple(Granularity.TOKEN if layer == index else None for layer in range(6))
    return mixed_cache(
        KVScales((None,) * 6, mixed=mixed), Format.BFLOAT16, Format.E4M3FN, ScaleSource.DYNAMIC
    )


def test_a_layer_costs_what_the_engine_measures_with_it_alone(found):
    runs = run_caches(ARGS, [one_layer(0), one_layer(4)], TEXT, window=64)
    assert len(runs[0].token_kl) == len(TEXT)
    assert [float(run.token_kl.double().mean()) for run in runs[1:]] == pytest.approx(
        [found.layers[0].kl, found.layers[4].kl],
        abs=2e-7,  # float32 log-probabilities on one side, sums of logits on the other
    )


def test_shares_add_up_and_the_whole_is_measured(found):
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)
    assert sum(layer.kl for layer in found.layers) == pytest.approx(found.kl_sum)
    assert min(layer.kl for layer in found.layers) > 0
    assert found.kl_whole > max(layer.kl for layer in found.layers) / 2
    assert found.num_tokens == len(TEXT)
    assert [(layer.dtype, layer.granularity) for layer in found.layers] == [
        ("fp8_e4m3fn", "token")
    ] * 6


def test_it_is_said_as_a_table_and_as_json(found):
    lines = as_table(found).splitlines()
    assert len(lines) == 2 + 6 + 2
    assert len({len(line) for line in lines}) == 1
    said = json.loads(json.dumps(asdict(found)))
    assert said["kl_whole"] == found.kl_whole
    assert said["layers"][2] == {
        "layer": 2,
        "read_by": [],
        "dtype": "fp8_e4m3fn",
        "granularity": "token",
    } | {
        "kl": found.layers[2].kl,
        "share": found.layers[2].share,
    }


def test_layers_that_share_a_cache_are_one_row(tmp_path: Path):
    """The last three of six layers read layers 1, 2 and 1. With one cache quantized, every reader
    reads that cache.
    """
    save_random(VARIANTS["gemma4-shared"], tmp_path / "model", torch.float32)
    args = EngineArgs(str(tmp_path / "model"), max_model_len=64)
    text = [*range(100, 140), 7]
    found = per_layer(args, [text])
    assert [(cost.layer, cost.read_by) for cost in found.layers] == [
        (0, ()),
        (1, (3, 5)),
        (2, (4,)),
    ]
    assert [row.split("|")[1].strip() for row in as_table(found).splitlines()[2:5]] == [
        "0",
        "1, read by 3, 5",
        "2, read by 4",
    ]
    assert sum(cost.share for cost in found.layers) == pytest.approx(1)

    opened = open_model(args)
    eight = opened.resolve(replace(args, kv_cache_dtype="fp8"))
    assert eight.kv.format.is_quantized
    config = plain_config(opened)
    decoder = load_for(opened, [config, eight])
    runs = [cache_run(opened, decoder, each, 64) for each in (config, eight)]
    nothing, by_layer = layer_kl(runs, cut_documents(opened, [text], 64))
    assert nothing is None
    assert by_layer == pytest.approx([*(cost.kl for cost in found.layers), 0, 0, 0], rel=1e-2)


def test_a_cache_that_quantizes_nothing_is_refused():
    with refuses(ConfigError, "no layer", "quantized"):
        per_layer(replace(ARGS, kv_cache_dtype="bfloat16"), [TEXT])


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([1023] * 4, [1023]),  # without BOS: a second window would have a single token
        ([1024] * 4, [1024]),
        ([600] * 4, [600, 424]),
        ([4096], [1024]),
        ([128] * 20, [128] * 8),
        ([700, 20, 15], [700, 20, 15]),
        ([20], [20]),
    ],
)
def test_layers_are_measured_over_1024_tokens_at_most(sizes: list[int], taken: list[int]):
    parts = [Part(Window([0] * size, [0] * size), 0) for size in sizes]
    assert [len(window.token_ids) for window in first_windows(parts)] == taken
    assert [len(window.targets) for window in first_windows(parts)] == taken
