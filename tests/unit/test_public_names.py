"""The public surface: exactly these names, each importable, loaded only when used."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata

import pytest

import freight

PUBLIC = {
    "LLM": "freight.llm",
    "AsyncLLM": "freight.async_llm",
    "LoRARequest": "freight.engine.adapters",
    "SamplingParams": "freight.sampling",
    "PoolingParams": "freight.pooling",
    "PoolingRequestOutput": "freight.outputs",
    "StructuredOutputs": "freight.structured",
    "RequestOutput": "freight.outputs",
    "CompletionOutput": "freight.outputs",
    "EngineStats": "freight.outputs",
    "FinishReason": "freight.outputs",
    "Logprob": "freight.outputs",
    "FreightError": "freight.errors",
    "ConfigError": "freight.errors",
    "RequestError": "freight.errors",
    "CheckpointError": "freight.errors",
    "CapacityError": "freight.errors",
    "KernelError": "freight.errors",
    "EngineError": "freight.errors",
    "GenerationError": "freight.errors",
    "quantize": "freight.quantizer.quantize",
    "QuantizeResult": "freight.quantizer.quantize",
    "Outcome": "freight.engine.verification",
    "Verification": "freight.engine.verification",
}


def test_all_is_exactly_the_public_names() -> None:
    assert set(freight.__all__) == {*PUBLIC, "__version__"}
    assert dir(freight) == sorted(freight.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_that_of_its_home(name: str) -> None:
    value = getattr(freight, name)
    assert callable(value)
    assert (value.__name__, value.__module__) == (name, PUBLIC[name])


def test_version_is_that_of_the_distribution() -> None:
    assert freight.__version__ == metadata.version("freight")


def test_from_source_without_an_installation_there_is_a_version_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    assert freight.__version__ == "0+source"


@pytest.mark.parametrize(
    ("typo", "meant"), [("SampleParams", "SamplingParams"), ("ConfgError", "ConfigError")]
)
def test_an_unknown_name_suggests_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{typo}' \(did you mean {meant}\?\)"):
        getattr(freight, typo)


def test_a_name_like_nothing_suggests_nothing() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = freight.xyzzy  # type: ignore[attr-defined]


def test_importing_freight_loads_neither_torch_nor_its_own_modules() -> None:
    code = "import sys, freight; print([m for m in sys.modules if m == 'torch' or m.startswith('freight.')])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


SPINS = "3000" if platform.machine().lower() in ("x86_64", "amd64") else "10000"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_give_way_unless_told_otherwise(given, spins):
    code = "import freight, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    run = [sys.executable, "-c", code]
    answer = subprocess.run(
        run, env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == str(spins)
