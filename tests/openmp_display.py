"""What GNU OpenMP has read in processes that tests start: it tells when it is loaded."""

from __future__ import annotations

import os
import re

# of this process: tests set some of them for themselves (tests/conftest.py)
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "PYTEST_XDIST_WORKER")


def given(**variables: str) -> dict[str, str]:
    """An environment in which GNU OpenMP tells what it has read; beside it, `variables` alone."""
    rest = {name: value for name, value in os.environ.items() if name not in NAMES}
    return rest | {"OMP_DISPLAY_ENV": "VERBOSE"} | variables


def has_read(said: str) -> set[int]:
    """The spin counts of those that were loaded."""
    return {int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", said)}
