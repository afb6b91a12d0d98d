"""LFM2 through all that runs a model: quantized, and with convolutions alone, where no layer has
pages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.asking import Server
from tests.faults import ERROR, inject
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import LFM2, VARIANTS
from tests.refusals import refuses
from tests.serving import freight_serve
from transformers import Lfm2Config

import freight
from freight import LLM, SamplingParams
from freight.errors import CheckpointError, ConfigError
from freight.lab.bench.latency import measure_latency
from freight.lab.capacity import Wish, make_plan
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report import compare_caches
from freight.model.open import open_checkpoint, open_model
from freight.settings.engine import EngineArgs

DEMO = Path(freight.__file__).parent / "demo"
FILE = "model.safetensors"
IDS = tokens(200)
PARAMS = SamplingParams(
    max_tokens=24, temperature=0.9, seed=7, logprobs=2, ignore_eos=True, detokenize=False
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, all of them convolutions, with the tokenizer of the demo."""
    folder = tmp_path_factory.mktemp("alone") / "alone"
    config = Lfm2Config(**LFM2 | {"layer_types": ["conv"] * 3, "vocab_size": 1024})
    save_random(config, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def said(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS)
    return [(one.outputs[0].token_ids, repr(one.outputs[0].logprobs)) for one in outputs]


# ------------------------------------------------------------------------------------------------------------
# quantized


@pytest.mark.parametrize("variant", ["lfm2", "lfm2-biases", "lfm2-moe", "lfm2-vl"])
def test_linears_are_quantized_and_convolutions_are_not(variant: str, tmp_path: Path) -> None:
    theirs = save_random(VARIANTS[variant], tmp_path / "plain", torch.bfloat16)
    options: dict[str, Any] = {
        "weights": "fp8", "activations": "static", "kv_cache": "fp8", "calibration_data": [IDS, IDS[70:]],
    }  # fmt: skip
    freight.quantize(str(tmp_path / "plain"), tmp_path / "made", **options)
    before, stored = (load_file(tmp_path / name / FILE) for name in ("plain", "made"))
    text = theirs.config.get_text_config()
    for index, kind in enumerate(text.layer_types):
        (norm,) = (name for name in before if f"layers.{index}.operator_norm" in name)
        layer = norm.partition("operator_norm")[0]
        if kind == "conv":
            for name in ("in_proj", "out_proj"):
                assert stored[f"{layer}conv.{name}.weight"].dtype == torch.float8_e4m3fn
                assert stored[f"{layer}conv.{name}.input_scale"] > 0
            own = [name for name in before if name.startswith(f"{layer}conv.")]
            plain = [name for name in own if "proj.weight" not in name]
            assert f"{layer}conv.conv.weight" in plain
        else:
            assert stored[f"{layer}self_attn.out_proj.weight"].dtype == torch.float8_e4m3fn
            plain = []
        plain += [name for name in before if name.startswith(f"{layer}feed_forward.gate.")]
        assert bool(plain) or kind != "conv"
        assert all(torch.equal(stored[name], before[name]) for name in plain)
    assert any("feed_forward.gate.weight" in name for name in stored) == (variant == "lfm2-moe")
    made = open_checkpoint(str(tmp_path / "made"))
    without_pages = [kind == "conv" for kind in text.layer_types]
    assert [layer is None for layer in made.kv_scales.layers] == without_pages
    assert not made.kv_scales.missing
    logits = [freight_logits(tmp_path / name, IDS, "auto") for name in ("made", "plain")]
    least = 0.94 if variant == "lfm2-moe" else 0.97  # a router that changes its choice changes much
    assert torch.cosine_similarity(*logits).mean() > least


# ---------------------------------------------------------------------------------------------------
# convolutions alone


def test_convolutions_alone_generate_the_same_however_they_are_cut(alone: Path) -> None:
    options: dict[str, Any] = {"kv_cache_memory": "1MiB", "state_every": 16}
    prompts = [IDS, IDS[:1], IDS[:16], IDS[:17], IDS[:100], IDS]
    plain = LLM(str(alone), max_num_batched_tokens=256, enable_prefix_caching=False, **options)
    expected = [said(plain, [ids])[0] for ids in prompts]
    llm = LLM(str(alone), max_num_batched_tokens=24, **options)
    assert said(llm, prompts) == expected
    assert said(llm, prompts) == expected
    assert llm.engine.scheduler.totals.prefix_hits > 300
    stats = llm.engine.stats()
    assert (stats.nans, stats.clipped, stats.held_tokens) == (0, 0, 0)
    facts = llm.kv_cache_info()
    assert stats.capacity_tokens == facts["capacity_tokens"] == facts["tokens_at_16_bits"]
    assert facts["bytes_per_token"] == 0


def test_convolutions_alone_are_planned(alone: Path) -> None:
    plan = make_plan(
        json.loads((alone / "config.json").read_text()), Wish(2**30, context=256, concurrency=4)
    )
    setting = plan.settings[plan.choice or 0]
    assert setting.requests >= 4
    spec = setting.spec
    assert (spec.bytes_per_token, spec.bytes_per_state) == (0, 3 * 2 * 64 * 2)
    assert spec.tokens_in(10 * spec.bytes_per_state + 1) == 10 * (spec.state_every or 0)


def test_convolutions_alone_are_timed(alone: Path) -> None:
    found = measure_latency(open_model(EngineArgs(str(alone))), "alone", 2, 20, 4, 1)
    assert found["tokens_that_fit"] > 0


def test_there_are_no_caches_to_compare(alone: Path) -> None:
    args = EngineArgs(str(alone))
    with refuses(ConfigError, "tensor, token", "lfm2", "freight bench latency"):
        evaluate_grid(args, [IDS], GridArgs(caches=("tensor", "token")))
    found = compare_caches(args, [("fp8", "dynamic")], IDS, window=100)
    assert [one.mean_kl for one in found] == [0.0, 0.0]
    assert all(one.tokens_in_64_mib > 0 for one in found)


def test_convolutions_alone_are_served(alone: Path) -> None:
    with freight_serve(alone, ["--kv-cache-memory", "1MiB"]) as url:
        body = {"model": "alone", "prompt": "def f(", "max_tokens": 8, "temperature": 0}
        server = Server(url)
        answer = server.ask("/v1/completions", body).body
        assert answer["usage"]["completion_tokens"] > 0
        assert server.metric("freight:cache_capacity_tokens") > 0
        assert server.ask("/health").status == 200


def test_there_are_no_keys_and_values_to_quantize(alone: Path, tmp_path: Path) -> None:
    with refuses(CheckpointError, "--kv-cache fp8", "lfm2", "--kv-cache none"):
        freight.quantize(str(alone), tmp_path / "made", kv_cache="fp8", calibration_data=[IDS])
    formats: dict[str, Any] = {"weights": "fp8", "activations": "dynamic", "kv_cache": "none"}
    freight.quantize(str(alone), tmp_path / "made", **formats)
    assert said(LLM(str(tmp_path / "made"), kv_cache_memory="1MiB"), [IDS])[0][0]


# ------------------------------------------------------------------------------------------------------
# what goes wrong


@pytest.mark.parametrize(
    ("kernels", "positions"), [("auto", (0, 79, 80, 81, 99)), ("reference", (0, 81))]
)
def test_a_request_that_raises_fails_alone(
    tmp_path: Path, kernels: str, positions: tuple[int, ...]
) -> None:
    """In its first step, at the end of its prompt and while it decodes; behind the layers, whose
    states are changed.
    """
    save_random(VARIANTS["lfm2"], tmp_path, torch.bfloat16)
    prompts = [IDS[:count] for count in (100, 80, 1, 33)] + [IDS[100:180]]
    options: dict[str, Any] = {"kv_cache_memory": "1MiB", "kernels": kernels}
    options |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 48}
    plain, caching = (
        LLM(str(tmp_path), enable_prefix_caching=caching, **options) for caching in (False, True)
    )
    expected = [said(plain, [ids])[0] for ids in prompts]
    given = [{"prompt_token_ids": ids} for ids in prompts]
    for position, llm in zip(positions, (caching, plain, caching, plain, caching), strict=False):
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, {tuple(prompts[4]): position})
            outputs = [one.outputs[0] for one in llm.generate(given, PARAMS, on_error="return")]
        assert [(one.token_ids, repr(one.logprobs)) for one in outputs[:4]] == expected[:4]
        assert outputs[4].error == ERROR
        assert list(outputs[4].token_ids) == list(expected[4][0])[: max(0, position - 79)]
        assert llm.engine.cache.num_held == 0
