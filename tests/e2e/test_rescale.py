"""Why scales matter: models that compute the same function, with keys or values of another size.

k_proj × c with q_proj / c, and v_proj × c with o_proj / c, change nothing in 16 bits. With scales measured per token,
the divergence from 16 bits stays what it is at c = 1; with scales of 1.0 the model is destroyed, by saturation at
c = 1000 and by underflow at c = 1e-4.
"""

from __future__ import annotations

import pytest

from freight.checkpoint.reader import resolve_model
from freight.config.engine import EngineArgs
from freight.evaluate import rescale
from freight.evaluate.report import CacheScore, compare_caches
from freight.evaluate.rescale import VARIANTS, calibrated_score, rescale_model

NUM_TOKENS = 2048
# How far the mean KL may be from that of c = 1, as a share of it. Codes differ, because c is no power of two and the
# rescaled weights are rounded anew. Measured: the five variants lie within 2 % of each other.
NOISE = 0.15
# Measured: 1000 to 3000 times the divergence of c = 1. A tenth of the least of them is still ruin.
RUIN = 100.0


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, float], list[CacheScore]]:
    """[16 bits, unit, dynamic] for each (c of keys, c of values)."""
    source = resolve_model("demo")
    text = (source / "heldout.txt").read_text(encoding="utf-8")
    results = {}
    for keys, values in VARIANTS:
        folder = tmp_path_factory.mktemp("rescaled") / "model"
        rescale_model(source, folder, keys, values)
        args = EngineArgs(model=str(folder), dtype="bfloat16")
        caches = [("fp8_e4m3", "unit"), ("fp8_e4m3", "dynamic")]
        results[keys, values] = compare_caches(args, caches, text, window=512, max_tokens=NUM_TOKENS)
        (folder / "model.safetensors").unlink()
    return results


def test_the_variants_are_those_that_are_documented():
    assert set(VARIANTS) == {(1.0, 1.0), (1000.0, 1.0), (1e-4, 1.0), (1.0, 1000.0), (1.0, 1e-4)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_16_bits_and_dynamic_do_not_notice(
    scores: dict[tuple[float, float], list[CacheScore]], variant: tuple[float, float]
):
    reference, _, dynamic_reference = scores[1.0, 1.0]
    plain, _, dynamic = scores[variant]
    assert plain.num_tokens == NUM_TOKENS
    assert plain.perplexity == pytest.approx(reference.perplexity, rel=0.005)
    assert dynamic.perplexity == pytest.approx(plain.perplexity, rel=0.005)
    assert 0 < dynamic.mean_kl == pytest.approx(dynamic_reference.mean_kl, rel=NOISE)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_unit_scales_do(scores: dict[tuple[float, float], list[CacheScore]], variant: tuple[float, float]):
    _, unit_reference, dynamic_reference = scores[1.0, 1.0]
    plain, unit, _ = scores[variant]
    assert unit.mean_kl > RUIN * max(unit_reference.mean_kl, dynamic_reference.mean_kl)
    assert unit.perplexity > 2 * plain.perplexity


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, float], CacheScore]:
    """One scale per layer, measured on a little of the calibration text."""
    source, results = resolve_model("demo"), {}
    text = (source / "heldout.txt").read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescale, "NUM_SAMPLES", 4)
        for keys, values in ((1.0, 1.0), (1000.0, 1.0), (1.0, 1e-4)):
            folder = tmp_path_factory.mktemp("calibrated") / "model"
            rescale_model(source, folder, keys, values)
            results[keys, values] = calibrated_score(
                folder, "tensor", source / "calibration.txt", text, NUM_TOKENS, 512
            )
            (folder / "model.safetensors").unlink()
    return results


def test_calibrated_scales_do_not_notice_either(
    scores: dict[tuple[float, float], list[CacheScore]], calibrated: dict[tuple[float, float], CacheScore]
):
    plain = scores[1.0, 1.0][0]
    for score in calibrated.values():
        assert (score.granularity, score.scale_source) == ("tensor", "checkpoint")
        assert score.perplexity == pytest.approx(plain.perplexity, rel=0.01)
    for variant in ((1000.0, 1.0), (1.0, 1e-4)):
        _, unit, _ = scores[variant]
        assert 5 * calibrated[variant].mean_kl < unit.mean_kl
