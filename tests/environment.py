"""The environment of what tests start: without the options that Freight reads there, and with the
build of the kernels that FREIGHT_CPU_BUILD names, so that all processes of a test compute the same
bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from freight.settings.cpu_builds import BUILD_VARIABLE


def is_option(name: str) -> bool:
    """Whether a variable of this name may change what a command does, beyond which build it loads."""
    return name.startswith("FREIGHT_") and name != BUILD_VARIABLE


def without_options(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not is_option(name)}
