"""Fail a build where an FP8 KV cache costs more than a bound: exit status 1, and why.

    python examples/evaluate_in_ci.py [MODEL --data TEXT] [--most-kl NATS] [--max-tokens COUNT]

TEXT was not seen by the model. The cache passes if its mean divergence from the 16-bit cache is at
most NATS per token, and if `freight evaluate` calls it safe (its other bounds are in docs/cli.md).
Exit status 2: the evaluation itself failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", help="needed for every model but demo")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--most-kl", type=float, default=0.005, help="nats per token")
    parser.add_argument("--max-tokens", default="16384", help="of the text")
    asked = parser.parse_args()

    command = [sys.executable, "-m", "freight", "evaluate", "caches", asked.model, "--json"]
    command += ["--no-speed", "--max-tokens", asked.max_tokens]
    command += ["--kv-cache-dtype", asked.kv_cache_dtype]
    command += ["--data", asked.data] if asked.data else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return 2

    _, run = json.loads(done.stdout)["runs"]  # the 16-bit cache, and the one asked for
    name = f"{run['kv_cache_dtype']}, scales {run['granularity']}"
    print(f"{name}: mean KL {run['kl_mean']:.5f} nats, same top token {run['same_top']:.2%}")
    failures = list(run["reasons"]) if run["verdict"] != "safe" else []
    if run["kl_mean"] > asked.most_kl:
        failures.append(f"mean KL {run['kl_mean']:.5f} is above {asked.most_kl}")
    for failure in failures:
        print(f"not accepted: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
