"""DeviceFacts and their probe: the device, its threads, and the memory that is really free.

Guarantees: free memory never exceeds what the kernel would give this process. On Linux that is the
minimum of MemAvailable and of what every control group above the process still allows (v1 and v2;
page cache that the kernel can drop, `inactive_file`, does not count as used). Cores are those
within the affinity mask and the CPU quota. Only files are read, under a `root` that tests replace.
torch is loaded when `probe` is called and not before, so importing this module stays cheap.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from freight.errors import ConfigError, FreightError, choices, nearest
from freight.fp8.formats import Format, amd_fp8

ROOT = Path("/")
DEVICES = ("auto", "cpu", "cuda")
# Features by which kernels are chosen, as /proc/cpuinfo spells them on x86 and on arm64
_FEATURES = (
    *(
        "avx2",
        "f16c",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vbmi",
        "avx512_vnni",
        "avx512_bf16",
    ),
    *("avx512dq", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "bf16", "sve"),
)
# Bytes: the largest frames of csrc take 50 KiB together, torch's some more
LEAST_STACK = 256 * 2**10
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class DeviceKind(StrEnum):
    """A kind of device, in torch's words: an AMD GPU is `cuda` as well."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class DeviceFacts:
    """One device. Memory in bytes, its own for a GPU; `cores` are those of the host that this
    process may use.

    `native_e4m3` is the E4M3 variant that the hardware computes with: FNUZ on AMD's gfx94x (MI300),
    FN elsewhere. `note` is a start-up message about the choice, or ''. `multiplies_fp8`: its matrix
    units take E4M3 operands. `count`: devices of its kind that this process sees.
    """

    kind: DeviceKind
    name: str
    native_e4m3: Format
    memory_total: int
    memory_free: int
    cores: int
    note: str = ""
    multiplies_fp8: bool = False
    count: int = 1


def require_one_kind(count: int, options: str) -> None:
    """Raise ConfigError unless the first `count` GPUs are of one kind: for another the kernels may
    choose other tiles, and sum in another order. options: those that ask for so many.
    """
    import torch

    names = {torch.cuda.get_device_name(index) for index in range(count)}
    if len(names) > 1:
        raise ConfigError(
            f"{options}: the GPUs are of several kinds, {choices(sorted(names))}, which may round differently; "
            "name those of one kind in CUDA_VISIBLE_DEVICES"
        )


def stage_devices(count: int, first: int | None = None) -> list[str]:
    """Return the GPUs from `first` on, of this process from its own: 'cuda:2', 'cuda:3'."""
    if first is None:
        import torch

        first = torch.cuda.current_device()
    return [f"cuda:{index}" for index in range(first, first + count)]


@dataclass(frozen=True)
class Card:
    """A GPU that torch sees. Memory in bytes."""

    name: str
    memory_total: int
    memory_free: int


def cards() -> tuple[Card, ...]:
    """Return the GPUs that torch sees, in its order: the first is 'cuda:0'."""
    import torch

    found = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found.append(Card(torch.cuda.get_device_name(index), total, free))
    return tuple(found)


def free_bytes(devices: Iterable[str]) -> dict[str, int]:
    """Return the bytes that are free on each of these GPUs now."""
    import torch

    return {device: torch.cuda.mem_get_info(device)[0] for device in devices}


def probe(device: str = "auto", root: Path = ROOT) -> DeviceFacts:
    """Find the facts of `device` ('auto': cuda if torch sees one, else cpu).

    Raises ConfigError for an unknown name, and for 'cuda' if torch has none, with a hint whether a
    GPU seems present.
    """
    if device not in DEVICES:
        raise ConfigError(
            f"device {device!r} is unknown{nearest(device, DEVICES)}: choose {choices(DEVICES)}"
        )
    import torch

    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info()
        native = Format.E4M3FN
        if getattr(torch.version, "hip", None) is not None:
            formats = amd_fp8(properties.gcnArchName)
            if Format.E4M3FNUZ in formats:
                native = Format.E4M3FNUZ
            multiplies = bool(formats)
        else:
            multiplies = (properties.major, properties.minor) >= (8, 9)
        facts = (DeviceKind.CUDA, properties.name, native, total, free, usable_cores(root))
        count = torch.cuda.device_count()
        return DeviceFacts(*facts, multiplies_fp8=multiplies, count=count)

    built_for_gpu = (
        torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    )
    note = _unused_gpu(gpu_present(root), torch.__version__, built_for_gpu)
    if device == "cuda":
        raise ConfigError(
            f"device 'cuda': {note or 'torch finds no GPU and none seems to be present'}; or use 'cpu'"
        )
    total, free = memory(root)
    return DeviceFacts(
        kind=DeviceKind.CPU,
        name=cpu_name(root),
        native_e4m3=Format.E4M3FN,
        memory_total=total,
        memory_free=free,
        cores=usable_cores(root),
        note=note,
    )


# The process in which threads were first used; a fork inherits the entry
_started_in: dict[str, int] = {}


class _Outside(threading.local):
    """For each thread: a stack of the thread counts to restore."""

    def __init__(self) -> None:
        self.counts: list[int] = []


@dataclass(frozen=True)
class Threads:
    """The number of threads that torch and Freight's kernels compute with, inside `with threads:`.

    torch keeps the number for each Python thread, and it is restored on leaving, so neither the
    caller nor another model sees it change. Only a Python thread that uses torch for the first time
    meanwhile does: it starts with the number that was set last. The context is reentrant, and may
    be used by several Python threads at once.

    Raises FreightError in a process that was forked after one was entered: the OpenMP runtime's
    threads are not copied, and it would wait for them forever.
    """

    count: int
    _outside: _Outside = field(default_factory=_Outside, init=False, repr=False, compare=False)

    def __enter__(self) -> None:
        import torch

        if _started_in.setdefault("pid", os.getpid()) != os.getpid():
            raise FreightError(
                f"process {os.getpid()} was forked from process {_started_in['pid']} after Freight's threads had "
                "started there, and a fork has none of them: start processes with the 'spawn' method, or fork before a "
                "model is loaded"
            )
        before = torch.get_num_threads()
        self._outside.counts.append(before)
        if before != self.count:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        import torch

        before = self._outside.counts.pop()
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def choose_threads(threads: int | None, cores: int, root: Path = ROOT) -> Threads:
    """Choose `wanted` threads, or else one per physical core, but no more than the `cores` that
    this process may use.

    Without `wanted`, no more than torch would take, which OMP_NUM_THREADS and torch.set_num_threads
    lower. Raises ConfigError as `check_threads`.
    """
    import torch

    check_threads(threads, cores)
    return Threads(threads or min(cores, physical_cores(root) or cores, torch.get_num_threads()))


def _stack_size(value: str) -> int | None:
    """Parse OpenMP's `16k`, `1 M`, `4096` (KiB) into bytes; None for a value that OpenMP would
    ignore.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([bkmg]?)\s*", value.lower())
    if match is None:
        return None
    units = {"b": 1, "": 2**10, "k": 2**10, "m": 2**20, "g": 2**30}
    return int(match[1]) * units[match[2]]


def check_threads(threads: int | None, cores: int) -> None:
    """Raise ConfigError if `wanted` is more than `cores`: the threads would wait for each other.
    Raises also as `check_stack`.
    """
    check_stack()
    if threads is not None and not 1 <= threads <= cores:
        usable = f"{cores} cores"
        if cores == 1:
            usable = "1 core"
        raise ConfigError(
            f"--threads {threads}: this process may use {usable}; choose a number from 1 to {cores}, or omit it"
        )


def check_stack() -> None:
    """Raise ConfigError for an OpenMP stack that the kernels' threads overrun: that ends the
    process silently.
    """
    for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE"):
        size = _stack_size(os.environ.get(name, ""))
        if size is not None and size < LEAST_STACK:
            raise ConfigError(
                f"{name}={os.environ[name]} is too small for the threads of the kernels: unset it, or set "
                f"{LEAST_STACK // 2**10}K or more"
            )


def physical_cores(root: Path = ROOT) -> int | None:
    """Count the physical cores among the processors of the affinity mask; None where /sys does not
    show them.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    folder = root / "sys/devices/system/cpu"
    cores: set[str] = set()
    for processor in os.sched_getaffinity(0):
        siblings = _read(folder / f"cpu{processor}/topology/thread_siblings_list").strip()
        if not siblings:
            return None
        cores.add(siblings)
    return len(cores)


def numa_nodes(root: Path = ROOT) -> tuple[frozenset[int], ...]:
    """Return the processors of the affinity mask by memory node (NUMA); () where /sys does not show
    them.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    usable = os.sched_getaffinity(0)
    by_number: dict[int, frozenset[int]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node = usable & frozenset(processors(_read(path / "cpulist")))
        if node:
            by_number[int(path.name.removeprefix("node"))] = frozenset(node)
    return tuple(by_number[number] for number in sorted(by_number))


def processors(text: str) -> Iterator[int]:
    """Yield the numbers of a list: '0-3,8' -> 0, 1, 2, 3, 8."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def bound_nodes(root: Path = ROOT) -> tuple[frozenset[int], ...]:
    """Return the memory nodes that threads of kernels are bound to; () for no binding.

    There is none on one node, or where OMP_PROC_BIND (false: the operating system places threads)
    or another variable of the OpenMP runtime says where threads run.
    """
    nodes = numa_nodes(root)
    if len(nodes) < 2 or not os.environ.keys().isdisjoint(_PLACES):
        return ()
    return nodes


def last_level_cache(root: Path = ROOT) -> int | None:
    """Return the bytes of the first processor's largest cache; None where /sys does not show it."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    largest = None
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        match = re.fullmatch(r"(\d+)([KMG])", _read(path / "size").strip())
        if match is not None:
            size = int(match[1]) * units[match[2]]
            largest = max(size, largest or 0)
    return largest


def gpu_present(root: Path = ROOT) -> str | None:
    """Return 'NVIDIA' or 'AMD' if such a GPU's driver has left its files, whether or not torch can
    use it.
    """
    if (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/version").exists():
        return "NVIDIA"
    if (root / "dev/kfd").exists():
        return "AMD"
    return None


def _unused_gpu(vendor: str | None, version: str, built_for_gpu: bool) -> str:
    """Say why a GPU that is present is not used, and the way out; '' without a GPU."""
    if vendor is None:
        return ""
    if built_for_gpu:
        return f"an {vendor} GPU is present, but torch {version} cannot use it: check its driver and which are visible"
    way_out = "install torch's ROCm build"
    if vendor == "NVIDIA":
        way_out = "make setup TORCH=cuda"
    return f"an {vendor} GPU is present, but torch {version} is a CPU build: {way_out}"


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return (total, free) bytes of main memory that this process may use."""
    if not (root / "proc/meminfo").exists():
        return _macos_memory()
    facts = _fields(root / "proc/meminfo")
    total = facts["MemTotal"] * 1024  # /proc/meminfo has kB
    free = facts["MemAvailable"] * 1024
    for group, limit, used, droppable in _MEMORY_FILES:
        for folder in _groups(root, group):
            allowed = _number(folder / limit)
            current = _number(folder / used)
            if allowed is None or current is None:
                continue
            current -= _fields(folder / "memory.stat").get(droppable, 0)
            total = min(total, allowed)
            free = min(free, max(0, allowed - current))
    return total, free


# Controller, and in its group: the limit, the usage, the droppable line of memory.stat
_MEMORY_FILES = [
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def usable_cores(root: Path = ROOT) -> int:
    """Count the cores within the affinity mask and the CPU quota, rounded down: threads beyond a
    quota only get throttled.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = []
    for folder in _groups(root, ""):
        quotas.append(_read(folder / "cpu.max").split())
    for folder in _groups(root, "cpu"):
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
        quotas.append([quota, period])
    for numbers in quotas:
        # Not 'max', -1 or missing
        if len(numbers) == 2 and numbers[0].isdigit() and numbers[1].isdigit():
            cores = min(cores, max(1, math.floor(int(numbers[0]) / int(numbers[1]))))
    return cores


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name, or its architecture if the system does not give one."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features(root: Path = ROOT) -> tuple[str, ...]:
    """Return the instruction sets that kernels choose by; empty if neither /proc nor macOS on arm64
    shows them.
    """
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            have = set(line.partition(":")[2].split())
            return tuple(name for name in _FEATURES if name in have)
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return _macos_features()
    return ()


def _macos_features() -> tuple[str, ...]:
    """Return an Apple processor's features, in the spelling of /proc/cpuinfo. Processors before the
    M2 have no BF16.
    """
    command = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        answer = ""
    if answer.strip() == "1":
        return ("asimd", "bf16")
    return ("asimd",)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of every group above it, for a v1
    controller ('': v2).

    In a container the path often names folders that only the host sees. Those are read as empty,
    and the walk ends at the mount, which is then the container's own group.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    """Read a file's text; '' if there is none or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    if not text.isdigit():
        return None
    return int(text)


def _fields(path: Path) -> dict[str, int]:
    """Parse 'name value' or 'name: value kB' lines as numbers."""
    values = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            values[words[0]] = int(words[1])
    return values


def _macos_memory() -> tuple[int, int]:
    """Return (total, free) bytes from sysctl and vm_stat."""
    try:
        total = _output("sysctl", "-n", "hw.memsize")
        pages = _output("vm_stat")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{platform.system()} does not report how much memory is free: {error}"
        ) from error
    return int(total), parse_vm_stat(pages)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_vm_stat(text: str) -> int:
    """Count the free bytes in macOS's vm_stat: pages that are free, or that the kernel drops on
    demand.
    """
    header, *lines = text.splitlines()
    page_size = int(header.split("page size of")[1].split()[0])
    counts = dict(line.split(":", 1) for line in lines if ":" in line)
    free = 0
    for kind in ("free", "inactive", "speculative", "purgeable"):
        free += int(counts[f"Pages {kind}"].strip(" ."))
    return page_size * free
