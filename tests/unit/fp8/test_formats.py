"""The facts in fp8/formats.py, against torch and ml_dtypes, and the words that users type."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch

from freight.fp8.formats import COMPUTE_FORMATS, Format, Granularity, ScaleSource

FP8 = [format for format in Format if format.is_fp8]


def test_the_names_of_every_json() -> None:
    assert set(Format) == {
        "bfloat16",
        "float16",
        "float32",
        "fp8_e4m3fn",
        "fp8_e4m3fnuz",
        "fp8_e5m2",
        "int8",
    }
    assert set(Granularity) == {"tensor", "head", "channel", "token", "group"}
    assert set(ScaleSource) == {"checkpoint", "calibrated", "file", "given", "dynamic", "unit"}
    assert f"{Format.E4M3FN}" == "fp8_e4m3fn"


@pytest.mark.parametrize("format", Format)
def test_bytes_are_those_of_the_torch_dtype(format: Format) -> None:
    assert format.bytes == getattr(torch, format.torch_name).itemsize


@pytest.mark.parametrize("format", FP8)
def test_max_is_that_of_torch_and_of_ml_dtypes(format: Format) -> None:
    assert format.max == torch.finfo(getattr(torch, format.torch_name)).max
    assert format.max == float(ml_dtypes.finfo(format.torch_name).max)


def test_which_formats_are_fp8_and_which_compute() -> None:
    assert set(FP8) == {Format.E4M3FN, Format.E4M3FNUZ, Format.E5M2}
    assert set(COMPUTE_FORMATS) == {format for format in Format if not format.is_quantized}
    assert [format for format in Format if format.is_e4m3] == [Format.E4M3FN, Format.E4M3FNUZ]


def test_int8_is_quantized_and_not_fp8() -> None:
    assert Format.INT8.is_quantized
    assert not Format.INT8.is_fp8
    assert Format.INT8.max == torch.iinfo(torch.int8).max


@pytest.mark.parametrize("format", COMPUTE_FORMATS)
def test_a_format_that_does_not_saturate_has_no_max(format: Format) -> None:
    with pytest.raises(KeyError):
        _ = format.max
