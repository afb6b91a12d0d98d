"""What happens when a rank ends, hangs, fails alone or is another one than expected."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.asking import ENDLESS, ONE_BY_ONE, Server
from tests.demo_adapter import write_adapter
from tests.demo_chat import demo_with_chat_template
from tests.forked_server import CAN_FORK
from tests.lost_ranks import (
    BASE,
    COMMON,
    GREEDY,
    PROMPT,
    RankPair,
    is_gone,
    leader_of,
    lose_while_it_reads,
    tokens_of,
)
from tests.refusals import assert_names
from tests.serving import (
    ServeProcess,
    children_of,
    completion_of,
    freight_serve,
    has_ended,
    health,
)

from freight import LLM, SamplingParams
from freight.engine import leader, node
from freight.engine.leader import Leader
from freight.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    GenerationError,
    RankError,
    RequestError,
)
from freight.kernels.cpu import library
from freight.model.weight_bytes import weight_bytes
from freight.settings.device import numa_nodes

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
OTHER = {"prompt_token_ids": list(range(50, 80))}
pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]


LOST = {signal.SIGKILL: "has ended", signal.SIGSTOP: "does not answer"}
PLACES = [False, True]  # the second rank is on this machine, or on another


def named(machines: bool, what: str) -> str:
    return rf"rank 1{' .node 1.' if machines else ''} {what}"


@pytest.mark.parametrize("machines", PLACES)
def test_a_rank_that_is_killed_while_nothing_runs_is_told_at_once(
    pair: RankPair, machines: bool
) -> None:
    llm, told = pair.start(machines=machines), threading.Event()
    tokens_of(llm)
    llm.engine.on_lost(told.set)
    os.kill(pair.pids[0], signal.SIGKILL)
    assert told.wait(1.0)
    with pytest.raises(RankError, match=named(machines, "has ended")):
        tokens_of(llm)


@pytest.mark.parametrize("machines", PLACES)
def test_a_rank_that_is_killed_in_a_step_ends_it_within_a_second(
    pair: RankPair, machines: bool
) -> None:
    llm = pair.start(machines=machines, kv_cache_memory="64MiB")
    tokens_of(llm)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pair.pids[0], signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    with pytest.raises(RankError, match=named(machines, "has ended")):
        llm.generate([PROMPT] * 200, LONG)  # for seconds
    assert killed
    assert time.monotonic() - killed[0] < 1.0
    assert not machines or pair.ended() == 1


@pytest.mark.parametrize("machines", PLACES)
@pytest.mark.parametrize("number", LOST)
def test_a_rank_that_is_lost_while_it_reads_weights_is_named(
    pair: RankPair, number: signal.Signals, machines: bool
) -> None:
    """It would read them for a minute. Of a rank that hangs nothing is left either."""
    sent = lose_while_it_reads(pair.monkeypatch, number, lambda: pair.pids[0])
    for module in (leader, node):  # then a rank that hangs is killed
        pair.monkeypatch.setattr(module, "_PATIENCE", 0.1)
    how = " with signal 9" if number == signal.SIGKILL and not machines else ""
    says = named(machines, f"{LOST[number]}{how}: the engine cannot go on")
    with pytest.raises(RankError, match=says):
        pair.start("slow", machines)
    assert time.monotonic() - sent[0] < 2.0 + machines  # a second of it is for a farewell
    if machines:
        assert pair.ended() == 1
        assert has_ended(pair.pids[0])


@pytest.mark.parametrize("number", LOST)
@pytest.mark.parametrize("call", [1, 6])  # the prompt's second part, a recorded decode step
def test_a_rank_that_is_lost_in_a_step_is_named(
    pair: RankPair, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, call: int
) -> None:
    llm = pair.start(rank_timeout=0.5, max_num_batched_tokens=20)
    monkeypatch.setattr(leader, "_PATIENCE", 0.1)
    leading, calls, sent = leader_of(llm), iter(range(1 << 30)), []
    encode = leading.encode

    def encode_and_lose(slices: Any) -> bytes:
        if next(calls) == call:  # the rank never gets this step, for which rank 0 then waits
            sent.append(time.monotonic())
            os.kill(pair.pids[0], number)
        return encode(slices)

    monkeypatch.setattr(leading, "encode", encode_and_lose)
    with pytest.raises(RankError, match=named(False, LOST[number])):
        tokens_of(llm)
    assert time.monotonic() - sent[0] < 1.0 + 0.5 * (number == signal.SIGSTOP)
    leading.close()
    assert is_gone(pair.pids[0])


def test_memory_that_runs_out_on_one_rank_ends_no_engine(
    pair: RankPair, tokens_of_one_rank: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    llm = pair.start(max_num_batched_tokens=2048, kv_cache_memory="64MiB")
    assert tokens_of(llm) == tokens_of_one_rank
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
    assert tokens_of(llm) == tokens_of_one_rank


def outputs_or_failed(llm: LLM, prompts: Any) -> list[Any]:
    """Tokens of each, None for a request that failed."""
    try:
        outputs = llm.generate(prompts, GREEDY)
    except GenerationError as error:
        outputs = error.outputs
    choices = [output.outputs[0] for output in outputs]
    return [None if one.finish_reason == "error" else one.token_ids for one in choices]


@pytest.mark.parametrize("machines", PLACES)
def test_a_rank_that_hangs_is_named_after_its_time(pair: RankPair, machines: bool) -> None:
    llm = pair.start(machines=machines, rank_timeout=1.0 if machines else 0.5)
    tokens_of(llm)
    pair.monkeypatch.setattr(node, "_PATIENCE", 0.1)  # then it is killed
    os.kill(pair.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=named(machines, "does not answer")):
        tokens_of(llm)
    assert time.monotonic() - began < 5.0
    if machines:
        leader_of(llm).close()
        assert pair.ended() == 1
        assert has_ended(pair.pids[0])
    else:
        os.kill(pair.pids[0], signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "machines"), [("step 4", False), ("step 4", True), ("late 4", True), ("step 1", True)]
)
def test_a_step_that_fails_on_one_rank_is_computed_again(
    pair: RankPair,
    tokens_of_one_rank: list[int],
    caplog: pytest.LogCaptureFixture,
    fault: str,
    machines: bool,
) -> None:
    llm = pair.start(fault, machines)
    assert tokens_of(llm) == tokens_of_one_rank
    assert "CapacityError: no memory on this rank" in caplog.text
    assert machines or "rank 1: " in caplog.text
    assert tokens_of(llm) == tokens_of_one_rank


@pytest.mark.parametrize("step", [3, 13])
def test_a_rank_that_fails_behind_its_last_gather_computes_again(
    pair: RankPair, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """In a recorded step rank 0 is done, and the next one finds it; else its logits are to come."""
    llm, alone = pair.start(f"late {step}"), LLM(BASE, **COMMON)
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
    for prompt in (PROMPT, OTHER):
        ours, expected = (one.generate(prompt, scored)[0].outputs[0] for one in (llm, alone))
        assert (ours.token_ids, ours.logprobs) == (expected.token_ids, expected.logprobs)
    assert next(calls) > step


def test_an_interrupt_leaves_the_ranks_together(
    pair: RankPair, tokens_of_one_rank: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pair.start()
    assert tokens_of(llm) == tokens_of_one_rank
    kind, calls = type(llm.engine.runner.model.layers[1]), iter(range(1 << 30))
    run = kind.__call__

    def interrupted(self: Any, *given: Any) -> Any:
        if next(calls) == 1:  # after the first layer's gathers
            raise KeyboardInterrupt
        return run(self, *given)

    monkeypatch.setattr(kind, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(OTHER, GREEDY)
    assert tokens_of(llm) == tokens_of_one_rank


def test_the_other_rank_ends_with_rank_0(pair: RankPair) -> None:
    llm = pair.start()
    leader_of(llm).close()
    assert is_gone(pair.pids[0])
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
    pair: RankPair, fault: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        pair.start(fault)


MACHINES = {"nnodes": 2, "master_addr": "127.0.0.1", "join_timeout": 0.1}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 3}, "4 attention heads.* 1, 2 or 4"),
    ({"kernels": "reference"}, "omit --kernels reference"),
    ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
    ({"tensor_parallel_size": 1, "rank_cpus": "0|1"}, "is for several ranks"),
    ({"rank_cpus": "0"}, "there are 2"),
    ({"rank_timeout": 0}, "--rank-timeout 0"),
    ({"rank_timeout": 1e12}, "--rank-timeout 1000000000000.0"),
    ({"rank_cpus": ["0", "1"]}, "write a text like"),
    ({"kv_store": "/dev/null/store"}, "--kv-store .* cannot be"),
    ({"tensor_parallel_size": 1, "nnodes": 0}, "--nnodes 0.*≥ 1"),
    ({"tensor_parallel_size": 1, "node_rank": 1}, "--node-rank 1.*--nnodes"),
    ({"tensor_parallel_size": 1, "nnodes": 2}, "multiple of 2.* 1"),
    ({"nnodes": 2}, "add --master-addr"),
    (MACHINES | {"node_rank": 2}, "--node-rank 2.*0 to 1"),
    ({"tensor_parallel_size": 1, "master_port": 70000}, "--master-port 70000.*≥ 1.*65535"),
    ({"tensor_parallel_size": 1, "join_timeout": 0}, "--join-timeout 0"),
    (MACHINES | {"kv_store": "store"}, "rank 0 maps the caches"),
    (MACHINES | {"node_rank": 1}, "freight serve"),
]


def test_what_cannot_be_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "spawn", lambda files: pytest.fail("a rank was started"))
    for options, says in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=says):
            LLM(BASE, skip_tokenizer_init=True, **{"tensor_parallel_size": 2} | options)


def test_a_rank_that_reads_weights_ends_with_rank_0(
    pair: RankPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Leader.load

    def interrupted(self: Leader, *given: int) -> None:
        load(self, *given)
        time.sleep(0.2)  # the other rank begins to read
        raise KeyboardInterrupt

    monkeypatch.setattr(Leader, "load", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.start("slow")
    assert time.monotonic() - began < 4.0  # after 5 s it would be killed
    assert is_gone(pair.pids[0])


def test_a_fork_does_not_keep_the_other_rank_alive(pair: RankPair) -> None:
    """As multiprocessing's children do in a program that has an LLM."""
    llm = pair.start()
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


def test_a_start_that_fails_leaves_no_file_open_and_no_thread_bound(pair: RankPair) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    if len(two) < 2:
        pytest.skip("needs two processors")
    cpus = f"{two[0]}|{two[1]}"
    llm = pair.start(rank_cpus=cpus)
    assert os.sched_getaffinity(0) == {two[0]}
    leader_of(llm).close()
    assert os.sched_getaffinity(0) > {two[0]}
    opened, usable = os.listdir("/proc/self/fd"), os.sched_getaffinity(0)
    with pytest.raises(CapacityError):
        pair.start(rank_cpus=cpus, kv_cache_memory=1)
    assert len(os.listdir("/proc/self/fd")) <= len(opened)
    assert os.sched_getaffinity(0) == usable


def test_sizes_are_those_of_all_ranks_together(pair: RankPair) -> None:
    alone = LLM(BASE, **COMMON)
    assert pair.start().kv_cache_info() == alone.kv_cache_info()
    with pytest.raises(CapacityError) as small:
        LLM(BASE, skip_tokenizer_init=True, kv_cache_memory=1000)
    with pytest.raises(CapacityError) as of_two:
        pair.start(kv_cache_memory=1000)
    assert str(small.value) == str(of_two.value)


def test_an_llm_starts_its_rank_and_ends_it(tokens_of_one_rank: list[int]) -> None:
    """Without a fork: an interpreter of its own, which gets its files by number."""
    llm = LLM(BASE, tensor_parallel_size=2, **COMMON)
    pid = leader_of(llm).pids[0]
    assert tokens_of(llm) == tokens_of_one_rank
    # weights of the other half were never read here
    whole = sum(tensor.nbytes for tensor in load_file(f"{BASE}/model.safetensors").values())
    assert weight_bytes(llm.engine.runner.model).total < 0.55 * whole
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
    pair: RankPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all processes of a container are paused."""
    clock = time.monotonic
    shift = [0.0]
    monkeypatch.setattr(leader.time, "monotonic", lambda: clock() + shift[0])
    llm = pair.start(rank_timeout=5)
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

    def processes() -> tuple[int, int]:
        """The engine's, which is rank 0, and that of rank 1, once the server answers as expected."""
        assert completion_of(server.wait_until_healthy()) == expected
        engine = server.children()["worker"]
        (rank,) = children_of(engine)
        return engine, rank

    def wait_for_another(engine: int) -> None:
        while server.children().get("worker") in (None, engine):
            time.sleep(0.05)

    try:
        engine, rank = processes()
        assert "on which ranks gain nothing" in server.said or len(numa_nodes()) > 1
        os.kill(rank, signal.SIGKILL)
        ended = time.monotonic() + 1.0
        while not has_ended(engine):
            assert time.monotonic() < ended
            time.sleep(0.01)
        assert_names(server.said, "rank 1", "signal 9")
        wait_for_another(engine)
        engine, rank = processes()
        os.kill(engine, signal.SIGKILL)
        assert is_gone(rank)
        wait_for_another(engine)
        _, rank = processes()
        assert server.stop() == 0
        assert is_gone(rank)
    finally:
        server.close()


def test_an_adapter_that_another_rank_cannot_read_is_refused_and_nothing_else(
    pair: RankPair, tmp_path: Path
) -> None:
    """Whatever it meets there: rank 0 waits for its answer, and goes on."""
    pair.model = "demo"
    pair.usual = {"enable_lora": True, "max_loras": 1, "rank_timeout": 2.0}
    llm = pair.start("adapter")
    expected = tokens_of(llm)
    folder = str(write_adapter(tmp_path / "adapter"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"rank 1: .*adapter.*Permission denied"):
            llm.load_adapter("mine", folder)
        assert tokens_of(llm) == expected
    assert not llm.adapters


def test_weights_of_several_ranks_neither_change_nor_sleep(pair: RankPair) -> None:
    llm = pair.start()
    expected = tokens_of(llm)
    for change in (lambda: llm.sleep(1), lambda: llm.sleep(2), lambda: llm.update_weights(BASE)):
        with pytest.raises(RequestError, match="several ranks"):
            change()
        assert not llm.is_sleeping
        assert tokens_of(llm) == expected
    llm.wake_up()  # is awake
    assert tokens_of(llm) == expected
