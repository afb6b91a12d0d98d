"""For all tests: Freight is imported before torch, so that its defaults for threads hold here as they do for users.

FREIGHT_TEST_DEFAULT_DTYPE=float64 runs them in a process whose default dtype is that (`make test-defaults`): what
Freight computes does not depend on it.
"""

import os

import freight  # noqa: F401


def pytest_configure() -> None:
    name = os.environ.get("FREIGHT_TEST_DEFAULT_DTYPE")
    if name:
        import torch

        torch.set_default_dtype(getattr(torch, name))
