"""Put what a command printed as JSON into benchmarks/published/, with the model, the machine and the date.

    python tools/publish.py tasks MODEL scores.json
    python tools/publish.py ladder MODEL ladder.json --of "GSM8K"
    python tools/publish.py oracle MODEL oracle.json --of "The Debian Administrator's Handbook"
    python tools/publish.py methods MODEL methods.json --of "GSM8K" --calibration "GSM8K"
    python tools/publish.py retrieval MODEL long.json [long-int8.json] --context 8192

MODEL is a name of real_model.py. The files come from `benchmarks/paired_questions.py score --json`,
`benchmarks/cache_ladder.py judge --json`, `benchmarks/quantize_methods.py --json`,
`benchmarks/peers/cache_oracle.py --json` and `freight evaluate long --json`. `--command` says how the
figures were made, once for each command. `python tools/published_tables.py --write` then writes
docs/quality.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import real_model
from published import (
    FOLDER,
    KINDS,
    DepthRow,
    Interval,
    Ladder,
    LadderStep,
    LongCache,
    Machine,
    MethodRow,
    Methods,
    Model,
    Oracle,
    OracleRow,
    Result,
    Retrieval,
    Task,
    Tasks,
    TaskScore,
    write,
)
from real_tables import described, machine_of

from freight.base.fields import JsonDict
from freight.base.files import read_object
from freight.errors import ConfigError, FreightError
from freight.lab.columns import scales_name
from freight.lab.evaluate.report import plain_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs


def pair(value: Sequence[float] | None) -> Interval | None:
    return None if value is None else (value[0], value[1])


def tasks_of(facts: JsonDict, common: Mapping[str, Any], command: str) -> Tasks:
    """Of what `paired_questions.py score --json` wrote."""
    tasks = []
    reference = facts["reference"]
    for name, compared in facts["comparisons"].items():
        by_cache = facts["tasks"].get(name)
        if by_cache is None:  # several sets together
            parts = list(facts["tasks"].values())
            by_cache = {cache: together([part[cache] for part in parts]) for cache in parts[0]}
        scores = []
        for cache, figures in compared.items():
            if figures["questions"]:
                scores.append(score_of(cache, figures, by_cache[cache]))
        questions = by_cache[reference]["verdicts"]
        answered = by_cache[reference]["answered"]
        tasks.append(Task(name, len(questions), answered, questions, tuple(scores)))
    return Tasks(
        **common,
        command=command,
        margin=facts["margin"],
        control=facts["control"],
        tasks=tuple(tasks),
    )


def together(parts: Sequence[JsonDict]) -> JsonDict:
    """The answers to several sets of questions as those to one."""
    counted = ("answered", "ended_by_length", "generated_tokens")
    counts = {name: sum(part[name] for part in parts) for name in counted}
    return {"verdicts": "".join(part["verdicts"] for part in parts), **counts}


def score_of(cache: str, figures: JsonDict, answers: JsonDict) -> TaskScore:
    both = figures["both"]
    only_reference = figures["only_reference"]
    only_cache = figures["only_cache"]
    low, high = figures["interval_90"]
    wide_low, wide_high = figures["interval_95"]
    return TaskScore(
        cache=cache,
        num_questions=figures["questions"],
        right=both + only_cache,
        reference_right=both + only_reference,
        only_reference=only_reference,
        only_cache=only_cache,
        difference=figures["difference"],
        interval_90=(low, high),
        interval_95=(wide_low, wide_high),
        mcnemar_p=figures["mcnemar_p"],
        differing_answers=figures["differing_answers"],
        ended_by_length=answers["ended_by_length"],
        generated_tokens=answers["generated_tokens"],
        verdict=figures["verdict"],
        right_by_question=answers["verdicts"],
    )


def ladder_of(facts: JsonDict, common: Mapping[str, Any], command: str, of: str) -> Ladder:
    """Of what `cache_ladder.py judge --json` wrote."""
    steps = []
    for step in facts["steps"]:
        solutions = step["by_question"]
        steps.append(
            LadderStep(
                cache=step["cache"],
                kl=step["kl"],
                kl_interval=pair(step["kl_interval"]),
                change=step["change"],
                change_interval=pair(step["change_interval"]),
                solution_change=sum(solutions) / len(solutions),
                same_top=step["same_top"],
            )
        )
    num_solutions = len(facts["steps"][0]["by_question"])
    return Ladder(
        **common,
        questions=of,
        num_solutions=num_solutions,
        num_tokens=facts["num_tokens"],
        command=command,
        steps=tuple(steps),
    )


def oracle_of(facts: JsonDict, common: Mapping[str, Any], commands: list[str], of: str) -> Oracle:
    """Of what `cache_oracle.py --beside FILE --json` wrote."""
    rows = []
    for name, own in facts["oracle"].items():
        freight = facts["freight"][name]
        row = OracleRow(name, freight["kl"], own["kl"], freight["perplexity"], own["perplexity"])
        rows.append(row)
    return Oracle(
        **common,
        text=of,
        num_tokens=facts["num_tokens"],
        window=facts["window"],
        commands=tuple(commands),
        transformers=package_version("transformers"),
        ml_dtypes=package_version("ml_dtypes"),
        rows=tuple(rows),
    )


def retrieval_of(
    files: Sequence[JsonDict], common: Mapping[str, Any], commands: list[str], context: int
) -> Retrieval:
    """Of what several runs of `freight evaluate long --json` printed, with the same reference."""
    caches: dict[str, LongCache] = {}
    for facts in files:
        for run in facts["runs"]:
            name = run["kv_cache_dtype"]
            if run["granularity"]:
                name += f", {scales_name(run['granularity'], run['scale_source'])}"
            caches.setdefault(name, LongCache(name, tuple(map(depth_of, run["depths"]))))
    return Retrieval(
        **common,
        context=context,
        num_contexts=files[0]["contexts"],
        commands=tuple(commands),
        caches=tuple(caches.values()),
    )


def depth_of(depth: JsonDict) -> DepthRow:
    return DepthRow(
        depth=depth["depth"],
        num_questions=depth["num_questions"],
        found=depth["found"]["mean"],
        gain=depth["gain"]["mean"],
        found_change=depth["found_change"]["mean"],
        gain_change=depth["gain_change"]["mean"],
        gain_change_interval=pair(depth["gain_change"]["interval"]),
    )


def methods_of(
    facts: JsonDict, common: Mapping[str, Any], command: str, of: str, calibration: str
) -> Methods:
    """Of what `quantize_methods.py --json` wrote."""
    evaluation = facts["evaluation"]
    rows = []
    for row in facts["rows"]:
        figures, with_tokens = row["runs"]
        cost = row["cost"]
        rows.append(
            MethodRow(
                method=row["method"],
                seconds=cost["seconds"],
                peak_bytes=cost["peak_bytes"],
                bytes_after=cost["bytes_after"],
                kl=figures["kl_mean"],
                kl_interval=pair(figures["kl_interval"]),
                kl_token=with_tokens["kl_mean"],
                perplexity=figures["perplexity"],
                perplexity_ratio=figures["perplexity_ratio"],
                perplexity_ratio_interval=pair(figures["perplexity_ratio_interval"]),
                same_top=figures["same_top"],
            )
        )
    return Methods(
        **common,
        text=of,
        num_tokens=evaluation["num_tokens"],
        window=evaluation["window"],
        calibration=calibration,
        num_samples=facts["num_samples"],
        max_seq_len=facts["max_seq_len"],
        weights=facts["weights"],
        group_size=facts["group_size"] or 0,
        perplexity=evaluation["runs"][0]["perplexity"],
        command=command,
        rows=tuple(rows),
    )


def facts_of(name: str) -> dict[str, Any]:
    """The model, this machine and today, as every kind of result has them."""
    if name not in real_model.KNOWN:
        raise ConfigError(f"{name} is unknown: choose among {', '.join(real_model.KNOWN)}")
    source = Path(real_model.locate(name))
    opened = open_model(EngineArgs(model=str(source)))
    model: Model = described(name, source)
    machine: Machine = machine_of(opened, plain_config(opened))
    return {"model": model, "machine": machine, "date": datetime.now(UTC).date().isoformat()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=tuple(KINDS)[1:])
    parser.add_argument("model")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--of", default="", help="what was judged: the questions, or the text")
    parser.add_argument("--calibration", default="", help="the text that methods looked at")
    parser.add_argument("--context", type=int, default=0, help="tokens, of retrieval")
    parser.add_argument("--command", action="append", default=[], help="that made the figures")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    try:
        common = facts_of(args.model)
        files = [dict(read_object(path)) for path in args.files]
        command = " && ".join(args.command)
        results: dict[str, Any] = {
            "tasks": lambda: tasks_of(files[0], common, command),
            "ladder": lambda: ladder_of(files[0], common, command, args.of),
            "oracle": lambda: oracle_of(files[0], common, args.command, args.of),
            "retrieval": lambda: retrieval_of(files, common, args.command, args.context),
            "methods": lambda: methods_of(files[0], common, command, args.of, args.calibration),
        }
        result: Result = results[args.kind]()
        print(write(result, args.out))
    except (FreightError, OSError, KeyError) as error:
        raise SystemExit(f"publish.py: {error}") from None


if __name__ == "__main__":
    main()
