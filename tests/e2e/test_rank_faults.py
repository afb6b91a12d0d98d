"""What happens when a rank ends, hangs, fails alone or is another one than expected."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.asking import ENDLESS, ONE_BY_ONE, Server
from tests.demo_chat import demo_with_chat_template
from tests.forked_server import CAN_FORK, forked
from tests.lost_ranks import lose_while_it_reads
from tests.refusals import assert_names, refuses
from tests.serving import (
    ServeProcess,
    children_of,
    completion_of,
    freight_serve,
    has_ended,
    health,
)
from torch import Tensor

from freight import LLM, SamplingParams
from freight.engine import leader
from freight.engine.leader import Leader
from freight.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    GenerationError,
    RankError,
)
from freight.kernels.cpu import library
from freight.model.weight_bytes import weight_bytes
from freight.settings.device import numa_nodes

BASE = str(Path(__file__).parents[1] / "fixtures" / "base_bf16")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(1, 40))}
pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]
Start = Callable[..., LLM]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts an LLM of two ranks; the second is forked, perhaps with a fault."""
    made: list[LLM] = []

    def start_llm(fault: str = "", **options: Any) -> LLM:
        environ = os.environ | {
            "FREIGHT_TEST_PAGES": str(tmp_path / "pages.pt"),
            "FREIGHT_TEST_FAULT": fault,
        }

        def spawn(files: Any) -> Any:
            command = ["python", "-m", "tests.rank_follower", *map(str, files)]
            return forked(command, files, environ)

        monkeypatch.setattr(leader, "spawn", spawn)
        given = {"skip_tokenizer_init": True, "threads": 1, "kv_cache_memory": "2MiB"}
        made.append(LLM(BASE, tensor_parallel_size=2, **(given | options)))
        return made[-1]

    yield start_llm
    for llm in made:
        leader_of(llm).close()


def leader_of(llm: LLM) -> Leader:
    found = llm.engine.runner.leader
    assert isinstance(found, Leader)
    return found


def tokens_of(llm: LLM) -> Any:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected() -> Any:
    return tokens_of(LLM(BASE, skip_tokenizer_init=True, threads=1, kv_cache_memory="2MiB"))


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def is_gone(pid: int) -> bool:
    """Say whether a process ends within five seconds."""
    deadline = time.monotonic() + 5
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(pid)


def test_a_rank_that_is_killed_while_nothing_runs_is_told_at_once(start: Start) -> None:
    llm, told = start(), threading.Event()
    tokens_of(llm)
    llm.engine.on_lost(told.set)
    os.kill(leader_of(llm).pids[0], signal.SIGKILL)
    assert told.wait(1.0)
    with refuses(RankError, "rank 1 has ended"):
        tokens_of(llm)


def test_a_rank_that_is_killed_in_a_step_ends_it_within_a_second(start: Start) -> None:
    llm = start(kv_cache_memory="64MiB")
    tokens_of(llm)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(leader_of(llm).pids[0], signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(RankError, match=r"rank 1 has ended"):
        llm.generate([PROMPT] * 200, LONG)  # for seconds
    assert killed
    assert time.monotonic() - killed[0] < 1.0


LOST = {
    signal.SIGKILL: "rank 1 has ended with signal 9: the engine cannot go on",
    signal.SIGSTOP: "rank 1 does not answer: the engine cannot go on",
}


@pytest.mark.parametrize("number", LOST)
def test_a_rank_that_is_lost_while_it_reads_weights_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It would read them for a minute."""
    sent = lose_while_it_reads(monkeypatch, number, lambda of: of.pids[0])
    monkeypatch.setattr(leader, "_PATIENCE", 0.1)  # then a rank that is stopped is killed
    with pytest.raises(RankError, match=LOST[number]):
        start("slow")
    assert time.monotonic() - sent[0] < 2.0


@pytest.mark.parametrize("number", LOST)
@pytest.mark.parametrize("call", [1, 6])  # the prompt's second part, a recorded decode step
def test_a_rank_that_is_lost_in_a_step_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, call: int
) -> None:
    llm = start(rank_timeout=0.5, max_num_batched_tokens=20)
    monkeypatch.setattr(leader, "_PATIENCE", 0.1)
    leading, calls, sent = leader_of(llm), iter(range(1 << 30)), []
    encode = leading.encode

    def encode_and_lose(slices: Any) -> bytes:
        if next(calls) == call:  # the rank never gets this step, for which rank 0 then waits
            sent.append(time.monotonic())
            os.kill(leading.pids[0], number)
        return encode(slices)

    monkeypatch.setattr(leading, "encode", encode_and_lose)
    with pytest.raises(RankError, match=LOST[number].partition(" with")[0]):
        tokens_of(llm)
    assert time.monotonic() - sent[0] < 1.0 + 0.5 * (number == signal.SIGSTOP)
    leading.close()
    assert is_gone(leading.pids[0])


def test_memory_that_runs_out_on_one_rank_ends_no_engine(
    start: Start, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start(max_num_batched_tokens=2048, kv_cache_memory="64MiB")
    assert tokens_of(llm) == expected
    pid = leader_of(llm).pids[0]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    pages += 64  # a message of 20 KiB can be received, and no step of this size computed
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    many = [{"prompt_token_ids": [1 + token % 90 for token in range(240)]}] * 8
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
    try:
        failed = outputs_or_failed(llm, many)
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert "the ranks begin anew" in caplog.text or "rank 1: " in caplog.text
    alone = [one.outputs[0].token_ids for one in llm.generate(many[:1], GREEDY)]
    assert all(one == alone[0] for one in failed if one is not None)  # in smaller steps
    assert tokens_of(llm) == expected


def outputs_or_failed(llm: LLM, prompts: Any) -> list[Any]:
    """Tokens of each, None for a request that failed."""
    try:
        found = llm.generate(prompts, GREEDY)
    except GenerationError as error:
        found = error.outputs
    return [
        None if one.outputs[0].finish_reason == "error" else one.outputs[0].token_ids
        for one in found
    ]


def test_a_rank_that_hangs_is_named_after_its_time(start: Start) -> None:
    llm = start(rank_timeout=0.5)
    tokens_of(llm)
    pid = leader_of(llm).pids[0]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 does not answer"):
        tokens_of(llm)
    assert time.monotonic() - began < 5.0
    os.kill(pid, signal.SIGCONT)


def test_a_step_that_fails_on_one_rank_is_computed_again(
    start: Start, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start("step 4")
    assert tokens_of(llm) == expected
    assert_names(caplog.text, "rank 1: CapacityError", "no memory")
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("step", [3, 13])
def test_a_rank_that_fails_behind_its_last_gather_computes_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """In a recorded step rank 0 is done, and the next one finds it; else its logits are to come."""
    llm = start(f"late {step}")
    other = {"prompt_token_ids": list(range(50, 80))}
    alone = LLM(BASE, skip_tokenizer_init=True, threads=1, kv_cache_memory="2MiB")
    leading, memory = leader_of(llm), leader_of(llm).memory
    begin, calls = leading.step, iter(range(1 << 30))

    def begin_later(*given: Any) -> Any:
        if next(calls) == step + 1:  # the logits of the first prompt are call 1
            deadline = time.monotonic() + 5
            while memory.failed() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert memory.failed() == 1
        return begin(*given)

    monkeypatch.setattr(leading, "step", begin_later)
    scored = replace(GREEDY, logprobs=3)
    for prompt in (PROMPT, other):
        found, wanted = (one.generate(prompt, scored)[0].outputs[0] for one in (llm, alone))
        assert found.token_ids == wanted.token_ids
        assert found.logprobs == wanted.logprobs
    assert next(calls) > step


def test_an_interrupt_leaves_the_ranks_together(
    start: Start, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start()
    assert tokens_of(llm) == expected
    model = llm.engine.runner.model
    kind, calls = type(model.layers[1]), iter(range(1 << 30))
    run = kind.__call__

    def interrupted(self: Any, *given: Any) -> Any:
        if next(calls) == 1:  # after the first layer's gathers
            raise KeyboardInterrupt
        return run(self, *given)

    monkeypatch.setattr(kind, "__call__", interrupted)
    other = {"prompt_token_ids": list(range(50, 80))}
    with pytest.raises(KeyboardInterrupt):
        llm.generate(other, GREEDY)
    assert tokens_of(llm) == expected


def test_the_other_rank_ends_with_rank_0(start: Start) -> None:
    llm = start()
    pid = leader_of(llm).pids[0]
    leader_of(llm).close()
    assert is_gone(pid)
    with pytest.raises(RankError, match="were ended"):
        tokens_of(llm)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("fingerprint", RankError, "rank 1.* fp_of_another"),
        ("load", CheckpointError, "rank 1: a weight of this rank is damaged"),
    ],
)
def test_a_rank_that_cannot_start_refuses_the_engine(
    start: Start, fault: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        start(fault)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads.* 1, 2 or 4"),
        ({"tensor_parallel_size": 2, "kernels": "reference"}, "omit --kernels reference"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "several GPUs"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
        ({"rank_cpus": "0|1"}, "is for several ranks"),
        ({"tensor_parallel_size": 2, "rank_cpus": "0"}, "there are 2"),
        ({"tensor_parallel_size": 2, "rank_timeout": 0}, "--rank-timeout 0"),
        ({"tensor_parallel_size": 2, "rank_timeout": 1e12}, "--rank-timeout 1000000000000.0"),
        ({"tensor_parallel_size": 2, "rank_cpus": ["0", "1"]}, "write a text like"),
        ({"tensor_parallel_size": 2, "kv_store": "/dev/null/store"}, "--kv-store .* cannot be"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(leader, "spawn", lambda files: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError, match=says):
        LLM(BASE, skip_tokenizer_init=True, **options)


def test_a_rank_that_reads_weights_ends_with_rank_0(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    load = Leader.load

    def interrupted(self: Leader, *given: int) -> None:
        load(self, *given)
        pids.extend(self.pids)
        time.sleep(0.2)  # the other rank begins to read
        raise KeyboardInterrupt

    monkeypatch.setattr(Leader, "load", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        start("slow")
    assert time.monotonic() - began < 4.0  # after 5 s it would be killed
    assert is_gone(pids[0])


def test_a_fork_does_not_keep_the_other_rank_alive(start: Start) -> None:
    """As multiprocessing's children do in a program that has an LLM."""
    llm = start()
    leading = leader_of(llm)
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        assert tokens_of(llm)  # nothing was closed here
        connection = leading._ranks.sockets[0]
        connection.close()
        assert is_gone(leading.pids[0])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_start_that_fails_leaves_no_file_open_and_no_thread_bound(start: Start) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    if len(two) < 2:
        pytest.skip("needs two processors")
    cpus = f"{two[0]}|{two[1]}"
    llm = start(rank_cpus=cpus)
    assert os.sched_getaffinity(0) == {two[0]}
    leader_of(llm).close()
    assert os.sched_getaffinity(0) > {two[0]}
    opened, usable = os.listdir("/proc/self/fd"), os.sched_getaffinity(0)
    with pytest.raises(CapacityError):
        start(rank_cpus=cpus, kv_cache_memory=1)
    assert len(os.listdir("/proc/self/fd")) <= len(opened)
    assert os.sched_getaffinity(0) == usable


def test_sizes_are_those_of_all_ranks_together(start: Start) -> None:
    alone = LLM(BASE, skip_tokenizer_init=True, threads=1, kv_cache_memory="2MiB")
    llm = start()
    assert llm.kv_cache_info() == alone.kv_cache_info()
    with pytest.raises(CapacityError) as one:
        LLM(BASE, skip_tokenizer_init=True, kv_cache_memory=1000)
    with pytest.raises(CapacityError) as two:
        start(kv_cache_memory=1000)
    assert str(one.value) == str(two.value)


def test_an_llm_starts_its_rank_and_ends_it(expected: Any) -> None:
    """Without a fork: an interpreter of its own, which gets its files by number."""
    llm = LLM(
        BASE, tensor_parallel_size=2, skip_tokenizer_init=True, threads=1, kv_cache_memory="2MiB"
    )
    pid = leader_of(llm).pids[0]
    assert tokens_of(llm) == expected
    # weights of the other half were never read here
    whole = load_file(f"{BASE}/model.safetensors").values()
    assert weight_bytes(llm.engine.runner.model).total < 0.55 * sum(map(size_of, whole))
    del llm
    assert is_gone(pid)


@pytest.mark.clock
@pytest.mark.parametrize("busy", [True, False])
def test_a_server_tells_at_once_that_a_rank_does_not_answer(tmp_path: Path, busy: bool) -> None:
    """Its clients, too. While nothing is computed the rank is missed as well."""
    timeout = 3.0
    model = demo_with_chat_template(tmp_path / "demo")
    common = ["--threads", "1", "--kv-cache-memory", "8MiB", *ONE_BY_ONE]
    options = [*common, "-tp", "2", "--rank-timeout", str(timeout), "--stall-timeout", "60"]
    served = ServeProcess(model, options, forked=True)
    try:
        server = Server(served.wait_until_healthy())
        (rank,) = children_of(served.children()["worker"])
        with ExitStack() as stack:
            opened = stack.enter_context(server.streaming(ENDLESS)) if busy else None
            os.kill(rank, signal.SIGSTOP)
            began = time.monotonic()
            while health(server.url) == 200:
                time.sleep(0.02)
            noticed = time.monotonic() - began
            rest = "" if opened is None else opened.whole().raw.decode()
            told = time.monotonic() - began
        assert served.wait() == 1
        assert not busy or '"engine_ended"' in rest
        assert_names(served.said, "rank 1", "not answer")
        assert is_gone(rank)
        print(f"/health after {noticed:.2f} s, clients after {told:.2f} s")
        assert 0.9 * timeout < noticed <= told < timeout + 2  # 1, and one for a busy machine
    finally:
        served.close()


def test_silence_while_rank_0_itself_stands_still_is_nobodys(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all processes of a container are paused."""
    clock = time.monotonic
    shift = [0.0]
    monkeypatch.setattr(leader.time, "monotonic", lambda: clock() + shift[0])
    llm = start(rank_timeout=5)
    told = threading.Event()
    llm.engine.on_lost(told.set)
    for _ in range(3):
        shift[0] += 60
        assert not told.wait(0.3)


@pytest.mark.slow  # starts two servers, and an engine again
def test_a_server_whose_rank_is_killed_starts_its_engine_again() -> None:
    """Its answers and its fingerprint are those of one rank, before and after."""
    common = ["--threads", "1", "--kv-cache-memory", "4MiB"]
    with freight_serve("demo", common) as url:
        expected = completion_of(url)
    server = ServeProcess("demo", [*common, "-tp", "2", "--restart-engine"], forked=True)
    try:
        url = server.wait_until_healthy()
        assert completion_of(url) == expected
        assert "on which ranks gain nothing" in server.said or len(numa_nodes()) > 1
        engine = server.children()["worker"]
        (rank,) = children_of(engine)
        os.kill(rank, signal.SIGKILL)
        ended = time.monotonic() + 1.0
        while not has_ended(engine):
            assert time.monotonic() < ended
            time.sleep(0.01)
        assert_names(server.said, "rank 1", "signal 9")
        while server.children().get("worker") in (None, engine):
            time.sleep(0.05)
        server.wait_until_healthy()
        assert completion_of(url) == expected
        engine = server.children()["worker"]
        (rank,) = children_of(engine)
        os.kill(engine, signal.SIGKILL)  # rank 0
        assert is_gone(rank)
        while server.children().get("worker") in (None, engine):
            time.sleep(0.05)
        server.wait_until_healthy()
        assert completion_of(url) == expected
        (rank,) = children_of(server.children()["worker"])
        assert server.stop() == 0
        assert is_gone(rank)
    finally:
        server.close()
