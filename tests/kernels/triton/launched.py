"""Compile what the tests of this folder launch on a GPU, for a GPU that is not there: each launch,
in its own sizes.

    python -O tests/kernels/triton/launched.py sm_90 [pytest's arguments]     one JSON object for each that fails

The tests run on the CPU as they would on that GPU, and every launch is recorded instead of run. So
what they compute is wrong: -O leaves their assertions out, and how they end does not matter. Then
each different launch is compiled. A test of another size than `cases.py` has, or of a type that
this GPU's matrix units do not take, is found before a card is. Tests in `test_gpu_*.py` need the
device itself, and are left out; `cases.py` has what they launch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "0",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}  # conftest.py leaves the former so
import pytest
import torch
import triton
from aot import OPTIONS, TARGETS, source_of
from triton.runtime.jit import JITFunction


class Recorder:
    """A plugin of pytest: makes torch name the target as its GPU, and records launches."""

    def __init__(self, arch: int) -> None:
        self.made: dict[str, tuple[str, Any, dict[str, Any]]] = {}
        self.test = ""
        facts = SimpleNamespace(major=arch // 10, minor=arch % 10, multi_processor_count=132)
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda device: facts
        made = self

        def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if not warmup:
                made.add(kernel, args, kwargs)

        JITFunction.run = record

    def add(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = source_of(kernel, args, kwargs)
        options = {option: kwargs[option] for option in OPTIONS if option in kwargs}
        parts = (source.signature, {str(k): str(v) for k, v in source.constants.items()}, options)
        key = json.dumps([kernel.fn.__name__, *parts, sorted(map(str, source.attrs))], default=str)
        self.made.setdefault(key, (self.test, source, options))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid


def main(target: str, *arguments: str) -> int:
    """The number of launches that do not compile."""
    gpu = TARGETS[target][1]
    recorder = Recorder(int(gpu.arch))
    torch.set_num_threads(1)
    here = Path(__file__).parent
    quiet = ["-p", "no:cacheprovider", "--tb=no", "--assert=plain", "-W", "default", "-m", ""]
    without = [f"--ignore={here / 'test_triton_compile.py'}"]
    pytest.main([*quiet, *without, *(arguments or [str(here)])], [recorder])
    failed = 0
    for test, source, options in recorder.made.values():
        try:
            triton.compile(source, target=gpu, options=options)
        except Exception as error:
            failed += 1
            constants = {
                name: str(value)
                for name, value in source.constants.items()
                if not isinstance(name, tuple)
            }
            report = {
                "test": test,
                "kernel": source.fn.fn.__name__,
                "error": str(error)[-400:],
                "constants": constants,
            }
            print(json.dumps(report | options), flush=True)
    print(json.dumps({"target": target, "launches": len(recorder.made), "failed": failed}))
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
