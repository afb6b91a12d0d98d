"""OpenMP's variables: how long threads spin, and start-up warnings about what makes steps slow.

GNU OpenMP, which torch brings on Linux, reads its variables once, when torch is loaded.
`freight/__init__.py` sets how threads wait, if torch is not loaded yet and the user has set
nothing. So `os.environ` shows what was read.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the first takes precedence
_VARIABLES = ("OMP_NUM_THREADS", *WAITING, "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
# Spins of GNU OpenMP for the two policies and without one (libgomp manual, "GOMP_SPINCOUNT")
_ACTIVE = 30_000_000_000
_PASSIVE = 0
_NEITHER = 300_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MANY_SPINS = 20_000  # about a millisecond


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the OpenMP variables that are set and affect the speed of a step."""
    return {name: environ[name] for name in _VARIABLES if name in environ}


def spins(environ: Mapping[str, str]) -> int:
    """Return how often a waiting thread spins before it sleeps, as GNU OpenMP reads `environ`; it
    ignores invalid values.
    """
    count = environ.get("GOMP_SPINCOUNT", "").strip().lower()
    if count in ("infinite", "infinity"):
        return _ACTIVE
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)", count)
    if match:
        return int(match[1]) * _UNITS[match[2]]
    policy = environ.get("OMP_WAIT_POLICY", "").strip().lower()
    return {"active": _ACTIVE, "passive": _PASSIVE}.get(policy, _NEITHER)


def long_waits(environ: Mapping[str, str]) -> str:
    """Warn of threads that spin for milliseconds in a process of this environment, with the way
    out; '' if none do.

    Without a variable, torch was loaded before Freight: Freight would have set one.
    """
    if platform.system() != "Linux" or spins(environ) < _MANY_SPINS:
        return ""
    declared = " and ".join(f"{name}={environ[name]}" for name in WAITING if name in environ)
    cause = declared or "torch was imported before freight"
    cure = "unset it" if declared else "import freight first"
    return f"{cause}: threads that wait spin for milliseconds, which stops steps on cores that others use; {cure}"


def few_threads(environ: Mapping[str, str], threads: int, possible: int) -> str:
    """Warn if OMP_NUM_THREADS lowers the threads to fewer than `possible`, with the way out; '' if
    it does not.
    """
    variable = environ.get("OMP_NUM_THREADS", "")
    if not variable or threads >= possible:
        return ""
    return (
        f"OMP_NUM_THREADS={variable} (torchrun and containers set it): Freight computes with {threads} of {possible} "
        f"threads; unset it, or give --threads {possible}"
    )
