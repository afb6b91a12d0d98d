"""Prove answers of random requests in one prefill each, alter every one, and measure what it takes.

    python benchmarks/verify_answers.py --count 10000
    python benchmarks/verify_answers.py --shape llama-1b --quantization fp8 --count 16 --prompt 256 --answer 256

The first form answers mixed requests with the demo model: greedy and seeded, with penalties, biases,
stops, several completions, grammars. It verifies them, and then verifies them again with one token,
one log-probability (by one unit in the last place), one token of the prompt, and the seed altered; an
altered seed counts where it draws another token. It fails if one is not proved, or not found.

The second form measures, in turns: generating greedy answers, verifying them, and the prefill of as
many tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from freight import LLM, Outcome, SamplingParams
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.engine.verification import compare_output
from freight.model.open import open_random
from freight.outputs import Logprob, RequestOutput
from freight.settings.engine import EngineArgs

BATCH = 500  # requests at a time
TEXT = "import os\n\n\ndef first(values):\n    return values[0]\n\n\nclass Queue:\n    def __init__(self):\n"
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]+ = [0-9]{3}\n"},
    {"choice": ["import os", "import sys"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
)


def random_params(rng: random.Random) -> SamplingParams:
    """Return parameters of which each answer has at least one token, and log-probabilities."""

    def sometimes(value: Any, otherwise: Any, share: float = 0.25) -> Any:
        return value if rng.random() < share else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=sometimes(0.9, 1.0),
        top_k=sometimes(20, 0),
        min_p=sometimes(0.05, 0.0),
        seed=rng.randrange(1 << 32),
        n=sometimes(2, 1),
        max_tokens=rng.randint(1, 48),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([0, 1, 3]),
        prompt_logprobs=sometimes(1, None, 0.1),
        stop=sometimes(("\n\n", "self"), ()),
        repetition_penalty=sometimes(1.2, 1.0),
        presence_penalty=sometimes(0.8, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        logit_bias=sometimes({5: 3.0, 17: -2.0}, {}),
        bad_words=sometimes(("in range",), (), 0.1),
        structured_outputs=sometimes(rng.choice(FORMS), None, 0.1),
    )


def alter_token(output: RequestOutput, rng: random.Random) -> None:
    ids = rng.choice(output.outputs).token_ids
    position = rng.randrange(len(ids))
    ids[position] = (ids[position] + rng.randint(1, 4000)) % 4096


def alter_logprob(output: RequestOutput, rng: random.Random) -> None:
    entries = rng.choice(rng.choice(output.outputs).logprobs or [])
    token, entry = rng.choice(list(entries.items()))
    entries[token] = Logprob(math.nextafter(entry.logprob, 1.0), entry.rank, entry.decoded_token)


def alter_prompt(output: RequestOutput, rng: random.Random) -> None:
    position = rng.randrange(len(output.prompt_token_ids))
    output.prompt_token_ids[position] = (output.prompt_token_ids[position] + 1) % 4096


ALTERATIONS: dict[str, Callable[[RequestOutput, random.Random], None]] = {
    "token": alter_token,
    "log-probability": alter_logprob,
    "prompt": alter_prompt,
}


def prove(llm: LLM, count: int, rng: random.Random) -> dict[str, Any]:
    """Return the counts of all that was verified, and the seconds."""
    seconds = {"generate": 0.0, "verify": 0.0}
    counts = {"answers": 0, "tokens": 0, "not proved": 0, "seeds that draw others": 0}
    counts |= {f"{name} not found": 0 for name in (*ALTERATIONS, "seed")}
    while counts["answers"] < count:
        size = min(BATCH, count - counts["answers"])
        prompts = [TEXT[: rng.randint(1, len(TEXT))] for _ in range(size)]
        params = [random_params(rng) for _ in range(size)]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        middle = time.perf_counter()
        results = llm.verify(outputs, params)
        seconds["generate"] += middle - begin
        seconds["verify"] += time.perf_counter() - middle
        counts["answers"] += size
        counts["tokens"] += sum(result.num_tokens for result in results)
        counts["not proved"] += sum(result.outcome is not Outcome.EQUAL for result in results)
        for name, alter in ALTERATIONS.items():
            altered = copy.deepcopy(outputs)
            for output in altered:
                alter(output, rng)
            outcome = llm.verify(altered, params)
            counts[f"{name} not found"] += sum(
                item.outcome is not Outcome.DIFFERS for item in outcome
            )
        seeds = [replace(item, seed=(item.seed or 0) + 1) for item in params]
        others = llm.generate(prompts, seeds)
        for given, other, result in zip(outputs, others, llm.verify(outputs, seeds), strict=True):
            differs = [item.token_ids for item in given.outputs] != [
                item.token_ids for item in other.outputs
            ]
            counts["seeds that draw others"] += differs
            counts["seed not found"] += differs != (result.outcome is Outcome.DIFFERS)
        print(f"{counts['answers']} of {count}", file=sys.stderr)
    return counts | {name: round(value, 2) for name, value in seconds.items()}


def finish(engine: Engine, names: Sequence[str], read: Callable[[str], Any]) -> list[Any]:
    """Step until all is done; returns what `read` says of each."""
    while engine.has_unfinished:
        engine.step(quiet_until=math.inf)
    results = [read(name) for name in names]
    for name in names:
        engine.release(name)
    return results


def one_round(engine: Engine, args: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """Return the seconds of generating some answers, of verifying them, and of the prefill."""
    params = SamplingParams(
        temperature=0.0, max_tokens=args.answer, ignore_eos=True, logprobs=0, detokenize=False
    )
    short = replace(params, max_tokens=1, logprobs=None)
    names = [str(index) for index in range(args.count)]
    vocab = engine.intake.vocab_size
    ids = [[rng.randrange(vocab) for _ in range(args.prompt)] for _ in names]
    prompts = dict(zip(names, (engine.accept(item, params) for item in ids), strict=True))
    seconds: dict[str, float] = {}

    def timed(what: str, add: Callable[[str], None], read: Callable[[str], Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        for name in names:
            add(name)
        result = finish(engine, names, read)
        seconds[what] = time.perf_counter() - begin
        return dict(zip(names, result, strict=True))

    def tokens(name: str) -> list[int]:
        return list(outputs[name].outputs[0].token_ids)

    outputs = timed("generate", lambda name: engine.add(name, prompts[name], params), engine.output)
    redrawn = timed(
        "verify",
        lambda name: engine.redraw(name, prompts[name], params, [tokens(name)]),
        engine.redrawn,
    )
    for name in names:
        result = compare_output(outputs[name], redrawn[name])
        assert result.outcome is Outcome.EQUAL, result.reason
    whole = {
        name: engine.accept([*prompts[name].token_ids, *tokens(name)[:-1]], short) for name in names
    }
    timed("prefill", lambda name: engine.add(name, whole[name], short), engine.output)
    return seconds


def measure(engine: Engine, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Return the medians of the ratios within each round."""
    rounds = []
    for _ in range(args.rounds):
        rounds.append(one_round(engine, args, rng))
        shown = {name: round(value, 3) for name, value in rounds[-1].items()}
        print(json.dumps(shown), file=sys.stderr)
    ratios = {
        "verify / prefill": [item["verify"] / item["prefill"] for item in rounds],
        "generate / verify": [item["generate"] / item["verify"] for item in rounds],
    }
    medians = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    return {"rounds": len(rounds)} | medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="answers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--quantization")
    parser.add_argument("--shape", help="measure this shape with random weights")
    parser.add_argument(
        "--prompt", type=int, default=256, help="tokens of each prompt, with --shape"
    )
    parser.add_argument(
        "--answer", type=int, default=256, help="tokens of each answer, with --shape"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --shape")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "kv_cache_dtype": args.kv_cache_dtype, "quantization": args.quantization, "threads": args.threads,
        "enable_prefix_caching": False,
    }  # fmt: skip
    rng = random.Random(args.seed)
    if args.shape is None:
        result = prove(LLM("demo", kv_cache_memory="64MiB", **options), args.count, rng)
    else:
        engine_args = EngineArgs.from_options(model="demo", kv_scales="dynamic", **options)
        engine, _ = start_engine(open_random(engine_args, args.shape))
        result = measure(engine, args, rng)
    print(json.dumps(result, indent=1))
    sys.exit(
        any(
            value
            for name, value in result.items()
            if name.startswith("not ") or name.endswith("not found")
        )
    )


if __name__ == "__main__":
    main()
