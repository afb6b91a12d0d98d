"""FREIGHT_… variables that nothing reads: a misspelt one would change nothing, and nobody would
know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from freight.errors import nearest

PREFIX = "FREIGHT_"
# Read by settings/cpu_builds.py and by the tests; and what Kubernetes sets in every pod of a namespace with a service
# called freight
_OTHERS = re.compile(
    r"FREIGHT_(CPU_BUILD|TEST_\w+|SOAK_SECONDS|SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)"
)


def known(command: Any) -> set[str]:
    """Return the variables of a click command's options, and of those of all its verbs."""
    names: set[str] = set()
    for option in _options(command):
        if isinstance(option.envvar, str):
            names.add(option.envvar)
        else:
            names.update(option.envvar)
    return names


def unknown(environ: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Write one line that names the variables that nothing reads, each with the nearest known; None
    where there are none.
    """
    names = set(names)
    # without the common prefix, which would make all alike
    ends = [name.removeprefix(PREFIX) for name in sorted(names)]
    unread = []
    for name in sorted(environ.keys() - names):
        if name.startswith(PREFIX) and not _OTHERS.fullmatch(name):
            hint = nearest(name.removeprefix(PREFIX), ends)
            unread.append(name + hint.replace("mean ", f"mean {PREFIX}"))
    if not unread:
        return None
    return f"freight: not read: {', '.join(unread)}"


def _options(command: Any) -> Iterator[Any]:
    for option in command.params:
        if getattr(option, "envvar", None):
            yield option
    for verb in getattr(command, "commands", {}).values():
        yield from _options(verb)
