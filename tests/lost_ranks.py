"""Engines of two ranks, the second of which a test breaks, stops or kills.

Rank 0 is the test's process. Rank 1 is forked (`rank_follower.py`), on this machine or on another one,
which is a thread here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked_server import Forked, forked
from tests.machines import Machine, other_machine, two_machines
from tests.serving import has_ended

from freight.engine import leader
from freight.engine.leader import Leader
from freight.llm import LLM
from freight.sampling import SamplingParams
from freight.settings.engine import EngineArgs

BASE = str(Path(__file__).parent / "fixtures" / "base_bf16")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(1, 40))}
COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "threads": 1, "kv_cache_memory": "2MiB"}


class RankPair:
    """Starts LLMs of two ranks; `pids` are those of the second ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.pids: list[int] = []
        self.llms: list[LLM] = []
        self.machine: Machine | None = None
        self.model = BASE
        self.usual: dict[str, Any] = {}  # options of every start

    def start(
        self,
        fault: str = "",
        machines: bool = False,
        theirs: dict[str, Any] | None = None,
        **options: Any,
    ) -> LLM:
        """fault: of the second rank, which is on another machine with `machines`; theirs: the options
        in which that machine differs.
        """
        environ = os.environ | {"FREIGHT_TEST_PAGES": str(self.folder / "pages.pt")}
        environ["FREIGHT_TEST_FAULT"] = fault

        def spawn(files: Any) -> Forked:
            command = ["python", "-m", "tests.rank_follower", *map(str, files)]
            process = forked(command, files, environ)
            self.pids.append(process.pid)
            return process

        self.monkeypatch.setattr(leader, "spawn", spawn)
        options = COMMON | {"tensor_parallel_size": 2} | self.usual | options
        if machines:
            options = two_machines() | options
            args = EngineArgs(**{"model": self.model} | options | (theirs or {}))
            with other_machine(args) as self.machine:
                self.llms.append(LLM(self.model, **options))
        else:
            self.llms.append(LLM(self.model, **options))
        return self.llms[-1]

    def ended(self) -> Any:
        """How the other machine ended, once it has."""
        assert self.machine is not None
        return self.machine.wait()

    def close(self) -> None:
        for llm in self.llms:
            leader_of(llm).close()
        if self.machine is not None:
            self.machine.wait()


def leader_of(llm: LLM) -> Leader:
    leading = llm.engine.runner.leader
    assert isinstance(leading, Leader)
    return leading


def tokens_of(llm: LLM) -> Any:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def is_gone(pid: int) -> bool:
    """Say whether a process ends within five seconds."""
    deadline = time.monotonic() + 5
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(pid)


def lose_while_it_reads(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, pid: Callable[[], int]
) -> list[float]:
    """Send a signal to process `pid` soon after the next leader has told its ranks to read weights;
    the list gets the time.
    """
    sent: list[float] = []
    load = Leader.load

    def load_and_lose(self: Leader, *given: int) -> None:
        load(self, *given)
        time.sleep(0.2)  # it begins to read
        self._ranks.sockets[0].settimeout(0.5)  # in place of ten minutes
        sent.append(time.monotonic())
        os.kill(pid(), number)

    monkeypatch.setattr(Leader, "load", load_and_lose)
    return sent
