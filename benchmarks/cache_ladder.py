"""A ladder of caches, from 8 bits down to 3: at which KL the log-probability of known solutions falls, and
the share of right answers.

    python benchmarks/paired_questions.py solutions FOLDER
    python benchmarks/cache_ladder.py judge MODEL FOLDER/gsm8k.solutions.jsonl [--max-tokens 8192] [--json FILE]
    python benchmarks/cache_ladder.py answer MODEL FOLDER/gsm8k-0.jsonl --cache int4

`judge` scores published solutions after their questions, teacher-forced, under every cache: the mean KL to
a 16-bit cache, and by how much the log-probability of a solution changes, paired by question. `answer`
writes answers under one simulated cache beside those of paired_questions.py, whose `score` compares them.
Caches of fewer than 8 bits are simulated (questions/rounded_cache.py), and two of E4M3 that keep the
biases of keys, which Freight's caches do not: a scale for each token, and a scale of 1.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from questions.rounded_cache import SIMULATED, rounded_runner

from freight import LLM, SamplingParams
from freight.base.tables import markdown
from freight.errors import FreightError
from freight.lab.evaluate.documents import Part, cut_prompted, read_prompted
from freight.lab.evaluate.measure import SettingRun, measure
from freight.lab.evaluate.report import cache_run, load_for, plain_config
from freight.lab.evaluate.safety import Interval
from freight.lab.evaluate.statistics import interval, unit_sums
from freight.model.open import OpenModel, open_model
from freight.settings.engine import EngineArgs, EngineConfig

# name -> --kv-cache-dtype and --kv-scales
STORED = {
    "int8": ("int8", "auto"),
    "token": ("fp8_e4m3", "dynamic"),
    "unit": ("fp8_e4m3", "unit"),
    "e5m2": ("fp8_e5m2", "unit"),
}
BATCH = 64  # requests that are answered together


@dataclass(frozen=True)
class Step:
    """One cache. `change` is that of the log-probability of a token of the solutions, in nats;
    `by_question` of each whole solution.
    """

    cache: str
    kl: float
    kl_interval: Interval | None
    change: float
    change_interval: Interval | None
    same_top: float
    by_question: list[float]


def judge(
    model: str, path: Path, caches: Sequence[str], max_tokens: int | None
) -> tuple[int, list[Step]]:
    """Return how many tokens were judged, and a step for each of `caches`, against 16 bits."""
    opened = open_model(EngineArgs(model=model))
    plain = plain_config(opened)
    documents = read_prompted(path, "solution", "prompt")
    parts = cut_prompted(opened, documents, None, plain.max_model_len, max_tokens)
    longest = max(len(part.window.token_ids) for part in parts)
    configs = {name: _resolved(opened, name) for name in caches if name in STORED}
    with opened.threads(plain):
        decoder = load_for(opened, [plain, *configs.values()], longest)
        runs = [replace(cache_run(opened, decoder, plain, longest), name="16 bits")]
        for name in caches:
            run = cache_run(opened, decoder, configs.get(name, plain), longest)
            if name in SIMULATED:
                run = replace(run, runner=rounded_runner(run.runner, name))
            runs.append(replace(run, name=name))
        measure(runs, [part.window for part in parts], _progress)
    print(file=sys.stderr)
    num_tokens = sum(part.window.num_scored for part in parts)
    return num_tokens, [_step(run, runs[0], parts) for run in runs]


def _resolved(opened: OpenModel, name: str) -> EngineConfig:
    dtype, scales = STORED[name]
    return opened.resolve(replace(opened.args, kv_cache_dtype=dtype, kv_scales=scales))


def _step(run: SettingRun, reference: SettingRun, parts: Sequence[Part]) -> Step:
    counts = [part.window.num_scored for part in parts]
    units = np.repeat(np.arange(len(parts)), counts)
    change = (run.token_logprobs - reference.token_logprobs).double().numpy()
    kl = run.token_kl.double().numpy()
    of_change, of_kl = unit_sums(units, change, kl)
    sizes = np.array(counts, dtype=np.float64)
    return Step(
        run.name,
        run.mean_kl,
        interval(of_kl, sizes),
        float(change.mean()),
        interval(of_change, sizes),
        float(run.token_same.double().mean()),
        of_change.tolist(),
    )


def _progress(done: int, total: int) -> None:
    if done == total or sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} tokens", end="", file=sys.stderr, flush=True)


def rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """The table, its heading first."""
    table = [("cache", "mean KL", "log-probability of a token", "of a solution", "same top")]
    for step in steps:
        solution = float(np.mean(step.by_question))
        table.append(
            (
                step.cache,
                f"{step.kl:.5f}{_half(step.kl, step.kl_interval, 5)}",
                f"{step.change:+.5f}{_half(step.change, step.change_interval, 5)}",
                f"{solution:+.3f}",
                f"{step.same_top:.2%}",
            )
        )
    return table


def _half(value: float, bounds: Interval | None, digits: int) -> str:
    return "" if bounds is None else f" ± {max(bounds[1] - value, value - bounds[0]):.{digits}f}"


def answer(model: str, path: Path, cache: str, context: int) -> None:
    """Write answers to the requests of `path` under a simulated cache, each as `freight batch` does.
    Those that are there stay.
    """
    out = path.with_name(f"{path.stem}.{cache}.jsonl")
    num_done = _complete_lines(out) if out.exists() else 0
    requests = [json.loads(line) for line in path.read_bytes().splitlines()]
    llm = LLM(model, max_model_len=context, max_num_seqs=BATCH)
    llm.engine.runner = rounded_runner(llm.engine.runner, cache)
    with out.open("a", encoding="utf-8") as file:
        for start in range(num_done, len(requests), BATCH):
            part = requests[start : start + BATCH]
            for line in _answers(llm, part):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{start + len(part)} of {len(requests)} answered", file=sys.stderr)


def _complete_lines(path: Path) -> int:
    """Count the lines, and remove a last one that a killed run has not ended."""
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        path.write_bytes(complete)
    return complete.count(b"\n")


def _answers(llm: LLM, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = [request["body"]["messages"] for request in requests]
    limits = [
        SamplingParams(temperature=0.0, max_tokens=request["body"]["max_tokens"])
        for request in requests
    ]
    lines = []
    for request, output in zip(requests, llm.chat(messages, limits), strict=True):
        completion = output.outputs[0]
        choice = {
            "message": {"role": "assistant", "content": completion.text},
            "finish_reason": completion.finish_reason,
        }
        body = {
            "choices": [choice],
            "usage": {"completion_tokens": len(completion.token_ids)},
        }
        response = {"status_code": 200, "body": body}
        lines.append({"custom_id": request["custom_id"], "response": response, "error": None})
    return lines


def main() -> None:
    known = [*STORED, *SIMULATED]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("judge", help="score published solutions")
    command.add_argument("model")
    command.add_argument("solutions", type=Path)
    command.add_argument("--caches", default=",".join(known))
    command.add_argument("--max-tokens", type=int, help="of the solutions, the first ones")
    command.add_argument("--json", type=Path, metavar="FILE")
    command = commands.add_parser("answer", help="answer requests under a simulated cache")
    command.add_argument("model")
    command.add_argument("requests", type=Path)
    command.add_argument("--cache", choices=list(SIMULATED), required=True)
    command.add_argument("--max-model-len", type=int, default=2048)
    args = parser.parse_args()
    try:
        if args.command == "answer":
            answer(args.model, args.requests, args.cache, args.max_model_len)
            return
        caches = args.caches.split(",")
        for name in caches:
            if name not in known:
                parser.error(f"--caches {name!r} is unknown: choose among {', '.join(known)}")
        num_tokens, steps = judge(args.model, args.solutions, caches, args.max_tokens)
    except FreightError as error:
        raise SystemExit(f"cache_ladder.py: {error}") from None
    print(markdown(rows(steps), 1))
    if args.json is not None:
        facts = {"num_tokens": num_tokens, "steps": [asdict(step) for step in steps]}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
