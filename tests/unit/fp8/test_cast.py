"""FP8 encode and decode, exhaustively: every code, every midpoint, every edge, against ml_dtypes
and golden.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import amax, clipped, convert_e4m3, decode, encode, format_of, torch_dtype
from freight.fp8.formats import Format

FP8 = [format for format in Format if format.is_fp8]
ML = {format: np.dtype(getattr(ml_dtypes, format.torch_name)) for format in FP8}
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "golden.json").read_text()
)


def all_codes(format: Format) -> Tensor:
    """[256] every code once."""
    return torch.arange(256, dtype=torch.uint8).view(torch_dtype(format))


def codes(stored: Tensor) -> list[int]:
    return stored.view(torch.uint8).flatten().tolist()


def magnitudes(format: Format) -> np.ndarray:
    """Every finite magnitude of `format`, ascending, float32."""
    values = np.arange(128, dtype=np.uint8).view(ML[format]).astype(np.float32)
    return np.sort(values[np.isfinite(values)])


def expected(values: np.ndarray, format: Format) -> list[int]:
    """What ml_dtypes makes of `values` (float32) after clamping."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.clip(values, -format.max, format.max).astype(ML[format]).view(np.uint8).tolist()


def check_encode(values: np.ndarray, format: Format) -> None:
    values = np.concatenate([values, -values]).astype(np.float32)
    assert codes(encode(torch.from_numpy(values), 1.0, format)) == expected(values, format)


@pytest.mark.parametrize("format", FP8)
def test_every_code_decodes_as_ml_dtypes_and_the_golden_table_say(format: Format) -> None:
    ours = decode(all_codes(format))
    theirs = np.arange(256, dtype=np.uint8).view(ML[format]).astype(np.float32)
    golden = [
        np.nan if value is None else float(value) for value in GOLDEN["decode"][format.torch_name]
    ]
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), theirs)
    np.testing.assert_array_equal(ours.numpy(), np.array(golden, np.float32))
    np.testing.assert_array_equal(
        np.signbit(ours.numpy()[~np.isnan(theirs)]), np.signbit(theirs[~np.isnan(theirs)])
    )


@pytest.mark.parametrize("format", FP8)
def test_every_midpoint_and_its_float32_neighbours_round_to_nearest_even(format: Format) -> None:
    known = magnitudes(format)
    middle = ((known[:-1].astype(np.float64) + known[1:]) / 2).astype(np.float32)
    assert len(known) >= 124
    for probe in (
        known,
        middle,
        np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(np.inf)),
    ):
        check_encode(probe, format)
    # the oracle itself: ties go to the code whose last bit is 0, neighbours to the nearer side
    low = np.array(expected(known[:-1], format))
    tied = np.array(codes(encode(torch.from_numpy(middle), 1.0, format)))
    assert (tied == low + (low & 1)).all()
    assert (
        codes(encode(torch.from_numpy(np.nextafter(middle, np.float32(0))), 1.0, format))
        == low.tolist()
    )


@pytest.mark.parametrize("format", FP8)
def test_float32_neighbours_of_every_value_encode_to_it(format: Format) -> None:
    known = magnitudes(format)[1:]
    for probe in (np.nextafter(known, np.float32(0)), np.nextafter(known, np.float32(np.inf))):
        assert codes(encode(torch.from_numpy(probe), 1.0, format)) == expected(known, format)


@pytest.mark.parametrize("format", FP8)
def test_past_the_range_and_infinity_saturate_with_their_sign(format: Format) -> None:
    beyond = np.array([1.0, 1.01, 1.04, 1.0625, 1.1, 2, 1e3, 1e30], np.float32) * np.float32(
        format.max
    )
    beyond = np.concatenate([beyond, [np.float32(np.inf), np.finfo(np.float32).max]]).astype(
        np.float32
    )
    stored = encode(torch.from_numpy(np.concatenate([beyond, -beyond])), 1.0, format)
    assert decode(stored).tolist() == [format.max] * len(beyond) + [-format.max] * len(beyond)


@pytest.mark.parametrize("format", FP8)
def test_zeros_keep_their_sign_where_the_format_has_one(format: Format) -> None:
    tiny = [0.0, 1e-45, 1e-38, float(magnitudes(format)[1]) / 2]  # the last is the tie with zero
    stored = codes(encode(torch.tensor(tiny + [-x for x in tiny]), 1.0, format))
    negative = 0x00 if format is Format.E4M3FNUZ else 0x80  # 0x80 is FNUZ's NaN
    assert stored == [0x00] * 4 + [negative] * 4


@pytest.mark.parametrize("format", FP8)
def test_nan_stays_nan(format: Format) -> None:
    assert decode(encode(torch.tensor([torch.nan, -torch.nan]), 0.5, format)).isnan().all()


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_encodes_as_its_float32_does(
    format: Format, dtype: torch.dtype
) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = ~x.isnan()
    stored = encode(x, 1.0, format)
    assert codes(stored.view(torch.uint8)[finite]) == expected(x[finite].float().numpy(), format)
    assert decode(stored)[~finite].isnan().all()


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize(
    "scale", [0.0152239128947258, 1 / 3, 0.75, 1.0, 7.3, 2.0**-126, 1e-40, 1e30]
)
def test_the_scale_divides_in_float32(format: Format, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * format.max * scale / 3
    with np.errstate(over="ignore"):
        divided = x.numpy() / np.float32(scale)
    assert divided.dtype == np.float32
    assert codes(encode(x, scale, format)) == expected(divided, format)
    assert codes(encode(x, torch.tensor(scale), format)) == expected(divided, format)
    assert codes(encode(x, torch.tensor(scale, dtype=torch.float64), format)) == expected(
        divided, format
    )


def test_division_is_not_multiplication_by_the_reciprocal() -> None:
    """Near a midpoint the reciprocal's rounding changes the code: an encoder that multiplies would
    fail here.
    """
    scale = np.float32(0.0152239128947258)
    middle = (magnitudes(Format.E4M3FN)[:-1] + magnitudes(Format.E4M3FN)[1:]) / 2
    x = (middle * scale).astype(np.float32)
    exact, reciprocal = x / scale, x * (np.float32(1) / scale)
    assert expected(exact, Format.E4M3FN) != expected(reciprocal, Format.E4M3FN)
    assert codes(encode(torch.from_numpy(x), float(scale), Format.E4M3FN)) == expected(
        exact, Format.E4M3FN
    )


def test_scales_broadcast_per_row() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    stored = encode(x, torch.tensor([[0.5], [2.0]]), Format.E4M3FN)
    assert stored.shape == x.shape
    assert decode(stored).tolist() == [[2.0, 4.0], [1.5, 2.0]]
    assert torch.equal(decode(stored, torch.tensor([[0.5], [2.0]])), x)


def test_golden_encode_cases() -> None:
    values, wanted = zip(*GOLDEN["encode_e4m3fn_clamped_rne"], strict=True)
    assert codes(encode(torch.tensor(values), 1.0, Format.E4M3FN)) == list(wanted)


def golden_weight() -> Tensor:
    bits = np.array(GOLDEN["weight_bf16_8x32"]["bits_u16"], np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).reshape(8, 32)


def test_golden_weight_with_a_float32_scale() -> None:
    wanted = GOLDEN["weight_bf16_8x32"]["f32_reference"]
    weight = golden_weight()
    scale = amax(weight, (0, 1)) / Format.E4M3FN.max
    assert float(scale) == wanted["scale_f32"]
    assert codes(encode(weight, scale, Format.E4M3FN)) == wanted["codes"]


@pytest.mark.parametrize("producer", ["ct_tensor", "ct_channel"])
def test_golden_weight_of_a_producer_that_divides_in_bfloat16(producer: str) -> None:
    wanted = GOLDEN["weight_bf16_8x32"][producer]
    scale = torch.tensor(wanted["scale_bf16"], dtype=torch.bfloat16).reshape(-1, 1)
    assert codes(encode(golden_weight() / scale, 1.0, Format.E4M3FN)) == wanted["codes"]


def test_golden_weight_of_a_producer_that_multiplies_by_the_reciprocal() -> None:
    wanted = GOLDEN["weight_bf16_8x32"]["autofp8"]
    reciprocal = (1 / torch.tensor(wanted["scale_f32"])).bfloat16()
    assert codes(encode(golden_weight() * reciprocal, 1.0, Format.E4M3FN)) == wanted["codes"]


def test_fn_bytes_become_fnuz_bytes_of_the_same_values() -> None:
    stored, scale = convert_e4m3(all_codes(Format.E4M3FN), torch.tensor(0.75), Format.E4M3FNUZ)
    got, golden = codes(stored), GOLDEN["fn_to_fnuz_bytes"]
    nan = [0x7F, 0xFF]  # the golden map leaves these, which FNUZ reads as ±240; NaN must stay NaN
    assert [got[c] for c in range(256) if c not in nan] == [
        golden[c] for c in range(256) if c not in nan
    ]
    assert [got[c] for c in nan] == [0x80, 0x80]
    assert scale.item() == 1.5
    np.testing.assert_array_equal(
        decode(stored, scale).numpy(), decode(all_codes(Format.E4M3FN), 0.75).numpy()
    )


def test_fnuz_bytes_become_fn_bytes_of_the_same_values_but_for_240() -> None:
    stored, scale = convert_e4m3(all_codes(Format.E4M3FNUZ), torch.tensor(1.5), Format.E4M3FN)
    before = decode(all_codes(Format.E4M3FNUZ), 1.5)
    after = decode(stored, scale)
    assert scale.item() == 0.75
    assert after[0x80].isnan()
    same = torch.ones(256, dtype=torch.bool)
    same[[0x7F, 0x80, 0xFF]] = False
    assert torch.equal(after[same], before[same])
    assert (after[0x7F].item(), after[0xFF].item()) == (224 * 1.5, -224 * 1.5)


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
def test_converting_to_the_same_variant_changes_nothing(format: Format) -> None:
    stored, scale = all_codes(format), torch.tensor(0.5)
    converted, same_scale = convert_e4m3(stored, scale, format)
    assert converted is stored
    assert same_scale is scale


def test_converting_and_back_keeps_every_number() -> None:
    there, scale = convert_e4m3(all_codes(Format.E4M3FN), torch.tensor([0.3, 0.7]), Format.E4M3FNUZ)
    back, same_scale = convert_e4m3(there, scale, Format.E4M3FN)
    assert torch.equal(same_scale, torch.tensor([0.3, 0.7]))
    np.testing.assert_array_equal(decode(back).numpy(), decode(all_codes(Format.E4M3FN)).numpy())


@pytest.mark.parametrize(
    ("have", "want"), [(Format.E5M2, Format.E4M3FN), (Format.E4M3FN, Format.E5M2)]
)
def test_e5m2_shares_no_bytes_with_e4m3(have: Format, want: Format) -> None:
    with pytest.raises(KernelError, match="cannot be reinterpreted"):
        convert_e4m3(all_codes(have), torch.tensor(1.0), want)


@pytest.mark.parametrize("format", Format)
def test_the_format_is_read_off_the_tensor(format: Format) -> None:
    assert format_of(torch.empty(1, dtype=torch_dtype(format))) is format


def test_a_dtype_that_is_no_format_is_refused() -> None:
    with pytest.raises(KernelError, match=r"torch\.int32"):
        format_of(torch.zeros(1, dtype=torch.int32))


def test_int8_codes_are_integers_and_the_one_that_symmetry_leaves_is_nan() -> None:
    stored = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    values = decode(stored)
    assert values.dtype == torch.float32
    assert values[0].isnan()
    assert values[1:].tolist() == list(range(-127, 128))
    assert torch.equal(encode(values, 1.0, Format.INT8), stored)


@pytest.mark.parametrize("scale", [0.0152239128947258, 1 / 3, 1.0, 7.3, 2.0**-126, 1e30])
def test_int8_rounds_the_float32_quotient_to_nearest_even(scale: float) -> None:
    """Against float64: every integer, every midpoint, their neighbours, and what lies beyond."""
    middle = np.concatenate([np.arange(-130, 130, 0.5), [1e30, np.inf, -np.inf, -0.0]]).astype(
        np.float32
    )
    quotients = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(200))]
    )
    with np.errstate(over="ignore", under="ignore"):
        x = quotients * np.float32(scale)
        wanted = np.rint(np.clip((x / np.float32(scale)).astype(np.float64), -127, 127))
    stored = encode(torch.from_numpy(x), scale, Format.INT8)
    assert stored.dtype == torch.int8
    assert stored.tolist() == wanted.astype(int).tolist()
    beyond = np.abs(x / np.float32(scale)) > 127.5
    assert clipped(torch.from_numpy(x), scale, Format.INT8).tolist() == beyond.tolist()


def test_int8_keeps_nan() -> None:
    assert encode(torch.tensor([torch.nan, -torch.nan, 0.0]), 0.5, Format.INT8).tolist() == [
        -128,
        -128,
        0,
    ]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
scales = st.floats(2.0**-40, 2.0**40, width=32)
formats = st.sampled_from([*FP8, Format.INT8])


@given(st.lists(finite, min_size=1), scales, formats)
def test_encoding_what_was_decoded_changes_nothing(
    values: list[float], scale: float, format: Format
) -> None:
    once = encode(torch.tensor(values), scale, format)
    assert codes(encode(decode(once, scale), scale, format)) == codes(once)


@given(st.lists(finite, min_size=2), scales, formats)
def test_encoding_keeps_order(values: list[float], scale: float, format: Format) -> None:
    stored = decode(encode(torch.tensor(sorted(values)), scale, format))
    assert (stored[1:] >= stored[:-1]).all()


@given(st.floats(-1, 1, width=32), formats)
def test_the_error_is_at_most_half_a_step(fraction: float, format: Format) -> None:
    x = torch.tensor(fraction * format.max)
    known = torch.arange(128.0) if format is Format.INT8 else torch.from_numpy(magnitudes(format))
    at = int(torch.searchsorted(known, x.abs()).clamp(1, len(known) - 1))
    step = (known[at] - known[at - 1]).item()
    assert abs(decode(encode(x, 1.0, format)).item() - x.item()) <= step / 2
