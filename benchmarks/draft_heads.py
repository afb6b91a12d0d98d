"""What drafts by a head gain beside drafts from the text alone, and beside none: on answers that the model
writes itself.

    python benchmarks/draft_heads.py MODEL --head '{"method": "draft_model", "model": "FOLDER"}'
        [--text code|prose|FILE] [--temperature 0] [--prompts 8] [--tokens 128] [--ways none text head both]
        [--row COST] [--option NAME=VALUE of LLM]

One engine answers each prompt once for each way to draft, in turns whose order rotates, and every answer
has to be the same. Prompts are the beginnings of functions of Python's standard library, of paragraphs of
its licence and documentation strings, or of the paragraphs of a file. The way `apart` has the head draw its
drafts with another random number than the model's (with PYTHONPATH=tools). A rate is that of the tokens behind
the first one; `first` is the time to the first token. Prints medians over the prompts, and for each
way the lowest and highest ratio to text alone.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freight import LLM, SamplingParams
from freight.base.json_schema import Json

WAYS = ("none", "text", "head", "both")
MODULES = (textwrap, ast, inspect, argparse, statistics, json)
CHARACTERS = 700  # of a prompt


@dataclass
class Measured:
    """What one way came to, by prompt."""

    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def prompts_of(text: str, count: int) -> list[str]:
    """Return `count` prompts of a kind of text, or of the paragraphs of a file."""
    prompts = []
    if text == "code":
        for module in MODULES:
            source = inspect.getsource(module)
            for part in source.split("\ndef ")[1:]:
                if len(part) > 1.5 * CHARACTERS:
                    prompts.append(f"def {part[:CHARACTERS]}")
                    break
    elif text == "prose":
        for module in (ast, inspect, argparse, statistics, textwrap, json):
            for _, member in inspect.getmembers(module, inspect.isclass):
                documented = inspect.getdoc(member) or ""
                if len(documented) > CHARACTERS / 2:
                    prompts.append(documented[:CHARACTERS])
                    break
    else:
        parts = Path(text).read_text().split("\n\n")
        prompts = [part[:CHARACTERS] for part in parts if len(part) > CHARACTERS / 2]
    return prompts[:count]


def run(llm: LLM, prompt: str, params: SamplingParams, way: str, measured: Measured) -> Json:
    """Answer a prompt in one way; return its token ids."""
    engine = llm.engine
    engine.forget_prefixes()
    most = engine.scheduler.most_drafts
    own_text = engine._drafts_from_text
    engine._drafts_from_text = way in ("text", "both")
    engine.scheduler.asks_head = way in ("head", "both", "apart")
    if way == "none":
        engine.scheduler.most_drafts = 0
    drafting = engine._drafting
    assert drafting is not None
    drawn = drafting._drawn
    if way == "apart":
        from measure_draft_heads import draw_apart

        draw_apart(drafting)
    before = engine.stats()
    accepted = engine.accept(prompt, params)
    began = time.perf_counter()
    engine.add("0", accepted, params)
    first = 0.0
    while engine.has_unfinished:
        engine.step()
        measured.steps += 1
        if not first:
            first = time.perf_counter()
    seconds = time.perf_counter() - first
    tokens = list(engine.output("0").outputs[0].token_ids)
    engine.release("0")
    stats = engine.stats()
    engine.scheduler.most_drafts = most
    engine._drafts_from_text = own_text
    drafting._drawn = drawn  # type: ignore[method-assign]
    measured.rates.append((len(tokens) - 1) / seconds)
    measured.firsts.append(first - began)
    measured.tokens += len(tokens)
    measured.drafted += stats.drafted - before.drafted
    measured.accepted += stats.accepted - before.accepted
    return tokens


def described(measured: Measured, beside: Measured) -> dict[str, Json]:
    ratios = []
    for rate, other in zip(measured.rates, beside.rates, strict=True):
        ratios.append(rate / other)
    return {
        "tokens_per_second": round(statistics.median(measured.rates), 2),
        "to_text": round(statistics.median(ratios), 3),
        "to_text_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "first": round(statistics.median(measured.firsts), 3),
        "tokens_per_step": round(measured.tokens / measured.steps, 2),
        "drafted": measured.drafted,
        "accepted": round(measured.accepted / max(measured.drafted, 1), 3),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--head", required=True)
    parser.add_argument("--text", default="code")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--row", type=float, help="what a row more is taken to cost, in steps")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of LLM")
    args = parser.parse_args(arguments)
    options = {}
    for option in args.option:
        name, _, value = option.partition("=")
        options[name] = int(value) if value.isdecimal() else value
    llm = LLM(
        args.model,
        speculate="auto",
        speculative_config=args.head,
        max_model_len=2048,
        max_num_seqs=4,
        **options,
    )
    if args.row is not None:
        assert llm.engine._drafting is not None
        llm.engine._drafting._row = args.row
    params = SamplingParams(
        temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True
    )
    measured = {way: Measured() for way in args.ways}
    prompts = prompts_of(args.text, args.prompts)
    for way in args.ways:  # records the steps of each number of rows
        run(llm, prompts[0], params, way, Measured())
    for index, prompt in enumerate(prompts):
        answers = []
        for turn in range(len(args.ways)):
            way = args.ways[(index + turn) % len(args.ways)]
            answers.append(run(llm, prompt, params, way, measured[way]))
        if any(answer != answers[0] for answer in answers):
            raise SystemExit(f"prompt {index}: the answers differ")
        print(f"{index + 1} of {len(prompts)} prompts", file=sys.stderr)
    beside = measured["text" if "text" in measured else args.ways[0]]
    figures = {way: described(of_way, beside) for way, of_way in measured.items()}
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
