"""A store below the cache, of whole engines: prefixes outlive eviction and restarts, and no block is
found where anything that decides its bytes differs.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.environment import without_options
from tests.serving import freight_serve
from typer.testing import CliRunner

from freight import LLM, SamplingParams
from freight.cache.spec import KVCacheSpec
from freight.cache.store import mover, tiers
from freight.cache.store.folder import segments_of
from freight.cache.store.pace import Rates
from freight.cache.store.survey import verify
from freight.checkpoint.reader import resolve_model
from freight.cli.main import app
from freight.engine import build
from freight.engine import store as engine_store
from freight.engine.fingerprint import fingerprint
from freight.engine.store import library, name_space, what_decides
from freight.errors import ConfigError
from freight.model.decoder import LanguageModel
from freight.model.open import OpenModel, open_model
from freight.outputs import StoreStats
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check

TEXT = (Path(__file__).parents[2] / "src/freight/demo/heldout.txt").read_text(encoding="utf-8")
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=5, ignore_eos=True, logprobs=3)
PROMPTS = [TEXT[start : start + 1300] for start in range(0, 6000, 1500)]


def opened(folder: Path, model: str = "demo", **options: Any) -> LLM:
    """An engine whose store is open: it is opened while requests may come already."""
    made: dict[str, Any] = {"kv_cache_dtype": "fp8", "max_model_len": 512, **options}
    llm = LLM(model, kv_store=str(folder), **made)
    store = llm.engine.store
    assert store is not None
    end = time.monotonic() + 20
    while not store.mover.tiers.is_open:
        assert time.monotonic() < end
        time.sleep(0.001)
    return llm


def said(llm: LLM, prompt: str, params: SamplingParams = PARAMS) -> tuple[Any, int]:
    """What is answered, and how many tokens of the prompt were found."""
    output = llm.generate([prompt], params)[0]
    one = output.outputs[0]
    assert one.logprobs is not None
    return (list(one.token_ids), [repr(entry) for entry in one.logprobs]), output.num_cached_tokens


def stats(llm: LLM) -> StoreStats:
    found = llm.engine.stats().store
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model computes about as fast as its pages are read."""
    monkeypatch.setattr(Rates, "is_worth", lambda *of: True)


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Answers without a store."""
    llm = LLM("demo", kv_cache_dtype="fp8", max_model_len=512)
    return [said(llm, prompt)[0] for prompt in PROMPTS]


@dataclass(frozen=True)
class Kept:
    """A store that an engine has left behind: the first prompt, in `count` blocks of `spec`."""

    folder: Path
    count: int
    spec: KVCacheSpec

    def copy(self, folder: Path) -> Path:
        return shutil.copytree(self.folder, folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("kept")
    llm = opened(folder)
    said(llm, PROMPTS[0])
    llm.engine.close()
    assert stats(llm).stored > 10
    return Kept(folder, stats(llm).stored, llm.engine.runner.pool.spec)


def test_a_restart(tmp_path: Path, plain: list[Any]) -> None:
    first = opened(tmp_path)
    assert [said(first, prompt) for prompt in PROMPTS] == [(answer, 0) for answer in plain]
    first.engine.close()
    second = opened(tmp_path)
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        again, found = said(second, prompt)
        assert again == answer
        assert found >= 256
    assert 0 < stats(second).disk_hits <= stats(first).stored
    assert stats(second).tokens == sum(said(second, prompt)[1] for prompt in PROMPTS)
    second.engine.close()


def test_eviction(tmp_path: Path, plain: list[Any]) -> None:
    """A pool with room for one prompt, and memory for the blocks of the others."""
    llm = opened(tmp_path, kv_cache_memory="1100KiB")
    for turn in range(2):
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            again, found = said(llm, prompt)
            assert again == answer
            assert (found >= 256) is (turn == 1)
            llm.engine.store.mover.flush(5)
    assert stats(llm).memory_hits > 0
    assert stats(llm).disk_hits == 0
    llm.engine.close()


def test_two_engines_that_write_at_once(
    tmp_path: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both store all prompts, in different orders, and read what the other stored meanwhile."""
    monkeypatch.setattr(tiers, "_REFRESH", 0.01)
    monkeypatch.setattr(mover, "_LOOK", 0.01)
    engines = [opened(tmp_path, kv_cache_memory="1100KiB") for _ in range(2)]

    def answers(llm: LLM, order: list[int]) -> list[Any]:
        found = {}
        for at in order * 3:
            found[at] = said(llm, PROMPTS[at])[0]
            llm.engine.store.mover.flush(5)
        return [found[at] for at in range(len(PROMPTS))]

    with ThreadPoolExecutor() as threads:
        orders = [0, 1, 2, 3], [3, 2, 1, 0]
        assert list(threads.map(answers, engines, orders)) == [plain, plain]
    for llm in engines:
        llm.engine.close()
        assert stats(llm).corrupt == stats(llm).errors == 0
    assert stats(engines[0]).disk_hits + stats(engines[1]).disk_hits > 0
    assert verify(tmp_path).damaged == 0
    assert len(list(segments_of(tmp_path))) == 2


def test_an_engine_that_nobody_closes(tmp_path: Path) -> None:
    llm = opened(tmp_path)
    said(llm, PROMPTS[0])
    before = threading.active_count()
    del llm
    gc.collect()
    assert threading.active_count() < before
    other = opened(tmp_path)
    assert said(other, PROMPTS[0])[1] >= 256
    other.engine.close()


def test_another_process_with_another_hash_seed(kept: Kept, tmp_path: Path) -> None:
    """What decides bytes is written the same in every process."""
    program = (
        "import sys; from pathlib import Path; from tests.e2e.test_kv_store import *;"
        "print(said(opened(Path(sys.argv[1])), PROMPTS[0])[1])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(kept.copy(tmp_path / "store"))],
        capture_output=True,
        text=True,
        check=True,
        env=without_options() | {"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
    )
    assert int(answer.stdout) >= 256


def test_damage_is_no_answer(kept: Kept, tmp_path: Path, plain: list[Any]) -> None:
    """A bit of every record flipped."""
    path = next(kept.copy(tmp_path / "store").rglob("*.blocks"))
    content = bytearray(path.read_bytes())
    for place in range(200, len(content), 5000):
        content[place] ^= 1
    path.write_bytes(content)
    llm = opened(tmp_path / "store")
    assert said(llm, PROMPTS[0])[0] == plain[0]
    assert stats(llm).corrupt == 1  # the prefix ends there
    llm.engine.close()


def test_a_folder_that_vanishes_under_way(tmp_path: Path, plain: list[Any]) -> None:
    llm = opened(tmp_path / "store", kv_store_memory=0)
    assert said(llm, PROMPTS[0])[0] == plain[0]
    llm.engine.store.mover.flush(5)
    shutil.rmtree(tmp_path / "store")
    llm.engine.scheduler.rebuild(())  # nothing in the pool
    assert said(llm, PROMPTS[0]) == (plain[0], 0)
    assert said(llm, PROMPTS[1])[0] == plain[1]
    llm.engine.close()
    assert stats(llm).errors > 0


def test_salts(tmp_path: Path, plain: list[Any]) -> None:
    salted = replace(PARAMS, cache_salt="mine")
    for stored in (False, True):
        llm = opened(tmp_path, kv_store_salted=stored)
        assert said(llm, PROMPTS[0], salted) == (plain[0], 0)
        llm.engine.close()
    for stored in (False, True):
        llm = opened(tmp_path, kv_store_salted=stored)
        assert said(llm, PROMPTS[0], replace(PARAMS, cache_salt=f"other {stored}"))[1] == 0
        assert (said(llm, PROMPTS[0], salted)[1] >= 256) is stored
        if stored:  # it stores this prompt without a salt
            assert said(llm, PROMPTS[0])[1] == 0
        llm.engine.close()


def copy_of_demo(folder: Path, change: Callable[[bytearray], None] | None = None) -> str:
    """The demo model in a folder, its weights changed."""
    shutil.copytree(resolve_model("demo", None), folder)
    if change is not None:
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)
    return str(folder)


def flip_the_last_byte(content: bytearray) -> None:
    content[-1] ^= 1


ALIKE: dict[str, dict[str, Any]] = {
    "same": {},
    "a copy": {"model": "demo"},
    "context": {"max_model_len": 480, "threads": 1, "kv_cache_memory": "8MiB"},
}
OTHER: dict[str, dict[str, Any]] = {
    "weights": {"model": "changed"},
    "kernels": {"kernels": "reference"},
    "format": {"kv_cache_dtype": "int8"},
    "static scales": {"kv_scales": "0.03"},
}
OTHER_AS_WELL: dict[str, dict[str, Any]] = {
    "16 bits": {"kv_cache_dtype": "bfloat16"},
    "scales": {"kv_scales": "unit"},
    "layers": {"kv_cache_dtype_skip_layers": "1"},
    "blocks": {"block_size": 32},
    "dtype": {"dtype": "float32"},
    "rounded": {"quantization": "fp8"},
}


@pytest.mark.parametrize("other", [OTHER, pytest.param(OTHER_AS_WELL, marks=pytest.mark.slow)])
def test_no_hit_where_anything_differs(
    other: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the weights, kernels, Freight's version, the cache's format or scales, blocks."""
    store = tmp_path / "store"
    models = {
        "same": copy_of_demo(tmp_path / "a" / "demo"),
        "changed": copy_of_demo(tmp_path / "b" / "demo", flip_the_last_byte),
        "demo": "demo",
    }
    first = opened(store, models["same"])
    said(first, PROMPTS[0])
    first.engine.close()
    found = {}
    for name, options in (ALIKE | other).items():
        model = models[options.get("model", "same")]
        found[name] = found_tokens(store, **options | {"model": model})
    with monkeypatch.context() as patch:
        patch.setattr(build, "version", lambda: "0.0.1")
        found["version"] = found_tokens(store, model=models["same"])
    with monkeypatch.context() as patch:
        (tmp_path / "build.so").write_bytes(b"other code")
        patch.setattr(engine_store, "path_of", lambda build: tmp_path / "build.so")
        found["build"] = found_tokens(store, model=models["same"])
    if first.engine.runner.model.kernels.name == "reference":
        del found["kernels"], found["build"]  # there are no others here
    assert {name for name, count in found.items() if count} == ALIKE.keys()


def test_no_hit_where_activations_are_declared_otherwise(tmp_path: Path) -> None:
    """config.json alone says whether inputs of FP8 weights are rounded."""
    store = tmp_path / "store"
    for name in ("dynamic", "none"):
        options = ["--weights", "fp8-channel", "--activations", name]
        made = CliRunner().invoke(app, ["quantize", "demo", str(tmp_path / name), *options])
        assert made.exit_code == 0, made.output
    shutil.copytree(tmp_path / "dynamic", tmp_path / "other")
    shutil.copy(tmp_path / "none/config.json", tmp_path / "other")
    first = opened(store, str(tmp_path / "dynamic"))
    said(first, PROMPTS[0])
    first.engine.close()
    assert found_tokens(store, model=str(tmp_path / "dynamic")) > 0
    assert found_tokens(store, model=str(tmp_path / "other")) == 0


def test_threads_decide_where_a_library_computes_products() -> None:
    args = EngineArgs("demo")
    model = open_model(args)
    model = replace(model, device=replace(model.device, cores=4))
    names = {library(model, replace(model.resolve(args), threads=count)) for count in (1, 2)}
    assert len(names) == 2


def found_tokens(store: Path, **options: Any) -> int:
    """How many tokens of a prompt are found; nothing is stored."""
    llm = opened(store, **options)
    _, found = said(llm, PROMPTS[0])
    llm.engine.scheduler.rebuild(())
    llm.engine.store.mover._offers.clear()
    llm.engine.close(0)
    return found


def test_weights_that_are_rounded_otherwise_are_others() -> None:
    """In name spaces and in fingerprints, though the files are the same."""
    spaces, prints = set(), set()
    pool: Any = SimpleNamespace(spec=SimpleNamespace(groups=()))
    for quantization in (None, "fp8", "int8", "int4"):
        model = open_model(EngineArgs("demo", quantization=quantization))
        config = model.resolve(model.args)
        kernels = model.kernels(config)
        spaces.add(name_space(what_decides(model, config, kernels, "1", pool, ()), "w"))
        prints.add(fingerprint(model, config, kernels, "1"))
    assert len(spaces) == len(prints) == 4


def test_another_build_of_the_kernels_is_another_name_space() -> None:
    decides = {"kernels": "cpu-avx512 1", "model": "demo"}
    names = {
        name_space(decides, "w"),
        name_space(decides | {"kernels": "cpu-avx512 2"}, "w"),
        name_space(decides | {"kernels": "cpu-avx2 1"}, "w"),
        name_space(decides, "v"),
    }
    assert len(names) == 4


def test_weights_that_changed_before_their_digest_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy_of_demo(tmp_path / "demo")
    load = OpenModel.load

    def loaded(*args: Any) -> LanguageModel:
        decoder = load(*args)
        (tmp_path / "demo/model.safetensors").touch()
        return decoder

    monkeypatch.setattr(OpenModel, "load", loaded)
    llm = LLM(model, kv_store=str(tmp_path / "store"), max_model_len=512)
    end = time.monotonic() + 300
    while "nothing is stored" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    said(llm, PROMPTS[0])
    llm.engine.close()
    assert not list((tmp_path / "store").glob("*/*"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_store_size": "1GiB"}, "--kv-store-size 1GiB"),
    ({"kv_store_memory": 0}, "--kv-store-memory 0"),
    ({"kv_store_salted": True}, "--kv-store-salted True"),
    ({"kv_store": ""}, "--kv-store ''.*folder"),
    ({"kv_store": "x", "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
    ({"kv_store": "x", "kv_store_size": "1KiB"}, "less than a MiB"),
    ({"kv_store": "x", "kv_store_size": "much"}, "--kv-store-size 'much'"),
    ({"kv_store": "x", "kv_store_memory": "-1"}, "--kv-store-memory '-1'"),
    ({"kv_store": "x", "kv_store_salted": 1}, "kv_store_salted is 1.*True or False"),
]


def test_options_that_contradict_each_other() -> None:
    for options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            check(EngineArgs("demo", **options))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        LLM("demo", kv_store=str(tmp_path / "file" / "store"))
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM("demo", kv_store=str(tmp_path / "file"))


def test_a_look_from_the_command_line(kept: Kept, tmp_path: Path) -> None:
    run = CliRunner().invoke
    store, count = kept.copy(tmp_path / "store"), kept.count
    (space,) = json.loads(run(app, ["store", "ls", str(store), "--json"]).stdout)["spaces"]
    assert space["num_blocks"] == count
    assert "fp8_e4m3" in space["decides"]["name"]
    assert f" {count} " in run(app, ["store", "ls", str(store)]).stdout
    assert json.loads(run(app, ["store", "verify", str(store), "--json"]).stdout) == {
        "sound": count,
        "damaged": 0,
    }
    for path in (*store.rglob("*.blocks"), *store.rglob("*.index")):
        content = bytearray(path.read_bytes())
        content[len(content) // 2 * (path.suffix == ".blocks")] ^= 8  # the first entry
        path.write_bytes(content)
    damaged = run(app, ["store", "verify", str(store)])
    assert damaged.exit_code == 1
    assert f"{count - 2} blocks are sound, 2 are damaged" in damaged.stdout
    assert int(run(app, ["store", "clear", str(store)]).stdout.split()[0].replace(",", "")) > 0
    assert not list(store.iterdir())
    assert "empty" in run(app, ["store", "ls", str(store)]).stdout


def test_the_plan_says_what_a_gib_holds(kept: Kept) -> None:
    """Against what an engine wrote: payloads, token ids and entries of the index."""
    made = CliRunner().invoke(app, ["plan", "demo", "--memory", "1GiB", "--json"])
    planned = {
        setting["stored_tokens_per_gib"]
        for setting in json.loads(made.stdout)["settings"]
        if setting["bytes_per_token"] == kept.spec.bytes_per_token
    }
    written = sum(size for _, _, size in segments_of(kept.folder))
    assert planned == {int((1 << 30) / (written / kept.count / kept.spec.block_size))}


def asked(url: str, prompt: str, key: str) -> tuple[str, int]:
    """What a server completes, and how many tokens of the prompt it found."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    content = json.dumps(body | {"ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", content, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.loads(answer.read())
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_server_with_keys_that_is_started_again(tmp_path: Path) -> None:
    """It stores what it has when it is stopped. Each key finds its own prompts again, in this
    folder alone, and what is found is counted.
    """
    files = {name: tmp_path / name for name in ("first", "again")}
    files["first"].write_text("alice:1\nbob:2\n")
    files["again"].write_text("bob:2\nalice:new\n")
    options = ["--kv-cache-dtype", "fp8", "--kv-store-salted", "--api-key-file"]
    store = ["--kv-store", str(tmp_path / "store")]
    with freight_serve("demo", [*store, *options, str(files["first"])]) as url:
        before = [asked(url, prompt, "1") for prompt in PROMPTS[:2]]
    assert [found for _, found in before] == [0, 0]
    with freight_serve("demo", [*store, *options, str(files["again"])]) as url:
        wait_until_open(url, "new")
        assert asked(url, PROMPTS[0], "2") == (before[0][0], 0)
        after = [asked(url, prompt, "new") for prompt in PROMPTS[:2]]
        assert re.search(r"freight:kv_store_tokens_total\{.*\} [1-9]", metrics(url, "new"))
    assert [text for text, _ in after] == [text for text, _ in before]
    # of the second it may find none: where the first took longer to read than to compute, it is computed
    assert after[0][1] >= 256
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    (tmp_path / "copy/secret").unlink()
    store = ["--kv-store", str(tmp_path / "copy")]
    with freight_serve("demo", [*store, *options, str(files["again"])]) as url:
        wait_until_open(url, "new")
        assert asked(url, PROMPTS[0], "new") == (before[0][0], 0)


def metrics(url: str, key: str) -> str:
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def wait_until_open(url: str, key: str) -> None:
    """Wait until a server has counted what is in its store, which has something."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with suppress(urllib.error.HTTPError):
            if re.search(r"freight:kv_store_bytes\{.*tier=\"disk\"\} [1-9]", metrics(url, key)):
                return
        time.sleep(0.2)
    raise AssertionError("the store was not opened")
