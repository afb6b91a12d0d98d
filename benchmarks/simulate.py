"""Replicas simulated: what a million tokens cost, how many replicas so many users need, what routing
by prefixes gains, and what a lost replica does to the tail.

    python benchmarks/simulate.py fit --output plane.json -- --threads 2 --kv-cache-dtype fp8
    python benchmarks/simulate.py cost plane.json --trace trace.csv --price 0.2

Freight's own Scheduler and CacheManager decide what a step computes, and how long it takes is a
plane over that: so much a step, a prefill token, a sequence, a cached byte read and a pair of
prefill's attention. `fit` makes one of `freight bench latency`; a file written by hand does as well.
`check` runs the simulation beside servers. Every result is printed with what it assumes and with
what binds it. The same options give the same figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_options import split_options
from simulation.answers import Limits, Setup, capacity, cost, replicas_for, routing, tail
from simulation.plane import Plane, plane_of, read_reports
from simulation.replicas import ROUTERS
from simulation.traffic import PUBLISHED, Even, Sizes, Traffic, read_trace

from freight.base.tables import markdown
from freight.errors import ConfigError, FreightError
from freight.lab.bench.prompts import Lengths
from freight.settings.resolve import parse_memory

BATCHES = (1, 4, 16)  # what `fit` runs
INPUTS = (32, 128, 512)
OUTPUT = 33
SIZES = (1, 100, 10_000)  # of fleets
AIM = 0.15  # of a simulated p50 or p95: relative difference to the measured one


def main(arguments: Sequence[str] | None = None) -> None:
    args, engine = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        result = args.run(args, engine)
    except FreightError as error:
        raise SystemExit(f"simulate.py: {error}") from None
    print(json.dumps(result, indent=1) if args.json else "\n".join(args.show(result)))


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those of the engine: what stands behind `--`."""
    mine, engine = split_options(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _fit_options(
        commands.add_parser("fit", help="a plane, from reports of `freight bench latency`")
    )
    _answer_options(commands)
    _check_options(commands.add_parser("check", help="beside servers on this machine"))
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="one object on standard output")
    args = parser.parse_args(mine)
    if engine and args.command not in ("fit", "check"):
        parser.error(f"{args.command} starts no engine: leave out what stands behind --")
    return args, engine


# ------------------------------------------------------------------------------------------------
# fit


def _fit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports", nargs="*", type=Path, metavar="REPORT",
        help="output of `freight bench latency --json`; none: it is run here, with the engine's "
        "options behind --",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, action="append", metavar="COUNT")
    parser.add_argument("--input-len", type=int, action="append", metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=OUTPUT, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="default: all that would fit")
    parser.add_argument("--max-step-seconds", type=float, default=0.0, help="of the server")
    parser.add_argument("--output", type=Path, metavar="PLANE.json")
    parser.set_defaults(run=run_fit, show=show_fit)


def run_fit(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    if args.reports:
        reports = [item for path in args.reports for item in read_reports(path)]
    else:
        reports = list(_latencies(args, engine))
    memory = parse_memory(args.kv_cache_memory)
    plane, seen, errors = plane_of(reports)
    if memory is not None:
        plane = replace(plane, cache_tokens=int(memory / plane.bytes_per_token))
    plane = replace(plane, max_step_seconds=args.max_step_seconds)
    if args.output is not None:
        args.output.write_text(json.dumps(plane.to_json(), indent=1) + "\n", encoding="utf-8")
    rows = [
        {"steps": item.label, "measured_ms": 1e3 * item.seconds, "error": error}
        for item, error in zip(seen, errors, strict=True)
    ]
    return {"plane": plane.to_json(), "observations": rows}


def _latencies(args: argparse.Namespace, engine: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    batches = args.batch_size or BATCHES
    inputs = args.input_len or INPUTS
    for batch in batches:
        for length in inputs:
            command = [sys.executable, "-m", "freight", "bench", "latency", "--json", *engine]
            command += ["--batch-size", str(batch), "--input-len", str(length)]
            command += ["--output-len", str(args.output_len), "--repeats", str(args.repeats)]
            print(f"batch of {batch}, prompts of {length}", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise ConfigError(f"{' '.join(command[1:])} ended with status {done.returncode}")
            yield json.loads(done.stdout)


def show_fit(result: Mapping[str, Any]) -> Iterator[str]:
    plane = result["plane"]
    yield f"{plane['name']}: {plane['source']}"
    unit = plane["seconds"]
    yield (
        f"a step {1e3 * unit['steps']:.3g} ms + a step with prefill {1e3 * unit['prefill_steps']:.3g} ms "
        f"+ a prefill token {1e6 * unit['prefill_tokens']:.3g} us "
        f"+ a sequence {1e6 * unit['sequences']:.3g} us + a cached MB {1e12 * unit['cached_bytes']:.3g} us "
        f"+ a thousand pairs of prefill {1e9 * unit['prefill_pairs']:.3g} us"
    )
    yield f"off by {plane['error'][0]:.1%} at the median, {plane['error'][1]:.1%} at most"
    rows = [("steps", "measured, ms", "plane")]
    for item in result["observations"]:
        rows.append((item["steps"], f"{item['measured_ms']:.2f}", f"{item['error']:+.1%}"))
    yield markdown(rows, 1)


# ------------------------------------------------------------------------------------------------
# answers


def _answer_options(commands: Any) -> None:
    asked = commands.add_parser("cost", help="a million output tokens, by plane and fleet")
    asked.add_argument("planes", nargs="+", type=Path, metavar="PLANE.json")
    asked.add_argument("--price", type=float, required=True, help="of a replica and hour")
    asked.add_argument("--replicas", type=int, action="append", metavar="COUNT")
    asked.set_defaults(run=run_cost, show=show_cost)

    asked = commands.add_parser("replicas", help="how many for so many users")
    asked.add_argument("planes", nargs="+", type=Path, metavar="PLANE.json")
    asked.add_argument("--users", type=int, action="append", required=True, metavar="COUNT")
    asked.add_argument("--per-minute", type=float, default=1.0, help="requests of each user")
    asked.set_defaults(run=run_replicas, show=show_replicas)

    asked = commands.add_parser("routing", help="what prefix-aware routing gains")
    asked.add_argument("planes", nargs=1, type=Path, metavar="PLANE.json")
    asked.add_argument("--replicas", type=int, default=8, metavar="COUNT")
    asked.add_argument("--share", type=float, action="append", metavar="0..1")
    _load_option(asked)
    asked.set_defaults(run=run_routing, show=show_routing)

    asked = commands.add_parser("tail", help="what a lost replica does")
    asked.add_argument("planes", nargs=1, type=Path, metavar="PLANE.json")
    asked.add_argument("--replicas", type=int, action="append", metavar="COUNT")
    asked.add_argument("--restart", type=float, default=30.0, help="seconds until it is back")
    _load_option(asked)
    asked.set_defaults(run=run_tail, show=show_tail)

    for name in ("cost", "replicas", "routing", "tail"):
        _setup_options(commands.choices[name])


def _load_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load", type=float, default=0.8,
        help="share of the highest rate of one replica within the limits",
    )  # fmt: skip


def _setup_options(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--trace", type=Path, metavar="FILE.csv", help="in the form of Azure's")
    lengths.add_argument("--published", choices=sorted(PUBLISHED), default="azure-conversation")
    lengths.add_argument("--even", nargs=2, metavar=("PROMPT", "OUTPUT"), help="as 64:256 32:64")
    parser.add_argument("--shared", type=float, default=0.0, help="share of common prefixes, 0..1")
    parser.add_argument("--prefixes", type=int, default=100, help="how many there are")
    parser.add_argument("--ttft", type=float, default=2.0, help="limit at p95, seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="limit at p95, seconds")
    parser.add_argument("--router", choices=ROUTERS, default="least-loaded")
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated, of one replica")
    parser.add_argument("--simulate", type=int, default=100, metavar="REPLICAS", help="at most")
    parser.add_argument("--front-ms", type=float, default=0.0, help="outside of the engine")
    parser.add_argument("--max-num-seqs", type=int, help="instead of the plane's")
    parser.add_argument("--seed", type=int, default=0)


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    """One for each plane."""
    if not 0 <= args.shared < 1:
        raise ConfigError(f"--shared {args.shared} must be a share from 0 to below 1")
    for name in ("ttft", "tpot", "seconds", "simulate", "prefixes"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)} must be above 0")
    traffic = Traffic(sizes(args), args.shared, args.prefixes, args.seed)
    for path in args.planes:
        plane = Plane.read(path)
        if args.max_num_seqs:
            plane = replace(plane, max_num_seqs=args.max_num_seqs)
        yield Setup(
            plane, traffic, Limits(args.ttft, args.tpot), args.router, args.seconds,
            args.simulate, args.front_ms / 1e3,
        )  # fmt: skip


def sizes(args: argparse.Namespace) -> Sizes:
    if args.trace is not None:
        return read_trace(args.trace)
    if args.even is not None:
        prompt, output = (Lengths.parse("even", value) for value in args.even)
        return Even((prompt.low, prompt.high), (output.low, output.high))
    return PUBLISHED[args.published]


def run_cost(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    rows = []
    assumed = list[str]()
    for setup in setups(args):
        assumed += [item for item in setup.assumptions() if item not in assumed]
        rows += cost(setup, args.replicas or SIZES, args.price)
    assumed.append(f"price: {args.price:g} an hour and replica, prompts included")
    return {"assumptions": assumed + scaled(args, rows), "rows": rows}


def scaled(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is assumed of fleets that are larger than what is simulated."""
    if all((row["replicas"] or 0) <= args.simulate for row in rows):
        return []
    return [
        f"fleets above {args.simulate} replicas: {args.simulate} are simulated, and the rest does as "
        "they do; replicas interact through the router alone"
    ]


def run_replicas(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    rows = []
    assumed = list[str]()
    for setup in setups(args):
        assumed += [item for item in setup.assumptions() if item not in assumed]
        for users in args.users:
            result = replicas_for(setup, users, args.per_minute / 60)
            rows.append({"plane": setup.plane.name} | result)
    assumed.append(f"users: each asks {args.per_minute:g} times a minute, whatever the others do")
    return {"assumptions": assumed + scaled(args, rows), "rows": rows}


def _rate(args: argparse.Namespace, setup: Setup) -> tuple[float, str]:
    """`--load` of what one replica carries without common prefixes, and that in a sentence."""
    plain = replace(setup, traffic=replace(setup.traffic, share=0.0))
    result = capacity(plain, 1)
    if result.level is None:
        raise ConfigError(
            f"{setup.plane.name}: one replica cannot keep {setup.limits} at any load "
            f"({result.binds}): raise --ttft or --tpot"
        )
    rate = args.load * result.level.rate
    return rate, (
        f"load: {rate:.2f} requests a second and replica, {args.load:.0%} of what one replica "
        f"carries within the limits without common prefixes"
    )


def run_routing(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    (setup,) = setups(args)
    rate, said = _rate(args, setup)
    rows = routing(setup, args.replicas, args.share or (0.0, 0.25, 0.5, 0.75), rate)
    assumed = [item for item in setup.assumptions() if not item.startswith("routing")]
    assumed = [
        item.replace(
            "no common prefixes", f"{setup.traffic.prefixes:,} common prefixes, of the share given"
        )
        for item in assumed
    ]
    cold = "caches: empty at the start; what is found and prefill count from then on"
    return {"assumptions": [*assumed, said, cold, *scaled(args, rows)], "rows": rows}


def run_tail(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    (setup,) = setups(args)
    rate, said = _rate(args, setup)
    rows = [tail(setup, count, rate, args.restart) for count in args.replicas or (2, 10, 100)]
    assumed = [
        *setup.assumptions(),
        said,
        f"loss: one of the simulated replicas, back after {args.restart:g} s with an empty cache; what "
        "has no token yet is sent again, what has begun to stream is cut",
    ]
    return {"assumptions": assumed + scaled(args, rows), "rows": rows}


def _assumed(result: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "Assumed:"
    for item in result["assumptions"]:
        yield f"- {item}"


def _p95(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['ttft'][1]:.2f}", f"{1e3 * row['tpot'][1]:.1f}"


def show_cost(result: Mapping[str, Any]) -> Iterator[str]:
    head = "engine", "binds", "replicas", "requests/s", "tok/s, each", "per M tokens"
    rows = [(*head, "p95 TTFT, s", "p95 TPOT, ms", "busy")]
    for row in result["rows"]:
        start = row["plane"], row["binds"], f"{row['replicas']:,}"
        if "cost_per_million_output_tokens" not in row:
            rows.append((*start, *["-"] * 6))
            continue
        rows.append((
            *start, f"{row['requests_per_second']:,.1f}",
            f"{row['output_tokens_per_second_and_replica']:,.0f}",
            f"{row['cost_per_million_output_tokens']:.3f}", *_p95(row), f"{row['busy']:.0%}",
        ))  # fmt: skip
    yield markdown(rows, 2)
    yield from _assumed(result)


def show_replicas(result: Mapping[str, Any]) -> Iterator[str]:
    head = "engine", "binds", "users", "requests/s", "replicas", "p95 TTFT, s", "p95 TPOT, ms"
    rows = [(*head, "busy")]
    for row in result["rows"]:
        start = row["plane"], row["binds"], f"{row['users']:,}"
        if row["replicas"] is None:
            rows.append((*start, *["-"] * 5))
            continue
        rows.append((
            *start, f"{row['requests_per_second']:,.1f}", f"{row['replicas']:,}", *_p95(row),
            f"{row['busy']:.0%}",
        ))  # fmt: skip
    yield markdown(rows, 2)
    yield from _assumed(result)


def show_routing(result: Mapping[str, Any]) -> Iterator[str]:
    head = "router", "misses", "share", "found in cache", "prefill ms a request", "p50 TTFT, ms"
    rows = [(*head, "p95 TTFT, ms", "p95 TPOT, ms", "busy")]
    for row in result["rows"]:
        rows.append((
            row["router"], " and ".join(row["missed"]) or "none", f"{row['share']:.0%}",
            f"{row['prefix_hits']:.1%}", f"{row['prefill_ms_per_request']:.1f}",
            f"{1e3 * row['ttft'][0]:.0f}", f"{1e3 * row['ttft'][1]:.0f}",
            f"{1e3 * row['tpot'][1]:.1f}", f"{row['busy']:.0%}",
        ))  # fmt: skip
    yield markdown(rows, 2)
    yield from _assumed(result)


def show_tail(result: Mapping[str, Any]) -> Iterator[str]:
    head = "requests that arrive", "replicas", "p50 TTFT, s", "p95", "p99", "p95 TPOT, ms"
    rows: list[tuple[str, ...]] = [(*head, "sent again", "cut")]
    for row in result["rows"]:
        for name, label in (
            ("without", "then, nothing lost"),
            ("with", "while one is missing"),
            ("after", "after it is back"),
        ):
            times = row[name]
            counts = (str(row["sent_again"]), str(row["cut"])) if name == "with" else ("", "")
            rows.append((
                label, f"{row['replicas']:,}", *(f"{value:.2f}" for value in times["ttft"]),
                f"{1e3 * times['tpot'][1]:.1f}", *counts,
            ))  # fmt: skip
    yield markdown(rows, 1)
    for row in result["rows"]:
        missed = " and ".join(row["missed"])
        yield (
            f"{row['replicas']:,} replicas: "
            + (f"{missed} over the limit while one is missing" if missed else "limits kept")
            + f"; busy {row['busy_without']:.0%} of the time before"
        )
    yield from _assumed(result)


# ------------------------------------------------------------------------------------------------
# check


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plane", type=Path, metavar="PLANE.json", help="of the same options")
    parser.add_argument("--replicas", type=int, action="append", metavar="COUNT")
    parser.add_argument(
        "--load", type=float, action="append", help="share of the highest rate; default: 0.3, 0.6"
    )
    parser.add_argument("--prompt-tokens", default="64:256")
    parser.add_argument("--output-tokens", default="32:64")
    parser.add_argument("--requests", type=int, default=100, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(run=run_check, show=show_check)


def run_check(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    from simulation.beside import Load, compare, servers  # it needs uvloop

    plane = Plane.read(args.plane)
    load = Load(
        Lengths.parse("prompt-tokens", args.prompt_tokens),
        Lengths.parse("output-tokens", args.output_tokens),
        args.requests,
        args.rounds,
    )
    rows = []
    for count in args.replicas or (1, 2):
        with servers(count, engine) as targets:
            rows += compare(plane, load, args.load or (0.3, 0.6), targets)
    return {
        "assumptions": [
            f"step time: {plane.source}",
            "calibrated: with what one request at a time took on each server in the same round "
            "(times the plane, and before the first token)",
            f"prompts of {load.prompt} and answers of {load.output} tokens, evenly; {load.requests} "
            f"requests, {load.rounds} rounds; differences are medians of those within a round",
        ],
        "rows": rows,
    }


def show_check(result: Mapping[str, Any]) -> Iterator[str]:
    head = "figure", "replicas", "requests/s", "measured, ms", "simulated, ms", "difference"
    rows = [(*head, "by the plane alone, ms", "difference")]
    for row in result["rows"]:
        for figure, item in row["figures"].items():
            rows.append((
                figure, str(row["replicas"]), f"{row['requests_per_second']:.2f}",
                f"{item['measured_ms']:.1f}", f"{item['simulated_ms']:.1f}",
                f"{item['difference']:+.1%}", f"{item['by_plane_ms']:.1f}",
                f"{item['difference_by_plane']:+.1%}",
            ))  # fmt: skip
    yield markdown(rows, 1)
    for row in result["rows"]:
        yield (
            f"{row['replicas']} at {row['requests_per_second']:.2f}/s: one at a time takes "
            f"{row['slowdown']:.2f} times the plane, and {row['front_ms']:.1f} ms before"
        )
    yield verdict(result)
    yield from _assumed(result)


def verdict(result: Mapping[str, Any]) -> str:
    """Whether all that is simulated is within AIM of what was measured."""
    differences = {
        f"{figure} of {row['replicas']} at {row['requests_per_second']:.2f}/s": item["difference"]
        for row in result["rows"]
        for figure, item in row["figures"].items()
    }
    far = [f"{what} {off:+.1%}" for what, off in differences.items() if abs(off) > AIM]
    count = f"{len(differences) - len(far)} of {len(differences)} figures"
    return f"within {AIM:.0%} of the servers: {count}" + "".join(f"; not {item}" for item in far)


if __name__ == "__main__":
    main()
