"""Perplexity of a GGUF file in Freight and in llama.cpp, over the same windows of the same tokens.

    python benchmarks/peers/gguf_perplexity.py FILE.gguf TEXT --python PYTHON

PYTHON is the interpreter of an environment with the wheel xllamacpp (score_xllamacpp.py). Freight
runs with its defaults, with an FP8 cache, and in float32 with inputs of products that are not
rounded. The last one shows whose roundings move the perplexity. Every window begins with the
model's begin-of-text token if the file asks for one, and all tokens after the first of a window are
scored. The tokenizer is Freight's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from freight import LLM, SamplingParams
from freight.text.tokenizer import Tokenizer

PEER = "llama.cpp"
EXACT = "Freight, exact: float32, inputs not rounded"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "Freight": {},
    "Freight, FP8 cache": {"kv_cache_dtype": "fp8"},
    EXACT: {"dtype": "float32", "activations": "bfloat16"},
}
Scores = Sequence[float]  # log-probabilities of all scored tokens


def windows(tokenizer: Tokenizer, text: str, count: int, length: int) -> list[list[int]]:
    """Cut a text into `count` windows of `length` tokens, with the begin-of-text token in them.

    Exits if the text is too short.
    """
    begin = tokenizer.encode("")  # what is added to every text
    part = length - len(begin)
    tokens = tokenizer.encode(text[: 16 * count * length], add_special_tokens=False)
    if len(tokens) < count * part:
        sys.exit(f"the text has {len(tokens)} tokens; {count * part} are needed")
    return [begin + tokens[start : start + part] for start in range(0, count * part, part)]


def of_freight(llm: LLM, sequences: list[list[int]]) -> Scores:
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in sequences], scored)
    scores = []
    for tokens, output in zip(sequences, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            scores.append(entry[token].logprob)
    return scores


def of_peer(python: str, file: Path, threads: int, sequences: list[list[int]]) -> Scores:
    script = Path(__file__).with_name("score_xllamacpp.py")
    command = [python, str(script), str(file), str(threads)]
    text = json.dumps(sequences)
    ran = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    return [score for scores in json.loads(ran.stdout) for score in scores]


def lines(scores: Mapping[str, Scores]) -> Iterator[str]:
    """Yield a Markdown table: perplexities, and differences with 95 % intervals."""
    yield f"| | perplexity | against {PEER} | against exact | mean change of a token, nats |"
    yield "|---|---|---|---|---|"
    for name, own in scores.items():
        perplexity = math.exp(-statistics.fmean(own))
        parts = [difference(own, scores[other]) for other in (PEER, EXACT)]
        pairs = zip(own, scores[EXACT], strict=True)
        apart = statistics.fmean(abs(score - exact) for score, exact in pairs)
        yield f"| {name} | {perplexity:.4f} | {' | '.join(parts)} | {apart:.4f} |"


def difference(own: Scores, other: Scores) -> str:
    """How much larger the perplexity is, with its 95 % interval over tokens."""
    changes = [right - left for left, right in zip(own, other, strict=True)]
    mean = statistics.fmean(changes)
    half = 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))
    return f"{math.expm1(mean):+.3%} ± {half:.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument(
        "--python", required=True, help="interpreter of the environment of xllamacpp"
    )
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    scores: dict[str, Scores] = {}
    for name, options in SETTINGS.items():
        llm = LLM(str(args.file), threads=args.threads, max_model_len=args.length + 1, **options)
        assert llm.engine.tokenizer is not None
        sequences = windows(llm.engine.tokenizer, text, args.windows, args.length)
        scores[name] = of_freight(llm, sequences)
        del llm  # before the next one is loaded
    scores[PEER] = of_peer(args.python, args.file, args.threads, sequences)
    print(f"{args.windows} windows of {args.length} tokens, {len(scores[PEER])} of them scored\n")
    for line in lines(scores):
        print(line)


if __name__ == "__main__":
    main()
