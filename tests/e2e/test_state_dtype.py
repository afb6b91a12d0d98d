"""A trained model with delta nets, its states in every format: same bits in any company, and the
line at start.

The oracle is each request alone, its prompt in one step.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.means import said
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.engine.fingerprint import fingerprint
from freight.errors import ConfigError
from freight.lab.evaluate.advice import how_to
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report import compare_caches
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

FOLDER = Path(__file__).parents[1] / "fixtures/hybrids/delta_net"
TEXT = (Path(__file__).parents[2] / "src/freight/demo/heldout.txt").read_text()[:6000]
FORMATS = ["float32", "bfloat16", "int8", "fp8", "fp8_e4m3fnuz"]
SIZES: dict[str, Any] = {"kv_cache_memory": "3MiB", "state_every": 32, "max_model_len": 256}
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=7, logprobs=2, ignore_eos=True)


def engine(state_dtype: str = "auto", **options: Any) -> LLM:
    return LLM(str(FOLDER), state_dtype=state_dtype, **{**SIZES, **options})


def ids(count: int) -> list[int]:
    tokenizer = open_model(EngineArgs(str(FOLDER))).load_tokenizer()
    assert tokenizer is not None
    return tokenizer.encode(TEXT, add_special_tokens=False)[:count]


PROMPTS = [ids(200)[:count] for count in (150, 1, 31, 32, 33, 96, 17, 16)]


@pytest.mark.parametrize("state_dtype", FORMATS)
def test_the_reference_has_the_same_promise(state_dtype: str) -> None:
    params, prompts = replace(DRAWN, max_tokens=6, temperature=0.0), [PROMPTS[4], PROMPTS[6]]
    options: dict[str, Any] = {"kernels": "reference", "enable_prefix_caching": False}
    whole, parts, compiled = (
        engine(state_dtype, dtype="float32", **made)
        for made in (options, {**options, "max_num_batched_tokens": 5}, {})
    )
    plain = [said(whole, [prompt], params)[0][0] for prompt in prompts]
    assert [tokens for tokens, _ in said(parts, prompts, params)] == plain
    assert [tokens for tokens, _ in said(compiled, prompts, params)] == plain


def test_formats_have_their_own_bits_and_fingerprints() -> None:
    """`auto` is the format that it stands for."""
    bits, prints = {}, {}
    for name in ("auto", *FORMATS):
        args = EngineArgs(str(FOLDER), state_dtype=name, dtype="bfloat16")
        opened = open_model(args)
        config = opened.resolve(args)
        prints[name] = fingerprint(opened, config, opened.kernels(config), "1")
        bits[name] = said(engine(name), PROMPTS[:1], DRAWN)[0][1]
    assert prints["auto"] == prints["bfloat16"]
    assert bits["auto"] == bits["bfloat16"]
    assert len(set(prints.values())) == len(set(bits.values())) == len(FORMATS)


def test_the_tile_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for tile in (16, 32):
        monkeypatch.setattr("freight.engine.fingerprint.STATE_TILE", tile)
        for model in (str(FOLDER), "demo"):
            opened = open_model(EngineArgs(model))
            config = opened.resolve(opened.args)
            found.add((model == "demo", fingerprint(opened, config, opened.kernels(config), "1")))
    assert len(found) == 3  # a model without states has no tile


# Bytes of 3 layers beside the 4 heads of 64 x 64 values: 16 rows of 2 keys and 4 values of 64
# channels and 3 columns of 512 inputs in bfloat16, with 8 more for drafts, 16 decays of 4 heads in float32.
REST = 3 * (2 * 16 * (2 + 4) * 64 + 2 * (3 + 8) * 512 + 4 * 16 * 4)


@pytest.mark.parametrize(
    ("state_dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("fp8", 1)]
)
def test_the_line_at_start_says_what_a_format_saves(
    state_dtype: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "freight"):
        llm = engine(state_dtype)
    line = next(message for message in caplog.messages if message.startswith("KV cache"))
    taken = REST + 3 * 4 * 64 * 64 * size + (3 * 2 * 4 * 64 if size == 1 else 0)
    whole = REST + 3 * 4 * 64 * 64 * 4
    name = "fp8_e4m3fn" if state_dtype == "fp8" else state_dtype
    wanted = f"states: {name}, rounded every 16 tokens; a sequence has {taken / 1024:.1f} KiB"
    wanted += f", in float32 {whole / 1024:.1f} KiB; "
    if size == 4:
        wanted = f"states: float32; a sequence has {whole / 1024:.1f} KiB; "
    assert wanted in line
    assert llm.engine.runner.pool.spec.bytes_per_state == taken


def test_a_model_without_states_refuses_it_before_weights_are_read() -> None:
    with refuses(ConfigError, "--state-dtype int8", "no layer"):
        LLM("demo", state_dtype="int8")


def test_evaluation_stores_states_as_the_engine_would() -> None:
    """Beside 16 bits unquantized; an 8-bit format beside a 16-bit cache is a row of its own."""
    args = EngineArgs(str(FOLDER), state_dtype="int8")
    plain, kept = compare_caches(args, [("bfloat16", "auto")], TEXT, window=128, max_tokens=256)
    assert plain.mean_kl == 0.0 < kept.mean_kl < 1e-3
    assert plain.bytes_per_token == kept.bytes_per_token


def evaluated(options: dict[str, str], **grid: Any) -> Evaluation:
    grid = {"window": 128, "max_tokens": 256, "speed": False, **grid}
    return evaluate_grid(EngineArgs(str(FOLDER), **options), [TEXT], GridArgs(**grid))


def test_evaluation_measures_states_apart() -> None:
    fp8 = ("states fp8_e4m3fn", "fp8_e4m3fn")
    for options, rows in (
        ({}, [("token", "bfloat16"), ("states int8", "int8"), fp8]),
        ({"state_dtype": "float32"}, [("token", "float32")]),
        ({"state_dtype": "fp8"}, [("token", "bfloat16"), fp8]),
    ):
        evaluation = evaluated(options, caches=("token",))
        first, *others = evaluation.runs
        assert first.state_dtype == rows[0][1]
        assert [(one.name, one.state_dtype) for one in others] == rows
        assert all(one.kl_mean > 0 for one in others)
        command = f"freight serve {FOLDER} --kv-cache-dtype fp8 --kv-scales dynamic"
        command += f" --state-dtype {rows[0][1]}"
        assert how_to(others[0], evaluation.overview) == command


def test_a_cache_that_is_asked_for_is_measured_by_its_parts_and_whole() -> None:
    for state_dtype, name in (("auto", "int8"), ("fp8", "fp8_e4m3fn")):
        runs = evaluated({"kv_cache_dtype": "fp8", "state_dtype": state_dtype}).runs
        assert [(one.name, one.kv_cache_dtype, one.state_dtype) for one in runs] == [
            ("16 bits", "bfloat16", "bfloat16"),
            ("token, dynamic", "fp8_e4m3fn", "bfloat16"),
            (f"states {name}", "bfloat16", name),
            (f"token, dynamic, states {name}", "fp8_e4m3fn", name),
        ]


def test_states_alone_are_evaluated_beside_16_bits() -> None:
    runs = evaluated({"kv_cache_dtype": "bfloat16", "state_dtype": "int8"}, per_layer=True).runs
    rows = [("16 bits", "bfloat16"), ("states int8", "int8")]
    assert [(one.name, one.state_dtype) for one in runs] == rows
    assert runs[1].layer_kl is not None
    # the last one has attention
    assert [kl > 0 for kl in runs[1].layer_kl] == [True] * 3 + [False]


def test_other_states_are_refused() -> None:
    named = {"state_dtype": "int8"}
    for options, states, parts in (
        ({}, "int4", ("--states 'int4'", "float32, bfloat16, int8 or fp8")),
        (named, "fp8", ("--states", "--state-dtype", "omit one")),
        ({"model": "demo"}, "int8", ("--states int8", "no layer", "llama")),
    ):
        with refuses(ConfigError, *parts):
            args = EngineArgs(**{"model": str(FOLDER), **options})
            evaluate_grid(args, [TEXT], GridArgs(states=(states,)))


def test_config_json_may_name_the_publishers_dtype(tmp_path: Path) -> None:
    """It changes neither bits nor fingerprint: `--state-dtype float32` is what asks for it."""
    for file in FOLDER.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mamba_ssm_dtype": "float32"}))
    named = LLM(str(tmp_path), **SIZES)
    assert said(named, PROMPTS[:1], DRAWN) == said(engine(), PROMPTS[:1], DRAWN)
