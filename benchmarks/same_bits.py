"""Compare logits and tokens of two checkouts of Freight to the bit, for every family of the tests.

    ENV/bin/python benchmarks/same_bits.py run OLD before.json
    .venv/bin/python benchmarks/same_bits.py run . after.json
    .venv/bin/python benchmarks/same_bits.py compare before.json after.json

`run` takes a checkout with compiled kernels, and an interpreter that has its dependencies: the
checkout's sources and its tests/parity come first on the path. For each build of the CPU kernels
that the processor runs, each family and each cache format it writes two digests: of the logits of
one long prompt, and of the output of a batch of requests that is computed in chunks, greedy and
drawn, with log-probabilities. `--only WORD` selects families with that word in their name, and
`--builds` some of the builds. `compare` counts the cases that differ, prints their names and exits
with 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Name of a cache -> options of the engine
CACHES: dict[str, dict[str, Any]] = {
    "16 bits": {"kv_cache_dtype": "bfloat16"},
    "fp8 token": {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"},
    "fp8 unit": {"kv_cache_dtype": "fp8", "kv_scales": "unit"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8 token, fp8 weights": {
        "kv_cache_dtype": "fp8",
        "kv_scales": "dynamic",
        "quantization": "fp8",
    },
}
PROMPTS = (70, 33, 1)  # tokens; the longest is computed in chunks, and is longer than every window
STEP_TOKENS = 48
NEW_TOKENS = 10


def load_models(checkout: Path) -> tuple[Mapping[str, Any], types.ModuleType]:
    """Import the families in tests/parity of `checkout`, and the module that makes their models."""
    sys.path.insert(0, str(checkout))
    variants = importlib.import_module("tests.parity.variants")
    # Older checkouts have both in one file
    apart = (checkout / "tests" / "parity" / "random_models.py").exists()
    models = importlib.import_module("tests.parity.random_models") if apart else variants
    return variants.VARIANTS, models


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def use_build(build: str) -> None:
    """Make 'auto' load this build of the CPU kernels from now on."""
    from freight.kernels.cpu import library

    library.runnable = lambda *_: (build,)
    library.load.cache_clear()


def run_case(folder: Path, token_ids: Sequence[int], options: dict[str, Any]) -> dict[str, str]:
    """Return the digests of one model with one cache."""
    import torch

    from freight import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="bfloat16", skip_tokenizer_init=True, kv_cache_memory="8MiB", max_model_len=128,
        max_num_batched_tokens=STEP_TOKENS, threads=1, **options,
    )  # fmt: skip
    runner = llm.engine.runner
    logits = runner.logits(list(token_ids[:100]), 0, runner.pool.whole)
    prompts = [
        {"prompt_token_ids": list(token_ids[index : index + count])}
        for index, count in enumerate(PROMPTS)
    ]
    params = [
        SamplingParams(
            max_tokens=NEW_TOKENS, temperature=temperature, seed=7, logprobs=3, ignore_eos=True
        )
        for temperature in (0.0, 0.0, 0.8)
    ]
    answers = [item.outputs[0] for item in llm.generate(prompts, params)]
    plain = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)] * len(prompts)
    # The same prompts again: prefix hits, and recorded steps
    repeated = [item.outputs[0] for item in llm.generate(prompts, plain)]
    outputs = [
        (list(item.token_ids), repr(item.logprobs), item.cumulative_logprob)
        for item in (*answers, *repeated)
    ]
    nans = bool(torch.isnan(logits).any())
    return {
        "logits": digest(logits.contiguous().numpy().tobytes()) + (" with NaN" if nans else ""),
        "generated": digest(repr(outputs).encode()),
    }


def cases(builds: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield cases with the family last, so that each model is made once and read from the disk's
    cache.
    """
    for name in names:
        for build in builds:
            for cache in CACHES:
                yield name, build, cache


def run(checkout: Path, out: Path, only: str, wanted: Sequence[str]) -> None:
    sys.path[:0] = [str(checkout / "src"), str(checkout / "tests")]
    import torch

    import freight

    assert Path(freight.__file__).is_relative_to(checkout), (
        f"{freight.__file__} is not of {checkout}"
    )
    from freight.kernels.cpu import library

    logging.disable(logging.WARNING)
    builds = [build for build in library.runnable() if not wanted or build in wanted]
    variants, models = load_models(checkout)
    names = [name for name in variants if only in name]
    token_ids = models.tokens()
    results: dict[str, dict[str, str]] = {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        made = ""
        for name, build, cache in cases(builds, names):
            folder = Path(temporary) / name
            if made != name:
                models.save_random(variants[name], folder, torch.bfloat16)
                made = name
            use_build(build)
            try:
                case = run_case(folder, token_ids, CACHES[cache])
            except Exception as error:  # both checkouts must refuse the same, in the same words
                case = {"refused": f"{type(error).__name__}: {error}".replace(temporary, "")}
            results[f"{name}, {build}, {cache}"] = case
            if sys.stderr.isatty():
                print(f"\r{len(results)} cases", end="", file=sys.stderr)
    out.write_text(json.dumps(results, indent=1))
    print(
        f"{len(results)} cases of {len(names)} families in {time.monotonic() - begin:.0f} s: {out}"
    )


def compare(before: Path, after: Path) -> int:
    first = json.loads(before.read_text())
    second = json.loads(after.read_text())
    both = [case for case in first if case in second]
    alone = len(first) + len(second) - 2 * len(both)
    different = [case for case in both if first[case] != second[case]]
    for case in different:
        kinds = [
            kind
            for kind in first[case] | second[case]
            if first[case].get(kind) != second[case].get(kind)
        ]
        print(
            f"{case}: {', '.join(f'{kind} {first[case].get(kind)} {second[case].get(kind)}' for kind in kinds)}"
        )
    refused = sum("refused" in first[case] for case in both)
    print(
        f"{len(different)} differ of {len(both)}; refused by both: {refused}; in one file alone: {alone}"
    )
    return 1 if different or not both else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two checkouts of Freight to the bit.")
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="write the digests of a checkout")
    run_parser.add_argument("checkout", type=Path)
    run_parser.add_argument("out", type=Path)
    run_parser.add_argument("--only", default="", help="families with this in their name")
    run_parser.add_argument("--builds", default="", help="of the CPU kernels, separated by commas")
    compare_parser = commands.add_parser("compare", help="count the cases that differ")
    compare_parser.add_argument("before", type=Path)
    compare_parser.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.before, args.after)
    run(
        args.checkout.resolve(),
        args.out,
        args.only,
        [build for build in args.builds.split(",") if build],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
