"""Two ranks that push columns into each other's memory: the engine's own way through the transport.

Both are processes on a CPU, the kernel runs in Triton's interpreter, and buffers are shared memory
(`tests/pushed_memory.py`). What is tried is what stands between an engine and the kernel: that ranks
agree to push, that turns stay in step while prompts are gathered by the group and decode steps
pushed, that a step's results are waited for, and that ranks which left a step go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_ranks import close
from tests.e2e.test_ranks_triton import outputs_of, with_ranks
from tests.forked_server import CAN_FORK, forked
from tests.interpreter import numbers_as_on_a_gpu, quick_interpreter
from tests.pushed_memory import Graphs, pushing_here

from freight.engine import leader
from freight.engine.engine import Engine
from freight.parallel.peers import FLAGS, TURN, WORD
from freight.parallel.push import Pushed

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton interprets the kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU"),
]
LONG = {
    "max_num_batched_tokens": 16
}  # prompts are more than a slot holds, which has 4 rows of logits


@pytest.fixture(scope="module", autouse=True)
def mended_interpreter() -> Iterator[None]:
    with numbers_as_on_a_gpu(), quick_interpreter():
        yield


@pytest.fixture
def pushing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Ranks push; True: steps are captured as well."""
    kind: str = request.param
    monkeypatch.setenv("FREIGHT_TEST_PAGES", str(tmp_path / "pages.pt"))
    monkeypatch.setenv("FREIGHT_TEST_INTERPRETER", "1")
    monkeypatch.setenv("FREIGHT_TEST_PUSH", kind)
    pushing_here(kind == "graphs", monkeypatch.setattr)

    def spawn(files: Any) -> Any:
        return forked(["python", "-m", "tests.rank_follower", *map(str, files)], files, os.environ)

    monkeypatch.setattr(leader, "spawn", spawn)
    return kind == "graphs"


def transport_of(engine: Engine) -> Pushed:
    ranks: Any = engine.runner.leader
    assert isinstance(ranks.memory, Pushed)
    return ranks.memory


def turns_of(transport: Pushed) -> int:
    assert transport._peers is not None
    return int(transport._peers.own[: WORD * FLAGS].view(torch.int64)[TURN])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    alone = tmp_path_factory.mktemp("alone")
    return outputs_of(with_ranks(alone, tensor_parallel_size=1, **LONG))


@pytest.mark.parametrize(
    "pushing", [pytest.param("launches", marks=pytest.mark.slow), "graphs"], indirect=True
)
def test_ranks_that_push_have_the_bits_of_one(
    pushing: bool, expected: list[Any], tmp_path: Path
) -> None:
    engine = with_ranks(tmp_path, check_ranks=not pushing, **LONG)
    transport = transport_of(engine)
    begun = turns_of(transport)
    assert outputs_of(engine) == expected
    assert transport.pushes
    assert turns_of(transport) > begun
    assert transport.grouped > 0
    steps = engine.runner.captured
    assert (steps is not None) == pushing
    if steps is not None:
        graphs: Any = steps._capture
        assert isinstance(graphs, Graphs)
        assert [bucket for bucket, _ in steps.steps] == [4, 2, 1]  # the largest before it is needed
        assert [graph.replays > 0 for graph in graphs.made] == [False, True, True]
    close(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pushing", "fault"), [("launches", "step 3"), ("graphs", "capture")], indirect=["pushing"]
)
def test_a_step_that_a_rank_leaves_is_computed_again(
    pushing: bool,
    fault: str,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns are counted anew. Steps are captured again: in the second case one by rank 0 alone."""
    monkeypatch.setenv("FREIGHT_TEST_FAULT", fault)
    engine = with_ranks(tmp_path, check_ranks=False, **LONG)
    assert outputs_of(engine) == expected
    transport = transport_of(engine)
    assert transport.times == 1
    assert turns_of(transport) > 1 << 40
    close(engine)
