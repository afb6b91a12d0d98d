"""The server's conformance suite against Ray's address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def test_the_conformance_suite(deployed: Callable[..., str]) -> None:
    url = deployed(api_key="suite", enable_tokenizer_info_endpoint=True)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--import-mode=importlib"]
    command += ["-m", "not slow", "tests/conformance", "--url", url, "--api-key", "suite"]
    for name in LISTENING:
        command += ["--deselect", f"tests/conformance/test_transport.py::{name}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(run.stdout[-600:])
    assert run.returncode == 0, run.stdout[-6000:]


# What a listener does, which is Ray's here
LISTENING = (
    "test_a_header_of_64_kilobytes_is_431",
    "test_two_thousand_headers_are_431",
)
