"""From the store, every cache has the bits that it would have computed: formats and granularities ×
full attention, windows, latents, states; after a restart from the disk, after an eviction from
memory.

`test_equivalences.py` and `test_state_equivalences.py` have the other families and the formats of
states. These are the caches that two engines could take for each other's.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import choose, in_rotation
from tests.e2e.test_equivalences import MODELS, SAMPLING, Trace, of_size, trace
from tests.hybrids import HYBRIDS
from tests.parity.random_models import save_random

from freight import LLM, SamplingParams
from freight.cache import stored
from freight.cache.store.pace import Rates
from freight.checkpoint.extras import write_extras
from freight.checkpoint.reader import resolve_model
from freight.fp8.formats import Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.open import open_checkpoint

E4M3: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
CACHES: dict[str, dict[str, Any]] = {
    "16 bits": {"kv_cache_dtype": "bfloat16"},
    "E4M3 tensor": E4M3 | {"kv_scales": "0.03,0.02"},
    "E4M3 head": E4M3,
    "E4M3 channel": E4M3,
    "E4M3 token": E4M3 | {"kv_scales": "dynamic"},
    "E5M2": {"kv_cache_dtype": "fp8_e5m2"},
    "INT8": {"kv_cache_dtype": "int8"},
    "E4M3 group": {"kv_cache_dtype": "fp8", "kv_scales": "group"},
    "INT8 group": {"kv_cache_dtype": "int8", "kv_scales": "group"},
}
KINDS = {  # of layers: a model that has them
    "full": "demo",
    "windows": "gemma3",
    "sinks": "gpt-oss",
    "latent": "deepseek-v3-groups",
    "states": "delta_net",
}
GROUPS, STATIC = {"E4M3 group", "INT8 group"}, {"E4M3 head", "E4M3 channel"}
# A latent has one head. Scales for a part of the layers are not written.
LACKING = {"latent": STATIC, "states": STATIC | GROUPS}
BLOCKS = [8, 16, 32]


def rows() -> list[Any]:
    """Every kind with every cache that it can have; all but a few are slow tests."""
    found = [
        (kind, cache, size, sampling)
        for number, kind in enumerate(KINDS)
        for at, cache in enumerate(CACHES)
        if cache not in LACKING.get(kind, GROUPS)
        for size in (BLOCKS[(number + at) % 3],)
        for sampling in (list(SAMPLING)[(number + at) % 2],)
    ]
    quick = set(choose(found, strength=1))
    return [
        pytest.param(*row, marks=() if at in quick or in_rotation(str(row)) else pytest.mark.slow)
        for at, row in enumerate(found)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a kind's model, with the scales of a cache."""
    parent, demo = tmp_path_factory.mktemp("models"), resolve_model("demo", None)

    def source(kind: str) -> Path:
        name = KINDS[kind]
        if name == "demo":
            return demo
        if kind == "states":
            return HYBRIDS / name
        folder = parent / name
        if not folder.exists():
            vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
            save_random(of_size(MODELS[name], vocab_size), folder, torch.bfloat16)
            for file in demo.glob("tokenizer*"):
                shutil.copy(file, folder)
        return folder

    def make(kind: str, cache: str) -> Path:
        granularity = cache.partition(" ")[2]
        if granularity not in ("head", "channel"):
            return source(kind)
        folder = parent / f"{kind} {granularity}"
        if not folder.exists():
            shutil.copytree(source(kind), folder)
            with_scales(folder, Granularity[granularity.upper()])
        return folder

    return make


def with_scales(folder: Path, granularity: Granularity) -> None:
    """Declare static scales, each of another value."""
    model = open_checkpoint(str(folder)).model
    layers: list[LayerScales | None] = [None] * model.num_layers
    for index, one in model.attention.items():
        count = granularity.num_scales(one.num_kv_heads, one.k_dim)
        values = tuple(0.02 + (index + at) / 2**12 for at in range(count))
        layers[index] = LayerScales(values, values[::-1], granularity)
    declared, files = write_extras(KVScales(tuple(layers)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | declared))
    for name, content in files.items():
        (folder / name).write_bytes(content)


def pages_of(llm: LLM, params: SamplingParams) -> Trace:
    """What a request left behind, without states: rows of an open tile behind its last token are
    anything. `test_state_equivalences.py` compares the others.
    """
    states = llm.engine.runner.pool.states.values()
    found = trace(llm, params)
    return replace(found, cache=found.cache[sum(len(one.states.parts) for one in states) :])


@pytest.mark.parametrize(("kind", "cache", "block_size", "sampling"), rows())
def test_every_cache_from_the_store(
    kind: str,
    cache: str,
    block_size: int,
    sampling: str,
    checkpoint: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    monkeypatch.setattr(Rates, "is_worth", lambda *of: True)  # these models compute as fast
    params = replace(SAMPLING[sampling], max_tokens=12)
    model = str(checkpoint(kind, cache))
    sizes = {"max_model_len": 512, "kv_cache_memory": "64MiB", "block_size": block_size}
    given: dict[str, Any] = {**sizes, **CACHES[cache]}
    if kind == "states":
        given["state_every"] = 32
    expected = pages_of(LLM(model, enable_prefix_caching=False, **given), params)
    hits = []
    for _ in range(2):
        llm = LLM(model, kv_store=str(tmp_path), **given)
        store = llm.engine.store
        assert store is not None
        while not store.mover.tiers.is_open:
            time.sleep(0.001)
        hits.append(pages_of(llm, params))
        store.mover.flush(10)
        llm.engine.scheduler.rebuild(())
        found = pages_of(llm, params)
        stats = store.stats()
        llm.engine.close()
        assert found == hits[-1] == expected
        assert found.num_cached_tokens >= 16
        assert stats.memory_hits > 0
        assert stats.corrupt == stats.errors == stats.dropped == 0
    assert [hit.num_cached_tokens for hit in hits] == [0, found.num_cached_tokens]
    assert stats.disk_hits > 0
