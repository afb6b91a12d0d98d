"""EngineArgs -> EngineConfig: the whole table of cache formats and scale sources, and every error
in it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.refusals import assert_names, refuses

from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales, Scheme
from freight.model.config.parse import parse_model_config
from freight.settings.engine import EngineArgs
from freight.settings.kv_source import kv_source
from freight.settings.resolve import check, for_variant, resolve

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
FN, FNUZ, E5M2, BF16 = Format.E4M3FN, Format.E4M3FNUZ, Format.E5M2, Format.BFLOAT16
INT8 = Format.INT8
LAYER = LayerScales((0.25,), (0.5,), Granularity.TENSOR, ("k_scale", "v_scale"))
NONE, SOME, ALL = (KVScales(layers) for layers in ((None, None), (LAYER, None), (LAYER, LAYER)))
NOTHING = Scheme()
STATIC = Scheme("compressed-tensors", None, FN, True, "compressed-tensors: KV cache")
CAST = Scheme("modelopt", None, FN, False, "modelopt: KV cache")
SOURCES = ["checkpoint", "dynamic", "unit"]


CPU = {"kind": "cpu", "name": "a CPU", "multiplies_fp8": False, "cores": 2}
GPU = {"kind": "cuda", "name": "a GPU", "multiplies_fp8": True, "cores": 2}


def decide(scheme=NOTHING, scales=NONE, native=FN, model=None, facts=CPU, **args):
    device = SimpleNamespace(native_e4m3=native, **facts)
    return resolve(
        EngineArgs(**args), parse_model_config(CONFIG | (model or {})), scheme, scales, device
    )


def kv(dtype="auto", source="auto", scheme=NOTHING, scales=NONE, native=FN, **more):
    cache = decide(scheme, scales, native, kv_cache_dtype=dtype, kv_scales=source, **more).kv
    assert (cache.scales is not None) == (
        cache.scale_source in (ScaleSource.CHECKPOINT, ScaleSource.FILE)
    )
    return cache.format, cache.granularity, cache.scale_source


def refused(error, *named, **said):
    with pytest.raises(error) as caught:
        kv(**said)
    for word in named:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kv_cache_scales.json"
    path.write_text(json.dumps({}))
    return str(path)


DYNAMIC = (Granularity.TOKEN, ScaleSource.DYNAMIC)
UNIT = (Granularity.TENSOR, ScaleSource.UNIT)
CHECKPOINT = (Granularity.TENSOR, ScaleSource.CHECKPOINT)
SIXTEEN = (None, None)


@pytest.mark.parametrize("scales", [NONE, SOME, ALL])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_sixteen_bits_have_no_scales(name, scales):
    assert kv(name, scales=scales) == (Format(name), *SIXTEEN)
    for source in SOURCES:
        refused(
            ConfigError,
            f"--kv-scales {source}",
            name,
            "fp8",
            dtype=name,
            source=source,
            scales=scales,
        )


def test_a_scale_of_one_side():
    k, v = (
        KVScales((LAYER, LayerScales((0.5,), (0.5,), Granularity.TENSOR, alone=side)))
        for side in "kv"
    )
    assert "K's scale for V too in layer 1" in decide(STATIC, k).kv.note
    refused(
        CheckpointError,
        "V, but none of K, for layer 1 of 2",
        "--kv-scales dynamic",
        scheme=STATIC,
        scales=v,
    )
    assert kv("fp8", "dynamic", scheme=STATIC, scales=v) == (FN, *DYNAMIC)


def test_auto_is_what_the_checkpoint_declares():
    assert kv() == (BF16, *SIXTEEN)
    assert kv(dtype="auto", model={"dtype": "float16"}) == (Format.FLOAT16, *SIXTEEN)
    assert kv(scheme=STATIC, scales=ALL) == (FN, *CHECKPOINT)
    assert kv(scheme=STATIC, scales=ALL, native=FNUZ) == (FNUZ, *CHECKPOINT)
    assert kv(scales=ALL) == (BF16, *SIXTEEN)
    for source in SOURCES:
        refused(
            ConfigError, f"--kv-scales {source}", "--kv-cache-dtype auto", "bfloat16", source=source
        )


def test_skipping_stored_scales_is_said():
    assert "skipped" in decide(STATIC, ALL, kv_cache_dtype="bfloat16").kv.note
    assert "--kv-cache-dtype fp8" in decide(NOTHING, ALL).kv.note
    assert decide(STATIC, NONE, kv_cache_dtype="bfloat16").kv.note == ""


@pytest.mark.parametrize(
    ("dtype", "native", "format"),
    [
        ("fp8", FN, FN),
        ("fp8", FNUZ, FNUZ),
        ("fp8_e4m3", FN, FN),
        ("fp8_e4m3", FNUZ, FNUZ),
        ("fp8_e4m3fn", FNUZ, FN),
        ("fp8_e4m3fnuz", FN, FNUZ),
    ],
)
def test_e4m3(dtype, native, format):
    said = {"dtype": dtype, "native": native}
    assert kv(**said) == (format, *DYNAMIC)
    assert kv(**said, scales=ALL) == (format, *CHECKPOINT)
    assert kv(**said, source="checkpoint", scales=ALL) == (format, *CHECKPOINT)
    for scales in (NONE, SOME, ALL):
        assert kv(**said, source="dynamic", scales=scales) == (format, *DYNAMIC)
        assert kv(**said, source="unit", scales=scales) == (format, *UNIT)


def test_e4m3_without_scales():
    note = decide(kv_cache_dtype="fp8").kv.note
    assert_names(note, "no scales", "checkpoint", "per token")
    refused(
        ConfigError,
        "--kv-scales checkpoint",
        "no KV scales",
        "dynamic",
        dtype="fp8",
        source="checkpoint",
    )
    measured = "freight quantize {} OUT"
    for scheme, taken in ((Scheme("mxfp4", FN), "MODEL"), (Scheme("gptq", FN), "BASE")):
        words = ("no KV scales", measured.format(taken), "--kv-scales dynamic")
        refused(ConfigError, *words, dtype="fp8", source="checkpoint", scheme=scheme)
    for dtype in ("auto", "fp8"):
        refused(
            CheckpointError,
            "declares static",
            "layers 0, 1",
            "--kv-scales",
            dtype=dtype,
            scheme=STATIC,
        )
        assert kv(dtype, scheme=CAST) == (FN, *UNIT)
    assert "modelopt" in decide(CAST).kv.note
    assert kv(scheme=Scheme("compressed-tensors", None, FN, False)) == (FN, *DYNAMIC)


@pytest.mark.parametrize("scheme", [NOTHING, STATIC, CAST])
@pytest.mark.parametrize("source", ["auto", "checkpoint"])
def test_e4m3_with_some_scales_names_the_layers(scheme, source):
    refused(
        CheckpointError,
        "layer 1",
        "dynamic",
        dtype="fp8",
        source=source,
        scheme=scheme,
        scales=SOME,
    )


def test_e5m2():
    for scheme in (NOTHING, STATIC, CAST):
        assert kv("fp8_e5m2", scheme=scheme) == (E5M2, *UNIT)
    for scales in (NONE, SOME, ALL):
        assert kv("fp8_e5m2", "dynamic", scales=scales) == (E5M2, *DYNAMIC)
        assert kv("fp8_e5m2", "unit", scales=scales) == (E5M2, *UNIT)
        refused(
            ConfigError,
            "--kv-scales checkpoint",
            "fp8_e5m2",
            dtype="fp8_e5m2",
            source="checkpoint",
            scales=scales,
        )
    for scales in (SOME, ALL):
        refused(
            ConfigError,
            "fp8_e5m2",
            "fp8_e4m3fn",
            "unit or dynamic",
            dtype="fp8_e5m2",
            scales=scales,
        )
    assert "E5M2" in decide(kv_cache_dtype="fp8_e5m2").kv.note


def test_int8_measures_each_token_whatever_scales_there_are(file):
    for scheme in (NOTHING, STATIC, CAST):
        for scales in (NONE, SOME, ALL):
            for source in ("auto", "dynamic"):
                assert kv("int8", source, scheme=scheme, scales=scales) == (INT8, *DYNAMIC)
            for source in ("checkpoint", "unit"):
                said = {"dtype": "int8", "source": source, "scheme": scheme, "scales": scales}
                refused(
                    ConfigError,
                    f"--kv-scales {source}",
                    "int8",
                    "--kv-cache-dtype fp8",
                    "omit the scales",
                    **said,
                )
    assert "skipped" in decide(STATIC, ALL, kv_cache_dtype="int8").kv.note
    assert "skipped" not in decide(kv_cache_dtype="int8").kv.note
    with refuses(ConfigError, f"--kv-scales {file}", "--kv-cache-dtype int8"):
        decide(NOTHING, ALL, kv_cache_dtype="int8", kv_scales=file)


def test_int8_is_refused_on_a_gpu_but_for_the_reference():
    with refuses(ConfigError, "int8", "GPU", "fp8", "--device cpu", "--kernels reference"):
        decide(facts=GPU, kv_cache_dtype="int8")
    assert decide(facts=GPU, kv_cache_dtype="int8", kernels="reference").kv.format is INT8
    assert decide(kv_cache_dtype="int8").kv.format is INT8


def test_file(file):
    for said in ({"kv_scales": file}, {"quantization_param_path": file}):
        cache = decide(NOTHING, ALL, kv_cache_dtype="fp8", **said).kv
        assert (cache.granularity, cache.scale_source) == (Granularity.TENSOR, ScaleSource.FILE)
        assert cache.scales == ALL
        assert str(kv_source(EngineArgs(**said)).file) == file
        assert decide(STATIC, ALL, **said).kv.scale_source is ScaleSource.FILE
    assert kv_source(EngineArgs()).file is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "fp8_e5m2", "int8"])
def test_file_with_a_format_that_has_no_static_scales(file, dtype):
    for flag, said in (
        ("--kv-scales", "kv_scales"),
        ("--quantization-param-path", "quantization_param_path"),
    ):
        with pytest.raises(ConfigError, match=f"{flag} .*json.*{dtype}"):
            kv_source(EngineArgs(kv_cache_dtype=dtype, **{said: file}))


def test_file_with_an_undeclared_cache_names_both(file):
    with refuses(
        ConfigError, "--quantization-param-path", "--kv-cache-dtype auto", "bfloat16", "fp8"
    ):
        decide(NOTHING, ALL, quantization_param_path=file)
    with pytest.raises(ConfigError, match="fp8_e5m2"):
        decide(Scheme("x", None, E5M2), ALL, kv_scales=file)


def test_file_twice_or_missing(file, tmp_path):
    with refuses(ConfigError, "twice", "--kv-scales", "--quantization-param-path"):
        kv_source(EngineArgs(kv_cache_dtype="fp8", kv_scales=file, quantization_param_path=file))
    for source in SOURCES:
        with pytest.raises(
            ConfigError, match=f"--kv-scales {source} and --quantization-param-path"
        ):
            kv_source(
                EngineArgs(kv_cache_dtype="fp8", kv_scales=source, quantization_param_path=file)
            )
    with refuses(ConfigError, "none.json", "no such file"):
        kv_source(EngineArgs(kv_cache_dtype="fp8", kv_scales=str(tmp_path / "none.json")))


def test_unknown_words_list_the_choices_and_suggest_one():
    refused(
        ConfigError,
        "'fp8_e4m4'",
        "fp8_e4m3",
        "did you mean",
        "bfloat16",
        "fp8_e5m2",
        dtype="fp8_e4m4",
    )
    refused(ConfigError, "'int4'", "auto, bfloat16, float16", dtype="int4")
    refused(ConfigError, "'dynamc'", "did you mean dynamic", "FILE.json", source="dynamc")
    with refuses(ConfigError, "--dtype 'float8'", "bfloat16"):
        check(EngineArgs(dtype="float8"))
    with refuses(ConfigError, "--device 'tpu'", "auto, cpu or cuda"):
        check(EngineArgs(device="tpu"))
    with pytest.raises(ConfigError, match="--kernels 'fast' is unknown"):
        check(EngineArgs(kernels="fast"))


def test_scales_are_converted_once_between_variants():
    assert for_variant(ALL, FN) is ALL
    doubled = for_variant(ALL, FNUZ)
    assert doubled.format is FNUZ
    assert (doubled.layers[0].k, doubled.layers[0].v) == ((0.5,), (1.0,))
    assert doubled.layers[0].names == LAYER.names
    assert for_variant(doubled, FN) == ALL
    assert decide(STATIC, ALL, FNUZ).kv.scales == doubled
    assert "converted from fp8_e4m3fn" in decide(STATIC, ALL, FNUZ).kv.note
    assert decide(STATIC, doubled, FN).kv.scales == ALL
    assert decide(STATIC, ALL, FN).kv.scales == ALL


def test_mixed_granularities_report_the_finest():
    head = LayerScales((1.0, 2.0), (1.0, 2.0), Granularity.HEAD)
    assert decide(STATIC, KVScales((head, LAYER))).kv.granularity is Granularity.HEAD


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("half", "float16"),
        ("float", "float32"),
        ("float32", "float32"),
    ],
)
def test_compute_dtype(dtype, format):
    assert decide(dtype=dtype).compute_format is Format(format)
    assert decide(dtype="auto", model={"dtype": "float32"}).compute_format is Format.FLOAT32


def test_weights_become_fp8_when_asked():
    assert decide().weight_format is BF16
    assert decide(dtype="float32").weight_format is Format.FLOAT32
    assert decide(quantization="fp8").weight_format is FN
    assert decide(quantization="fp8", native=FNUZ).weight_format is FNUZ
    assert decide(quantization="fp8").kv.format is BF16
    assert decide(quantization="int8").weight_format is Format.INT8
    with pytest.raises(ConfigError, match="are quantized already"):
        decide(Scheme("fp8", FN), quantization="int8")
    with refuses(ConfigError, "--quantization 'fp4'", "fp8, int8 or int4"):
        check(EngineArgs(quantization="fp4"))


def group(inputs=None, **weights):
    """A declaration of compressed-tensors."""
    weights = {"num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False, **weights}
    if inputs is not None:
        inputs = {**weights, "strategy": "token", "dynamic": True, **inputs}
    targets = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": targets}}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
# what checkpoints declare, and the options that ask for what they have
DECLARED = {
    "fp8": (group({}, type="float"), {"fp8"}),
    "int8": (group({}, type="int"), {"int8"}),
    "int4": (group(**INT4) | {"format": "pack-quantized"}, {"int4"}),
    "mxfp4": (group(**MX) | {"format": "mxfp4-pack-quantized"}, set()),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, {"int4"}),
    "gpt-oss": ({"quant_method": "mxfp4"}, {"fp8"}),
}


@pytest.mark.parametrize("asked", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("stored", DECLARED)
def test_stored_weights_are_kept_or_the_option_is_refused(stored, asked):
    """None is rounded a second time, and none is taken for another."""
    declared, same = DECLARED[stored]
    scheme = read_scheme({"quantization_config": declared, "model_type": "gpt_oss"}, None)
    if asked not in (None, *same):
        with pytest.raises(ConfigError, match=f"--quantization {asked}: .* quantized already"):
            decide(scheme, quantization=asked)
        return
    decided = decide(scheme, quantization=asked)
    wanted = INT8 if stored == "int8" else FN  # codes in 4 bits have no format of their own
    assert (decided.weight_format, decided.int4) == (wanted, False)


def test_int8_weights_are_refused_on_a_gpu_but_for_the_reference():
    """Stored, or asked for where the device is found: `check` does not know it yet."""
    stored = read_scheme({"quantization_config": DECLARED["int8"][0]}, None)
    for scheme, args in ((stored, {}), (NOTHING, {"quantization": "int8"})):
        with refuses(ConfigError, "weights in INT8", "GPU", "--kernels reference"):
            decide(scheme, facts=GPU, **args)
        decided = decide(scheme, facts=GPU, kernels="reference", **args)
        assert decided.weight_format is INT8


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("native", [FN, FNUZ])
def test_fp8_weights_of_a_checkpoint_become_the_device_s_variant(quantization, native):
    scheme = Scheme("fp8", FN, FN, True, "fp8: weights fp8_e4m3fn")
    decided = decide(scheme, ALL, quantization=quantization, native=native)
    assert (decided.weight_format, decided.compute_format) == (native, BF16)


def test_context_length():
    assert decide().max_model_len == 1024
    assert decide(max_model_len=17).max_model_len == 17
    with pytest.raises(ConfigError, match=r"--max-model-len 1025.*1024 positions"):
        decide(max_model_len=1025)
    stretched = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert decide(model=stretched).max_model_len == 1024
    assert decide(model=stretched, max_model_len=4096).max_model_len == 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_step_seconds", -0.5),
        ("max_step_seconds", float("nan")),
        ("max_step_seconds", float("inf")),
        ("max_step_seconds", True),
        ("max_step_seconds", "1"),
        ("max_model_len", 0),
        ("max_model_len", "12"),
        ("threads", 0),
        ("seed", -1),
        ("seed", None),
        ("seed", 1.5),
        ("max_num_seqs", True),
        ("block_size", 12),
        ("block_size", 0),
        ("block_size", 512),
        ("kv_cache_memory", "lots"),
        ("kv_cache_memory", 0),
        ("kv_cache_memory", -1),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError) as error:
        check(EngineArgs(**{name: value}))
    assert f"--{name.replace('_', '-')}" in str(error.value)
    assert str(value) in str(error.value)


def test_numbers_of_numpy_are_kept_as_python_s():
    args = EngineArgs(max_num_seqs=np.int64(4), max_step_seconds=np.float32(1))
    check(args)
    assert json.dumps([args.max_num_seqs, args.max_step_seconds]) == "[4, 1.0]"


def test_more_threads_than_cores_are_named():
    assert decide(threads=2).threads == 2
    refused(ConfigError, "--threads 64", "2 cores", "from 1 to 2", threads=64)
    refused(ConfigError, "--threads 2", "1 core", threads=2, facts=CPU | {"cores": 1})


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_block_sizes(size):
    assert decide(block_size=size).block_size == size


def test_device_must_be_the_one_that_was_found():
    assert decide(device="cpu").device == decide().device == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda.*cpu"):
        decide(device="cuda")


@pytest.mark.parametrize(
    ("facts", "native", "said"),
    [
        (GPU, FN, {"kv_cache_dtype": "fp8"}),
        (GPU, FNUZ, {"kv_cache_dtype": "fp8", "kv_scales": "unit"}),
        (GPU, FN, {"kv_cache_dtype": "fp8", "dtype": "float16"}),
        (CPU, FN, {"kv_cache_dtype": "fp8", "kernels": "reference"}),
        (CPU, FN, {"kv_cache_dtype": "fp8_e4m3fnuz", "kernels": "reference"}),
    ],
)
def test_attention_computes_in_fp8_where_it_can_and_only_if_asked(facts, native, said):
    assert decide(facts=facts, native=native, attention_compute="fp8", **said).fp8_attention
    assert not decide(facts=facts, native=native, **said).fp8_attention


@pytest.mark.parametrize(
    ("facts", "said", "problem", "way_out"),
    [
        (CPU, {"kv_cache_dtype": "fp8"}, "a CPU", "--kernels reference"),
        (
            GPU | {"multiplies_fp8": False},
            {"kv_cache_dtype": "fp8"},
            "a GPU",
            "no FP8 matrix units",
        ),
        (GPU, {"kv_cache_dtype": "fp8_e5m2"}, "a cache in fp8_e5m2", "--kv-cache-dtype fp8"),
        (CPU, {"kv_cache_dtype": "int8"}, "a cache in int8", "--kv-cache-dtype fp8"),
        (GPU, {}, "a cache in bfloat16", "--kv-cache-dtype fp8"),
        (CPU, {"kernels": "reference"}, "a cache in bfloat16", "--kv-cache-dtype fp8"),
        (GPU, {"kv_cache_dtype": "fp8_e4m3fnuz"}, "multiplies fp8_e4m3fn", "--kv-cache-dtype fp8"),
        (GPU, {"kv_cache_dtype": "fp8", "dtype": "float32"}, "--dtype float32", "--dtype bfloat16"),
    ],
)
def test_attention_in_fp8_is_refused_where_it_cannot_run(facts, said, problem, way_out):
    with refuses(
        ConfigError, "--attention-compute fp8", "omit --attention-compute", problem, way_out
    ):
        decide(facts=facts, attention_compute="fp8", **said)


def test_an_unknown_attention_compute_is_refused():
    with refuses(ConfigError, "--attention-compute 'fp16'", "auto or fp8"):
        check(EngineArgs(attention_compute="fp16"))
