"""What --kv-scales and --quantization-param-path ask for: words, files, and numbers for K and V."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.parse import parse_model_config
from freight.settings.device import DeviceFacts, DeviceKind
from freight.settings.engine import KV_SCALES, EngineArgs
from freight.settings.kv_source import kv_source, uniform_scales
from freight.settings.resolve import check, resolve

POSITIVE = st.floats(min_value=2.0**-126, max_value=2.0**127, width=32)
LAYERS = 3
MODEL = parse_model_config(
    {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "dtype": "bfloat16",
    }
)


def as_float32(value: float) -> float:
    stored: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return stored


@given(k=POSITIVE, v=POSITIVE)
def test_two_numbers_are_the_scales_of_k_and_v_as_text_and_in_python(k: float, v: float):
    for args in (
        EngineArgs(kv_scales=f"{k!r},{v!r}"),
        EngineArgs.from_options(kv_scales=(k, v)),
        EngineArgs.from_options(kv_scales=[k, v]),
    ):
        assert kv_source(args).values == (k, v)
    assert kv_source(EngineArgs.from_options(kv_scales=k)).values == (k, k)


def test_numbers_are_rounded_to_float32_as_every_scale():
    assert kv_source(EngineArgs(kv_scales="0.03")).values == (as_float32(0.03), as_float32(0.03))
    assert kv_source(EngineArgs.from_options(kv_scales=1)).values == (1.0, 1.0)


@pytest.mark.parametrize("word", KV_SCALES)
def test_a_word_is_itself(word: str):
    source = kv_source(EngineArgs.from_options(kv_scales=word))
    assert (source.word, source.file, source.values) == (word, None, None)


@pytest.mark.parametrize(
    "text", ["0", "-0.03", "nan", "inf", "1e39", "1e-60", "0.03,0", "0,03", "0.03,-1"]
)
def test_a_number_that_is_no_scale_is_refused(text: str):
    with pytest.raises(ConfigError, match=f"--kv-scales {text}: .*finite and above 0"):
        kv_source(EngineArgs(kv_scales=text))


@pytest.mark.parametrize("text", ["0.03,", "0.03,0.02,0.01", "", "0.03;0.02"])
def test_text_that_is_no_number_lists_the_choices(text: str):
    with refuses(ConfigError, "unknown", "FILE.json", "0.03,0.02"):
        kv_source(EngineArgs(kv_scales=text))


@pytest.mark.parametrize(
    "value", [True, None, (0.1, 0.2, 0.3), (), ("0.1",), {"k": 0.1}, (0.1, False)]
)
def test_a_python_value_that_is_no_source_is_refused(value: object):
    with pytest.raises(ConfigError, match=r"kv_scales .* is unknown"):
        EngineArgs.from_options(kv_scales=value)


def test_numbers_with_a_file_are_two_sources():
    with refuses(
        ConfigError, "two sources", "--kv-scales 0.03", "--quantization-param-path x.json"
    ):
        kv_source(EngineArgs(kv_scales="0.03", quantization_param_path="x.json"))


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        *[
            (dtype, source)
            for dtype in ("bfloat16", "float16", "float32")
            for source in (*KV_SCALES[1:], "0.03")
        ],
        *[("fp8_e5m2", source) for source in ("checkpoint", "0.03")],
        *[("int8", source) for source in ("checkpoint", "unit", "0.03,0.02")],
    ],
)
def test_a_source_that_the_named_cache_cannot_have_is_refused_from_the_options_alone(
    dtype: str, source: str
):
    with pytest.raises(ConfigError, match=f"--kv-scales {source} with --kv-cache-dtype {dtype}: "):
        check(EngineArgs(kv_cache_dtype=dtype, kv_scales=source))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "a cache in bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a cache in fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "dtype": "float"}, "--dtype float32"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "a CPU"),
    ],
)
def test_fp8_attention_that_cannot_be_is_refused_from_the_options_alone(
    args: dict[str, str], says: str
):
    with pytest.raises(ConfigError, match=f"--attention-compute fp8 with {says}"):
        check(EngineArgs(attention_compute="fp8", **args))


def test_int8_on_a_named_gpu_is_refused_from_the_options_alone():
    with pytest.raises(ConfigError, match="int8 on --device cuda"):
        check(EngineArgs(kv_cache_dtype="int8", device="cuda"))
    check(EngineArgs(kv_cache_dtype="int8", device="cuda", kernels="reference"))


def test_what_can_be_is_not_refused():
    for dtype in ("auto", "fp8", "fp8_e4m3fnuz"):
        for source in (*KV_SCALES, "0.03,0.02"):
            check(EngineArgs(kv_cache_dtype=dtype, kv_scales=source))
    check(
        EngineArgs(kv_cache_dtype="fp8", attention_compute="fp8", device="cpu", kernels="reference")
    )
    check(EngineArgs(attention_compute="fp8", device="cuda"))


def decide(native: Format, scales: KVScales, **args: str):
    device = SimpleNamespace(
        kind="cpu", name="a CPU", multiplies_fp8=False, cores=2, native_e4m3=native
    )
    return resolve(EngineArgs(**args), MODEL, Scheme(), scales, device).kv


def test_given_scales_are_one_per_tensor_in_every_layer_and_say_so():
    scales = uniform_scales((0.5, 0.25), LAYERS)
    kv = decide(Format.E4M3FN, scales, kv_cache_dtype="fp8", kv_scales="0.5,0.25")
    assert (kv.granularity, kv.scale_source) == (Granularity.TENSOR, ScaleSource.GIVEN)
    assert [(layer.k, layer.v) for layer in kv.scales.layers] == [((0.5,), (0.25,))] * LAYERS
    assert kv.note == "K 0.5, V 0.25 in every layer"
    converted = decide(Format.E4M3FNUZ, scales, kv_cache_dtype="fp8", kv_scales="0.5,0.25")
    assert [layer.k for layer in converted.scales.layers] == [(1.0,)] * LAYERS
    assert "converted from fp8_e4m3fn" in converted.note


def test_an_assumed_format_is_said():
    scales = uniform_scales((0.5, 0.25), LAYERS)
    assumed = KVScales(scales.layers, scales.format, format_assumed=True)
    says = "fp8_e4m3fn assumed: config.json has no kv_cache_torch_dtype to declare it"
    assert decide(Format.E4M3FN, assumed, kv_cache_dtype="fp8").note == says
    assert decide(Format.E4M3FN, scales, kv_cache_dtype="fp8").note == ""
    assert (
        "assumed"
        not in decide(Format.E4M3FN, assumed, kv_cache_dtype="fp8", kv_scales="dynamic").note
    )


def test_the_largest_float32_is_a_scale():
    assert math.isfinite(kv_source(EngineArgs(kv_scales="3.4028234e38")).values[0])


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_per_token_head", "fp8"), ("int8_per_token_head", "int8")]
)
def test_vllms_names_of_caches_are_two_options(name: str, dtype: str) -> None:
    ours = EngineArgs(kv_cache_dtype=dtype, kv_scales="dynamic")
    assert EngineArgs(kv_cache_dtype=name) == ours
    assert EngineArgs(kv_cache_dtype=name, kv_scales="dynamic") == ours
    assert EngineArgs.from_options(kv_cache_dtype=name, max_model_len=8) == replace(
        ours, max_model_len=8
    )
    assert EngineArgs().with_cache(name) == ours
    assert replace(ours, kv_cache_dtype=name) == ours
    check(ours)


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize("scales", ["checkpoint", "unit", "group", "scales.json", "0.03"])
def test_vllms_names_of_caches_with_other_scales(name: str, scales: str) -> None:
    with refuses(
        ConfigError, f"--kv-cache-dtype {name}", f"--kv-scales {scales}", "omit the scales"
    ):
        EngineArgs(kv_cache_dtype=name, kv_scales=scales)
    with refuses(ConfigError, f"--kv-cache-dtype {name}", "--quantization-param-path a.json"):
        EngineArgs(kv_cache_dtype=name, quantization_param_path="a.json")


def test_vllms_name_takes_no_scales_of_a_checkpoint() -> None:
    """`fp8` takes them, `fp8_per_token_head` measures."""
    scales = uniform_scales((0.5, 0.25), LAYERS)
    device = DeviceFacts(DeviceKind.CPU, "a CPU", Format.E4M3FN, 2**30, 2**30, 2)
    kinds = {}
    for name in ("fp8", "fp8_per_token_head"):
        kv = resolve(EngineArgs(kv_cache_dtype=name), MODEL, Scheme(), scales, device).kv
        kinds[name] = (kv.format, kv.granularity, kv.scale_source)
    assert kinds["fp8"] == (Format.E4M3FN, Granularity.TENSOR, ScaleSource.CHECKPOINT)
    assert kinds["fp8_per_token_head"] == (Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC)
