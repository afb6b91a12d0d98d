"""What a leader says to the other ranks of steps that are launched ahead, where they begin anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refuses

from freight import SamplingParams
from freight.engine.ahead import Launched
from freight.engine.leader import Leader
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import Drawn, Inputs, ModelRunner, StepRows
from freight.engine.sampler import Draw
from freight.errors import KernelError
from freight.parallel.messages import Kind
from freight.parallel.steps import StepReader, StepWriter

SLICES = [SequenceSlice((5,), 3, ((1, 2),), Logits.LAST) for _ in range(2)]
DRAWS = [Draw(SamplingParams(top_p=0.5), 7 + row, 1) for row in range(2)]
DRAWN = Drawn(torch.tensor([3, 4]), torch.tensor([[3, 4], [1, 1]]))


class Sent(Leader):
    """A leader of ranks that do as they are told; `sent` has what."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, bytes]] = []
        self.memory: Any = SimpleNamespace(
            lost=lambda: "",
            failed=lambda: None,
            fail=lambda: None,
            finish=lambda: None,
            restart=lambda times: None,
            take_interrupt=lambda: None,
        )
        self.size = 2
        self._ranks: Any = SimpleNamespace(closing=False)
        self._writer = StepWriter()
        self._torn = False
        self._restarts = 0
        self._why_anew = ""

    def _send(self, kind: Kind, data: bytes) -> None:
        self.sent.append((kind, data))

    def _left(self, rank: int) -> str:
        return "no memory"


class Runner(ModelRunner):
    """A runner whose model computes nothing."""

    def _run(self, slices: Any, tokens: Any) -> StepRows:
        return StepRows(self.model, [1] * len(slices), leader=self.leader)

    def _draw(self, rows: StepRows, draws: Any) -> Drawn:
        assert rows.leader is None, "the others take their logits untold"
        return DRAWN


def launched(leader: Leader, microbatch: int, inputs: Inputs | None = None) -> Drawn:
    nothing: Any = None
    runner = Runner(nothing, nothing, "cpu", leader=leader)
    return runner.launch(SLICES, DRAWS, microbatch, inputs)


def test_a_step_does_not_follow_one_that_the_ranks_have_forgotten() -> None:
    """It is refused, once for each microbatch, and the ranks are not made to begin anew by that."""
    leader = Sent()
    before = [launched(leader, microbatch) for microbatch in (0, 1)]
    with (
        pytest.raises(ZeroDivisionError),
        leader.launching(SLICES, DRAWS, 0, Inputs(before[0], [1])),
    ):
        raise ZeroDivisionError  # what comes in the middle of a step
    assert [kind for kind, _ in leader.sent] == [Kind.LAUNCH] * 3 + [Kind.RESTART]
    leader.sent.clear()
    fresh = launched(leader, 0)
    with refuses(KernelError, "left the step", "no memory"):
        launched(leader, 1, Inputs(before[1], [0, 1]))
    assert [kind for kind, _ in leader.sent] == [Kind.LAUNCH]
    launched(leader, 0, Inputs(fresh, [1]))
    reader = StepReader()
    assert [reader.decode_launch(data).rows for _, data in leader.sent] == [None, [1]]


def test_a_failure_that_is_seen_at_a_launch_forgets_what_it_follows() -> None:
    leader = Sent()
    before = launched(leader, 0)
    leader.sent.clear()
    leader.memory.failed = lambda: 1
    with refuses(KernelError, "no memory"):
        launched(leader, 0, Inputs(before, [0, 1]))
    assert [kind for kind, _ in leader.sent] == [Kind.RESTART]


def test_tokens_do_not_count_once_the_ranks_began_anew() -> None:
    """Waits of the step's gathers may have ended early."""
    leader = Sent()
    runner: Any = SimpleNamespace(leader=leader)
    runner.settle = lambda *given: ModelRunner.settle(runner, *given)
    step: Any = None
    under_way = Launched(step, launched(leader, 0), DRAWN.facts, None, runner)
    assert under_way.read() == [3, 4]
    leader._restart()
    assert under_way.read() is None
    assert Launched(step, launched(leader, 0), DRAWN.facts, None, runner).read() == [3, 4]


def test_a_gather_that_was_ended_makes_the_ranks_begin_anew() -> None:
    """Rank 0 learns of it where it reads the tokens: gathers that are pushed return before they are done."""
    leader = Sent()
    drawn = launched(leader, 0)

    def ended() -> None:
        raise KernelError("another rank has left the step")

    leader.memory.finish = ended
    with pytest.raises(KernelError, match="left"):
        leader.settle(drawn.beginning, None)
    leader.memory.finish = lambda: None
    leader.sent.clear()
    launched(leader, 0)
    assert [kind for kind, _ in leader.sent] == [Kind.RESTART, Kind.LAUNCH]


@pytest.mark.parametrize(("rows", "tokens"), [([0, 1], [3, 4]), ([1], [4])])
def test_inputs_are_rows_of_what_was_drawn(rows: list[int], tokens: list[int]) -> None:
    assert Inputs(DRAWN, rows).tokens().tolist() == tokens
