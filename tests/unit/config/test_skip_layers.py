"""`kv_cache_dtype_skip_layers`: which layers are meant, what each of them stores, and what is
refused.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from tests.parity.variants import VARIANTS
from tests.refusals import refuses

from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales, Scheme
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.settings.device import probe
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.resolve import check, resolve
from freight.settings.skip_layers import layer_names

FN, FNUZ, BF16 = Format.E4M3FN, Format.E4M3FNUZ, Format.BFLOAT16
TENSOR, CHANNEL, TOKEN = Granularity.TENSOR, Granularity.CHANNEL, Granularity.TOKEN


def model(variant: str) -> ModelConfig:
    return parse_model_config(VARIANTS[variant].to_dict())


LLAMA = model("llama")
LLAMA = replace(LLAMA, layers=LLAMA.layers[:2])
SHARED = model(
    "gemma4-shared"
)  # windows in layers 0, 2, 4; the last three of six layers read layers 1, 2 and 1
COUNT = LLAMA.num_layers
ONE = LayerScales((0.25,), (0.5,), TENSOR, ("k_scale", "v_scale"))


def scales(*layers: LayerScales | None, **more: Any) -> KVScales:
    return KVScales(layers or (None,) * COUNT, **more)


def decide(
    skip: Any,
    of: ModelConfig = LLAMA,
    stored: KVScales | None = None,
    scheme: Scheme | None = None,
    **options: Any,
) -> EngineConfig:
    options = {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "device": "cpu"} | options
    args = EngineArgs(kv_cache_dtype_skip_layers=skip, **options)
    found = stored or KVScales((None,) * of.num_layers)
    return resolve(args, of, scheme or Scheme(), found, probe("cpu"))


def formats(config: EngineConfig, of: ModelConfig = LLAMA) -> list[Format]:
    return [config.kv.of_layer(index).format for index in range(of.num_layers)]


def test_the_shapes_are_as_these_tests_take_them() -> None:
    assert COUNT == 2
    assert [layer.mixer.kv_from for layer in SHARED.layers] == [None, None, None, 1, 2, 1]
    assert [layer.mixer.window is not None for layer in SHARED.layers] == [True, False] * 3


@pytest.mark.parametrize(
    "given",
    [
        "0,2",
        "0 2",
        " 0,, 2 ",
        ["0", "2"],
        [0, 2],
        (0, "2"),
        ["0,2"],
        ["0 2", "0"],
        np.array([0, 2]),
        iter(["0", 2]),
    ],
)
def test_every_spelling_of_the_same_layers(given: Any) -> None:
    assert EngineArgs(kv_cache_dtype_skip_layers=given).kv_cache_dtype_skip_layers == ("0", "2")


def test_one_layer_and_none() -> None:
    assert layer_names(3) == ("3",)
    assert layer_names("") == layer_names([]) == layer_names(" , ") == ()
    assert EngineArgs.from_options(
        kv_cache_dtype_skip_layers=["sliding_window"]
    ).kv_cache_dtype_skip_layers == ("sliding_window",)


@pytest.mark.parametrize("given", [None, 1.5, True, [True], [1.0], [None], b"0", [["0"]], object()])
def test_what_names_no_layer_is_refused(given: Any) -> None:
    with refuses(ConfigError, "kv_cache_dtype_skip_layers", "[0, 2]"):
        EngineArgs(kv_cache_dtype_skip_layers=given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("-1", ("'-1'", "count from 0")),
        ([-2], ("'-2'", "count from 0")),
        ("sliding-window", ("'sliding-window'", "did you mean sliding_window")),
        ("full_attention", ("'full_attention'",)),
        ("0-3", ("'0-3'",)),
        ("1.0", ("'1.0'",)),
        ("٣", ("unknown",)),
        ("all", ("'all'",)),
        ("x" * 100_000, ("(100000 characters)",)),
    ],
)
def test_words_are_refused_from_the_options_alone(given: Any, named: tuple[str, ...]) -> None:
    with refuses(ConfigError, "--kv-cache-dtype-skip-layers", "give layer numbers", "0,2", *named):
        check(EngineArgs(kv_cache_dtype_skip_layers=given))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cache_that_is_not_quantized_skips_nothing(dtype: str) -> None:
    says = f"--kv-cache-dtype-skip-layers 0,1 with --kv-cache-dtype {dtype}: none of its layers is quantized; use"
    with pytest.raises(ConfigError, match=says):
        check(EngineArgs(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers="0,1"))
    with refuses(ConfigError, "--kv-cache-dtype auto", "FP8 cache", "bfloat16"):
        decide("0", kv_cache_dtype="auto")


@pytest.mark.parametrize("number", ["2", "7", "00009", "9" * 20, "9" * 6000])
def test_a_layer_beyond_the_last_is_refused(number: str) -> None:
    with refuses(ConfigError, "--kv-cache-dtype-skip-layers", "2 layers", "0 to 1"):
        decide(number)


def test_all_layers_are_refused_and_a_window_that_no_layer_has() -> None:
    with refuses(ConfigError, "0,1", "8-bit cache", "left", "16-bit cache"):
        decide("0,1")
    with refuses(ConfigError, "sliding_window", "no layer", "window"):
        decide("sliding_window")
    with refuses(ConfigError, "0,1,2", "8-bit cache", "left"):
        decide("0,1,2", SHARED)
    with refuses(ConfigError, "sliding_window", "8-bit cache", "left"):
        decide("sliding_window", model("phi3-window"))


@pytest.mark.parametrize(
    ("options", "format", "granularity", "source"),
    [
        ({}, FN, TOKEN, ScaleSource.DYNAMIC),
        ({"kv_scales": "0.03"}, FN, TENSOR, ScaleSource.GIVEN),
        ({"kv_scales": "unit"}, FN, TENSOR, ScaleSource.UNIT),
        ({"kv_cache_dtype": "fp8_e5m2"}, Format.E5M2, TENSOR, ScaleSource.UNIT),
        ({"kv_cache_dtype": "fp8_e4m3fnuz"}, FNUZ, TOKEN, ScaleSource.DYNAMIC),
        ({"kv_cache_dtype": "int8"}, Format.INT8, TOKEN, ScaleSource.DYNAMIC),
    ],
)
def test_every_8_bit_cache_can_skip(
    options: Any, format: Format, granularity: Granularity, source: str
) -> None:
    given = KVScales((ONE, ONE)) if "kv_scales" in options and "." in options["kv_scales"] else None
    kv = decide("1,01,1", stored=given, **options).kv
    expected = [(format, granularity), (BF16, None)]
    assert [(one.format, one.granularity) for one in kv.layers or ()] == expected
    assert (kv.format, kv.granularity, kv.scale_source) == (format, granularity, source)
    assert kv.scales is None or kv.scales.layers[1] is None
    assert kv.names()["dtype"] == "mixed"
    assert kv.describe() == f"{format}, layer 1 in bfloat16"
    assert kv.layer_names() == [
        {"dtype": str(format), "granularity": str(granularity)},
        {"dtype": "bfloat16", "granularity": None},
    ]


def test_the_compute_dtype_is_what_a_skipped_layer_stores() -> None:
    assert formats(decide("0", dtype="float16")) == [Format.FLOAT16, FN]
    assert formats(decide("0", dtype="float32")) == [Format.FLOAT32, FN]


def test_readers_follow_the_layer_that_they_read() -> None:
    assert formats(decide("1", SHARED), SHARED) == [FN, BF16, FN, BF16, FN, BF16]
    assert formats(decide("1,3", SHARED), SHARED) == formats(decide("1", SHARED), SHARED)
    assert formats(decide("sliding_window", SHARED), SHARED) == [BF16, FN] * 3
    assert formats(decide("0", SHARED), SHARED) == [BF16, FN, FN, FN, FN, FN]
    with refuses(ConfigError, "layer 4", "keys and values of layer 2", "skip layer 2"):
        decide("4", SHARED)
    with refuses(ConfigError, "layer 5", "keys and values of layer 1"):
        decide("0,2,5", SHARED)


FP8 = Scheme("fp8", kv_format=FN, kv_static=True, description="fp8")


def test_scales_of_skipped_layers_are_not_needed() -> None:
    kv = decide("1", stored=KVScales((ONE, None)), scheme=FP8, kv_cache_dtype="auto").kv
    assert (kv.scale_source, kv.granularity) == (ScaleSource.CHECKPOINT, TENSOR)
    assert kv.layers is not None
    assert [one.format for one in kv.layers] == [FN, BF16]
    with refuses(CheckpointError, "KV scales", "none for layer 1 of 2"):
        decide((), stored=KVScales((ONE, None)), scheme=FP8)
    with refuses(CheckpointError, "static KV scales", "none for layer 1"):
        decide("0", stored=KVScales((ONE, None)), scheme=FP8)
    assert decide("0", stored=KVScales((ONE, None))).kv.scale_source is ScaleSource.DYNAMIC
    v_alone = replace(ONE, alone="v")
    assert decide("0", stored=KVScales((v_alone, ONE))).kv.scale_source is ScaleSource.CHECKPOINT
    with refuses(CheckpointError, "V", "none of K", "layer 0"):
        decide("1", stored=KVScales((v_alone, ONE)))


def test_the_granularity_is_that_of_the_layers_that_are_left() -> None:
    values = (0.5,) * 64
    finer = LayerScales(values, values, CHANNEL, k_center=values)
    kv = decide("0", stored=KVScales((finer, ONE)), kv_cache_dtype="fp8_e4m3fnuz").kv
    assert kv.granularity is TENSOR
    assert kv.scales is not None
    assert kv.scales.layers == (None, replace(ONE, k=(0.5,), v=(1.0,)))
    assert "keys centered" not in kv.note


def test_a_choice_by_layer_of_the_checkpoint_has_fewer_quantized_layers() -> None:
    choice = KVScales((ONE, None, None), mixed=(TENSOR, TOKEN, None))
    three = replace(LLAMA, layers=(*LLAMA.layers, LLAMA.layers[0]))
    kv = decide("0", three, choice, kv_cache_dtype="auto").kv
    assert (kv.granularity, kv.scale_source) == (TOKEN, ScaleSource.DYNAMIC)
    assert kv.describe() == "fp8_e4m3fn, layers 0 and 2 in bfloat16"
    as_declared, again = (
        decide(skip, three, choice, kv_cache_dtype="auto").kv for skip in ("", "2")
    )
    assert again.layers == as_declared.layers
    assert as_declared.describe() == "mixed"
    with refuses(ConfigError, "0,1", "8-bit cache", "left"):
        decide("0,1", three, choice, kv_cache_dtype="auto")


def test_other_caches_of_the_same_options() -> None:
    """What an evaluation compares with has nothing to skip, and passes the check."""
    args = EngineArgs(
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers="0",
        attention_compute="fp8",
        kv_scales="unit",
    )
    check(plain := args.with_plain_cache())
    assert plain == EngineArgs(kv_cache_dtype="float32")
    assert args.with_cache("bfloat16").kv_cache_dtype_skip_layers == ()
    assert args.with_cache("fp8_e5m2") == replace(args, kv_cache_dtype="fp8_e5m2")


def test_many_layers_are_counted() -> None:
    many = replace(LLAMA, layers=LLAMA.layers * 10)
    kv = decide(list(range(9)), many, KVScales((None,) * 20)).kv
    assert kv.describe() == "fp8_e4m3fn, 9 of 20 layers in bfloat16"
    assert json.dumps(kv.layer_names())
    assert "kv_cache_dtype_skip_layers" in {field.name for field in fields(EngineArgs)}
