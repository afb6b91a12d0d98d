"""Where the Triton kernels are tested: on the GPU if torch has one, else in Triton's interpreter,
on the CPU.

Tests that need a GPU stand in files `test_gpu_*.py`, which are collected only where there is one:
`pytest -m gpu`. Without Triton, which is built for Linux alone, nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.interpreter import numbers_as_on_a_gpu, quick_interpreter

HAVE_GPU = torch.cuda.is_available()
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif HAVE_GPU:
    # their budgets and instructions are those of the compiler that development pins
    collect_ignore_glob = ["test_triton_compile.py", "test_push_fences.py"]
else:
    assert os.environ["TRITON_INTERPRET"]  # tests/conftest.py
    collect_ignore_glob = ["test_gpu_*.py"]


# of numpy, about the interpreter of Triton 3.5
SCALARS = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker("triton")
            item.add_marker(SCALARS)
            if HAVE_GPU:
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAVE_GPU else "cpu"


@pytest.fixture(scope="session", autouse=True)
def mended_interpreter() -> Iterator[None]:
    with numbers_as_on_a_gpu(), quick_interpreter():
        yield
