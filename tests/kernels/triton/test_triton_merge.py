"""The merge of decode attention sums in one order, whatever form its rows are written in:
`merge_order.py`, for sm_90.

Bits of the interpreter would not tell. It takes a minute of compiling: `make test-all` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_no_consumer_changes_the_order_of_the_merge_s_sums(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, Path(__file__).with_name("merge_order.py"), "sm_90"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    shapes = [json.loads(line) for line in printed.splitlines()]
    assert len(shapes) == 3
    for shape in shapes:
        assert shape["operations"] > 10
        assert shape["different"] == []
