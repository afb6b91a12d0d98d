"""Other weights in an engine that lives: as a fresh start with them, or as before."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.demo_adapter import write_random_adapter
from tests.hybrids import HYBRIDS
from tests.weight_versions import changed_tensors, demo_tensors, write_version

from freight import SamplingParams
from freight.engine.adapters import LoRARequest
from freight.engine.engine import Engine, Parts
from freight.engine.host_copy import HostCopy
from freight.errors import CapacityError, CheckpointError, ConfigError, RequestError
from freight.llm import LLM

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, seed=3)
PROMPTS = ["def main(", "import os\n" * 12]
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"kv_cache_dtype": "fp8", "quantization": "fp8"},
    "int8": {"kv_cache_dtype": "int8", "quantization": "int8"},
    "reference": {"kv_cache_dtype": "fp8_e5m2", "kernels": "reference"},
}
Scored = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_version(tmp_path_factory.mktemp("versions") / "other", changed_tensors(1))


def new_llm(model: Path | str = "demo", **options: Any) -> LLM:
    return LLM(str(model), kv_cache_memory="8MiB", **options)


def answers(llm: LLM, adapter: LoRARequest | None = None) -> Scored:
    scored = []
    for output in llm.generate(PROMPTS, PARAMS, lora_request=adapter):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        scored.append([(token, entry[token].logprob) for token, entry in pairs])
    return scored


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_update_gives_what_a_fresh_start_gives(options: dict[str, Any], other: Path):
    fresh = new_llm(other, **options)
    expected = answers(fresh)
    llm = new_llm(**options)
    before = answers(llm)
    old = llm.fingerprint
    assert before != expected
    llm.update_weights(str(other))
    assert answers(llm) == expected
    assert llm.fingerprint == fresh.fingerprint != old
    llm.update_weights("demo")
    assert answers(llm) == before
    assert llm.fingerprint == old
    llm.update_weights(other)  # a Path
    assert answers(llm) == expected


@pytest.mark.parametrize(
    ("options", "limited"),
    [({}, False), ({"kernels": "reference"}, False), ({"kv_cache_memory": "300KiB"}, True)],
    ids=["drafts", "no-drafts", "short-context"],
)
def test_states_have_the_room_that_they_had(options: dict[str, Any], limited: bool):
    """Their layout is decided before it is known that reference kernels have no drafts, and that the
    cache holds a shorter context.
    """
    hybrid = str(HYBRIDS / "delta_net")
    llm = LLM(hybrid, **{"kv_cache_memory": "8MiB", "threads": 1, **options})
    assert (llm.engine.scheduler.token_limit(1, None) < 1024) == limited
    assert (llm.engine.scheduler.most_drafts > 0) == ("kernels" not in options)
    before = answers(llm)
    llm.update_weights(hybrid)
    assert answers(llm) == before
    llm.sleep(2)
    llm.wake_up()
    assert answers(llm) == before


def test_tensors_in_memory_are_copied(other: Path):
    tensors = changed_tensors(1)
    expected = answers(new_llm(other, kernels="reference"))
    llm = new_llm(kernels="reference")
    old = llm.fingerprint
    llm.update_weights(tensors.items())
    for tensor in tensors.values():
        tensor.zero_()  # the trainer goes on
    assert answers(llm) == expected
    in_memory = llm.fingerprint
    llm.update_weights(demo_tensors())
    assert len({old, in_memory, llm.fingerprint}) == 3


def test_static_scales_follow_their_weights(tmp_path: Path, scaled: Callable[[Path, float], Path]):
    low = scaled(tmp_path / "low", 0.05)
    high = scaled(tmp_path / "high", 0.4)
    expected = answers(new_llm(high, kv_cache_dtype="fp8"))
    llm = new_llm(low, kv_cache_dtype="fp8")
    assert answers(llm) != expected
    llm.update_weights(str(high))
    assert answers(llm) == expected
    with pytest.raises(ConfigError, match="another cache"):
        llm.update_weights("demo")  # which has no scales
    assert answers(llm) == expected


@pytest.fixture
def scaled() -> Callable[[Path, float], Path]:
    def write(folder: Path, scale: float) -> Path:
        tensors = demo_tensors()
        layers = json.loads((write_version(folder, tensors) / "config.json").read_text())
        for layer in range(layers["num_hidden_layers"]):
            for part in ("k", "v"):
                tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale)
        (folder / "model.safetensors").unlink()
        return rewritten(folder, tensors)

    return write


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def broken(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    name = "model.layers.1.mlp.down_proj.weight"
    missing = dict(tensors)
    del missing[name]
    yield "is missing", missing
    yield "has shape", {**tensors, name: tensors[name][:, :8].contiguous()}
    yield "belong to no part", {**tensors, "model.other": torch.zeros(1)}
    yield "complex64", {**tensors, name: tensors[name].to(torch.complex64)}


def test_a_failed_update_leaves_the_old_weights(tmp_path: Path):
    llm = new_llm(kv_cache_dtype="fp8")
    before = answers(llm)
    old = llm.fingerprint
    for words, tensors in broken(demo_tensors()):
        with pytest.raises(CheckpointError, match=words):
            llm.update_weights(tensors.items())
        assert answers(llm) == before
    for odd in ([1], [("name", 3)], ["name"], [(3, torch.zeros(1))]):
        with pytest.raises(CheckpointError, match="no pair of a name and a tensor"):
            llm.update_weights(odd)  # type: ignore[arg-type]
    twice = [*demo_tensors().items()] * 2
    with pytest.raises(CheckpointError, match="twice"):
        llm.update_weights(twice)
    with pytest.raises(CheckpointError, match="no folder"):
        llm.update_weights(str(tmp_path / "none"))
    folder = write_version(tmp_path / "cut", demo_tensors())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        llm.update_weights(str(folder))
    assert answers(llm) == before
    assert llm.fingerprint == old


def test_weights_of_another_model_are_refused(tmp_path: Path):
    folder = write_version(tmp_path / "other", demo_tensors())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    llm = new_llm()
    before = answers(llm)
    with pytest.raises(ConfigError, match="another model: ropes"):
        llm.update_weights(str(folder))
    assert answers(llm) == before


def test_a_load_that_fails_halfway_leaves_the_old_weights(
    other: Path, monkeypatch: pytest.MonkeyPatch
):
    llm = new_llm(kv_cache_dtype="fp8")
    before = answers(llm)
    for error in (MemoryError("no"), KeyboardInterrupt()):
        with monkeypatch.context() as patched:

            def fail(*_: object, error: BaseException = error, **__: object) -> None:
                raise error

            patched.setattr("freight.model.loader.Builder.linear", fail)
            with pytest.raises(type(error)):
                llm.update_weights(str(other))
        assert answers(llm) == before


def test_weights_without_room_beside_the_old_ones(other: Path, monkeypatch: pytest.MonkeyPatch):
    llm = new_llm()
    before = answers(llm)
    monkeypatch.setattr("freight.engine.renewal.least_weight_bytes", lambda *_: 1 << 60)
    with pytest.raises(CapacityError, match="sleep at level 2"):
        llm.update_weights(str(other))
    assert answers(llm) == before
    llm.sleep(2)  # the way out
    llm.update_weights(str(other))
    llm.wake_up()
    assert answers(llm) != before


def test_sleep_and_wake_up():
    llm = new_llm(kv_cache_dtype="fp8")
    before = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping
        with pytest.raises(RequestError, match=f"sleeps at level {level}"):
            llm.generate(PROMPTS, PARAMS)
        assert llm.engine.stats().capacity_tokens > 0
        llm.sleep(level)
        llm.wake_up()
        assert not llm.is_sleeping
        assert answers(llm) == before
    llm.sleep(2)
    llm.sleep(1)  # as deep as before
    with pytest.raises(RequestError, match="level 2"):
        llm.generate(PROMPTS, PARAMS)
    llm.wake_up()
    llm.wake_up()
    assert answers(llm) == before
    with pytest.raises(RequestError, match="level is 3"):
        llm.sleep(3)


def test_an_update_while_it_sleeps(other: Path):
    expected = answers(new_llm(other))
    llm = new_llm()
    for level in (1, 2):
        llm.sleep(level)
        llm.update_weights(changed_tensors(1).items())
        assert llm.is_sleeping
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == expected
    llm.sleep(2)
    with pytest.raises(CheckpointError, match="came from memory"):
        llm.wake_up()
    with pytest.raises(RequestError, match="tags has 'cache'"):
        llm.wake_up(tags=["cache"])
    llm.update_weights("demo")
    llm.wake_up()
    assert answers(llm) != expected


def test_files_that_changed_while_it_slept_are_not_taken_for_its_own(tmp_path: Path):
    folder = write_version(tmp_path / "model", demo_tensors())
    llm = new_llm(folder)
    before = answers(llm)
    llm.sleep(2)
    rewritten(folder, changed_tensors(1))
    with pytest.raises(CheckpointError, match="was changed or replaced"):
        llm.wake_up()
    llm.update_weights(str(folder))
    llm.wake_up()
    assert answers(llm) != before


def test_no_block_is_found_again():
    llm = new_llm()
    answers(llm)
    again = llm.generate(PROMPTS[1], PARAMS)[0]
    assert again.num_cached_tokens > 0
    llm.reset_prefix_cache()
    assert llm.generate(PROMPTS[1], PARAMS)[0].num_cached_tokens == 0
    assert llm.generate(PROMPTS[1], PARAMS)[0].num_cached_tokens > 0
    llm.update_weights("demo")
    assert llm.generate(PROMPTS[1], PARAMS)[0].num_cached_tokens == 0


def test_a_running_request_keeps_its_blocks():
    llm = new_llm()
    expected = llm.generate(PROMPTS[1], PARAMS)[0].outputs[0].token_ids
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    llm.reset_prefix_cache()
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.update_weights("demo")
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.sleep()
    last = list(stream)[-1]
    assert last.outputs[0].token_ids == expected
    llm.update_weights("demo")


def test_counters_go_on(other: Path):
    llm = new_llm(kv_cache_dtype="fp8", kv_scales="unit")
    answers(llm)
    before = llm.engine.stats()
    llm.update_weights(str(other))
    after = llm.engine.stats()
    assert (after.nans, after.clipped, after.generated) == (
        before.nans,
        before.clipped,
        before.generated,
    )


def test_adapters_are_loaded_again(tmp_path: Path, other: Path):
    adapter = LoRARequest("a", 0, str(write_random_adapter(tmp_path / "a", 1)))
    fresh = new_llm(other, enable_lora=True)
    expected = answers(fresh, adapter)
    llm = new_llm(enable_lora=True)
    assert answers(llm, adapter) != expected
    llm.update_weights(str(other))
    assert answers(llm, LoRARequest("a")) == expected
    assert answers(llm) == answers(fresh)


def test_a_store_has_a_name_space_for_each_version(tmp_path: Path, other: Path):
    store = tmp_path / "store"
    llm = new_llm(kv_store=str(store), kv_cache_dtype="fp8")
    before = answers(llm)
    first = spaces(store, 1)
    llm.update_weights(str(other))
    assert answers(llm) == answers(new_llm(other, kv_cache_dtype="fp8"))
    both = spaces(store, 2)
    assert first < both
    llm.update_weights("demo")
    assert answers(llm) == before
    llm.engine.close()
    assert spaces(store, 2) == both


def spaces(store: Path, count: int) -> set[str]:
    """The name spaces of a store, once there are `count`: a thread opens them."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        names = {path.parent.name for path in store.glob("*/name.json")}
        if len(names) >= count:
            return names
        time.sleep(0.02)
    raise AssertionError(f"{store} has not {count} name spaces")


def test_what_is_moved_to_the_host_comes_back():
    llm = new_llm(kernels="reference")
    model = llm.engine.runner.model
    copied = torch.arange(1000.0)
    parts = (model, copied, copied[10:20])
    moved = HostCopy(parts)
    assert moved.num_bytes >= copied.nbytes
    assert copied.untyped_storage().nbytes() == 0
    moved.restore()
    assert torch.equal(copied, torch.arange(1000.0))
    expected = answers(new_llm(kernels="reference"))
    assert answers(llm) == expected


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(3))
def test_an_interrupt_leaves_the_old_weights_or_the_new_ones(
    number: int, is_done: bool, other: Path, monkeypatch: pytest.MonkeyPatch
):
    llm = new_llm()
    expected = {llm.fingerprint: answers(llm)}
    llm.update_weights(str(other))
    expected[llm.fingerprint] = answers(llm)
    calls = iter(range(10))
    renew = Engine.renew

    def interrupted(engine: Engine, parts: Parts) -> None:
        """Without the cache, with the new weights, or with a new cache."""
        is_it = next(calls) == number
        if is_it and not is_done:
            raise KeyboardInterrupt
        renew(engine, parts)
        if is_it:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "renew", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights("demo")
    stated = llm.fingerprint
    if llm.is_sleeping:
        llm.wake_up()
    assert llm.fingerprint == stated
    assert answers(llm) == expected[stated]


def test_weights_keep_their_fingerprint_when_their_files_change(tmp_path: Path):
    folder = write_version(tmp_path / "model", demo_tensors())
    llm = new_llm(folder)
    never_asked = new_llm(folder)
    before = llm.fingerprint
    rewritten(folder, changed_tensors(1))
    assert llm.fingerprint == before
    with pytest.raises(CheckpointError, match="was changed or replaced"):
        _ = never_asked.fingerprint
    shutil.rmtree(folder)
    llm.sleep(1)
    llm.wake_up()
    assert llm.fingerprint == before
    llm.update_weights("demo")
    assert llm.fingerprint == new_llm().fingerprint


def test_files_that_changed_while_it_slept_name_no_blocks_of_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = write_version(tmp_path / "model", demo_tensors())
    store = tmp_path / "store"
    llm = new_llm(folder, kv_store=str(store), kv_cache_dtype="fp8")
    before = answers(llm)
    spaces(store, 1)
    llm.sleep(1)
    rewritten(folder, changed_tensors(1))
    with caplog.at_level(logging.WARNING, "freight"):
        llm.wake_up()
        end = time.monotonic() + 120
        while "the weights are not the files that were loaded" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert answers(llm) == before
    llm.engine.close()
    assert len(spaces(store, 1)) == 1


def test_a_config_that_changed_while_it_slept_is_not_taken_for_its_own(tmp_path: Path):
    folder = write_version(tmp_path / "model", demo_tensors())
    llm = new_llm(folder)
    llm.sleep(2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        llm.wake_up()
    (folder / "config.json").write_text(json.dumps(config))
    llm.wake_up()
