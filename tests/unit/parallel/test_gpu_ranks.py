"""Ranks on GPUs as far as none is needed: what is refused, which GPU a rank takes, and gathers over a
group whose backend computes while the host goes on, as NCCL's does.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.refusals import refuses
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import HashStore

from freight.engine import build, follower, leader, transports
from freight.engine.step import Mode
from freight.errors import ConfigError, KernelError
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.parallel import distributed
from freight.parallel.distributed import Distributed
from freight.parallel.join import Join
from freight.parallel.messages import Start
from freight.settings.device import DeviceFacts, DeviceKind
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.nodes import given
from freight.settings.resolve import check, resolve

GPU = DeviceFacts(DeviceKind.CUDA, "a GPU", Format.E4M3FN, 2**30, 2**30, 2)
CPU = DeviceFacts(DeviceKind.CPU, "a CPU", Format.E4M3FN, 2**30, 2**30, 2)
MODEL = parse_model_config(PRESETS["llama-1b"])


def resolved(found: DeviceFacts, **options: Any) -> EngineConfig:
    args = EngineArgs(**options)
    return resolve(args, MODEL, Scheme(), KVScales((None,) * MODEL.num_layers), found)


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    options = {"tensor_parallel_size": 4}
    for seen, named in ((1, "1 GPU"), (2, "2 GPUs")):
        parts = ("tensor-parallel-size 4", named, f"at most {seen}", "device cpu")
        with refuses(ConfigError, *parts):
            resolved(replace(GPU, count=seen), **options)
    assert resolved(replace(GPU, count=4), **options).device == "cuda"
    assert resolved(CPU, **options).device == "cpu"


def test_each_machine_needs_gpus_for_its_ranks() -> None:
    options = {"tensor_parallel_size": 4, "nnodes": 2, "master_addr": "10.0.0.1"}
    for device in ("auto", "cuda"):
        assert resolved(replace(GPU, count=2), **options, device=device).device == "cuda"
        with refuses(ConfigError, "2 of them on each of --nnodes 2", "1 GPU;", "at most 2"):
            resolved(replace(GPU, count=1), **options, device=device)
    one_each = options | {"tensor_parallel_size": 2}
    assert resolved(replace(GPU, count=1), **one_each).device == "cuda"
    with refuses(ConfigError, "4 of them on each of --nnodes 2", "2 GPUs", "at most 4"):
        resolved(replace(GPU, count=2), **options, pipeline_parallel_size=2)


def test_triton_s_interpreter_is_a_value_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton interprets; its kernels then take what those of a GPU take."""
    args = EngineArgs(kernels="triton", kv_cache_dtype="int8")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with refuses(ConfigError, "kernels 'triton'"):
        check(args)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check(args)
    with refuses(ConfigError, "kv-cache-dtype int8", "kernels for GPUs"):
        resolved(CPU, **vars(args))


def test_ranks_on_gpus_gather_over_nccl() -> None:
    assert build._backend(resolved(GPU)) == "nccl"
    assert build._backend(resolved(CPU)) is None
    assert build._backend(replace(resolved(CPU), kernels="triton")) == "gloo"


def test_steps_are_launched_ahead_on_gpus_and_where_their_kernels_are_interpreted() -> None:
    keeps_pages: Any = SimpleNamespace(repeatable=True)
    keeps_states: Any = SimpleNamespace(repeatable=False)
    on_cpu = replace(resolved(CPU), most_drafts=0)
    for config, mode in (
        (resolved(GPU), Mode.OVERLAPPED),
        (replace(on_cpu, kernels="triton"), Mode.OVERLAPPED),
        (on_cpu, Mode.REPEATABLE),
    ):
        assert build._mode(config, keeps_pages) is mode
        assert build._mode(config, keeps_states) is Mode.ONCE


@pytest.mark.parametrize(
    ("backend", "nodes", "stages", "taken"),
    [
        ("nccl", 1, 1, [3]),
        ("nccl", 2, 1, [1]),
        ("nccl", 2, 2, [2]),
        ("nccl", 4, 1, [0]),
        ("gloo", 1, 1, []),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number(
    backend: str, nodes: int, stages: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its machine, before anything asks for the facts of a GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(follower, "_transport", lambda *_: "transport")
    opened = SimpleNamespace(as_rank=lambda ranks, cores: (ranks.rank, cores))

    def open_random(args: EngineArgs, shape: str) -> Any:
        assert calls == taken
        return opened

    monkeypatch.setattr(follower, "open_random", open_random)
    args = EngineArgs(tensor_parallel_size=4, nnodes=nodes, pipeline_parallel_size=stages)
    start = Start(args, "llama-1b", 3, 4, None, 2, 60.0, 0, ("127.0.0.1", 1), backend, 7)
    assert Start.decode(start.encode()) == start
    with socket.socket() as connection:
        assert follower._open(start, connection, ()) == ((3, 2), "transport")


def test_a_machine_with_fewer_gpus_than_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees its own machine alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = EngineArgs(tensor_parallel_size=4, nnodes=2)
    start = Start(args, None, 3, 4, None, 2, 60.0, 0, ("127.0.0.1", 1), "nccl")
    with refuses(ConfigError, "needs GPU 1", "there are 1"):
        follower._take_gpu(start)


def test_ranks_of_another_machine_are_bound_as_those_of_rank_0() -> None:
    """On GPUs to no memory node, unless processors are named there."""
    args = EngineArgs(tensor_parallel_size=2, nnodes=2)
    start = Start(args, None, 1, 2, None, 1, 60.0, 0, ("127.0.0.1", 1), "nccl")
    for backend, named, expected in (
        ("nccl", None, None),
        ("nccl", "4-5", (4, 5)),
        ("gloo", None, (4, 5)),
    ):
        options = given(replace(args, rank_cpus=named))
        join = Join("1", options, None, 1, (4, 5), 2)
        started = leader._start_of(replace(start, backend=backend), join)
        assert (started.processors, started.cores) == (expected, 2)


def test_what_keeps_ranks_from_pushing() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2}
    config = resolved(replace(GPU, count=4), **options)
    for more, named in (
        ({}, ""),
        ({"disable_custom_all_reduce": True}, "--disable-custom-all-reduce"),
        ({"nnodes": 2}, "--nnodes 2"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ):
        obstacle = transports.obstacle_to_pushing(EngineArgs(**options | more), config)
        assert obstacle.startswith(named)
        assert bool(obstacle) == bool(named)
    assert transports.obstacle_to_pushing(EngineArgs(**options), resolved(CPU, **options))


def test_a_slot_holds_the_largest_gather_of_a_captured_step() -> None:
    config = resolved(replace(GPU, count=2), max_num_seqs=20)
    logits = 4 * MODEL.vocab_size
    assert transports.slot_bytes(MODEL, config, 2) == 24 * logits
    assert transports.slot_bytes(MODEL, replace(config, max_num_seqs=500), 2) == 64 * logits
    uneven = replace(MODEL, vocab_size=MODEL.vocab_size + 1)
    assert transports.slot_bytes(uneven, config, 2) == 24 * (logits + 8)
    # of a small vocabulary, other columns: an expert's for each expert of a row
    moe = parse_model_config(PRESETS["qwen3-30b-a3b"])
    few = replace(moe, vocab_size=10)
    assert transports.slot_bytes(few, config, 2) == 24 * 2 * 8 * 768


class LateGroup:
    """A ProcessGroupNCCL of rank 0 of two: a gather is done after it was looked at `late` times."""

    late = 3
    made: ClassVar[list[LateGroup]] = []

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options._timeout.total_seconds() == 0.2
        self.size = size
        self.aborted = 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def _allgather_base(self, parts: Tensor, part: Tensor) -> Any:
        looks = iter(range(1 << 30))

        def is_completed() -> bool:
            if next(looks) < self.late:
                return False
            parts.view(self.size, *part.shape).copy_(part)
            return True

        return SimpleNamespace(wait=lambda: None, is_completed=is_completed)

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def late_group(monkeypatch: pytest.MonkeyPatch) -> type[LateGroup]:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", LateGroup, raising=False)
    monkeypatch.setattr(LateGroup, "made", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return LateGroup


def store_of_two() -> HashStore:
    """The other rank comes to the first two meetings."""
    store = HashStore()
    for times in range(2):
        store.set(f"coming {times} 1", "1")
    return store


def test_a_gather_of_gpus_is_waited_for(late_group: type[LateGroup]) -> None:
    rank = Distributed(store_of_two(), 0, 2, 0.2, "127.0.0.1", distributed.NCCL)
    part = torch.arange(6.0).view(2, 3)
    assert torch.equal(rank.gather(part), torch.cat((part, part), 1))
    rank.restart(1)
    assert [group.aborted for group in late_group.made] == [1]
    rank.gather(part)
    rank.close()
    assert [group.aborted for group in late_group.made] == [1, 1]


def test_a_gather_of_gpus_ends_where_another_rank_does_not_come(
    late_group: type[LateGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_group, "late", 1 << 30)
    store = store_of_two()
    rank = Distributed(store, 0, 2, 0.2, "127.0.0.1", distributed.NCCL)
    with pytest.raises(KernelError, match=r"no answer within 0\.2 seconds"):
        rank.gather(torch.ones(1, 1))
    rank.restart(1)
    store.compare_set("failed 1", "", "1")
    with pytest.raises(KernelError, match="it has left the step"):
        rank.gather(torch.ones(1, 1))
    rank.fail()
    assert [group.aborted for group in late_group.made] == [1, 1]
