"""KV scales: every name they are stored under, every shape, and every value that is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.refusals import refuses

from freight.checkpoint.kv_scales import parse_scale_name, read_kv_scales, read_scale_json
from freight.checkpoint.layouts import read_scheme
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import Scheme

FIXTURES = Path(__file__).parents[2] / "fixtures"
PREFIX = "model.layers.0.self_attn."
PAIRS = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.qkv_proj.k_proj.output_scale", "self_attn.qkv_proj.v_proj.output_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    ("self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale"),
    ("self_attn.k_cache.scale", "self_attn.v_cache.scale"),
    ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"),
    ("mixer.k_scale", "mixer.v_scale"),
    ("mixer.attn.k_scale", "mixer.attn.v_scale"),
    ("attention.k_scale", "attention.v_scale"),
    ("attention.k_fake_quantizer.qscale_act", "attention.v_fake_quantizer.qscale_act"),
]
SHARED = [
    "self_attn.kv_scale",
    "attention.kv_fake_quantizer.qscale_act",
    "attention.kv_cache_scaling_factor",
]


@pytest.fixture
def read(open_tensors, shape):
    def reader(tensors, config=None):
        checkpoint = open_tensors(tensors, config)
        scheme = read_scheme(checkpoint.config, checkpoint.hf_quant_config)
        scales = read_kv_scales(checkpoint, shape, scheme)
        scales.require_valid("make others")
        return scales, checkpoint

    return reader


@pytest.mark.parametrize("pair", PAIRS, ids=[k for k, _ in PAIRS])
def test_every_pair_of_names(read, pair):
    names = [f"model.layers.1.{name}" for name in pair]
    scales, checkpoint = read({names[0]: torch.tensor(0.25), names[1]: torch.tensor(0.5)})
    assert scales.layers[0] is None
    assert scales.missing == (0,)
    layer = scales.layers[1]
    assert (layer.k, layer.v, layer.granularity) == ((0.25,), (0.5,), Granularity.TENSOR)
    assert layer.names == tuple(names)
    checkpoint.finish()  # the tensors count as taken


def test_layers_that_predict_further_tokens_may_have_scales_which_are_not_read(open_tensors, shape):
    model = replace(shape, prediction_layers=1)
    names = [f"model.layers.{layer}.self_attn.kv_scale" for layer in range(4)]
    scales = read_kv_scales(
        open_tensors({name: torch.tensor(0.5) for name in names[:3]}), model, Scheme()
    )
    assert len(scales.layers) == 2
    with refuses(CheckpointError, "layer 3", "2 layers"):
        read_kv_scales(open_tensors({name: torch.tensor(0.5) for name in names}), model, Scheme())


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("prefix", ["model.layers.0.", "layers.0.", "transformer.layers.0."])
def test_one_scale_for_both(read, name, prefix):
    layer = read({prefix + name: torch.tensor([0.25])})[0].layers[0]
    assert (layer.k, layer.v, layer.names, layer.alone) == ((0.25,), (0.25,), (prefix + name,), "")


@pytest.mark.parametrize("side", "kv")
def test_a_scale_of_one_side_stands_for_both(read, side):
    layer = read({f"{PREFIX}{side}_scale": torch.tensor(0.25)})[0].layers[0]
    assert (layer.k, layer.v, layer.names) == ((0.25,), (0.25,), (f"{PREFIX}{side}_scale",))
    assert layer.alone == side


@pytest.mark.parametrize(
    "name", ["weight", "k_proj.weight_scale", "k_proj.input_scale", "q_scale", "k_proj.v_scale"]
)
def test_other_tensors_are_no_kv_scales(name):
    assert parse_scale_name(PREFIX + name) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [(), (1,), (1, 1)])
def test_tensor_scales(read, dtype, stored):
    scales = {f"{PREFIX}{side}_scale": torch.full(stored, 0.1, dtype=dtype) for side in "kv"}
    layer = read(scales)[0].layers[0]
    assert layer.k == layer.v == (float(torch.tensor(0.1, dtype=dtype)),)
    assert layer.granularity is Granularity.TENSOR


@pytest.mark.parametrize("stored", [(3,), (3, 1, 1), (1, 3, 1, 1)])
def test_head_scales(read, stored):
    values = torch.tensor([1.0, 2.0, 3.0]).view(stored)
    layer = read({f"{PREFIX}k_scale": values, f"{PREFIX}v_scale": values * 2})[0].layers[0]
    assert (layer.k, layer.v) == ((1.0, 2.0, 3.0), (2.0, 4.0, 6.0))
    assert layer.granularity == Granularity.HEAD


def test_channel_scales(read):
    values = torch.arange(1.0, 13.0).view(3, 4)
    layer = read({f"{PREFIX}k_scale": values, f"{PREFIX}v_scale": torch.tensor([1.0, 2.0, 3.0])})[
        0
    ].layers[0]
    assert layer.granularity is Granularity.CHANNEL
    assert layer.k == tuple(range(1, 13))
    assert layer.v == (1.0,) * 4 + (2.0,) * 4 + (3.0,) * 4


@pytest.mark.parametrize("stored", [(2,), (4,), (3, 1), (1, 3), (4, 3), (1, 3, 4, 1), (0,)])
def test_other_shapes_are_named(read, stored):
    with pytest.raises(CheckpointError, match="k_scale has shape") as error:
        read({f"{PREFIX}k_scale": torch.ones(stored)})
    assert str(list(stored)) in str(error.value)


@pytest.mark.parametrize(
    ("value", "named"), [(0.0, "0.0"), (-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")]
)
def test_values_that_are_no_scales_are_named(read, value, named):
    for tensor in (torch.tensor(value), torch.tensor([1.0, value, 1.0])):
        with refuses(CheckpointError, "layers.0.self_attn.v_scale", named):
            read({f"{PREFIX}v_scale": tensor})


def test_two_names_for_one_scale(read):
    same = {f"{PREFIX}k_scale": torch.tensor(0.25), f"{PREFIX}k_proj.k_scale": torch.tensor(0.25)}
    assert read(same)[0].layers[0].k == (0.25,)
    with refuses(CheckpointError, "k_proj.k_scale = 0.25", "self_attn.k_scale = 0.5"):
        read({**same, f"{PREFIX}k_scale": torch.tensor(0.5)})


def test_a_layer_that_the_model_lacks(read):
    with refuses(CheckpointError, "layers.2.self_attn.k_scale", "layer 2", "2 layers"):
        read({"model.layers.2.self_attn.k_scale": torch.ones(1)})


def test_integer_scales_are_refused(read):
    with pytest.raises(CheckpointError, match="k_scale is stored as I32"):
        read({f"{PREFIX}k_scale": torch.ones(1, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({}, Format.E4M3FN),
        ({"kv_cache_torch_dtype": "float8_e4m3fnuz"}, Format.E4M3FNUZ),
        ({"kv_cache_dtype": "float8_e4m3fn"}, Format.E4M3FN),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_format": "fp8_e4m3fnuz",
                }
            },
            Format.E4M3FNUZ,
        ),
    ],
)
def test_the_format_that_scales_were_made_for(read, config, format):
    assert read({f"{PREFIX}kv_scale": torch.ones(1)}, config)[0].format is format


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        (
            "autofp8_static_kv",
            (0.022346368059515953, 0.021052632480859756),
            (0.01092896144837141, 0.010869565419852734),
        ),
        ("ct_docs", (0.0174560546875, 0.0169677734375), (0.007659912109375, 0.0091552734375)),
    ],
)
def test_files_of_real_tools(shape, name, k, v):
    scales = read_kv_scales(Checkpoint(FIXTURES / name), shape, Scheme())
    assert tuple(layer.k[0] for layer in scales.layers) == k
    assert tuple(layer.v[0] for layer in scales.layers) == v
    assert scales.missing == ()


def test_a_format_that_nothing_declares_is_assumed_to_be_e4m3fn(read):
    tensors = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(2)}
    undeclared, _ = read(tensors)
    assert (undeclared.format, undeclared.format_assumed) == (Format.E4M3FN, True)
    for name, format in (("float8_e4m3fn", Format.E4M3FN), ("float8_e4m3fnuz", Format.E4M3FNUZ)):
        declared, _ = read(tensors, {"kv_cache_torch_dtype": name})
        assert (declared.format, declared.format_assumed) == (format, False)
    assert not read({"model.norm.weight": torch.ones(12)})[0].format_assumed


def test_a_checkpoint_without_scales(shape):
    assert read_kv_scales(Checkpoint(FIXTURES / "base_bf16"), shape, Scheme()).empty


FACTORS = {"0": 0.0152239128947258, "1": 0.0188860222697258}


@pytest.fixture
def read_json(tmp_path, shape):
    def reader(factors=FACTORS, dtype="float8_e4m3fn", ranks=None, **top):
        cache = {"dtype": dtype, "scaling_factor": {"0": factors} if ranks is None else ranks}
        path = tmp_path / "kv_cache_scales.json"
        path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache} | top))
        return read_scale_json(path, shape)

    return reader


def test_json(read_json):
    scales = read_json()
    assert scales.format is Format.E4M3FN
    for layer, factor in zip(scales.layers, FACTORS.values(), strict=True):
        stored = float(torch.tensor(factor, dtype=torch.float32))
        assert (layer.k, layer.v, layer.granularity) == ((stored,), (stored,), Granularity.TENSOR)
    assert "scaling_factor[0][1]" in scales.layers[1].names[0]
    assert read_json(model_type=None) == scales
    assert not scales.format_assumed
    assert read_json({"1": 2, "0": 1}).layers[1].k == (2.0,)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"ranks": {"rank0": FACTORS}}, "'rank0'"),
        ({"ranks": {"0": FACTORS, "2": FACTORS}}, "2 ranks, '0', '2'"),
        ({"ranks": {"0": FACTORS, "01": FACTORS}}, "without a gap"),
        (
            {"ranks": {"0": FACTORS, "1": {"0": 0.1}, "2": FACTORS}},
            "for 1 layers in rank 1, but the model has 2: lacking '1'",
        ),
        (
            {"ranks": {"0": FACTORS, "1": FACTORS | {"1": 0}, "2": FACTORS}},
            "scaling_factor[1][1] is 0",
        ),
        (
            {"ranks": {str(rank): FACTORS | {"1": 1 + (rank == 3)} for rank in range(6)}},
            "different factors in layer 1 (rank 0: 1, rank 1: 1, rank 2: 1, rank 3: 2, rank 4: 1, rank 5: 1)",
        ),
        (
            {"ranks": {"0": FACTORS, "1": FACTORS}},
            "2 ranks, which cannot share the 3 KV heads of layer 0",
        ),
        ({"ranks": {"1": FACTORS}}, "'1'"),
        ({"ranks": {}}, "0 ranks"),
        ({"ranks": [FACTORS]}, "'scaling_factor'"),
        ({"ranks": {"0": [0.1, 0.1]}}, "'0'"),
        ({"factors": {"0": 0.1}}, "factors for 1 layers, but the model has 2: lacking '1'"),
        ({"factors": {"0": 0.1, "1": 0.1, "2": 0.1}}, "unknown '2'"),
        ({"factors": {"0": 0.1, "layer1": 0.1}}, "'layer1'"),
        ({"dtype": "float8_e4m3fnuz"}, "'float8_e4m3fnuz'"),
        ({"dtype": "float8_e5m2"}, "'float8_e5m2'"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"kv_cache": 3}, "'kv_cache'"),
        ({"factors": {"0": 0.1, "1": 0}}, "scaling_factor[0][1] is 0"),
        ({"factors": {"0": 0.1, "1": -0.5}}, "scaling_factor[0][1] is -0.5"),
        ({"factors": {"0": float("nan"), "1": 0.1}}, "scaling_factor[0][0] is nan"),
        ({"factors": {"0": float("inf"), "1": 0.1}}, "scaling_factor[0][0] is inf"),
        ({"factors": {"0": 1e39, "1": 0.1}}, "scaling_factor[0][0] is 1e+39"),
        ({"factors": {"0": 1e-60, "1": 0.1}}, "scaling_factor[0][0] is 1e-60"),
        ({"factors": {"0": "0.1", "1": 0.1}}, "scaling_factor[0][0] is '0.1'"),
        ({"factors": {"0": True, "1": 0.1}}, "scaling_factor[0][0] is True"),
    ],
)
def test_bad_json_is_named(read_json, said, named):
    with pytest.raises(CheckpointError) as error:
        read_json(**said)
    assert named in str(error.value), error.value
    assert "kv_cache_scales.json" in str(error.value)


def test_json_without_a_model_type(read_json, tmp_path, shape):
    scales = read_json()
    path = tmp_path / "kv_cache_scales.json"
    content = json.loads(path.read_text())
    del content["model_type"]
    path.write_text(json.dumps(content))
    assert read_scale_json(path, shape) == scales


@pytest.mark.parametrize("count", [1, 3, 6])
def test_json_of_several_ranks_with_equal_factors(read_json, count):
    assert read_json(ranks={str(rank): FACTORS for rank in range(count)}) == read_json()


def test_each_rank_has_the_scale_of_its_heads(read_json):
    """Three KV heads: of 3 ranks each has one, of 6 each has one together with its neighbour."""
    for count in (3, 6):
        ranks = {
            str(rank): {"0": 0.5, "1": 0.25 * (1 + rank * 3 // count)} for rank in range(count)
        }
        first, second = read_json(ranks=ranks).layers
        assert (first.k, first.v, first.granularity) == ((0.5,) * 3, (0.5,) * 3, Granularity.HEAD)
        assert second.k == second.v == (0.25, 0.5, 0.75)
        assert second.granularity is Granularity.HEAD
        assert len(second.names) == count


def test_a_rank_has_several_heads(tmp_path, shape):
    """vLLM gives rank r of n the KV heads from r * heads / n on."""
    wide = replace(
        shape,
        layers=tuple(
            replace(layer, mixer=replace(layer.mixer, num_heads=8, num_kv_heads=4))
            for layer in shape.layers
        ),
    )
    path = tmp_path / "kv_cache_scales.json"
    factors = {"0": {"0": 0.5, "1": 1.0}, "1": {"0": 2.0, "1": 1.0}}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"kv_cache": cache}))
    expected = [(0.5, 0.5, 2.0, 2.0), (1.0, 1.0, 1.0, 1.0)]
    assert [layer.k for layer in read_scale_json(path, wide).layers] == expected


def test_layers_whose_ranks_share_a_head_and_differ_are_counted(tmp_path, shape):
    many = replace(shape, layers=shape.layers * 3)
    factors = {str(layer): 0.1 for layer in range(len(many.layers))}
    ranks = {str(rank): dict.fromkeys(factors, 0.1 + rank) for rank in range(6)}
    path = tmp_path / "kv_cache_scales.json"
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks}
    path.write_text(json.dumps({"kv_cache": cache}))
    with refuses(CheckpointError, "layer 0", "layer 1", "layer 2", "3 more layers", "largest"):
        read_scale_json(path, many)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "\x00", '{"kv_cache": {}}', '{"model_type": "llama", "model_type": "llama"}'),
        pytest.param("[" * 200_000, id="nested"),
    ],
)
def test_files_that_are_no_scale_json(tmp_path, shape, text):
    path = tmp_path / "kv_cache_scales.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"kv_cache_scales\.json"):
        read_scale_json(path, shape)


def test_a_missing_scale_json(tmp_path, shape):
    with pytest.raises(CheckpointError, match=r"nowhere\.json"):
        read_scale_json(tmp_path / "nowhere.json", shape)


def test_a_layer_that_reads_the_keys_of_another_has_its_scales(open_tensors, shape):
    layers = list(shape.layers)
    layers[1] = replace(layers[1], mixer=replace(layers[1].mixer, kv_from=0))
    model = replace(shape, layers=tuple(layers))
    tensors = {f"{PREFIX}k_scale": torch.tensor(0.25), f"{PREFIX}v_scale": torch.tensor(0.5)}
    scales = read_kv_scales(open_tensors(tensors), model, Scheme())
    assert [(layer.k, layer.v) for layer in scales.layers] == [((0.25,), (0.5,))] * 2
