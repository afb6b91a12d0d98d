"""Measure what serving costs: tokens per second of `freight serve` against `LLM.generate`.

Both engines get the same prompts. They stay loaded, each in its own process, and alternate: the one
that is not measured sleeps. Every round has new prompts, so that none is in the prefix cache.
Ratios are taken within a round, because a shared machine changes its speed between rounds. The
client reads its streams on the same cores that the server computes on. All prompts of a round start
at once, and every answer has the same number of tokens (`ignore_eos`, greedy).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import uvloop

from freight.lab.bench.http_stream import Address, StreamError
from freight.lab.bench.load import Amount, Level, Target, fetch, run_level
from freight.lab.bench.prompts import Ask, Ids, Lengths, Listed
from freight.lab.bench.serving_figures import interval

LISTENING = re.compile(r"listening on (http://\S+)")
START_SECONDS = 120.0
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """One side in one round. `cpu` in seconds: of the server's first process (0 for offline) and of
    the client.
    """

    tokens: int
    seconds: float
    server_cpu: float = 0.0
    client_cpu: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Offline:
    """A process that generates on command: it reads and answers lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.vocab_size: int = self._read()["vocab_size"]

    def turn(self, asks: Sequence[Ask]) -> Turn:
        assert self._process.stdin is not None
        command = {"prompts": [ask.content for ask in asks], "max_tokens": asks[0].max_tokens}
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return Turn(**self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the offline process ended with status {self._process.wait()}")
        return json.loads(line)


class Server:
    """`freight serve`, and the client that puts load on it."""

    def __init__(self, pid: int, url: str) -> None:
        self._pid = pid
        self.target = Target(Address.parse(url), "")

    def turn(self, asks: Sequence[Ask]) -> Turn:
        before = cpu_seconds(self._pid)
        client = time.process_time()
        load = run_level(
            self.target, Listed(asks), Level(concurrency=len(asks)), Amount(requests=len(asks)), 0
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answers = runner.run(load)
        failed = [
            answer for answer in answers if answer.error or answer.num_tokens != answer.max_tokens
        ]
        if failed:
            raise SystemExit(
                f"{len(failed)} of {len(answers)} answers are not whole: {failed[0].message}"
            )
        seconds = max(answer.end for answer in answers) - min(answer.start for answer in answers)
        used = cpu_seconds(self._pid) - before, time.process_time() - client
        return Turn(sum(answer.num_tokens for answer in answers), seconds, *used)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process if /proc has it; else 0."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


@contextmanager
def offline_process(options: Sequence[str]) -> Iterator[Offline]:
    command = [sys.executable, __file__, "--offline", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Offline(process)  # the process ends when its input is closed


@contextmanager
def server_process(options: Sequence[str], log: IO[str]) -> Iterator[Server]:
    """Start a server whose steps are plain: what is compared with it counts no drafts."""
    plain = ("--speculate", "0")
    command = [sys.executable, "-m", "freight", "serve", *plain, *options, "--port", "0"]
    with subprocess.Popen(command, stderr=log) as process:
        try:
            yield Server(process.pid, _ready_url(process, Path(log.name)))
        finally:
            process.terminate()


def _ready_url(process: subprocess.Popen[Any], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        match = LISTENING.search(log.read_text())
        try:
            if match:
                asyncio.run(fetch(Target(Address.parse(match[1]), ""), "/health"))
                return match[1]
        except StreamError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"freight serve did not start: {log.read_text()[-2000:]}")


def measure(args: argparse.Namespace, options: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each number of streams."""
    with (
        tempfile.NamedTemporaryFile("w", suffix=".log") as log,
        offline_process(options) as offline,
        server_process(options, log) as server,
    ):
        lengths = (
            Lengths(args.prompt_tokens, args.prompt_tokens),
            Lengths(args.output_tokens, args.output_tokens),
        )
        prompts = Ids(offline.vocab_size, *lengths)
        sides: dict[str, Offline | Server] = {"offline": offline, "server": server}
        rows = []
        for streams in args.concurrency:
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            for number in range(-args.warmup, args.rounds):
                asks = list(
                    islice(
                        prompts.asks(random.Random(f"{streams} {number}").randrange(2**32)), streams
                    )
                )
                for name in sorted(sides, reverse=number % 2 == 0):
                    turn = sides[name].turn(asks)
                    if number >= 0:
                        turns[name].append(turn)
            rows.append(describe(streams, turns["offline"], turns["server"]))
            print(shown(rows[-1]), file=sys.stderr, flush=True)
        return rows


def ratio_figures(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios, its interval, and the ratios themselves."""
    low, high, coverage = interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "coverage": coverage,
        "ratios": ratios,
    }


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of rounds in which two ways to run an engine take turns."""
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="fewer than 6 give an interval that covers less than 95 %%",
    )
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--kv-cache-memory", default="256MiB")


def describe(streams: int, offline: Sequence[Turn], server: Sequence[Turn]) -> dict[str, Any]:
    ratios = [served.rate / alone.rate for alone, served in zip(offline, server, strict=True)]
    tokens = sum(turn.tokens for turn in server)
    return {
        "streams": streams,
        "offline_tokens_per_second": statistics.median(turn.rate for turn in offline),
        "server_tokens_per_second": statistics.median(turn.rate for turn in server),
        **ratio_figures(ratios),
        "server_cpu_us_per_token": sum(turn.server_cpu for turn in server) / tokens * 1e6,
        "client_cpu_us_per_token": sum(turn.client_cpu for turn in server) / tokens * 1e6,
    }


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['streams']:3} streams: offline {row['offline_tokens_per_second']:8.1f} tok/s, "
        f"server {row['server_tokens_per_second']:8.1f} tok/s, "
        f"ratio {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}, {row['coverage']:.0%}); "
        f"server's process {row['server_cpu_us_per_token']:.1f} us/token, "
        f"client {row['client_cpu_us_per_token']:.1f} us/token"
    )


def run_offline(options: Sequence[str]) -> None:
    """Say the size of the vocabulary; then a Turn for every line with prompts."""
    from freight import SamplingParams

    llm = load(options)
    print(json.dumps({"vocab_size": llm.engine.runner.model.config.vocab_size}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        params = SamplingParams(max_tokens=command["max_tokens"], temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(command["prompts"], params)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


def load(options: Sequence[str]) -> Any:
    """Build an LLM with the engine's options of `freight serve`."""
    from unittest import mock

    from freight import llm
    from freight.model.open import open_random

    values = dict(
        zip(
            (name.removeprefix("--").replace("-", "_") for name in options[::2]),
            options[1::2],
            strict=True,
        )
    )
    values["speculate"] = 0  # as the server's
    if "threads" in values:
        values["threads"] = int(values["threads"])
    shape = values.pop("random_weights", None)
    if shape is None:
        return llm.LLM(**values)

    def opened(args: Any) -> Any:
        return open_random(args, shape)

    # LLM has no option for random weights
    with mock.patch.object(llm, "open_model", opened):
        return llm.LLM(**values)


def main() -> None:
    if sys.argv[1:2] == ["--offline"]:
        run_offline(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--random-weights", metavar="SHAPE", help="such as llama-1b; without it the demo model"
    )
    parser.add_argument(
        "--concurrency", type=int, action="append", metavar="STREAMS", help="default: 32 and 1"
    )
    add_round_options(parser)
    parser.add_argument("--threads", help="of each engine")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    args = parser.parse_args()
    args.concurrency = args.concurrency or [32, 1]
    options = ["--kv-cache-dtype", args.kv_cache_dtype, "--kv-cache-memory", args.kv_cache_memory]
    options += ["--threads", args.threads] if args.threads else []
    options += ["--random-weights", args.random_weights] if args.random_weights else []
    # Runs the exits that end both processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = measure(args, options)
    if args.json:
        print(json.dumps(vars(args) | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
