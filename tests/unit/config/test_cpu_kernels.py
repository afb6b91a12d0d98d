"""`--kernels cpu-BUILD`: which builds are taken, what is refused, and the device that is meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import assert_names, refuses

from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales, Scheme
from freight.model import open as opening
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import shape_config
from freight.settings import cpu_builds
from freight.settings.device import DeviceFacts
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.resolve import KERNELS, check, resolve

BEST, *_, LEAST = cpu_builds.builds()
HASWELL = ("avx2", "f16c", "fma")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A processor like Haswell, with a file for each build of x86-64."""
    monkeypatch.delenv("FREIGHT_CPU_BUILD", raising=False)
    monkeypatch.setattr(cpu_builds.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_builds, "cpu_features", lambda: HASWELL)
    monkeypatch.setattr(cpu_builds, "FOLDER", tmp_path)
    for build in cpu_builds.X86_BUILDS:
        cpu_builds.path_of(build).touch()
    return tmp_path


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every build of this architecture can run."""
    monkeypatch.delenv("FREIGHT_CPU_BUILD", raising=False)
    monkeypatch.setattr(
        "freight.settings.hardware.obstacles", lambda: dict.fromkeys(cpu_builds.builds(), "")
    )


def decide(kind: str, **args: Any) -> EngineConfig:
    device: Any = SimpleNamespace(
        kind=kind, name=f"a {kind}", multiplies_fp8=True, cores=2, native_e4m3=Format.E4M3FN
    )
    model = parse_model_config(shape_config("llama-1b"))
    return resolve(EngineArgs(**args), model, Scheme(), KVScales((None,) * 16), device)


def test_the_values_of_the_option_are_the_builds_of_this_architecture() -> None:
    assert ("auto", "reference", *(f"cpu-{build}" for build in cpu_builds.builds())) == KERNELS
    assert [cpu_builds.build_in(kernels) for kernels in KERNELS[:2]] == ["", ""]
    assert cpu_builds.build_in(f"cpu-{BEST}") == BEST
    with refuses(ConfigError, "--kernels", "'cpu-i386'", "auto", "reference", f"cpu-{LEAST}"):
        check(EngineArgs(kernels="cpu-i386"))
    with refuses(ConfigError, "--kernels", "cpu"):
        check(EngineArgs(kernels="cpu"))


@pytest.mark.skipif("avx2" not in cpu_builds.builds(), reason="the builds are those of x86-64")
def test_a_build_that_cannot_run_is_refused_with_those_that_can(compiled: Path) -> None:
    check(EngineArgs(kernels="cpu-avx2"))
    with refuses(ConfigError, "--kernels cpu-avx_vnni", "the processor lacks avx_vnni") as error:
        check(EngineArgs(kernels="cpu-avx_vnni"))
    assert_names(str(error.value), "auto, reference, cpu-avx2 or cpu-portable")
    cpu_builds.path_of("avx2").unlink()
    with refuses(ConfigError, "--kernels cpu-avx2", "not compiled", "cpu-portable") as error:
        check(EngineArgs(kernels="cpu-avx2"))
    cpu_builds.path_of("portable").unlink()
    with refuses(ConfigError, "--kernels cpu-avx2", "auto or reference"):
        check(EngineArgs(kernels="cpu-avx2"))


def test_the_option_and_the_variable_name_one_build(
    all_run: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREIGHT_CPU_BUILD", LEAST)
    check(EngineArgs(kernels=f"cpu-{LEAST}"))
    check(EngineArgs(kernels="reference"))
    if BEST != LEAST:
        with refuses(ConfigError, f"--kernels cpu-{BEST}", "FREIGHT_CPU_BUILD", f"'{LEAST}'"):
            check(EngineArgs(kernels=f"cpu-{BEST}"))


def test_a_build_means_the_cpu(all_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, too."""
    asked = []

    def probe(device: str) -> DeviceFacts:
        asked.append(device)
        raise ConfigError("enough")

    monkeypatch.setattr(opening, "probe", probe)
    for kernels in ("auto", "reference", f"cpu-{LEAST}"):
        with pytest.raises(ConfigError, match="enough"):
            opening.open_random(EngineArgs(kernels=kernels), "llama-1b")
    assert asked == ["auto", "auto", "cpu"]
    assert EngineArgs(kernels=f"cpu-{LEAST}", device="cpu").computes_on == "cpu"
    with refuses(ConfigError, f"--kernels cpu-{LEAST}", "--device cuda", "--device cpu"):
        check(EngineArgs(kernels=f"cpu-{LEAST}", device="cuda"))
    with refuses(ConfigError, "--device cpu", "the device found is cuda"):
        decide("cuda", kernels=f"cpu-{LEAST}")


def test_a_build_is_checked_like_auto_on_a_cpu(all_run: None) -> None:
    build = f"cpu-{LEAST}"
    for options in (
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4"},
    ):
        of_build = decide("cpu", kernels=build, **options)
        assert of_build.kernels == build
        of_auto = decide("cpu", **options)
        assert (of_build.kv, of_build.int8_activations) == (of_auto.kv, of_auto.int8_activations)
    check(EngineArgs(kernels=build, tensor_parallel_size=2))
    with refuses(ConfigError, "--attention-compute fp8", "--kernels reference"):
        check(EngineArgs(kernels=build, attention_compute="fp8"))
