"""The probe, against made-up /proc, /sys and /dev trees, and against a torch that says it has a
GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.errors import ConfigError, FreightError
from freight.fp8.formats import Format
from freight.settings.device import (
    Card,
    DeviceKind,
    Threads,
    cards,
    choose_threads,
    cpu_features,
    cpu_name,
    gpu_present,
    last_level_cache,
    memory,
    parse_vm_stat,
    probe,
    usable_cores,
)

GIB = 2**30
CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx2 f16c fma avx512_bf16 avx512vbmi\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, 48 of them available, and no control groups."""
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {48 * 2**20} kB\n",
    )
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def write(root: Path, path: str, text: str | int) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def group(root: Path, folder: str, *, limit: str | int, used: int, inactive: int = 0) -> None:
    """A v2 control group."""
    write(root, f"sys/fs/cgroup{folder}/memory.max", limit)
    write(root, f"sys/fs/cgroup{folder}/memory.current", used)
    write(
        root,
        f"sys/fs/cgroup{folder}/memory.stat",
        f"anon 5\ninactive_file {inactive}\nactive_file 7",
    )


def test_without_control_groups_the_machine_decides(root: Path) -> None:
    assert memory(root) == (64 * GIB, 48 * GIB)


def test_v2_limit_less_use_plus_what_can_be_dropped(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a")
    group(root, "/a", limit=8 * GIB, used=6 * GIB, inactive=1 * GIB)
    assert memory(root) == (8 * GIB, 3 * GIB)


@pytest.mark.parametrize("tight", ["/a/b/c", "/a/b", "/a"])
def test_v2_the_tightest_group_on_the_path_counts(root: Path, tight: str) -> None:
    write(root, "proc/self/cgroup", "0::/a/b/c")
    for folder in ("/a", "/a/b", "/a/b/c"):
        group(root, folder, limit=20 * GIB if folder != tight else 4 * GIB, used=3 * GIB)
    group(root, "/other", limit=1, used=1)
    assert memory(root) == (4 * GIB, 1 * GIB)


def test_v2_no_limit_is_no_limit(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a")
    group(root, "/a", limit="max", used=60 * GIB)
    assert memory(root) == (64 * GIB, 48 * GIB)


def test_v2_a_container_whose_path_only_the_host_sees(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../kubepods/pod7")
    group(root, "", limit=2 * GIB, used=1 * GIB)
    assert memory(root) == (2 * GIB, 1 * GIB)


def test_use_above_the_limit_leaves_nothing(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    group(root, "", limit=2 * GIB, used=3 * GIB)
    assert memory(root) == (2 * GIB, 0)


def test_v1_limits_are_read_along_the_path(root: Path) -> None:
    write(root, "proc/self/cgroup", "3:cpu,cpuacct:/x\n2:memory:/docker/7f\n1:name=systemd:/\n0::/")
    unlimited = 2**63 - 4096
    for folder, limit, used, dropped in (
        ("", unlimited, 9 * GIB, 0),
        ("/docker/7f", 6 * GIB, 5 * GIB, GIB),
    ):
        write(root, f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes", limit)
        write(root, f"sys/fs/cgroup/memory{folder}/memory.usage_in_bytes", used)
        write(
            root,
            f"sys/fs/cgroup/memory{folder}/memory.stat",
            f"inactive_file 1\ntotal_inactive_file {dropped}",
        )
    assert memory(root) == (6 * GIB, 2 * GIB)


def test_memory_available_counts_where_the_group_allows_more(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    group(root, "", limit=60 * GIB, used=0)
    assert memory(root) == (60 * GIB, 48 * GIB)


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10.
Pages active:                          99999.
Pages inactive:                           20.
Pages speculative:                         3.
Pages throttled:                           0.
Pages wired down:                       7777.
Pages purgeable:                           4.
"Translation faults":              123456789.
"""


def test_macos_counts_pages_that_can_be_had() -> None:
    assert parse_vm_stat(VM_STAT) == 16384 * 37


def test_macos_tools_answer_where_there_is_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vm_stat.txt").write_text(VM_STAT)
    for name, line in (("sysctl", "echo 17179869184"), ("vm_stat", f"cat {tmp_path}/vm_stat.txt")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert memory(tmp_path) == (16 * GIB, 16384 * 37)


def test_a_system_that_tells_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses(ConfigError, "how much memory"):
        memory(tmp_path)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_cores_respect_affinity_and_the_v2_quota(
    root: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(root, "proc/self/cgroup", "0::/a/b")
    write(root, "sys/fs/cgroup/a/cpu.max", quota)
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (200000, 2)])
def test_cores_respect_the_v1_quota(
    root: Path, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(root, "proc/self/cgroup", "4:cpu,cpuacct:/a")
    write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota)
    write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", 100000)
    assert usable_cores(root) == cores


def test_cores_without_an_affinity_mask(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(root) == 6


def test_the_processor_and_its_features(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert cpu_name(root) == "Some CPU @ 3 GHz"
    assert cpu_features(root) == ("avx2", "f16c", "fma", "avx512vbmi", "avx512_bf16")
    assert cpu_features(tmp_path / "nowhere") == ()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """torch is left at a number that no test asks for."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_threads_hold_inside_and_not_outside(counts: list[int], fails: bool) -> None:
    """However they are nested, the same object in itself too, and whether or not what is inside
    raises.
    """
    made = {count: Threads(count) for count in counts}

    def nest(left: list[int]) -> None:
        if not left:
            raise KeyError if fails else StopIteration
        before = torch.get_num_threads()
        try:
            with made[left[0]]:
                assert torch.get_num_threads() == left[0]
                nest(left[1:])
        finally:
            assert torch.get_num_threads() == before

    with pytest.raises(KeyError if fails else StopIteration):
        nest(counts)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_count_for_the_python_thread_that_entered_them() -> None:
    shared, inside, done = Threads(1), threading.Event(), threading.Event()
    found = []

    def other() -> None:
        torch.set_num_threads(2)
        with shared:
            found.append(torch.get_num_threads())
            inside.set()
            done.wait(300)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(300)
    assert torch.get_num_threads() == 3
    with shared:
        assert torch.get_num_threads() == 1
        done.set()
        thread.join(300)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    assert found == [1, 2]


def test_threads_are_refused_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freight.settings.device._started_in", {"pid": os.getpid() + 1})
    with pytest.raises(
        FreightError, match=rf"forked from process {os.getpid() + 1} after .* 'spawn' method"
    ):
        Threads(1).__enter__()
    monkeypatch.setattr("freight.settings.device._started_in", {})
    with Threads(1), Threads(2):
        pass


FORK = """
import freight, os, signal, torch
from freight.settings.device import Threads
from freight.errors import FreightError

threads = Threads(2)
with threads:
    torch.ones(2**20).sum()
if os.fork() == 0:
    signal.alarm(10)  # ends it, should it hang
    for again in (threads, Threads(2)):
        try:
            with again:
                torch.ones(2**20).sum()  # would wait forever for threads that only the parent has
        except FreightError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_gets_an_error_and_does_not_hang() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("'spawn'") == 2


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("wanted", "cores", "siblings", "count"),
    [
        (None, 2, ["0", "1"], 2),  # no more than the cores
        (None, 8, [str(i) for i in range(8)], 3),  # no more than torch is set to
        (None, 4, ["0,2", "1,3", "0,2", "1,3"], 2),  # one for each physical core
        (4, 4, ["0,2", "1,3", "0,2", "1,3"], 4),  # a wish may use them all
        (1, 4, [], 1),
        (None, 2, [], 2),  # /sys shows nothing
    ],
)
def test_how_many_threads(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    cores: int,
    siblings: list[str],
    count: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    for processor, text in enumerate(siblings):
        write(root, f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list", text)
    assert choose_threads(wanted, cores, root).count == count
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("wanted", [64, 3, 0, -1])
def test_more_threads_than_cores_are_refused(wanted: int) -> None:
    with refuses(ConfigError, f"--threads {wanted}", "2 cores", "1 to 2"):
        choose_threads(wanted, 2)


def test_the_last_level_cache(root: Path) -> None:
    assert last_level_cache(root) is None
    for index, size in enumerate(("48K", "32K", "2048K", "480M")):
        write(root, f"sys/devices/system/cpu/cpu0/cache/index{index}/size", size)
    assert last_level_cache(root) == 480 * 2**20


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_cpu_facts(root: Path, device: str) -> None:
    facts = probe(device, root)
    assert (facts.kind, facts.name, facts.native_e4m3) == (
        DeviceKind.CPU,
        "Some CPU @ 3 GHz",
        Format.E4M3FN,
    )
    assert (facts.memory_total, facts.memory_free, facts.note) == (64 * GIB, 48 * GIB, "")
    assert facts.cores >= 1


@pytest.mark.usefixtures("no_gpu")
def test_cuda_where_there_is_none(root: Path) -> None:
    with refuses(ConfigError, "device 'cuda'", "no GPU", "'cpu'"):
        probe("cuda", root)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("path", "cuda", "says"),
    [
        ("dev/nvidia0", None, r"NVIDIA GPU.*CPU build.*make setup TORCH=cuda"),
        ("proc/driver/nvidia/version", None, r"make setup TORCH=cuda"),
        ("dev/nvidia0", "12.8", r"NVIDIA GPU.*driver"),
        ("dev/kfd", None, r"AMD GPU.*ROCm build"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, path: str, cuda: str | None, says: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    write(root, path, "")
    with pytest.raises(ConfigError, match=says):
        probe("cuda", root)
    facts = probe("auto", root)
    assert facts.kind is DeviceKind.CPU
    assert "GPU is present" in facts.note


def test_no_gpu_files_no_gpu(root: Path) -> None:
    assert gpu_present(root) is None


@pytest.mark.parametrize(
    ("arch", "capability", "native", "multiplies"),
    [
        ("gfx942:sramecc+", (9, 4), Format.E4M3FNUZ, True),
        ("gfx950:sramecc+:xnack-", (9, 5), Format.E4M3FN, True),
        ("gfx90a", (9, 0), Format.E4M3FN, False),
        ("NVIDIA H100", (9, 0), Format.E4M3FN, True),
        ("NVIDIA L4", (8, 9), Format.E4M3FN, True),
        ("NVIDIA A10", (8, 6), Format.E4M3FN, False),
    ],
)
def test_cuda_facts(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    capability: tuple[int, int],
    native: Format,
    multiplies: bool,
) -> None:
    properties = SimpleNamespace(
        name="A GPU", gcnArchName=arch, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(
        torch.version, "hip", "7.0" if arch.startswith("gfx") else None, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    for device in ("auto", "cuda"):
        facts = probe(device, root)
        assert (facts.kind, facts.name, facts.native_e4m3) == (DeviceKind.CUDA, "A GPU", native)
        assert facts.multiplies_fp8 is multiplies
        assert (facts.memory_total, facts.memory_free) == (80 * GIB, 70 * GIB)
    assert probe("cpu", root).kind is DeviceKind.CPU


def test_all_cards_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [70 * GIB, 8 * GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * GIB))
    assert cards() == (Card("GPU 0", 80 * GIB, 70 * GIB), Card("GPU 1", 80 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cards() == ()


def test_an_unknown_device_lists_the_choices(root: Path) -> None:
    with refuses(ConfigError, "'cudaa'", "did you mean cuda", "auto, cpu or cuda"):
        probe("cudaa", root)


def test_this_machine() -> None:
    facts = probe("cpu")
    assert 0 < facts.memory_free <= facts.memory_total
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
