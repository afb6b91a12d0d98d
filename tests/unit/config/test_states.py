"""--state-dtype -> the format of recurrent states: every name beside every cache, and what is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import refuses

from freight.cache.spec import cache_spec
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.resolve import check, resolve

FIXTURES = Path(__file__).parents[2] / "fixtures"
DELTA_NET: dict[str, Any] = json.loads((FIXTURES / "hybrids/delta_net/config.json").read_text())
PLAIN = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "dtype": "bfloat16",
}  # fmt: skip
LLAMA = {**PLAIN, "model_type": "llama"}
LFM2 = {
    **PLAIN, "model_type": "lfm2", "conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip
DECLARED = Scheme("compressed-tensors", None, Format.E4M3FN, False, "compressed-tensors: KV cache")
FNUZ = Format.E4M3FNUZ


def resolved(
    model: ModelConfig,
    native: Format = Format.E4M3FN,
    scheme: Scheme | None = None,
    kind: str = "cpu",
    **args: Any,
) -> EngineConfig:
    device: Any = SimpleNamespace(
        kind=kind, name="a device", native_e4m3=native, multiplies_fp8=True, cores=2
    )
    scales = KVScales((None,) * model.num_layers, unneeded=model.without_pages)
    return resolve(EngineArgs(**args), model, scheme or Scheme(), scales, device)


def stored(
    native: Format = Format.E4M3FN, scheme: Scheme | None = None, kind: str = "cpu", **args: Any
) -> str:
    """The format in the resolved configuration, which is that of the cache's matrices."""
    model = parse_model_config(DELTA_NET)
    config = resolved(model, native, scheme, kind, **args)
    spec = cache_spec(config.kv, model, 16, config.compute_format)
    assert spec.state_format is config.kv.state
    return str(spec.state_format)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ({"kv_cache_dtype": "float32"}, "bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "int8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "int8"),
        ({"kv_cache_dtype": "int8"}, "int8"),
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, "int8"),
        ({"scheme": DECLARED}, "int8"),
        ({"scheme": DECLARED, "kv_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
    ids=str,
)
def test_auto_follows_the_dtype_and_the_cache(options: dict[str, Any], wanted: str) -> None:
    assert stored(**options) == stored(**options, state_dtype="auto") == wanted


def test_auto_follows_a_cache_whose_layers_differ() -> None:
    """A checkpoint's own choice by layer; and layers that are skipped."""
    model = parse_model_config(
        {**DELTA_NET, "num_hidden_layers": 8, "layer_types": DELTA_NET["layer_types"] * 2}
    )
    device: Any = SimpleNamespace(
        kind="cpu", name="a CPU", native_e4m3=Format.E4M3FN, multiplies_fp8=False, cores=2
    )
    mixed = KVScales((None,) * 8, mixed=(*(None,) * 7, Granularity.TOKEN))
    assert resolve(EngineArgs(), model, Scheme(), mixed, device).kv.state is Format.INT8
    skipping = EngineArgs(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("3",))
    assert resolve(skipping, model, Scheme(), KVScales((None,) * 8), device).kv.state is Format.INT8


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_a_name_is_what_it_says_beside_every_cache(asked: str, kv_cache_dtype: str) -> None:
    assert stored(state_dtype=asked, kv_cache_dtype=kv_cache_dtype) == asked
    assert (
        stored(state_dtype=asked, kv_cache_dtype=kv_cache_dtype, dtype="float32", native=FNUZ)
        == asked
    )


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_fp8_is_the_devices_e4m3(asked: str) -> None:
    assert stored(state_dtype=asked) == "fp8_e4m3fn"
    assert stored(state_dtype=asked, native=FNUZ, kind="cuda") == "fp8_e4m3fnuz"


def test_int8_states_are_for_gpus_too() -> None:
    """Where pages in INT8 are refused."""
    assert stored(kind="cuda", kv_cache_dtype="fp8") == "int8"
    with refuses(ConfigError, "--kv-cache-dtype int8", "device"):
        stored(kind="cuda", kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            "float16",
            "--state-dtype float16: a state may grow beyond its largest number, 65,504; use bfloat16",
        ),
        (
            "fp8_e5m2",
            "--state-dtype fp8_e5m2: two bits of mantissa make twice the error of E4M3; use int8",
        ),
        ("fp4", "--state-dtype 'fp4' is unknown.*: choose auto, bfloat16, float32, int8, fp8"),
        (["int8"], "--state-dtype .* is unknown"),
        (None, "--state-dtype None is unknown"),
    ],
)
def test_other_formats_are_refused_by_the_options_alone(asked: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(EngineArgs(state_dtype=asked))


@pytest.mark.parametrize("config", [LLAMA, LFM2], ids=["llama", "lfm2"])
@pytest.mark.parametrize("asked", ["bfloat16", "int8", "fp8"])
def test_a_model_without_recurrent_states_refuses_all_but_auto(
    config: dict[str, Any], asked: str
) -> None:
    model = parse_model_config(config)
    name = config["model_type"]
    with refuses(ConfigError, f"--state-dtype {asked}", name, "omit"):
        resolved(model, state_dtype=asked)
    for cache in ("bfloat16", "fp8"):
        kv = resolved(model, kv_cache_dtype=cache).kv
        assert kv.state is None
        spec = cache_spec(kv, model, 16)
        assert spec.state_format is None
        assert spec.float32_bytes_per_state == spec.bytes_per_state  # of columns, if there are any


def test_every_published_model_with_recurrent_states_is_known_as_one() -> None:
    """What decides whether the option is taken says the same as what the cache allocates."""
    found = set()
    for file in sorted((FIXTURES / "published").glob("*.json")):
        try:
            model = parse_model_config(json.loads(file.read_text()))
        except CheckpointError:  # test_published.py says which are refused, and why
            continue
        kept = cache_spec(resolved(model).kv, model, 16).state_format
        assert (kept is not None) is model.recurrent, file.name
        found |= {model.model_type} if model.recurrent else set()
    assert "qwen3_next" in found
    assert {name for name in found if name.startswith("qwen3_5")}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act = 'gelu_pytorch_tanh' is not implemented for layers with a",
        ),
        (
            {"linear_conv_kernel_dim": 9},
            "linear_conv_kernel_dim = 9 is not implemented; 2 to 8 are",
        ),
    ],
)
def test_convolutions_that_no_delta_net_has_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_model_config({**DELTA_NET, **keys})


@pytest.mark.parametrize("source", ["auto", "checkpoint"])
def test_a_model_of_states_alone_needs_no_scales(source: str) -> None:
    layers = {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}
    model = parse_model_config({**DELTA_NET, **layers})
    kv = resolved(model, kv_cache_dtype="fp8", kv_scales=source).kv
    assert (kv.format, kv.scale_source) == (Format.E4M3FN, ScaleSource.DYNAMIC)
    assert kv.state == Format.INT8
    with refuses(ConfigError, "layer 0", "no attention", "none"):
        resolved(model, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="0")


def test_states_may_lie_no_further_apart_than_kernels_count() -> None:
    check(EngineArgs(state_every=2**30))
    with refuses(ConfigError, "--state-every 2147483648", "1073741824"):
        check(EngineArgs(state_every=2**31))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_a_publishers_own_code_decides_nothing(dtype: str) -> None:
    model = parse_model_config({**DELTA_NET, "mamba_ssm_dtype": dtype})
    assert model == parse_model_config(DELTA_NET)
    assert "mamba_ssm_dtype" not in (model.unread_keys.describe() or "")
    assert resolved(model).kv.state is Format.BFLOAT16


def test_what_is_compared_with_is_not_quantized() -> None:
    for asked, kept in (
        ("int8", "auto"),
        ("fp8", "auto"),
        ("auto", "auto"),
        ("float32", "float32"),
    ):
        assert EngineArgs(state_dtype=asked).with_plain_cache().state_dtype == kept
