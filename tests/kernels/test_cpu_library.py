"""The rules by which a build of the CPU kernels is found, chosen and refused."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.refusals import refuses

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.errors import KernelError
from freight.kernels.cpu import library
from freight.kernels.reference_set import REFERENCE
from freight.kernels.select import select_kernels
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KVPages
from freight.operands.weight import Weight
from freight.settings import cpu_builds

ROOT = Path(__file__).parents[2]
SAPPHIRE_RAPIDS = (*cpu_builds.X86_BUILDS["amx"], "avx_vnni")
ZEN4 = (*cpu_builds.X86_BUILDS["avx512"], "avx512dq")
HASWELL = ("avx2", "f16c", "fma")
ALDER_LAKE = (*HASWELL, "avx_vnni")
ICE_LAKE = (*HASWELL, "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni")
GRAVITON3 = ("asimd", "asimdhp", "bf16", "sve")
ALTRA = ("asimd", "asimdhp")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for every build of every architecture, on an x86 system that allows
    tiles.
    """
    monkeypatch.setattr(cpu_builds, "tile_obstacle", lambda: "")
    monkeypatch.setattr(cpu_builds.platform, "machine", lambda: "x86_64")
    for build in cpu_builds.X86_BUILDS | cpu_builds.ARM64_BUILDS:
        cpu_builds.path_of(build, tmp_path).touch()
    return tmp_path


def compiler_works(folder: Path) -> bool:
    source = folder / "probe.cpp"
    source.write_text("#include <thread>\nint main() { return 0; }\n")
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-std=c++17",
        "-c",
        str(source),
        "-o",
        str(folder / "probe.o"),
    ]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_the_kernels_were_compiled_where_a_compiler_works(tmp_path: Path) -> None:
    assert cpu_builds.installed() or not compiler_works(tmp_path), (
        "the build of csrc/ failed: see `pip install -v -e .`"
    )


@pytest.mark.parametrize(
    ("features", "builds"),
    [
        (SAPPHIRE_RAPIDS, ("amx", "avx512", "avx512_vnni", "avx_vnni", "avx2", "portable")),
        (ZEN4, ("avx512", "avx512_vnni", "avx2", "portable")),
        (ICE_LAKE, ("avx512_vnni", "avx2", "portable")),
        (ALDER_LAKE, ("avx_vnni", "avx2", "portable")),
        (HASWELL, ("avx2", "portable")),
        (("avx2", "fma"), ("portable",)),  # AVX2 without F16C
        (
            (*HASWELL, "avx512f", "avx512bw", "avx512vl"),
            ("avx2", "portable"),
        ),  # AVX-512 without VBMI and BF16
        ((), ("portable",)),
    ],
)
def test_the_processor_decides_which_builds_run(
    features: tuple[str, ...], builds: tuple[str, ...], folder: Path
) -> None:
    assert cpu_builds.runnable(features, folder) == builds


@pytest.mark.parametrize(
    ("machine", "features", "builds"),
    [
        ("aarch64", GRAVITON3, ("neon_bf16", "neon")),
        ("arm64", ("asimd", "bf16"), ("neon_bf16", "neon")),  # as macOS names an M2
        ("aarch64", ALTRA, ("neon",)),
        ("arm64", (), ("neon",)),
        ("riscv64", GRAVITON3, ("portable",)),
        ("x86_64", GRAVITON3, ("portable",)),
        ("AMD64", HASWELL, ("avx2", "portable")),  # as Windows says it
    ],
)
def test_a_machine_runs_builds_of_its_own_architecture(
    machine: str,
    features: tuple[str, ...],
    builds: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_builds.platform, "machine", lambda: machine)
    assert cpu_builds.runnable(features, folder) == builds


def test_the_description_names_no_build_of_another_architecture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_builds.platform, "machine", lambda: "aarch64")
    assert cpu_builds.describe(GRAVITON3, folder) == "neon_bf16"
    assert cpu_builds.describe(ALTRA, folder) == "neon (neon_bf16: the processor lacks bf16)"


def test_what_was_not_compiled_does_not_run(folder: Path) -> None:
    cpu_builds.path_of("amx", folder).unlink()
    cpu_builds.path_of("avx512", folder).unlink()
    cpu_builds.path_of("avx512_vnni", folder).unlink()
    assert cpu_builds.runnable(SAPPHIRE_RAPIDS, folder) == ("avx_vnni", "avx2", "portable")
    expected = "avx_vnni (amx: not compiled; avx512: not compiled; avx512_vnni: not compiled)"
    assert cpu_builds.describe(SAPPHIRE_RAPIDS, folder) == expected


def test_tiles_are_used_only_where_the_system_allows_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu_builds,
        "tile_obstacle",
        lambda: "Linux denied this process the tile registers (because)",
    )
    assert cpu_builds.runnable(SAPPHIRE_RAPIDS, folder) == (
        *("avx512", "avx512_vnni", "avx_vnni", "avx2", "portable"),
    )
    said = cpu_builds.describe(SAPPHIRE_RAPIDS, folder)
    assert said == "avx512 (amx: Linux denied this process the tile registers (because))"


def test_a_system_that_is_not_linux_gives_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_builds.sys, "platform", "darwin")
    assert "only Linux" in cpu_builds.tile_obstacle.__wrapped__()


def test_the_description_says_what_runs_and_why_not_better(folder: Path, tmp_path: Path) -> None:
    assert cpu_builds.describe(SAPPHIRE_RAPIDS, folder) == "amx"
    expected = "avx512 (amx: the processor lacks amx_bf16, amx_int8, amx_tile)"
    assert cpu_builds.describe(ZEN4, folder) == expected
    said = cpu_builds.describe(HASWELL, folder)
    assert said.startswith("avx2 (amx: the processor lacks amx_bf16, ")
    assert "; avx512: the processor lacks avx512_bf16, " in said
    assert "no C++17 compiler" in cpu_builds.describe(ZEN4, tmp_path / "empty")


def test_every_build_that_runs_here_loads() -> None:
    for build in cpu_builds.runnable():
        assert library.load(build).build == build
        assert select_kernels(f"cpu-{build}").name == f"cpu-{build}"


@pytest.mark.parametrize("build", cpu_builds.runnable())
def test_a_named_build_is_the_one_that_is_loaded(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREIGHT_CPU_BUILD", build)
    assert cpu_builds.runnable() == (build,)
    assert library.load.__wrapped__(None).build == build
    assert "FREIGHT_CPU_BUILD" in cpu_builds.describe()


def test_a_named_build_is_loaded_in_child_processes_too() -> None:
    build = cpu_builds.runnable()[-1]
    environment = os.environ | {"FREIGHT_CPU_BUILD": build}
    command = [sys.executable, "-m", "freight", "env", "--json"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    facts = json.loads(child.stdout)
    assert facts["kernels"] == f"cpu-{build}"
    assert "FREIGHT_CPU_BUILD" in facts["kernels_because"]


def test_a_named_build_that_cannot_run_is_refused_and_nothing_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FREIGHT_CPU_BUILD", "avx1024")
    assert cpu_builds.runnable() == ()
    with refuses(KernelError, "FREIGHT_CPU_BUILD", "'avx1024'", "portable"):
        library.load.__wrapped__(None)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    with pytest.raises(KernelError, match="FREIGHT_CPU_BUILD"):
        select_kernels("auto")


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which CMake asks only once what the compiler can do."""
    return tmp_path_factory.mktemp("build")


CPUINFO = {
    "sapphire rapids": (
        SAPPHIRE_RAPIDS,
        ["amx", "avx512", "avx512_vnni", "avx_vnni", "avx2", "portable"],
    ),
    "zen 4": (ZEN4, ["avx512", "avx512_vnni", "avx2", "portable"]),
    "ice lake": (ICE_LAKE, ["avx512_vnni", "avx2", "portable"]),
    "alder lake": (ALDER_LAKE, ["avx_vnni", "avx2", "portable"]),
    "haswell": (HASWELL, ["avx2", "portable"]),
    "core 2": (("sse2", "ssse3"), ["portable"]),
}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the builds are those of x86-64")
@pytest.mark.parametrize("processor", CPUINFO)
def test_an_editable_install_compiles_what_the_processor_runs(
    processor: str, build_folder: Path
) -> None:
    """CMake's rule of what a processor runs is that of library.py."""
    features, builds = CPUINFO[processor]
    cpuinfo = build_folder / "cpuinfo"
    cpuinfo.write_text(f"model name\t: a processor\nflags\t\t: fpu {' '.join(features)}\n")
    best = [("best", builds[:1])] if processor == "zen 4" else []
    for choice, compiled in (("runnable", builds), *best):
        command = [
            *("cmake", "-S", str(ROOT / "csrc"), "-B", str(build_folder)),
            *(f"-DFREIGHT_CPUINFO={cpuinfo}", f"-DFREIGHT_BUILDS={choice}"),
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [line] = [line for line in output.splitlines() if line.startswith("-- CPU kernels: ")]
        assert line.startswith(f"-- CPU kernels: {', '.join(compiled)}, the b")


def test_auto_takes_the_best_build() -> None:
    best = cpu_builds.runnable()
    assert select_kernels("auto").name == (f"cpu-{best[0]}" if best else "reference")


def test_the_reference_is_there_by_name_and_for_other_devices() -> None:
    assert select_kernels("reference") == REFERENCE
    assert select_kernels("reference", "cuda") == REFERENCE


def test_without_a_build_auto_says_why_and_cpu_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FREIGHT_CPU_BUILD", raising=False)
    monkeypatch.setattr(cpu_builds, "installed", lambda folder=tmp_path: ())
    chosen = select_kernels("auto")
    assert chosen.name == "reference"
    assert "no C++17 compiler" in chosen.note
    with pytest.raises(KernelError, match="none is usable here"):
        library.load.__wrapped__(None)
    assert REFERENCE.note == ""


def test_a_build_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "runnable", lambda features=None, folder=None: ("portable",))
    with refuses(KernelError, "avx512 build"):
        library.load.__wrapped__("avx512")


def test_a_damaged_library_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(library, "runnable", lambda features=None, folder=None: ("portable",))
    monkeypatch.setattr(library, "path_of", lambda build: folder / f"freight_{build}.so")
    with pytest.raises(KernelError, match="reinstall Freight"):
        library.load.__wrapped__("portable")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    for build in cpu_builds.runnable():
        with pytest.raises(KernelError, match="of another version"):
            library.load.__wrapped__(build)


@pytest.mark.skipif(
    "amx" not in cpu_builds.runnable(), reason="this processor or system has no matrix tiles"
)
def test_the_amx_build_computes_on_tiles() -> None:
    """Tiles sum even and odd inputs apart, dot products all in order: sums of 0 keep other rounding
    errors.
    """
    torch.manual_seed(0)
    half, matrix = torch.randn(40, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    x, matrix = torch.cat((half, half), 1), torch.cat((matrix, -matrix), 1)
    q, k, v = torch.randn(1, 4, 64).bfloat16(), *torch.randn(2, 2, 16, 2, 64).bfloat16()
    pages = KVPages(
        torch.cat((k, k)), torch.cat((v, -v)), None, None, torch.zeros(2, dtype=torch.int64)
    )
    batch = prepare(
        [SequenceSlice([0], 63, ([0, 1, 2, 3],), Logits.LAST)], [Pages((0,), 0, None, 16)]
    ).sequences(0)
    results = []
    for build in ("amx", "avx512"):
        kernels = select_kernels(f"cpu-{build}")
        results.append(
            (
                kernels.linear(x, kernels.pack(Weight(matrix))),
                kernels.attention(q, pages, batch, AttentionCall(0.125)),
            )
        )
    for tiles, dots in zip(*results, strict=True):
        assert not torch.equal(tiles, dots)
        assert torch.allclose(tiles, dots, rtol=0.01, atol=0.01)
