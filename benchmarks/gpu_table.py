"""Fill the GPU table of docs/benchmarks.md: run its benchmarks; print goals, results and limits.

From the root of the repository, on a machine with a GPU; the package may run from source:

    PYTHONPATH=src python benchmarks/gpu_table.py --output FOLDER

Every command runs in its own process. A row goes into FOLDER/rows.jsonl as soon as it is printed,
other output of a command into FOLDER/log, and the table into FOLDER/table.md after each command. If
a row fails, ends its process or exceeds its time limit, only that row is lost: the command
continues after it. A second run with the same folder measures only what is missing. If `ncu` is
installed, it reads counters of the kernels that miss a goal. Needs the standard library and
`gpu_goals.py` in the same folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpu_goals import KERNEL_GOALS, Results, Row, table

FREIGHT = (sys.executable, "-m", "freight", "bench")
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
STATIC = (*FP8, "--kv-scales", "unit")
BF16 = ("--dtype", "bfloat16")
BIG = (
    "--device",
    "cuda",
    "--batch-size",
    "64",
    "--input-len",
    "2048",
    "--output-len",
    "256",
    "--repeats",
    "1",
)
ALONE = ("--device", "cuda", "--batch-size", "1", "--input-len", "128", "--output-len", "65")
SHORT = (
    "--device",
    "cuda",
    "--batch-size",
    "1",
    "--input-len",
    "512",
    "--output-len",
    "17",
    "--repeats",
    "1",
)
KERNELS = "kernels"
START_UP = 120.0  # seconds that a process may take for its first row, beyond the row's own limit


@dataclass(frozen=True)
class Command:
    """Arguments of `freight bench`, and the longest time that one of its rows may take, in seconds."""

    words: tuple[str, ...]
    limit: float


def latency(shape: str, *options: str, limit: float = 300) -> Command:
    return Command(("latency", "--random-weights", shape, *options), limit)


COMMANDS: dict[str, Command] = {
    KERNELS: Command(("kernels", "--device", "cuda"), 120),
    "8b batch 64, FP8": latency("llama-8b", *FP8, *BIG),
    "8b batch 64, BF16": latency("llama-8b", *BF16, *BIG),
    "8b batch 1, FP8": latency("llama-8b", *FP8, *ALONE),
    "8b batch 1, BF16": latency("llama-8b", *BF16, *ALONE),
    "8b, one scale": latency("llama-8b", *STATIC, *SHORT),
    "70b, FP8 cache": latency("llama-70b", *FP8, *SHORT, limit=900),
    "70b, BF16 cache": latency("llama-70b", "--quantization", "fp8", *SHORT, limit=900),
}
COUNTERS = {
    "issue_active": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
OUR_KERNELS = {
    "attention": "^(decode|prefill)_kernel",
    "rotate_store": "^rotate_store",
    "linear": "^matmul_kernel",
}


class Folder:
    """The results: one line per row, `{"command", "row"}`, and `{"command", "done"}` for a finished
    command.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results: Results = {}
        self.done: set[str] = set()
        rows = path / "rows.jsonl"
        for line in rows.read_text().splitlines() if rows.exists() else ():
            try:
                self._take(json.loads(line))
            except ValueError:  # a line that an interruption cut short
                continue

    def _take(self, record: Row) -> None:
        if "done" in record:
            self.done.add(record["command"])
        else:
            self.results.setdefault(record["command"], []).append(record["row"])

    def write(self, command: str, row: Row | None) -> None:
        """Keep a row; without one, that the command is finished."""
        record: Row = {"command": command} | ({"done": True} if row is None else {"row": row})
        self._take(record)
        with (self.path / "rows.jsonl").open("a") as file:
            file.write(f"\n{json.dumps(record)}\n")  # on its own line, even after a cut one
        if row is not None and "error" in row:
            print(f"  failed: {row['error']}", file=sys.stderr, flush=True)

    def write_table(self) -> str:
        text = "\n".join(table({KERNELS: []} | self.results))
        (self.path / "table.md").write_text(text + "\n")
        return text

    def last_case(self) -> int:
        return max((row["case"] for row in self.results.get(KERNELS, ())), default=0)


def lines_of(words: Sequence[str], limit: float, log: Path, ended: list[str]) -> Generator[str]:
    """Yield the lines that a process prints, as they come; if it fails, append the reason to
    `ended` at the end.

    It is ended, with all that it started, when it prints nothing for `limit` seconds; at the start,
    for START_UP more.
    """
    with log.open("a") as errors:
        print(f"\n$ {' '.join(words)}", file=errors, flush=True)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    patience = limit + START_UP
    finished = False
    try:
        while (line := lines.get(timeout=patience)) is not None:
            patience = limit
            yield line
        status = process.wait(timeout=limit)
        finished = True
        if status:
            ended.append(f"exit status {status}: {_tail(log)}")
    except (queue.Empty, subprocess.TimeoutExpired):
        ended.append(f"took more than {patience:.0f} s")
    finally:
        if not finished:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(timeout=limit)


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-600:]


def rows_of(lines: Iterator[str]) -> Iterator[Row]:
    """Yield the lines that are rows: libraries print other lines in between."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def run_once(name: str, command: Command, folder: Folder) -> None:
    """Run a command of one row."""
    ended: list[str] = []
    rows = list(
        rows_of(
            lines_of(
                [*FREIGHT, *command.words, "--json"], command.limit, folder.path / "log", ended
            )
        )
    )
    if rows and not ended:
        folder.write(name, rows[-1])
        folder.write(name, None)
    else:
        folder.write(name, {"error": ended[0] if ended else "printed no row"})


def run_kernels(command: Command, folder: Folder) -> None:
    """Run all rows of `freight bench kernels`; it restarts after a row that ended it or took too
    long.
    """
    in_vain = 0
    while in_vain < 2:
        ended: list[str] = []
        before = len(folder.results.get(KERNELS, ()))
        after = folder.last_case()
        words = [*FREIGHT, *command.words, "--json", "--after", str(after)]
        for row in rows_of(lines_of(words, command.limit, folder.path / "log", ended)):
            if isinstance(row.get("case"), int):
                folder.write(KERNELS, row)
        if not ended:
            folder.write(KERNELS, None)
            return
        result = folder.results.get(KERNELS, [])[before:]
        in_vain = 0 if any("error" not in row for row in result) else in_vain + 1
        # The row after the last one ended the process, and left no record
        if not result or "error" not in result[-1]:
            unnamed = {"kernel": "?", "kernels": "?", "what": "unknown", "error": ended[0]}
            folder.write(KERNELS, {"case": folder.last_case() + 1} | unnamed)


def count(folder: Folder, ncu: str, limit: float) -> None:
    """Read counters of our kernels whose goal is missed, and keep their rows with them."""
    for goal in KERNEL_GOALS:
        try:
            row = goal.row(folder.results) if goal.row else {}
            result = goal.find(folder.results)
        except LookupError:
            continue
        missed = goal.aim is not None and isinstance(result, float) and result < goal.aim
        if not missed or "issue_active" in row or row["kernel"] not in OUR_KERNELS:
            continue
        log = folder.path / "log"
        report = folder.path / "counters.csv"
        ended = list[str]()
        words = (
            ncu,
            "--clock-control",
            "none",
            "--csv",
            "--page",
            "raw",
            "--log-file",
            str(report),
        )
        words += ("-k", f"regex:{OUR_KERNELS[row['kernel']]}", "-c", "1", "--kill", "yes")
        words += (
            "--metrics",
            ",".join(COUNTERS.values()),
            *FREIGHT,
            *COMMANDS[KERNELS].words,
            "--seconds",
            "0",
        )
        report.unlink(missing_ok=True)
        every = lines_of([*words, "--json", "--after", str(row["case"] - 1)], limit, log, ended)
        # Two rows at most; ncu ends the process after one kernel
        for _ in zip(range(2), every, strict=False):
            pass
        every.close()
        counters = counters_of(report.read_text()) if report.exists() else {}
        if len(counters) == len(COUNTERS):
            folder.write(KERNELS, row | counters)


def counters_of(report: str) -> dict[str, float]:
    """Return the values of COUNTERS in a report of ncu in CSV, for its last kernel; {} if it has
    none.
    """
    lines = [line for line in report.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    try:
        return {name: float(rows[-1][metric].replace(",", "")) for name, metric in COUNTERS.items()}
    except (IndexError, KeyError, ValueError):
        return {}


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="of results; continued if it exists",
    )
    made.add_argument(
        "--only", action="append", choices=sorted(COMMANDS), metavar="NAME", help="may be repeated"
    )
    made.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="begin no command later than this"
    )
    args = made.parse_args(arguments)
    # An exception, so that the running command is ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM; run again to go on"))
    folder = Folder(args.output)
    begin = time.monotonic()
    for name, command in COMMANDS.items():
        if (args.only and name not in args.only) or name in folder.done:
            continue
        if args.stop_after is not None and time.monotonic() - begin > args.stop_after:
            break
        print(f"{name}: freight bench {' '.join(command.words)}", file=sys.stderr, flush=True)
        if name == KERNELS:
            run_kernels(command, folder)
        else:
            run_once(name, command, folder)
        folder.write_table()
    ncu = shutil.which("ncu")
    if ncu and not args.only and KERNELS in folder.done:
        count(folder, ncu, COMMANDS[KERNELS].limit)
    print(folder.write_table())


if __name__ == "__main__":
    main()
