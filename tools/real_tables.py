"""Measure what caches and formats of weights cost any model, as one table. Run by `make real`.

    python tools/real_tables.py [MODEL] [--tokens 4096] [--data FILE] [--speed] [--publish FOLDER]

MODEL is a name that real_model.py fetches (default smollm2), a folder, a GGUF file, or the name of a
model on the Hugging Face hub, which is downloaded. A GGUF file is decoded to 16 bits first, so that
formats of weights can be compared. The table comes from one run of `freight evaluate caches`, which
is printed above it; --speed adds tables of throughput and latency. All go into OUT/tables.md, next
to OUT/report and OUT/cache-gain.svg. --publish writes the figures as data too (published.py). A
command that fails says why, the others run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import published
import real_model
import real_text
from package_files import cache_folder, digest_of
from published import (
    Clipping,
    LayerMagnitudes,
    Machine,
    Model,
    Noise,
    Quality,
    Row,
    Side,
    Text,
)
from published_tables import COLUMNS, legend, noise_sentence, table

from freight.base.fields import JsonObject
from freight.base.version import version
from freight.checkpoint.reader import resolve_model
from freight.errors import ConfigError, FreightError
from freight.fp8.formats import Format
from freight.lab.evaluate.report import plain_config
from freight.lab.evaluate.safety import MIN_UNITS
from freight.model.open import OpenModel, open_model
from freight.settings.device import DeviceKind, cpu_name
from freight.settings.engine import EngineArgs, EngineConfig

DEMO = Path(__file__).parent.parent / "src" / "freight" / "demo"
HELD_OUT = DEMO / "heldout.txt"
TOKENS = 4096
LONGEST_WINDOW = 1024  # tokens; as `freight evaluate` without --window
INPUT = 256  # tokens of a request, as in docs/benchmarks.md
OUTPUT = 64
FREIGHT = [sys.executable, "-m", "freight"]

CACHES = ("token", "tensor", "head", "channel", "unit", "e5m2", "int8", "centered")
CALIBRATED = ("tensor", "head", "channel", "centered")
WEIGHTS = (
    "fp8-channel",
    "fp8-channel-a16",
    "int8",
    "int4-32",
    "int4-32-a16",
    "int4",
    "mxfp4",
)
CPU_CACHES = ("int8",)  # which the kernels for GPUs do not have
CPU_WEIGHTS = ("int8", "int4-32-a16")  # inputs of products with INT4 are in 16 bits there anyway


@dataclass(frozen=True)
class Settings:
    """What is measured: names of `freight evaluate caches --caches` and `--weights`. `left_out` has
    a line for each reason why something is not.
    """

    caches: tuple[str, ...]
    weights: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """The text that is judged, and the one of static scales: None for what ships with Freight, or
    what the demo has. Names say what they are.
    """

    name: str
    data: Path
    calibration_name: str | None = None
    calibration: Path | None = None


@dataclass(frozen=True)
class Sizes:
    """Amounts of the tables of speed: requests of the throughput, and runs of each setting."""

    requests: int
    repeats: int


def window_for(num_tokens: int) -> int:
    """Return tokens that are scored together: the most with which `num_tokens` give the windows that
    an interval takes (341 for 4,096), at most LONGEST_WINDOW.
    """
    return max(2, min(LONGEST_WINDOW, num_tokens // MIN_UNITS))


def settings_for(
    opened: OpenModel, config: EngineConfig, caches: Sequence[str], weights: Sequence[str]
) -> Settings:
    """Return which of `caches` and `weights` can be measured of this model on this device."""
    left_out: list[str] = []

    def without(names: Sequence[str], refused: Collection[str], why: str) -> tuple[str, ...]:
        gone = [name for name in names if name in refused]
        if gone:
            left_out.append(f"Left out: {', '.join(gone)}: {why}.")
        return tuple(name for name in names if name not in refused)

    if config.device != DeviceKind.CPU:
        caches = without(caches, CPU_CACHES, "the kernels for GPUs have no such cache")
        weights = without(weights, CPU_WEIGHTS, "the kernels for GPUs have no such products")
    if opened.model.foreign is not None:
        why = "the model runs through transformers"
        caches = without(caches, CALIBRATED, why)
        weights = without(weights, weights, why)
    if opened.scheme.weight_format is not None:
        weights = without(weights, weights, "the weights are quantized already")
    return Settings(tuple(caches), tuple(weights), tuple(left_out))


def evaluate_command(
    model: str, judged: Judged, settings: Settings, num_tokens: int, report: Path, noise: bool
) -> list[str]:
    """Return the arguments of the one run of `freight` that the table is made of."""
    arguments = ["evaluate", "caches", model, "--caches", ",".join(settings.caches)]
    if settings.weights:
        arguments += ["--weights", ",".join(settings.weights)]
    arguments += ["--data", str(judged.data)]
    if judged.calibration is not None:
        arguments += ["--calibration-data", str(judged.calibration)]
    window = window_for(num_tokens)
    arguments += ["--max-tokens", str(num_tokens), "--window", str(window), "--no-speed"]
    if noise:
        arguments.append("--noise")
    return [*arguments, "--report", str(report), "--json"]


def cache_memories(bytes_per_token: int, block_size: int, requests: int) -> tuple[int, int]:
    """Return bytes of a 16-bit cache: for two requests but not three, and for all of them."""
    request = (-(-(INPUT + OUTPUT) // block_size) + 1) * block_size * bytes_per_token
    return 2 * request, max(requests, 3) * request


def speed_commands(
    model: str, out: Path, sizes: Sizes, memories: Iterable[int]
) -> list[tuple[str, list[str]]]:
    """Return (heading, arguments of `freight`) of each table of speed."""
    repeats = ["--repeats", str(sizes.repeats)]
    gain = ["bench", "throughput", model, "--num-requests", str(sizes.requests), *repeats]
    gain += ["--input-len", str(INPUT), "--output-len", str(OUTPUT)]
    gain += ["--compare", "auto", "--compare", "fp8"]
    for memory in memories:
        gain += ["--compare-memory", str(memory)]
    speed = ["bench", "latency", model, *repeats]
    in_fp8 = [*speed, "--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    return [
        ("What the cache alone gains", [*gain, "--picture", str(out / "cache-gain.svg")]),
        ("Latency, weights as stored, a cache of 16 bits", speed),
        ("Latency, FP8 weights and cache", in_fp8),
    ]


def run(arguments: Sequence[str]) -> tuple[bool, str]:
    """Run `freight ARGUMENTS`; return whether it succeeded, and what it printed. Its stderr, with
    progress, the time left and errors, is this process's.
    """
    wide = {**os.environ, "COLUMNS": "120"}  # tables fit themselves to the terminal's width
    done = subprocess.run([*FREIGHT, *arguments], stdout=subprocess.PIPE, text=True, env=wide)
    return done.returncode == 0, done.stdout


def row_of(figures: JsonObject) -> Row:
    """Return a row of one of `runs` in the JSON of `freight evaluate caches`."""

    def interval(name: str) -> tuple[float, float] | None:
        bounds = figures[name]
        return None if bounds is None else (bounds[0], bounds[1])

    return Row(
        cache=figures["name"],
        weights=figures["weights"],
        kv_cache_dtype=figures["kv_cache_dtype"],
        granularity=figures["granularity"],
        kl=figures["kl_mean"],
        kl_interval=interval("kl_interval"),
        kl_without_noise=figures["kl_without_noise"],
        kl_p99=figures["kl_p99"],
        perplexity=figures["perplexity"],
        perplexity_ratio=figures["perplexity_ratio"],
        perplexity_ratio_interval=interval("perplexity_ratio_interval"),
        same_top=figures["same_top"],
        same_top_interval=interval("same_top_interval"),
        clipped_share=figures["clipped_share"],
        clipping=clipping_of(figures["clipping"]),
        flushed_share=figures["flushed_share"],
        bytes_per_token=figures["bytes_per_token"],
        tokens_per_gib=figures["tokens_per_gib"],
    )


def clipping_of(entries: Sequence[JsonObject] | None) -> Clipping | None:
    """Sum up the layers of `Magnitudes.clipping`."""
    if entries is None:
        return None
    return Clipping(
        layers=len({entry["layer"] for entry in entries}),
        channels=sum(entry["channels"] for entry in entries),
        times=max((entry["times"] for entry in entries), default=1.0),
    )


def magnitudes_of(entry: JsonObject) -> LayerMagnitudes:
    """Of an entry of `Magnitudes.as_list`."""
    sides = []
    for name in ("k", "v"):
        figures = entry[name]
        if figures is None:
            continue
        first, *later = figures["positions"]
        side = Side(
            max=figures["max"],
            channel=figures["channel"],
            smallest_channel=figures["smallest_channel"],
            first=first,
            later=max(later),
            beyond_448=figures["beyond_448"],
            below_normal=figures["below_normal"],
        )
        sides.append(side)
    return LayerMagnitudes(entry["layer"], sides[0], sides[1] if len(sides) > 1 else None)


def quality_of(
    evaluation: JsonObject, model: Model, judged: Judged, machine: Machine, command: str
) -> Quality:
    """Return the result that is published, of the JSON of `freight evaluate caches`."""
    calibration = judged.calibration
    text = Text(
        name=judged.name,
        sha256=digest_of(judged.data),
        num_tokens=evaluation["num_tokens"],
        window=evaluation["window"],
        num_units=evaluation["num_units"],
        calibration=judged.calibration_name,
        calibration_sha256=None if calibration is None else digest_of(calibration),
    )
    noise = evaluation["noise"]
    return Quality(
        model=model,
        text=text,
        command=command,
        machine=machine,
        date=datetime.now(UTC).date().isoformat(),
        noise=None if noise is None else Noise(noise["kl"], noise["num_tokens"]),
        magnitudes=tuple(map(magnitudes_of, evaluation["magnitudes"])),
        rows=tuple(row_of(figures) for figures in evaluation["runs"]),
    )


def machine_of(opened: OpenModel, config: EngineConfig) -> Machine:
    """Return the facts of this machine, and of the kernels that `config` chooses."""
    on_cpu = config.device == DeviceKind.CPU
    return Machine(
        processor=cpu_name() if on_cpu else opened.device.name,
        kernels=opened.kernels(config).name,
        freight=version(),
        torch=package_version("torch"),
        python=platform.python_version(),
    )


def described(name: str, source: Path) -> Model:
    """Return what is published about the model: `name` as it was given, `source` its folder or GGUF
    file.
    """
    known = real_model.KNOWN.get(name)
    if known is not None:
        return Model(known.name, known.title, known.origin, known.licence, known.sha256)
    if name == "demo":
        return Model("demo", "The demo model", "this repository", None, None)
    if source.is_file():
        title = Path(name).name
        return Model(Path(name).stem, title, "a GGUF file", None, digest_of(source))
    if Path(name).is_dir():
        base = source.resolve().name
        return Model(base, base, "a folder", None, None)
    return Model(name, name, "the Hugging Face hub", None, None)


def is_demo(path: str) -> bool:
    return path == "demo" or Path(path).resolve() == DEMO.resolve()


def judged_for(args: argparse.Namespace, path: str) -> Judged:
    """Return the texts: those that are named, the demo's own, or GSM8K. Raises ConfigError for
    files that are not there.
    """
    for option, file in (("--data", args.data), ("--calibration-data", args.calibration_data)):
        if file is not None and not file.is_file():
            raise ConfigError(f"{option} {file} is no file; give a text, not of the training data")
    other = args.calibration_data
    other_name = None if other is None else other.name
    if args.data is not None:
        return Judged(args.data.name, args.data, other_name, other)
    if is_demo(path):
        return Judged(HELD_OUT.name, HELD_OUT, other_name, other)
    texts = real_text.fetch(real_text.GSM8K, cache_folder())
    if other is not None:
        return Judged(texts.name, texts.judged, other_name, other)
    return Judged(texts.name, texts.judged, texts.calibration_name, texts.calibration)


def make_command(args: argparse.Namespace, name: str) -> str:
    """Return the `make real` that measures the same, without folders of this machine."""
    options: list[str] = []
    for option in ("tokens", "caches", "weights"):
        value = getattr(args, option)
        if value is not None and (option, value) != ("tokens", TOKENS):
            options += [f"--{option}", str(value)]
    for option in ("data", "calibration_data"):
        file = getattr(args, option)
        if file is not None:
            options += [f"--{option.replace('_', '-')}", file.name]
    command = f"make real MODEL={shlex.quote(name)}"
    if options:
        command += f" OPTIONS={shlex.quote(shlex.join(options))}"
    return command


def measured_text(result: Quality, settings: Settings) -> str:
    """Return the table, and what a reader has to know about it."""
    lines = [table([result]), "", *COLUMNS, noise_sentence(result), *settings.left_out]
    return "\n".join([*lines, "", *legend([result])])


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add: Any = parser.add_argument
    known = ", ".join(real_model.KNOWN)
    add("model", nargs="?", default="", help=f"{known}, a folder, a GGUF file, or OWNER/NAME")
    add("--data", type=Path, help="text to judge by (default: GSM8K's; for the demo its own)")
    add("--calibration-data", type=Path, help="text for static scales (default: GSM8K's last 300)")
    add("--tokens", type=int, default=TOKENS, help=f"of the text (default {TOKENS})")
    add("--caches", help=f"default {','.join(CACHES)}")
    add("--weights", help=f"formats, or 'none' (default {','.join(WEIGHTS)})")
    add("--speed", action="store_true", help="tables of throughput and latency as well")
    add("--requests", type=int, default=64, help="of the throughput (default 64)")
    add("--repeats", type=int, default=3, help="runs of each setting of speed (default 3)")
    add("--out", type=Path, default=Path("real"), help="folder of the results (default real)")
    add("--publish", type=Path, help="folder for the figures as data: NAME.PROCESSOR.json")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(f"--tokens {args.tokens}: perplexity needs at least 2")
    return args


def names_of(option: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if option is None:
        return default
    return () if option == "none" else tuple(option.split(","))


class Page:
    """OUT/tables.md, and the same on stdout; counts the commands that failed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self.path = path
        self.num_failed = 0

    def run(self, heading: str, arguments: Sequence[str]) -> str | None:
        """Print the heading and the command, and run it; return what it printed, or None if it
        failed: it has said why on stderr.
        """
        self.add(f"## {heading}\n\n    freight {shlex.join(arguments)}\n")
        succeeded, output = run(arguments)
        if succeeded:
            return output
        self.num_failed += 1
        self.add(f"{output}This command failed.\n")
        return None

    def add(self, text: str) -> None:
        print(text, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def tables(args: argparse.Namespace) -> Page:
    """Make all tables. Raises FreightError for bad input, before anything is measured."""
    name = args.model or real_model.DEFAULT
    folder = real_model.locate(name)
    source = resolve_model(folder)
    model = described(name, source)
    judged = judged_for(args, folder)
    if source.is_file():
        folder = str(real_model.sixteen_bits(source, cache_folder()))
    opened = open_model(EngineArgs(model=folder))
    config = plain_config(opened)
    caches = names_of(args.caches, CACHES)
    settings = settings_for(opened, config, caches, names_of(args.weights, WEIGHTS))
    noise = name in real_model.KNOWN and config.compute_format is not Format.FLOAT32
    page = Page(args.out / "tables.md")
    heading = f"What caches and formats of weights cost: {model.title}"
    output = page.run(
        heading,
        evaluate_command(folder, judged, settings, args.tokens, args.out / "report", noise),
    )
    if output is not None:
        machine = machine_of(opened, config)
        command = make_command(args, model.name)
        result = quality_of(json.loads(output), model, judged, machine, command)
        page.add(measured_text(result, settings) + "\n")
        if args.publish is not None:
            print(f"{published.write(result, args.publish)}: the figures as data")
    if args.speed:
        per_token = opened.cache_spec(config).bytes_per_token
        memories = cache_memories(per_token, config.block_size, args.requests)
        sizes = Sizes(args.requests, args.repeats)
        for heading, arguments in speed_commands(folder, args.out, sizes, memories):
            printed = page.run(heading, arguments)
            if printed is not None:
                page.add(printed)
    return page


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    try:
        page = tables(args)
    except (FreightError, OSError) as error:
        raise SystemExit(f"real_tables.py: {error}") from None
    print(f"{page.path}: the tables above; {args.out / 'report' / 'report.html'}: the report")
    if page.num_failed:
        raise SystemExit(
            f"real_tables.py: {page.num_failed} of the commands failed; their errors are above"
        )


if __name__ == "__main__":
    main()
