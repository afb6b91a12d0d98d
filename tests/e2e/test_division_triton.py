"""Stages and ranks with the kernels for GPUs, which Triton interprets, in pairs: two and four processes
over gloo have the tokens, log-probabilities and bytes of the cache of one.

`CASES` is a covering array, as in `test_division.py`; all are slow.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import choose
from tests.e2e.test_division import CACHES, FAMILIES, WEIGHTS, compare_pages
from tests.e2e.test_ranks import close, opened_as, started
from tests.e2e.test_ranks_triton import TRITON, mended_interpreter, outputs_of, pytestmark
from tests.forked_server import forked
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.rank_follower import pages_of

from freight import SamplingParams
from freight.engine import build, leader
from freight.engine.engine import Engine

__all__ = ["mended_interpreter", "pytestmark"]  # the fixture and the marks are this module's too

GPU_CACHES = [cache for cache in CACHES if cache != "int8"]  # GPUs have no kernels for it
DIVISIONS = ((1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2))  # stages, ranks
PLAIN = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def possible(row: tuple[Any, ...]) -> bool:
    family, _, (stages, _), _ = row
    return not (family in ("shared", "own inputs") and stages > 2)


ROWS = [row for row in itertools.product(FAMILIES, GPU_CACHES, DIVISIONS, WEIGHTS) if possible(row)]
CASES = [ROWS[place] for place in choose(ROWS)]


def tokens_of(engine: Engine) -> list[Any]:
    """Those of requests that need nothing of the host: steps are launched ahead."""
    for index in range(3):
        engine.add(f"t{index}", engine.accept(range(5 + index, 8 + 2 * index), PLAIN), PLAIN)
    while engine.has_unfinished:
        engine.step()
    return [engine.output(f"t{index}").outputs[0].token_ids for index in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda row: "-".join(map(str, row)))
def test_processes_have_the_bits_of_one(
    case: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, cache, (stages, ranks), weights = case
    save_random(VARIANTS[FAMILIES[family]], tmp_path / "model", torch.bfloat16)
    given = str(tmp_path / "model")
    options = TRITON | CACHES[cache] | WEIGHTS[weights]
    alone = started(opened_as(given, options, tmp_path, kv_cache_memory="2MiB")[0])
    expected = outputs_of(alone), tokens_of(alone)
    blocks = alone.runner.pool.num_blocks
    whole = pages_of(alone.runner.pool)
    monkeypatch.setattr(build, "split_memory", lambda *_: blocks)
    pages_file = tmp_path / "pages.pt"
    environ = os.environ | {"FREIGHT_TEST_PAGES": str(pages_file), "FREIGHT_TEST_INTERPRETER": "1"}

    def spawn(files: Any) -> Any:
        return forked(["python", "-m", "tests.rank_follower", *map(str, files)], files, environ)

    monkeypatch.setattr(leader, "spawn", spawn)
    more: dict[str, Any] = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    more["kv_cache_memory"] = f"{2 * ranks}MiB"
    opened, _ = opened_as(given, options, tmp_path, **more)
    engine = started(opened)
    try:
        assert len(engine.runner.pool.stages) == (stages if stages > 1 else 0)
        assert (outputs_of(engine), tokens_of(engine)) == expected
        first = pages_of(engine.runner.pool)
    finally:
        if ranks > 1:
            close(engine)
    if stages == 1:  # microbatches take blocks in another order
        compare_pages(opened.model, ranks, whole, first, pages_file)
