"""FREIGHT_… variables that nothing reads: a misspelt one would change nothing, and nobody would
know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from freight.errors import nearest

PREFIX = "FREIGHT_"
# Read by kernels/cpu/library.py and by the tests; and what Kubernetes sets in every pod of a namespace with a service
# called freight
_OTHERS = re.compile(
    r"FREIGHT_(CPU_BUILD|TEST_\w+|SOAK_SECONDS|SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)"
)


def known(command: Any) -> set[str]:
    """Return the variables of a click command's options, and of those of all its verbs."""
    return {name for option in _options(command) for name in _names(option.envvar)}


def unknown(environ: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Write one line that names the variables that nothing reads, each with the nearest known; None
    where there are none.
    """
    names = set(names)
    unread = sorted(
        n for n in environ if n.startswith(PREFIX) and n not in names and not _OTHERS.fullmatch(n)
    )
    if not unread:
        return None
    # the common prefix would make all alike
    ends = {name.removeprefix(PREFIX): name for name in sorted(names)}
    hints = [
        nearest(name.removeprefix(PREFIX), ends).replace("mean ", f"mean {PREFIX}")
        for name in unread
    ]
    return f"freight: not read: {', '.join(map(str.__add__, unread, hints))}"


def _options(command: Any) -> Iterator[Any]:
    yield from (option for option in command.params if getattr(option, "envvar", None))
    for verb in getattr(command, "commands", {}).values():
        yield from _options(verb)


def _names(envvar: str | Iterable[str]) -> Iterable[str]:
    return [envvar] if isinstance(envvar, str) else envvar
