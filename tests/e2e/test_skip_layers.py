"""`--kv-cache-dtype-skip-layers` from the options to the bytes: what each layer stores, and what
skipping gains.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.asking import Server
from tests.refusals import assert_names, refuses
from tests.serving import ServeProcess

from freight import LLM, ConfigError, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.cli.main import main
from freight.engine.fingerprint import fingerprint
from freight.errors import CheckpointError
from freight.model.open import OpenModel, open_model
from freight.settings.engine import EngineArgs

SMALL: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory": "8MiB"}
PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
# with layers 0 and 2 skipped
LINE = ("KV cache: fp8_e4m3fn", "layers 0 and 2 in bfloat16", "token, dynamic")
MIXED = ("mixed", "token", "dynamic")
DTYPES = ["bfloat16", "fp8_e4m3fn", "bfloat16", *["fp8_e4m3fn"] * 3]


def generated(**options: Any) -> tuple[LLM, list[int], list[Any]]:
    llm = LLM(**{"model": "demo", **SMALL, **options})
    completion = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    return llm, completion.token_ids, completion.logprobs


def stored(llm: LLM, layer: int) -> list[torch.Tensor]:
    """The bytes of the blocks that the prompt filled, which a second request finds; nothing else
    has run.
    """
    pages = llm.engine.runner.pool.layers[layer].pages
    blocks = llm.generate(PROMPT, GREEDY)[0].num_cached_tokens // pages.k.shape[1]
    assert blocks > 0
    return [side[:blocks].contiguous().view(torch.uint8).clone() for side in (pages.k, pages.v)]


def demo_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """The demo model in `folder`, its tensors changed; returns it."""
    shutil.copytree(resolve_model("demo"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def sixteen() -> tuple[LLM, list[int], list[Any]]:
    return generated(kv_cache_dtype="bfloat16")


def test_layers_up_to_the_first_quantized_one_are_those_of_16_bits(sixteen: Any) -> None:
    """Layers before and at the first 8-bit one project the same states; what a layer behind it
    stores differs.
    """
    plain, *_ = sixteen
    skipping, *_ = generated(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[0, 1, 2, 4])
    whole, *_ = generated(kv_cache_dtype="fp8")
    pages = [layer.pages for layer in skipping.engine.runner.pool.layers]
    assert [page.k.itemsize for page in pages] == [2, 2, 2, 1, 2, 1]
    for layer in (0, 1, 2):
        assert same(stored(skipping, layer), stored(plain, layer))
    assert not same(stored(skipping, 4), stored(plain, 4))
    # behind three layers of 16 bits, not of 8
    assert not same(stored(skipping, 3), stored(whole, 3))
    first, *_ = generated(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[1, 2])
    assert same(stored(first, 0), stored(whole, 0))


def test_an_unread_quantized_layer_changes_no_bit(sixteen: Any, tmp_path: Path) -> None:
    """With the output projection of the only 8-bit layer at zero, its cache has no effect: all is
    as in 16 bits.
    """
    projection = "model.layers.3.self_attn.o_proj.weight"
    model = demo_with(tmp_path / "demo", lambda tensors: tensors[projection].zero_())
    skip = "0,1,2,4,5"
    plain = generated(model=model, kv_cache_dtype="bfloat16")[1:]
    assert (
        generated(model=model, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skip)[1:] == plain
    )
    other = generated(model=model, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="0")
    assert other[2] != plain[1]
    assert generated(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skip)[2] != sixteen[2]


def test_what_is_in_use_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "freight")
    llm = LLM("demo", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0", 2], **SMALL)
    assert_names(caplog.text, *LINE)
    info = llm.kv_cache_info()
    assert (info["dtype"], info["granularity"], info["scale_source"]) == MIXED
    assert [one["dtype"] for one in info["layers"]] == DTYPES
    values = 2 * 2 * 64  # K and V, 2 heads of 64
    assert info["bytes_per_token"] == 2 * 2 * values + 4 * (values + 2 * 2 * 2)
    assert llm.engine.runner.pool.num_bytes <= 8 * 2**20


def test_the_layers_are_part_of_the_fingerprint() -> None:
    def of(**options: Any) -> str:
        opened = open_model(EngineArgs(device="cpu", **options))
        config = opened.resolve(opened.args)
        return fingerprint(opened, config, opened.kernels(config), "1")

    skips = ["", "0", "0,2", "1"]
    found = [of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skip) for skip in skips]
    assert len({*found, of(kv_cache_dtype="bfloat16")}) == len(skips) + 1
    assert of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[2, "00", 0]) == found[2]


@pytest.fixture(scope="module")
def without_scales_in_2(tmp_path_factory: pytest.TempPathFactory) -> str:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(0.03 + layer / 256)
        for layer in (0, 1, 3, 4, 5)
        for side in "kv"
    }
    return demo_with(
        tmp_path_factory.mktemp("scales") / "demo", lambda tensors: tensors.update(scales)
    )


def test_a_checkpoint_without_scales_in_the_skipped_layer_runs(without_scales_in_2: str) -> None:
    options = {"model": without_scales_in_2, "kv_cache_dtype": "fp8"}
    for skipped in ({}, {"kv_cache_dtype_skip_layers": "1"}):
        with pytest.raises(CheckpointError, match="none for layer 2 of 6"):
            generated(**options, **skipped)
    llm, tokens, _ = generated(**options, kv_cache_dtype_skip_layers="2")
    info = llm.kv_cache_info()
    assert (info["scale_source"], info["granularity"]) == ("checkpoint", "tensor")
    assert llm.engine.runner.pool.layers[2].pages.k_scale is None
    assert len(tokens) == 16


def evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> Any:
    monkeypatch.setattr(sys, "argv", ["freight", "evaluate", "demo", *options, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_skipping_the_most_sensitive_layer_lowers_kl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 1 of the demo model, which `--per-layer` names: a quarter of the layers' sum."""
    costs = evaluated(monkeypatch, capsys, "--per-layer", "--window", "256")["layers"]
    worst = max(costs, key=lambda one: one["kl"])["layer"]
    assert worst == 1
    common = ("--kv-cache-dtype", "fp8", "--max-tokens", "4096", "--no-speed")
    whole = evaluated(monkeypatch, capsys, *common)
    less, little = (
        evaluated(monkeypatch, capsys, *common, "--kv-cache-dtype-skip-layers", skip)
        for skip in "10"
    )
    kl = [found["runs"][1]["kl_mean"] for found in (less, little, whole)]
    assert kl[0] < 0.9 * min(kl[1:])
    assert less["runs"][1]["bytes_per_token"] == whole["runs"][1]["bytes_per_token"] + 2 * 2 * (
        64 - 2
    )
    assert less["runs"][0]["perplexity"] == whole["runs"][0]["perplexity"]
    assert less["runs"][1]["kv_cache_dtype"] == "mixed"
    assert less["runs"][1]["layers"][1] == {"dtype": "bfloat16", "granularity": None}
    errors = less["runs"][1]["layer_errors"]
    assert errors[1]["k"] == errors[1]["v"] == 0.0 < errors[0]["k"]
    assert whole["runs"][1]["layers"] is None
    assert_names(" ".join(less["notes"]), "8-bit cache", "layer 1", "bfloat16")


@pytest.mark.parametrize(
    "form", [["--kv-cache-dtype-skip-layers", "0", "2"], ["--kv_cache_dtype_skip_layers=0,2"]]
)
def test_a_server_says_which_layers(form: list[str]) -> None:
    options = ["--kv-cache-dtype", "fp8", *form, "--kv-cache-memory", "8MiB"]
    with ServeProcess("demo", options, forked=True) as process:
        cache = Server(process.wait_until_healthy()).ask("/info").body["kv_cache"]
        assert process.stop() == 0
    assert_names(process.said, *LINE)
    assert cache["dtype"] == "mixed"
    assert [layer["dtype"] for layer in cache["layers"]] == DTYPES


def test_errors_come_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenModel, "load", lambda *_: pytest.fail("weights were read"))
    every: Any = list(range(6))
    for skipped, dtype, parts in (
        ("6", "fp8", ("'6'", "6 layers, 0 to 5")),
        ("sliding_window", "fp8", ("sliding_window", "no layer")),
        ("0", "auto", ("--kv-cache-dtype auto",)),
        (every, "fp8", ("no layer", "8-bit", "--kv-cache-dtype bfloat16")),
    ):
        with refuses(ConfigError, *parts):
            generated(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped)
