"""Measure the cost of each format of states, written every 16 tokens or after every token.

    python benchmarks/state_formats.py MODEL… [--tokens 8192] [--window 256] [--data FILE] [--every 16 1] [--json]

The cost is KL (nats per token) against states in float32, with everything else in float32 too, on
the reference kernels; the default text is the held-out text that ships with Freight. Each interval
runs in its own process, in which STATE_TILE is set to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "src" / "freight" / "demo" / "heldout.txt"


def measure(model: str, every: int, tokens: int, window: int, data: Path) -> list[dict[str, Any]]:
    """Return the runs of `freight evaluate caches`, with states that are written every `every`
    tokens. Once per process.
    """
    import freight.operands.tiles as tiles

    # The reference kernels read this; the compiled ones have their own constant
    tiles.STATE_TILE = every

    from freight.lab.evaluate.grid import GridArgs, evaluate_grid
    from freight.settings.engine import EngineArgs

    args = EngineArgs(model, dtype="float32", kernels="reference")
    kinds = "bfloat16", "int8", "fp8"
    grid = GridArgs(caches=(), states=kinds, max_tokens=tokens, window=window, speed=False)
    runs: list[dict[str, Any]] = evaluate_grid(
        args, [data.read_text(encoding="utf-8")], grid
    ).as_json()["runs"]
    return runs


def in_a_process(
    model: str, every: int, tokens: int, window: int, data: Path
) -> list[dict[str, Any]]:
    """Run `measure` in a new process."""
    command = [
        sys.executable,
        __file__,
        model,
        "--tokens",
        str(tokens),
        "--window",
        str(window),
        "--data",
        str(data),
    ]
    out = subprocess.run(
        [*command, "--json", "--every", str(every)], check=True, capture_output=True, text=True
    ).stdout
    runs: list[dict[str, Any]] = json.loads(out)
    return runs


def row(model: str, every: int, run: dict[str, Any]) -> list[str]:
    interval = (
        "" if run["kl_interval"] is None else " ({:.1e} … {:.1e})".format(*run["kl_interval"])
    )
    cells = [
        run["state_dtype"],
        str(every),
        f"{run['kl_mean']:.1e}{interval}",
        f"{1 - run['same_top']:.2%}",
    ]
    return [Path(model).resolve().name, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, the first")
    parser.add_argument("--window", type=int, default=256, help="tokens judged together")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="text that the model was not trained on"
    )
    parser.add_argument(
        "--every", type=int, nargs="+", default=[16, 1], help="tokens between writes"
    )
    parser.add_argument(
        "--json", action="store_true", help="the runs of the first model and the first of --every"
    )
    args = parser.parse_args()
    shared = args.tokens, args.window, args.data
    if args.json:
        print(json.dumps(measure(args.models[0], args.every[0], *shared)))
        return

    from freight.base.tables import markdown

    rows = [["model", "state", "written every", "mean KL", "other top token"]]
    for model in args.models:
        for every in args.every:
            runs = in_a_process(model, every, *shared)
            rows += [row(model, every, run) for run in runs[1:]]  # the first is float32
    print(markdown(rows, num_left=2))


if __name__ == "__main__":
    main()
