"""The fences of the gather between GPUs are in its machine code, for the whole system: `fences.py`
compiles it for GPUs that are not here, in a process of its own, without the interpreter.

Its kernels with a weaker fence show that what is looked for would be missed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
FENCES = Path(__file__).parent / "fences.py"
FENCED = {
    "releases": ("release for one GPU", "no release"),
    "acquires": ("acquire for one GPU", "no acquire"),
}
TARGETS = ("sm_90", "gfx942")


@pytest.fixture(scope="module", params=TARGETS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("push"))
    printed = subprocess.run(
        [sys.executable, FENCES, request.param],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    reports = [json.loads(line) for line in printed.splitlines()]
    return request.param, {report["change"]: report for report in reports}


def only(code: list[str], pattern: str) -> int:
    """The place of the only instruction that matches."""
    (place,) = (index for index, text in enumerate(code) if re.search(pattern, text))
    return place


def first(code: list[str], pattern: str) -> int:
    return next(index for index, text in enumerate(code) if re.search(pattern, text))


def last(code: list[str], pattern: str) -> int:
    return max(index for index, text in enumerate(code) if re.search(pattern, text))


def sm_90_releases(code: list[str]) -> bool:
    """After the last store of columns, and before the exchange: a fence of all memory."""
    exchange = only(code, r"^ATOMG\S*\.EXCH\.64")
    stores = last(code[:exchange], r"\bSTG\.E\.128\b")
    between = code[stores:exchange]
    fences = [text for text in between if re.search(r"^MEMBAR\.(ALL|SC)\.SYS", text)]
    return bool(fences) and "STRONG.SYS" in code[exchange]


def sm_90_acquires(code: list[str]) -> bool:
    """After the flags are read, and before columns are: the L1 cache is emptied."""
    exchange = only(code, r"^ATOMG\S*\.EXCH\.64")
    reads = exchange + only(code[exchange:], r"^ATOMG\S*\.ADD\.64\.STRONG\.\w+ PT, \S+ .*RZ$")
    columns = reads + first(code[reads:], r"\bLDG\.E\.128\b")
    return "STRONG.SYS" in code[reads] and "CCTL.IVALL" in code[reads:columns]


def gfx942_releases(code: list[str]) -> bool:
    """What is in the L2 cache is written back, and that and all stores are waited for."""
    exchange = only(code, r"_atomic_swap_x2")
    stores = last(code[:exchange], r"_store_dwordx4")
    between = code[stores:exchange]
    if "buffer_wbl2 sc0 sc1" not in between or not code[exchange].endswith("sc1"):
        return False
    waited = between[between.index("buffer_wbl2 sc0 sc1") :]
    return any("vmcnt(0)" in text for text in waited)


def gfx942_acquires(code: list[str]) -> bool:
    """Caches drop what may be old, after the flags came and before columns are read."""
    exchange = only(code, r"_atomic_swap_x2")
    reads = exchange + first(code[exchange:], r"_atomic_add_x2")
    columns = reads + first(code[reads:], r"_load_dwordx4")
    after = code[reads:columns]
    if "buffer_inv sc0 sc1" not in after or not re.search(r"\bsc1$", code[reads]):
        return False
    return any("vmcnt(0)" in text for text in after[: after.index("buffer_inv sc0 sc1")])


CHECKS: dict[str, dict[str, Callable[[list[str]], bool]]] = {
    "sm_90": {"releases": sm_90_releases, "acquires": sm_90_acquires},
    "gfx942": {"releases": gfx942_releases, "acquires": gfx942_acquires},
}


def test_flags_are_released_and_acquired_for_the_whole_system(compiled) -> None:
    target, reports = compiled
    for name, holds in CHECKS[target].items():
        assert holds(reports[""]["code"]), (name, reports[""]["code"])


def test_a_weaker_fence_would_be_seen(compiled) -> None:
    target, reports = compiled
    for name, changes in FENCED.items():
        for change in changes:
            assert not CHECKS[target][name](reports[change]["code"]), change
        for other in FENCED.keys() - {name}:
            assert all(CHECKS[target][other](reports[change]["code"]) for change in changes)


def test_what_triton_writes_for_nvidia_has_both_semantics_and_scopes(compiled) -> None:
    target, reports = compiled
    if target == "sm_90":
        words = [set(text.split(".")) for text in reports[""]["ptx"]]
        assert words[0] >= {"atom", "sys", "release", "exch"}
        assert words[1] >= {"atom", "sys", "acquire", "add"}
        assert words[2] >= {"atom", "gpu", "acq_rel", "add"}
        assert len(words) == 3
