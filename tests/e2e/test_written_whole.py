"""`freight quantize --overwrite`, `convert` and `merge` ended by signals at any moment, and by errors
of the file system at any call: the old model is there or the new one, whole.

FREIGHT_TEST_KILLS sets the number of rounds. `pytest -s` prints what they found.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.demo_adapter import write_adapter
from tests.demo_chat import DEMO
from tests.forked_server import Forked
from tests.serving import CAN_FORK

from freight.checkpoint.partial import LOCK, PATTERN, remove_abandoned, restore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clock,
    pytest.mark.skipif(not CAN_FORK, reason="processes are forked"),
]

ROUNDS = int(os.environ.get("FREIGHT_TEST_KILLS", "200"))
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL")
_STATUS = {"SIGTERM": (143,), "SIGINT": (130,), "SIGHUP": (129,), "SIGKILL": (-signal.SIGKILL,)}
_ERRORS = ("ENOSPC", "EPERM", "EIO", "ENOSPC+", "EPERM+", "EIO+")
_PLAIN = ("--kv-cache", "none", "--json")
Contents = dict[str, bytes]


def run(argv: list[str], **faults: str) -> Forked:
    return Forked(argv, {**os.environ, **faults}, "tests.failing_writer", blocked=True)


def end(process: Forked) -> tuple[int, str]:
    assert process.stderr is not None
    text = process.stderr.read()
    process.stderr.close()
    return process.wait(300), text


def contents(out: Path) -> Contents | None:
    """The files of the model, without hidden ones of a run that was killed."""
    if not out.exists():
        return None
    return {
        file.name: file.read_bytes()
        for file in out.iterdir()
        if file.name != LOCK and not file.match(PATTERN)
    }


def pickled(folder: Path) -> Path:
    """The demo model with its weights in a pickle."""
    shutil.copytree(DEMO, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def commands(place: Path) -> dict[str, Callable[[Path], list[str]]]:
    bin_folder, lora = pickled(place / "pickled"), write_adapter(place / "adapter")
    return {
        "quantize": lambda out: ["quantize", "demo", str(out), *_PLAIN, "--overwrite"],
        "convert": lambda out: ["convert", str(bin_folder), str(out)],
        "merge": lambda out: ["merge", "demo", str(lora), str(out)],
    }


def interrupt(process: Forked, seconds: float, name: str) -> None:
    time.sleep(seconds)
    process.send_signal(getattr(signal, name))


def one_round(
    argv: list[str], rng: random.Random, calls: int, seconds: float
) -> tuple[str, int, str]:
    """Run with one fault; return what it was, the exit status, and what was said."""
    faults = {"FREIGHT_TEST_MOVES": "1"} if rng.random() < 0.5 else {}
    kind = rng.choice(("from outside", "signal", "error"))
    if kind == "from outside":
        name = rng.choice(_SIGNALS)
        process = run(argv, **faults)
        interrupt(process, rng.uniform(0, seconds), name)
    else:
        name = rng.choice(_SIGNALS if kind == "signal" else _ERRORS)
        process = run(argv, FREIGHT_TEST_FAULT=f"{rng.randint(1, calls)} {name}", **faults)
    status, text = end(process)
    return f"{kind} {name}", status, text


def check_end(fault: str, status: int, text: str) -> None:
    """The documented status, and a line or none."""
    name = fault.split()[-1]
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    # 2: the output was refused before anything was written
    assert status == 0 or status in _STATUS.get(name, (1, 2)), f"{fault}: {status}\n{text}"
    errors = [line for line in text.splitlines() if line.startswith(("error: ", "freight: "))]
    silent = status == 0 or name in ("SIGINT", "SIGKILL")
    assert len(errors) == (not silent), text


def test_rounds(tmp_path: Path) -> None:
    rng = random.Random(57)
    verbs = commands(tmp_path)
    old = tmp_path / "old"
    status, text = end(run(["quantize", "demo", str(old), *_PLAIN, "--weights", "int8"]))
    assert status == 0, text
    found: Counter[tuple[str, str]] = Counter()
    faults: Counter[str] = Counter()
    whole: dict[str, tuple[Any, int, float]] = {}
    for verb, argv in verbs.items():
        begun = time.monotonic()
        status, text = end(run(argv(tmp_path / f"new-{verb}")))
        assert status == 0, text
        new = contents(tmp_path / f"new-{verb}")
        whole[verb] = (new, int(text.split()[-1]), time.monotonic() - begun)
    for index in range(ROUNDS):
        # Of ten rounds: a conversion starts a process that imports torch
        verb = (*("quantize",) * 6, *("merge",) * 3, "convert")[index % 10]
        new, calls, seconds = whole[verb]
        place = tmp_path / f"round{index}"
        place.mkdir()
        out = place / "out"
        if verb == "quantize":
            shutil.copytree(old, out)
        before = contents(out)
        fault, status, text = one_round(verbs[verb](out), rng, calls + 8, seconds)
        check_end(fault, status, text)
        if fault.split()[-1] in ("SIGTERM", "SIGINT", "SIGHUP"):
            assert not list(place.rglob(PATTERN)), f"{index} {verb}: {fault}"
        restore(out)
        after = contents(out)
        assert after is not None or before is None, f"{index} {verb}: {fault}"
        assert after in (before, new), f"{index} {verb}: {fault}, {sorted(after or ())}"
        assert status != 0 or after == new, f"{index} {verb}: {fault}"
        found[verb, "new" if after == new else "old"] += 1
        faults[fault] += 1
        print(index, verb, fault, status, "new" if after == new else "old", flush=True)
        if after == before and index % 10 in (0, 7):  # the next run finds nothing in its way
            status, text = end(run(verbs[verb](out)))
            assert status == 0, text
            assert contents(out) == new
        remove_abandoned(out)
        assert not list(place.rglob(".freight.*.partial")), f"{index} {verb}: {fault}"
        shutil.rmtree(place)
    print(f"\n{ROUNDS} rounds: {dict(found)}\n{dict(faults)}")
    assert min(Counter(verb for verb, _ in found).values()) > 0
