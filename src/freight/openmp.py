"""How long OpenMP's threads spin for each other, and what of its variables makes steps slow: words
for people.

GNU OpenMP, which torch brings on Linux, reads its variables once, when torch is loaded.
`freight/__init__.py` sets how threads wait if that has not happened yet and the user has not; so
`os.environ` says what was read.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the first ranks above the second
_VARIABLES = ("OMP_NUM_THREADS", *WAITING, "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
# What GNU OpenMP takes for the two policies and without one (libgomp, "GOMP_SPINCOUNT").
_ACTIVE, _PASSIVE, _NEITHER = 30_000_000_000, 0, 300_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MANY_SPINS = 20_000  # from about a millisecond on


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of OpenMP's variables that are set and decide how fast a step is."""
    return {name: environ[name] for name in _VARIABLES if name in environ}


def spins(environ: Mapping[str, str]) -> int:
    """How often a waiting thread looks before it sleeps, as GNU OpenMP reads `environ`; it ignores
    what it cannot.
    """
    count = environ.get("GOMP_SPINCOUNT", "").strip().lower()
    if count in ("infinite", "infinity"):
        return _ACTIVE
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)", count)
    if found:
        return int(found[1]) * _UNITS[found[2]]
    policy = environ.get("OMP_WAIT_POLICY", "").strip().lower()
    return {"active": _ACTIVE, "passive": _PASSIVE}.get(policy, _NEITHER)


def long_waits(environ: Mapping[str, str]) -> str:
    """What to do against threads that spin for milliseconds in a process of this environment; '' if
    none do.

    Without a variable, torch was loaded before Freight: Freight would have set one.
    """
    if platform.system() != "Linux" or spins(environ) < _MANY_SPINS:
        return ""
    said = " and ".join(f"{name}={environ[name]}" for name in WAITING if name in environ)
    cause, cure = (
        said or "torch was imported before freight",
        "unset it" if said else "import freight first",
    )
    return f"{cause}: threads that wait spin for milliseconds, which stops steps on cores that others use; {cure}"


def few_threads(environ: Mapping[str, str], threads: int, possible: int) -> str:
    """What to do if OMP_NUM_THREADS lowers the threads to fewer than `possible`; '' if it does not."""
    given = environ.get("OMP_NUM_THREADS", "")
    if not given or threads >= possible:
        return ""
    return (
        f"OMP_NUM_THREADS={given} (torchrun and containers set it): Freight computes with {threads} of {possible} "
        f"threads; unset it, or give --threads {possible}"
    )
