"""Why scales and centers matter: models of the same function with keys or values of another size,
and biased keys.

Keys × c with queries / c, and values × c with the output projection / c, change nothing in 16 bits.
With measured scales the divergence from 16 bits stays what it is at c = 1; with scales of 1.0 the
model is destroyed, by saturation at c = 1000 and by underflow at c = 1e-4. A large key bias
destroys it under every scale, and centers repair that. It is the table of docs/numerics.md on less
text, and takes a minute: `make test-all` runs it.
"""

from __future__ import annotations

import measure_scales
import pytest
import torch
from measure_scales import SCALES, Row, as_table, judge, paired_difference, variants

from freight.checkpoint.reader import resolve_model
from freight.fp8.formats import Format

pytestmark = pytest.mark.slow
NUM_TOKENS = 2048
# How far the mean KL may be from that of the plain model, as a share of it. Codes differ, because c
# is no power of two and the rescaled weights are rounded anew. Measured on 16,384 tokens: within 10
# %.
NOISE = 0.25
MEASURED = SCALES[1:]


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Every variant, computed in bfloat16; scales measured on a little of the calibration text."""
    source = resolve_model("demo")
    text = (source / "heldout.txt").read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_scales, "NUM_SAMPLES", 4)
        patch.setattr(measure_scales, "FORMATS", (Format.E4M3FN,))
        data = source / "calibration.txt"
        return {
            name: judge(name, write, "demo", text, data, NUM_TOKENS)
            for name, write in variants("demo", list(range(5, 205))).items()
        }


def kl(row: Row, kind: str) -> float:
    return row.score(Format.E4M3FN, kind).mean_kl


@pytest.mark.parametrize("name", ["k × 1000", "v × 1e-4", "one hot pair"])
def test_rescaled_models_notice_scales_of_1_only(rows: dict[str, Row], name: str):
    plain, row = rows["plain"], rows[name]
    assert row.plain.num_tokens == NUM_TOKENS
    assert row.plain.perplexity == pytest.approx(plain.plain.perplexity, rel=0.005)
    for kind in MEASURED:
        assert kl(row, kind) == pytest.approx(kl(plain, kind), rel=NOISE)
        assert kl(row, "unit") > 5 * kl(row, kind)


@pytest.mark.parametrize("name", ["k × 1000", "v × 1e-4"])
def test_scales_of_1_destroy_them(rows: dict[str, Row], name: str):
    row = rows[name]
    assert kl(row, "unit") > 100 * kl(rows["plain"], "unit")
    assert row.score(Format.E4M3FN, "unit").perplexity > 2 * row.plain.perplexity


def test_calibrated_scales_are_no_worse_than_1_on_the_plain_model(rows: dict[str, Row]):
    runs = rows["plain"].runs
    unit = runs[Format.E4M3FN, "unit"].token_logprobs
    assert len(unit) == NUM_TOKENS
    for kind in MEASURED:
        _, low, _ = paired_difference(runs[Format.E4M3FN, kind].token_logprobs, unit)
        assert low <= 0


@pytest.mark.parametrize("name", ["bias, slow pair", "bias, fast pair"])
def test_centers_repair_biased_keys(rows: dict[str, Row], name: str):
    """Positions go to 1023, and the calibrated ones to 511."""
    centered = kl(rows[name], "centered")
    assert centered < 4 * kl(rows["plain"], "centered")
    for kind in ("unit", "tensor", "head", "channel"):
        assert kl(rows[name], kind) > 5 * centered
    assert kl(rows[name], "token") > 1.5 * centered


def test_centers_pay_on_the_plain_model(rows: dict[str, Row]):
    for kind in ("tensor", "head", "channel"):
        assert kl(rows["plain"], "centered") < 0.85 * kl(rows["plain"], kind)


def test_the_table_has_a_row_for_each(rows: dict[str, Row]):
    lines = as_table(list(rows.values()), Format.E4M3FN).splitlines()
    assert len(lines) == 2 + len(rows)
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["", "16 bits", *SCALES]


def test_a_difference_beyond_chance_is_outside_its_interval():
    generator = torch.Generator().manual_seed(0)
    loss, noise = (torch.randn(4096, generator=generator, dtype=torch.float32) for _ in range(2))
    mean, low, high = paired_difference(loss, loss + 0.05 + 0.1 * noise)
    assert low < mean < high
    assert 0.04 < low < 0.05 < high < 0.06
    _, low, high = paired_difference(loss, loss + 0.1 * (noise - noise.mean()))
    assert low < 0 < high
