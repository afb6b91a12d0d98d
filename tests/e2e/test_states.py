"""A model with layers that keep a state, through all that runs a model: the kind is that of
`tests/means.py`.

The oracle is the same model computed as plainly as it can be: one request, all of its prompt in one
step.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.means import (
    DRAWN,
    IDS,
    LENGTH,
    MEANS,
    PROMPTS,
    Mean,
    engine,
    plain_answers,
    register,
    said,
    save_means,
)
from tests.parity.random_models import freight_logits
from tests.refusals import assert_names, refuses

import freight
from freight import LLM, SamplingParams
from freight.cache.pool import PagedState
from freight.cli.plan import _print as print_plan
from freight.engine.fingerprint import fingerprint
from freight.errors import ConfigError
from freight.lab.capacity import Wish, as_json, make_plan
from freight.lab.evaluate import long
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report import cache_run, compare_caches
from freight.lab.evaluate.retrieval import Question, RetrievalContext
from freight.lab.evaluate.sensitivity import per_layer
from freight.model.open import open_checkpoint, open_model
from freight.model.sizes import Layout, loaded_bytes
from freight.model.weight_bytes import weight_bytes
from freight.operands.batch import ForwardBatch
from freight.operands.states import States
from freight.settings.engine import EngineArgs


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_means(tmp_path_factory.mktemp("means"))


# ------------------------------------------------------------------------------------------------------------
# same bits


# Tokens of a step and of a block that are tried, and the rest, which is slow
QUICK = [("bfloat16", (7, 33), (64,)), ("fp8-token", (1, 16), (16, 256))]
REST = [("bfloat16", (1, 16), (16, 256)), ("fp8-token", (7, 33), (64,))]


@pytest.mark.parametrize(
    ("cache", "chunks", "blocks"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in REST)],
)
def test_no_company_changes_a_bit(
    folder: Path, cache: str, chunks: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    """Chunks, neighbours and the size of blocks, prefix hits, preemption."""
    plain, alone = plain_answers(folder, [cache])[cache], {"enable_prefix_caching": False}
    for chunk in chunks:
        llm = engine(folder, cache, max_num_batched_tokens=chunk, **alone)
        for index in (0, 4, 9):
            assert said(llm, [PROMPTS[index]])[0] == plain[index]
    for every in blocks:
        llm = engine(folder, cache, max_num_batched_tokens=48, state_every=every, **alone)
        assert said(llm, PROMPTS) == plain
        assert llm.engine.cache.num_held == 0
    llm = engine(folder, cache, max_num_batched_tokens=48)
    assert said(llm, PROMPTS) == plain
    before = llm.engine.scheduler.totals.prefix_hits
    assert said(llm, PROMPTS) == plain
    assert llm.engine.scheduler.totals.prefix_hits > before + 500
    if cache == "bfloat16":
        sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "max_model_len": 340}
        llm = engine(folder, kv_cache_memory="140KiB", **sizes)
        assert said(llm, PROMPTS) == plain
        assert llm.engine.scheduler.totals.preemptions > 0
        assert llm.engine.cache.num_held == 0


def test_siblings_share_states(folder: Path) -> None:
    """Completions of one prompt begin with its last full state, and each goes on in a block of its
    own.
    """
    answers = []
    for options in ({"max_num_batched_tokens": 48}, {"enable_prefix_caching": False}):
        llm, prompt = engine(folder, **options), {"prompt_token_ids": IDS[:200]}
        outputs = llm.generate([prompt], replace(DRAWN, n=3))[0].outputs
        answers.append([repr((one.token_ids, one.logprobs)) for one in outputs])
    assert answers[0] == answers[1]


def test_hits_are_multiples_of_a_state(folder: Path) -> None:
    llm, plain = (
        engine(folder, max_num_batched_tokens=48),
        engine(folder, enable_prefix_caching=False),
    )
    said(llm, [IDS])
    for shared, hit in ((300, 256), (200, 192), (63, 0), (64, 64), (128, 128)):
        other = IDS[:shared] + [token ^ 1 for token in IDS[shared:]]
        output = llm.generate([{"prompt_token_ids": other}], DRAWN)[0]
        assert output.num_cached_tokens == hit
        assert said(plain, [other])[0][0] == list(output.outputs[0].token_ids)


def test_the_mean_is_the_mean(folder: Path) -> None:
    """The layer alone, in float64 from its weights, against what the engine's layer gives in
    float32 over chunks.
    """
    opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32"))
    decoder = opened.load(opened.resolve(opened.args))
    mean = decoder.layers[0].mixer  # type: ignore[attr-defined]
    assert isinstance(mean, Mean)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    cache = PagedState(States({"sum": torch.full((4, 48), float("nan"))}, 32))
    found, start = [], 0
    for count in (1, 30, 2, 40, 27):
        rows = torch.arange(start, start + count)
        batch = ForwardBatch(
            rows, rows, torch.tensor([0, count], dtype=torch.int32), torch.tensor([start + count], dtype=torch.int32),
            (rows[:0],), (torch.tensor([[2, 0, 3, 1]], dtype=torch.int32),), rows[:0],
        )  # fmt: skip
        found.append(mean(x[rows], batch, cache))
        start += count
    stored = load_file(folder / "model.safetensors")
    names = [f"model.layers.0.mean.{name}.weight" for name in ("in_proj", "out_proj")]
    inner, out = (stored[name].double() for name in names)
    u = x.double() @ inner.T
    expected = (u.cumsum(0) / torch.arange(1, 101)[:, None]) @ out.T
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-4, atol=1e-5)
    assert cache.states.parts["sum"].isfinite().all()


# --------------------------------------------------------------------------------------------------------------
# options


def test_the_line_at_start_has_the_states(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "freight"):
        engine(folder, max_num_seqs=8)
    line = next(message for message in caplog.messages if message.startswith("KV cache"))
    assert_names(line, "2 layers", "64 tokens", "34 blocks", "2,176 tokens", "12.8 KiB")


def test_the_default_is_at_most_an_eighth_of_the_context(folder: Path) -> None:
    for length, every in ((512, 64), (256, 32), (64, 16)):
        opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=length))
        assert opened.cache_spec(opened.resolve(opened.args)).state_every == every


def test_other_numbers_are_refused() -> None:
    numbers: list[Any] = [0, 8, 48, 96, -64, True, "64"]
    for every in numbers:
        with refuses(ConfigError, f"--state-every {every!r}", "power of two", "16 or more"):
            open_model(EngineArgs("demo", state_every=every))


def test_it_is_a_multiple_of_the_block_size(folder: Path) -> None:
    with refuses(ConfigError, "--state-every 32", "--block-size 64", "64, 128 or 256"):
        open_model(EngineArgs(str(folder), state_every=32, block_size=64))
    assert said(engine(folder, block_size=64, state_every=64), [IDS[:70]])


def test_a_model_without_states_refuses_it_before_weights_are_read() -> None:
    with refuses(ConfigError, "--state-every 64", "no layer"):
        LLM("demo", state_every=64)


def test_it_is_in_no_fingerprint(folder: Path) -> None:
    """It decides no bit (`test_no_company_changes_a_bit`)."""
    found = set()
    for every in (None, 16, 256):
        opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True, state_every=every))
        config = opened.resolve(opened.args)
        found.add(fingerprint(opened, config, opened.kernels(config), "1"))
    assert len(found) == 1


# ------------------------------------------------------------------------------------- calibration,
# evaluation and plan


def test_quantizing_gives_scales_for_attention_and_keeps_means(
    folder: Path, tmp_path: Path
) -> None:
    """The scales are those of what the engine stores, so layers behind a mean have seen what it
    gives.
    """
    options: dict[str, Any] = {
        "weights": "fp8", "activations": "static", "kv_cache": "fp8", "calibration_data": [IDS[:200], IDS[100:]],
    }  # fmt: skip
    freight.quantize(str(folder), tmp_path / "made", **options)
    made = open_checkpoint(str(tmp_path / "made"))
    assert [layer is None for layer in made.kv_scales.layers] == [True, False, True, False]
    assert not made.kv_scales.missing
    stored = load_file(tmp_path / "made" / "model.safetensors")
    for index in MEANS:
        for name in ("in_proj", "out_proj"):
            assert stored[f"model.layers.{index}.mean.{name}.weight"].dtype == torch.float8_e4m3fn
            assert stored[f"model.layers.{index}.mean.{name}.input_scale"] > 0
    logits, plain = (
        freight_logits(one, IDS, "auto", kv_cache_dtype="auto", state_every=512)
        for one in (tmp_path / "made", folder)
    )
    assert torch.cosine_similarity(logits, plain).mean() > 0.98
    options = {"kv_cache_dtype": "bfloat16", "state_every": 512}
    unmoved = freight_logits(folder, IDS, "auto", "reference", **options)
    assert torch.cosine_similarity(unmoved, plain).mean() > 0.999


def test_calibrated_scales_are_those_of_the_stored_keys(folder: Path, tmp_path: Path) -> None:
    formats: dict[str, Any] = {"weights": "none", "kv_cache": "fp8"}
    freight.quantize(str(folder), tmp_path / "made", calibration_data=[IDS], **formats)
    layers = open_checkpoint(str(tmp_path / "made")).kv_scales.layers
    options: dict[str, Any] = {"kernels": "reference", "max_num_batched_tokens": LENGTH}
    llm = engine(folder, enable_prefix_caching=False, **options)
    llm.generate([{"prompt_token_ids": IDS}], SamplingParams(max_tokens=1))
    pages, scales = llm.engine.runner.pool.paged[3].pages, layers[3]
    amax = [float(page.flatten(0, 1)[:300].abs().max()) for page in (pages.k, pages.v)]
    assert scales is not None
    assert [scales.k[0] * 448, scales.v[0] * 448] == pytest.approx(amax, rel=0.02)


def test_evaluation_does_not_depend_on_chunks(folder: Path) -> None:
    caches = [("fp8", "dynamic"), ("fp8", "unit")]
    args = EngineArgs(str(folder), skip_tokenizer_init=True, state_every=64)
    other = replace(args, max_num_batched_tokens=32, state_every=16)
    whole, parts = (compare_caches(each, caches, IDS, window=150) for each in (args, other))
    for one, other in zip(whole, parts, strict=True):
        assert (one.perplexity, one.mean_kl) == (other.perplexity, other.mean_kl)
        assert (one.num_tokens, one.cut_off_share) == (300, other.cut_off_share)
    assert whole[0].mean_kl == 0.0 < whole[1].mean_kl


def test_the_whole_evaluation_runs(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": IDS}))
    caches = ("tensor", "token")
    grid = GridArgs(caches=caches, calibration_data=str(data), window=150, per_layer=True)
    args = EngineArgs(str(folder), skip_tokenizer_init=True)
    runs = evaluate_grid(args, [IDS], grid).runs
    by_layer = [one.layer_kl for one in runs if one.layer_kl]
    parts = replace(args, max_num_batched_tokens=32)
    chunks = evaluate_grid(parts, [IDS], replace(grid, speed=False)).runs
    assert [one.layer_kl for one in chunks if one.layer_kl] == by_layer
    assert [one.kl_mean for one in chunks] == [one.kl_mean for one in runs]
    assert len(by_layer) == 2
    assert all(layers[0] == layers[2] == 0.0 < min(layers[1], layers[3]) for layers in by_layer)
    assert all((one.decode_tokens_per_second or 0) > 0 for one in runs)
    found = per_layer(EngineArgs(str(folder), skip_tokenizer_init=True), [IDS])
    assert [layer.layer for layer in found.layers] == [1, 3]


@pytest.mark.parametrize("length", [128, 150])
def test_every_question_goes_behind_the_context_alone(folder: Path, length: int) -> None:
    """The answer to a question does not depend on those before it, which went through the same
    states.
    """
    opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True, state_every=64))
    config = opened.resolve(opened.args)
    runner = cache_run(opened, opened.load(config), config, 256).runner
    questions = [Question(1, IDS[at : at + 3], IDS[at + 3 : at + 5]) for at in (200, 220, 240)]
    context = RetrievalContext(IDS[:length], questions)
    (together,) = long._ask(runner, context, [questions], 512)
    alone = [long._ask(runner, context, [[one]], 32)[0][0] for one in questions]
    assert together == alone


def test_the_plan_counts_states(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    plan = make_plan(config, Wish(2**24, context=256, concurrency=4, device="cpu", state_every=32))
    setting = plan.settings[0]
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, state_every=32, max_model_len=256, max_num_seqs=4,
        kv_cache_memory=setting.cache_bytes,
    )  # fmt: skip
    llm = LLM(**vars(args))
    assert llm.engine.runner.pool.num_blocks == setting.num_blocks
    counted = {"state_every": 32, "bytes_per_block": 2 * 48 * 4, "blocks": setting.num_blocks[0]}
    assert as_json(plan)["settings"][0]["groups"][0] == {"layers": 2, **counted}
    assert "--state-every 32" in as_json(plan)["verdict"]
    print_plan("means", plan)
    printed = " ".join(capsys.readouterr().out.split())
    assert_names(printed, "0.4 KiB", "every 32 tokens")
    assert setting.needed_bytes <= 2**24
    opened = open_model(replace(args, kernels="reference"))
    resolved = opened.resolve(opened.args)
    formats = resolved.compute_format, resolved.weight_format
    length = resolved.max_model_len
    loaded = loaded_bytes(opened.model, *formats, lambda _: None, Layout.PLAIN, length)
    assert loaded.layers == weight_bytes(opened.load(resolved)).layers


def test_a_plan_refuses_states_that_are_not_there() -> None:
    demo = open_checkpoint("demo").checkpoint.config
    with refuses(ConfigError, "--state-every 64", "no layer"):
        make_plan(demo, Wish(2**30, device="cpu", state_every=64))
    with refuses(ConfigError, "--state-every 33", "power of two"):
        make_plan(demo, Wish(2**30, device="cpu", state_every=33))
