"""Measure how often the drafts of the heads that `tools/train_draft_heads.py` wrote are right.

    python tools/measure_draft_heads.py FOLDER [--tokens 200] [--heads eagle3 mimo qwen3_5]

Four beginnings of code are answered by an engine without drafts and by one with each head, at
temperatures of 0 and 0.8. Answers are compared bit by bit: token ids and log-probabilities. At 0.8
each head is measured once more with another random number than the model's, where drafts are
right as often as two independent draws agree. Copies that have a layer more, of the demo and of the small
hybrid, are compared with the model that they are a copy of. Ends with 1 where any bits differ.

Prints a table in Markdown: drafts, the share that is right, and tokens a step. A pass is counted as
0.02 of a step: by its real cost the demo, which is as small as the heads, would not be drafted for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from train_draft_heads import DELTA_NET, EAGLE, HEADS, HYBRID, PREDICTING

from freight import LLM, SamplingParams
from freight.engine.drafting import Drafting, _Going

PROMPTS = (
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "def first(values):\n    return values[0]\n\n\n" * 3,
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
    "for index in range(10):\n    print(index)\n",
)
COST = 0.02  # of a pass, in steps
ROW = 0.03  # of one more row
Answers = list[Any]


@dataclass(frozen=True)
class Measured:
    answers: Answers
    drafted: int
    accepted: int
    steps: int
    tokens: int


@dataclass(frozen=True)
class Way:
    """How a head is run: its title in the table, the model without it, the one with it, and the
    `speculative_config`.
    """

    title: str
    alone: str
    model: str
    config: dict[str, Any]


def way_of(name: str, folder: Path) -> Way:
    """Return how the head of this name, one of `HEADS`, in `folder` is run."""
    head = str(folder / name)
    if name == EAGLE:
        return Way("EAGLE-3", "demo", "demo", {"method": "eagle3", "model": head})
    if name == PREDICTING:
        return Way("layer of MiMo", "demo", head, {"method": "mtp"})
    assert name == HYBRID
    return Way("layer of Qwen3.5, a hybrid", str(DELTA_NET), head, {"method": "mtp"})


def engine_of(model: str, config: dict[str, Any] | None) -> LLM:
    """Return an engine with the drafts of `config`; None: without drafts."""
    drafts: dict[str, Any] = {"speculate": 0} if config is None else {"speculative_config": config}
    llm = LLM(model, max_model_len=512, threads=1, **drafts)
    drafting = llm.engine._drafting
    if drafting is not None:
        drafting._cost = COST
        drafting._row = ROW
    return llm


def draw_apart(drafting: Drafting) -> None:
    """Have drafts drawn with another random number than the model's."""
    drawn = drafting._drawn

    def apart(logits: Tensor, going: Sequence[_Going]) -> list[_Going]:
        for item in going:
            row = item.work.row.fork(item.work.row.output_token_ids)
            row.seed = row.seed + 1
            item.work = item.work._replace(row=row)
        return drawn(logits, going)

    drafting._drawn = apart  # type: ignore[method-assign]


def measure(llm: LLM, temperature: float, tokens: int) -> Measured:
    """Answer the prompts, one after another."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True, logprobs=3
    )
    engine = llm.engine
    before = engine.stats()
    answers: Answers = []
    steps = 0
    for prompt in PROMPTS:
        engine.add("0", engine.accept(prompt, params), params)
        while engine.has_unfinished:
            engine.step()
            steps += 1
        completion = engine.output("0").outputs[0]
        answers.append((completion.token_ids, completion.logprobs))
        engine.release("0")
    stats = engine.stats()
    drafted = stats.drafted - before.drafted
    accepted = stats.accepted - before.accepted
    return Measured(answers, drafted, accepted, steps, len(PROMPTS) * tokens)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)
    args = parser.parse_args(arguments)
    ways = [way_of(name, args.folder) for name in args.heads]
    plain = {}
    for model in sorted({way.alone for way in ways}):
        for temperature in (0.0, 0.8):
            found = measure(engine_of(model, None), temperature, args.tokens)
            plain[model, temperature] = found.answers
    differ = 0
    print("| head | temperature | random number | drafts | right | tokens a step | bits |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:
        for temperature, apart in ((0.0, False), (0.8, False), (0.8, True)):
            llm = engine_of(way.model, way.config)
            if apart:
                assert llm.engine._drafting is not None
                draw_apart(llm.engine._drafting)
            found = measure(llm, temperature, args.tokens)
            is_same = found.answers == plain[way.alone, temperature]
            differ += not is_same
            number = "none" if temperature == 0 else "another" if apart else "the model's"
            right = found.accepted / max(found.drafted, 1)
            print(
                f"| {way.title} | {temperature} | {number} | {found.drafted} | {100 * right:.0f} % | "
                f"{found.tokens / found.steps:.2f} | {'same' if is_same else 'differ'} |",
                flush=True,
            )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
