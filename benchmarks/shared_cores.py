"""Measure decoding of engines alone and together on the same cores, by settings of OpenMP.

    python benchmarks/shared_cores.py --setting GOMP_SPINCOUNT=10000 --setting '' --rounds 24
    python benchmarks/shared_cores.py --setting '' --setting OMP_NUM_THREADS=1 --random-weights llama-1b --seconds 1

A setting is a list of variables with commas between them; '' is Freight's own setting. The others
are compared with the first one. For each setting `--processes` engines stay loaded, each in its own
process with `--threads` threads, restarted every `--restart` rounds. In a round every setting has
two turns, in an order that changes from round to round: one of its engines decodes alone for
`--seconds`, then all of them together. Other engines sleep. Prompts are computed before the
measured time. Ratios are taken within a round; their interval is that of order statistics, of at
least 95 %. `CPU` is processor time per step.

A turn begins once other programs take less than `--quiet` of all cores, and is repeated if they
took more during it; after `--patience` seconds the quietest one counts. `others` is the median of
their share in the turns that count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from line_process import LineProcess

PROMPT = 64  # tokens
LOOK = 0.1  # seconds for which other programs are observed before a turn
LEAD = 0.05  # seconds between the commands and the measured time, so that all begin at once


@dataclass(frozen=True)
class Turn:
    """The result of a turn: steps per second of its engines together, processor milliseconds per
    step, and the share of all cores that other programs took.
    """

    rate: float
    cpu: float
    others: float


@dataclass(frozen=True)
class Work:
    """The task of an engine's process, sent at its start."""

    model: str
    random_weights: str | None
    threads: int
    batch: int
    context: int


def work(task: Work) -> None:
    """Run an engine in its own process. The first of two lines asks for prompts, the second has the
    times to begin and to end.
    """
    from freight.engine.build import start_engine
    from freight.lab.bench.drive import greedy, random_prompt
    from freight.model.open import open_model, open_random
    from freight.settings.device import choose_threads, usable_cores
    from freight.settings.engine import EngineArgs

    args = EngineArgs(
        model=task.model,
        max_num_seqs=task.batch,
        max_model_len=task.context,
        threads=task.threads,
        speculate=0,  # each step is one token of each request
        skip_tokenizer_init=True,
    )
    engine, _ = start_engine(
        open_random(args, task.random_weights) if task.random_weights else open_model(args)
    )
    numbers = random.Random(0)
    vocabulary = engine.runner.model.config.vocab_size
    params = greedy(task.context - PROMPT)
    ids = [str(index) for index in range(task.batch)]
    with choose_threads(task.threads, usable_cores()):
        print("ready", flush=True)
        while sys.stdin.readline():
            for request_id in ids:
                engine.release(request_id)
                prompt = random_prompt(PROMPT, vocabulary, numbers)
                engine.add(request_id, engine.intake.accept(prompt, params), params)
            while len(engine.step()) < task.batch:
                pass
            print("prompted", flush=True)
            begin, end = json.loads(sys.stdin.readline())
            time.sleep(max(0.0, begin - time.monotonic()))
            steps = 0
            cpu = time.process_time()
            while time.monotonic() < end and engine.has_unfinished:
                engine.step()
                steps += 1
            seconds = time.monotonic() - begin
            print(json.dumps([steps, seconds, time.process_time() - cpu]), flush=True)


class Engine(LineProcess):
    """One engine's process."""

    def __init__(self, setting: str, task: Work) -> None:
        variables = dict(item.split("=", 1) for item in setting.split(",") if item)
        known = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
        env = {name: value for name, value in os.environ.items() if name not in known} | variables
        command = [sys.executable, __file__, "--worker", json.dumps(vars(task))]
        super().__init__(f"an engine with {setting or 'no setting'}", command, env)


def busy() -> float:
    """Return the seconds that all processors of this machine have worked, for any program, since it
    started.
    """
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, *interrupts = [int(field) for field in fields[:8]]
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def others(begin: float, worked: float, own: float) -> float:
    """Return the share of all cores that other programs took since `begin`, when `busy()` was
    `worked`.
    """
    return max(0.0, busy() - worked - own) / ((time.monotonic() - begin) * (os.cpu_count() or 1))


def quiet_turn(engines: list[Engine], args: argparse.Namespace) -> Turn:
    """Return a turn in which others take less than `--quiet` of the cores, or the quietest within
    `--patience` seconds.
    """
    turns: list[Turn] = []
    late = time.monotonic() + args.patience
    while not turns or (turns[-1].others >= args.quiet and time.monotonic() < late):
        share = 1.0
        while share >= args.quiet and time.monotonic() < late:
            worked = busy()
            begin = time.monotonic()
            time.sleep(LOOK)
            share = others(begin, worked, 0.0)
        turns.append(decode(engines, args.seconds))
    return min(turns, key=lambda turn: turn.others)


def decode(engines: list[Engine], seconds: float) -> Turn:
    """Decode with all `engines` at once."""
    for engine in engines:
        engine.tell("prompts")
        if engine.answer() != "prompted":
            raise SystemExit("an engine has ended: see the lines above")
    worked = busy()
    sent = time.monotonic()
    begin = sent + LEAD
    for engine in engines:
        engine.tell([begin, begin + seconds])
    results = [json.loads(engine.answer()) for engine in engines]
    steps = sum(item[0] for item in results)
    own = sum(item[2] for item in results)
    return Turn(
        sum(item[0] / item[1] for item in results), own / steps * 1e3, others(sent, worked, own)
    )


def end(running: dict[str, list[Engine]]) -> None:
    for engines in running.values():
        for engine in engines:
            engine.end()


def measure(args: argparse.Namespace) -> dict[tuple[str, str], list[Turn]]:
    """Return turns by setting and 'alone' or 'together'."""
    task = Work(args.model, args.random_weights, args.threads, args.batch, args.context)
    results: dict[tuple[str, str], list[Turn]] = {
        (item, how): [] for item in args.setting for how in ("alone", "together")
    }
    running: dict[str, list[Engine]] = {}
    order = random.Random(0)
    for number in range(args.rounds):
        if number % args.restart == 0:
            end(running)
            running = {}
            for item in args.setting:
                running[item] = [Engine(item, task) for _ in range(args.processes)]
            for engines in running.values():
                decode(engines, args.seconds)  # warms up
        for item in order.sample(args.setting, len(args.setting)):
            chosen = running[item][number % args.processes]
            results[item, "alone"].append(quiet_turn([chosen], args))
            results[item, "together"].append(quiet_turn(running[item], args))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    end(running)
    return results


def table(result: dict[tuple[str, str], list[Turn]], first: str) -> None:
    from freight.lab.bench.serving_figures import interval

    print("| setting | engines | steps/s | first = 1 | interval | CPU ms/step | others |")
    print("|---|---|---:|---:|---|---:|---:|")
    for (setting, how), turns in result.items():
        ratios = [
            turn.rate / other.rate for turn, other in zip(turns, result[first, how], strict=True)
        ]
        low, high, _ = interval(ratios)
        rate = statistics.median(turn.rate for turn in turns)
        cpu = statistics.median(turn.cpu for turn in turns)
        share = statistics.median(turn.others for turn in turns)
        ratio = f"{statistics.median(ratios):.3f} | {low:.3f} to {high:.3f}"
        print(
            f"| {setting or 'by itself'} | {how} | {rate:.1f} | {ratio} | {cpu:.2f} | {share:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setting", action="append", default=[], help="NAME=VALUE,NAME=VALUE; may be repeated"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--random-weights", metavar="SHAPE")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--restart", type=int, default=8)
    parser.add_argument("--quiet", type=float, default=0.05)
    parser.add_argument("--patience", type=float, default=10.0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Work(**json.loads(args.worker)))
        return
    if not args.setting:
        parser.error("at least one --setting is needed")
    table(measure(args), args.setting[0])


if __name__ == "__main__":
    main()
