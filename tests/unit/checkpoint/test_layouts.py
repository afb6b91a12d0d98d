"""read_scheme: what each producer declares, and what none of them may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError
from freight.fp8.formats import Format

FIXTURES = Path(__file__).parents[2] / "fixtures"
FN, FNUZ = Format.E4M3FN, Format.E4M3FNUZ
FP8_ARGS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
GROUP = {"group_0": {"targets": ["Linear"], "weights": FP8_ARGS, "input_activations": FP8_ARGS}}
CT = {
    "quant_method": "compressed-tensors",
    "config_groups": GROUP,
    "format": "float-quantized",
    "ignore": ["lm_head"],
}
DENSE = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
QUARK_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": QUARK_SPEC},
    "export": {"weight_format": "real"},
}
QUARK_KV = {"*k_proj": {"output_tensors": QUARK_SPEC}, "*v_proj": {"output_tensors": QUARK_SPEC}}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}


def declared(said, hf_quant_config=None):
    scheme = read_scheme({"quantization_config": said} if said else {}, hf_quant_config)
    return scheme.method, scheme.weight_format, scheme.kv_format, scheme.kv_static


def refused(said, *named, hf_quant_config=None):
    with pytest.raises(CheckpointError) as error:
        declared(said, hf_quant_config)
    for word in named:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("fp8", FN, None, False)),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, ("fp8", FN, FN, True)),
        ({"quant_method": "fp8", "kv_cache_scheme": FP8_ARGS}, ("fp8", FN, FN, True)),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            ("fp8", FN, None, False),
        ),
        (CT, ("compressed-tensors", FN, None, False)),
        (CT | {"quant_method": "compressed_tensors"}, ("compressed-tensors", FN, None, False)),
        (CT | {"kv_cache_scheme": FP8_ARGS}, ("compressed-tensors", FN, FN, True)),
        (DENSE | {"kv_cache_scheme": FP8_ARGS}, ("compressed-tensors", None, FN, True)),
        (
            DENSE | {"kv_cache_scheme": FP8_ARGS | {"strategy": "attn_head"}},
            ("compressed-tensors", None, FN, True),
        ),
        (
            DENSE | {"kv_cache_scheme": FP8_ARGS | {"dynamic": True}},
            ("compressed-tensors", None, FN, False),
        ),
        (
            {"config_groups": GROUP, "format": "float-quantized"},
            ("compressed-tensors", FN, None, False),
        ),
        (
            DENSE | {"transform_config": {}, "sparsity_config": {"format": "dense"}},
            ("compressed-tensors", None, None, False),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("modelopt", FN, None, False)),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8_ARGS},
            ("modelopt", FN, FN, False),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
            ("modelopt", None, FN, False),
        ),
        (QUARK, ("quark", FN, None, False)),
        (QUARK | {"layer_quant_config": QUARK_KV}, ("quark", FN, FN, True)),
        (QUARK | {"kv_cache_quant_config": QUARK_KV}, ("quark", FN, FN, True)),
        (QUARK | {"export": {"weight_format": "fake_quantized"}}, ("quark", None, None, False)),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            ("fbgemm_fp8", FN, None, False),
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}},
            },
            ("torchao", FN, None, False),
        ),
        (None, (None, None, None, False)),
    ],
)
def test_declarations(said, expected):
    assert declared(said) == expected


def test_old_name_of_the_key():
    scheme = read_scheme({"compression_config": CT | {"kv_cache_scheme": FP8_ARGS}}, None)
    assert (scheme.method, scheme.weight_format, scheme.kv_format) == ("compressed-tensors", FN, FN)


def test_modelopt_in_its_own_file():
    assert declared(None, MODELOPT) == ("modelopt", FN, FN, False)
    only_kv = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert declared(None, only_kv) == ("modelopt", None, FN, False)
    expected = ("modelopt", FN, FN, False)
    assert declared({"quant_method": "modelopt", "quant_algo": "FP8"}, MODELOPT) == expected
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}
    assert declared(None, {"quantization": mixed}) == ("modelopt", FN, None, False)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "gguf"}, "'gguf'"),
        ({"quant_method": "modelopt_fp8"}, "'modelopt_fp8'"),
        ({"bits": 4}, "None"),
        ({"quant_method": ["fp8"]}, "['fp8']"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "kv_cache_scheme": "int8"}, "'int8'"),
        (DENSE | {"kv_cache_scheme": FP8_ARGS | {"strategy": "group"}}, "'group'"),
        (DENSE | {"kv_cache_scheme": FP8_ARGS | {"symmetric": False}}, "symmetric False"),
        (
            DENSE
            | {"config_groups": {"g": {"weights": FP8_ARGS | {"num_bits": 3, "type": "int"}}}},
            "num_bits 3",
        ),
        (
            DENSE
            | {"transform_config": {"config_groups": {"u": {"apply": [{"location": "output"}]}}}},
            "u at 'output'",
        ),
        (DENSE | {"transform_config": {"config_groups": {"u": {"apply": ["x"]}}}}, "u at 'x'"),
        (DENSE | {"transform_config": {"u": 1}}, "transform_config"),
        (DENSE | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "x"}},
            },
            "'int4'",
        ),
        (
            QUARK
            | {
                "layer_quant_config": {
                    "*k_proj": {"output_tensors": QUARK_SPEC | {"dtype": "int8"}}
                }
            },
            "'int8'",
        ),
        (
            QUARK
            | {
                "layer_quant_config": {
                    "*v_proj": {"output_tensors": QUARK_SPEC | {"qscheme": "per_channel"}}
                }
            },
            "per_channel",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
            },
            "Int4",
        ),
        ("fp8", "'fp8'"),
        (CT | {"config_groups": {"g": {"weights": 3}}}, "config_groups['g'] weights = 3"),
        (
            CT | {"config_groups": {"g": {"weights": FP8_ARGS | {"strategy": ["channel"]}}}},
            "['channel']",
        ),
        (CT | {"sparsity_config": 3}, "sparsity_config = 3"),
        (CT | {"kv_cache_format": ["fp8_e4m3fn"]}, "['fp8_e4m3fn']"),
        ({"quant_method": "fp8", "activation_scheme": ["static"]}, "['static']"),
    ],
)
def test_what_is_not_implemented_is_named(said, named):
    refused(said, named)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (DENSE | {"kv_cache_scheme": FP8_ARGS | {"type": "int"}}, "num_bits 8, type 'int'"),
        (DENSE | {"kv_cache_scheme": FP8_ARGS | {"num_bits": 4}}, "NVFP4: kv_cache_scheme of"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, "kv_cache_scheme 'NVFP4'"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "'INT8'"),
    ],
)
def test_a_cache_that_is_not_implemented_is_remembered(said, named):
    """It matters where the checkpoint is to choose the cache: `kv_scales.read_kv_scales`."""
    scheme = read_scheme({"quantization_config": said}, None)
    assert named in scheme.kv_refused
    assert named in scheme.description
    assert scheme.kv_format is None


def test_a_quantization_of_modelopt_that_is_no_object_is_named():
    refused(None, "hf_quant_config.json: quantization = 3", hf_quant_config={"quantization": 3})


@pytest.mark.parametrize("key", ["kv_cache_torch_dtype", "kv_cache_dtype"])
@pytest.mark.parametrize(("name", "format"), [("float8_e4m3fn", FN), ("float8_e4m3fnuz", FNUZ)])
def test_text_generation_inference(key, name, format):
    scheme = read_scheme({key: name}, None)
    assert (scheme.method, scheme.weight_format, scheme.kv_format) == (None, None, format)
    assert scheme.kv_static is True


def test_named_formats_are_checked():
    for name in ("float8_e5m2", "int8", 8):
        with pytest.raises(CheckpointError, match="kv_cache_torch_dtype"):
            read_scheme({"kv_cache_torch_dtype": name}, None)
    with pytest.raises(CheckpointError, match="contradicts"):
        read_scheme(
            {"kv_cache_torch_dtype": "float8_e4m3fn", "kv_cache_dtype": "float8_e4m3fnuz"}, None
        )


def test_a_named_format_refines_a_declared_cache():
    said = DENSE | {"kv_cache_scheme": FP8_ARGS, "kv_cache_format": "fp8_e4m3fnuz"}
    assert declared(said) == ("compressed-tensors", None, FNUZ, True)


@pytest.mark.parametrize(
    ("name", "method"), [("autofp8_static_kv", "fp8"), ("ct_docs", "compressed-tensors")]
)
def test_files_of_real_tools(name, method):
    scheme = read_scheme(json.loads((FIXTURES / name / "config.json").read_text()), None)
    assert (scheme.method, scheme.weight_format, scheme.kv_format) == (method, FN, FN)
    assert scheme.kv_static is True
    assert scheme.description.startswith(f"{method}: weights fp8_e4m3fn")
    assert "KV cache fp8_e4m3fn, static scales" in scheme.description
