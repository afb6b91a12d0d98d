"""plan: defaults that follow from one another, and what is refused before a file is opened."""

from __future__ import annotations

from typing import Any

import pytest

from freight.errors import ConfigError
from freight.fp8.formats import Granularity
from freight.quantizer.plan import QuantizeArgs, plan


def decide(**options: Any) -> tuple[str, str, Granularity | None]:
    decided = plan(QuantizeArgs.from_options(**options))
    return decided.weights, decided.activations, decided.kv_granularity


@pytest.mark.parametrize(
    ("options", "decided"),
    [
        ({}, ("fp8-channel", "dynamic", None)),
        ({"weights": "none", "kv_cache": "fp8"}, ("none", "none", Granularity.TENSOR)),
        ({"format": "fp8"}, ("fp8", "dynamic", None)),
        ({"format": "fp8", "weights": "fp8-block"}, ("fp8-block", "dynamic", None)),
        ({"format": "tgi"}, ("none", "none", Granularity.TENSOR)),
        (
            {"kv_cache": "fp8", "kv_granularity": "head"},
            ("fp8-channel", "dynamic", Granularity.HEAD),
        ),
        ({"weights": "fp8", "activations": "none"}, ("fp8", "none", None)),
        ({"weights": "fp8-weight-only"}, ("fp8-channel", "none", None)),
        ({"weights": "fp8-weight-only", "activations": "none"}, ("fp8-channel", "none", None)),
    ],
)
def test_what_is_not_said_follows(
    options: dict[str, Any], decided: tuple[str, str, Granularity | None]
):
    assert decide(**options) == decided


def test_the_defaults_need_no_data():
    assert not plan(QuantizeArgs()).needs_data


def test_what_needs_data_is_named():
    decided = plan(QuantizeArgs(activations="static", kv_cache="fp8"))
    assert decided.needs_data
    assert decided.needed_by == "--activations static and --kv-cache fp8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "fp8-row"}, "--weights 'fp8-row' is unknown"),
        ({"kv_cache": "fp16"}, "--kv-cache 'fp16' is unknown"),
        ({"kv_cache": "fp8", "kv_granularity": "token"}, "--kv-granularity 'token' is unknown"),
        ({"format": "gguf"}, "--format 'gguf' is unknown"),
        ({"kv_cache": "fp8", "observer": "minmax"}, "--observer 'minmax' is unknown"),
        ({"weights": "none"}, "leave nothing to do"),
        (
            {"weights": "fp8-weight-only", "activations": "static"},
            "--activations static with --weights fp8-weight-only: .*--weights fp8-channel",
        ),
        (
            {"weights": "none", "activations": "static", "kv_cache": "fp8"},
            "--activations static with --weights none",
        ),
        ({"weights": "fp8-block", "activations": "static"}, "dynamic groups"),
        ({"format": "fp8", "weights": "fp8-channel"}, "--format fp8 with --weights fp8-channel"),
        ({"format": "fp8", "activations": "none"}, "--format fp8 with --activations none"),
        ({"format": "tgi", "weights": "fp8"}, "--format tgi with --weights fp8"),
        ({"format": "tgi", "kv_cache": "none"}, "leave nothing to do"),
        ({"kv_granularity": "head"}, "--kv-granularity head changes nothing"),
        ({"center": True}, "--center changes nothing with --kv-cache none"),
        (
            {"weights": "none", "kv_cache": "fp8", "lm_head": True},
            "--lm-head changes nothing with --weights none",
        ),
        (
            {"weights": "none", "kv_cache": "fp8", "ignore": ["lm_head"]},
            "--ignore lm_head changes nothing",
        ),
        (
            {"calibration_data": "text.txt"},
            "--calibration-data is given, but nothing is calibrated",
        ),
        ({"observer": "mse"}, "--observer is given, but nothing is calibrated"),
        ({"kv_cache": "fp8", "num_samples": 0}, "--num-samples 0"),
        ({"kv_cache": "fp8", "max_seq_len": 1}, "--max-seq-len 1"),
        ({"kv_cache": "fp8", "max_seq_len": True}, "--max-seq-len True"),
        ({"ignore": "lm_head"}, "give a list"),
        ({"kv_cache_dtype": "fp8"}, r"did you mean kv_cache\?"),
        ({"dataset": []}, r"did you mean calibration_data\?"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        decide(**options)
