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

from freight.engine import build, follower
from freight.engine.step import Mode
from freight.errors import ConfigError, KernelError
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.parallel import distributed
from freight.parallel.distributed import Distributed
from freight.parallel.messages import Start
from freight.settings.device import DeviceFacts, DeviceKind
from freight.settings.engine import EngineArgs, EngineConfig
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


def test_gpus_of_several_machines_are_refused() -> None:
    options = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1"}
    for device in ("auto", "cuda"):
        with refuses(ConfigError, "nnodes 2", "GPUs"):
            resolved(replace(GPU, count=2), **options, device=device)


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


@pytest.mark.parametrize(("backend", "taken"), [("nccl", [3]), ("gloo", [])])
def test_a_rank_takes_the_gpu_of_its_number(
    backend: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything asks for the facts of a GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(follower, "_transport", lambda *_: "transport")
    opened = SimpleNamespace(as_rank=lambda ranks, cores: (ranks.rank, cores))

    def open_random(args: EngineArgs, shape: str) -> Any:
        assert calls == taken
        return opened

    monkeypatch.setattr(follower, "open_random", open_random)
    args = EngineArgs(tensor_parallel_size=4)
    start = Start(args, "llama-1b", 3, 4, None, 2, 60.0, 0, ("127.0.0.1", 1), backend)
    assert Start.decode(start.encode()) == start
    with socket.socket() as connection:
        assert follower._open(start, connection, ()) == ((3, 2), "transport")


class LateGroup:
    """A ProcessGroupNCCL of one rank: a gather is done after it was looked at `late` times."""

    late = 3
    made: ClassVar[list[LateGroup]] = []

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options._timeout.total_seconds() == 0.2
        self.size = size
        self.aborted = 0
        self.made.append(self)

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
    return LateGroup


def test_a_gather_of_gpus_is_waited_for(late_group: type[LateGroup]) -> None:
    rank = Distributed(HashStore(), 0, 2, 0.2, "127.0.0.1", distributed.NCCL)
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
    store = HashStore()
    rank = Distributed(store, 0, 2, 0.2, "127.0.0.1", distributed.NCCL)
    with pytest.raises(KernelError, match=r"no answer within 0\.2 seconds"):
        rank.gather(torch.ones(1, 1))
    rank.restart(1)
    store.compare_set("failed 1", "", "1")
    with pytest.raises(KernelError, match="it has left the step"):
        rank.gather(torch.ones(1, 1))
    rank.fail()
    assert [group.aborted for group in late_group.made] == [1, 1]
