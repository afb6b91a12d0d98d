"""Compare the speed of embeddings: Freight, sentence-transformers and llama.cpp, in turns.

    python benchmarks/peers/embedding_speed.py [--rounds 20] [--tokens 512] [--texts 2] [--threads N] \
        [--llama PYTHON=FILE.gguf]

One model of Qwen3-Embedding-0.6B's shape with random weights in BF16, the state of the last token
pooled and normalized. `freight-...` are LLM.embed with weights in BF16, and rounded to FP8, INT8 and
INT4 as they load; `torch-bf16` and `torch-float32` are SentenceTransformer.encode; `llama.cpp` is a
prefill of as many tokens by xllamacpp (run_xllamacpp.py) in another environment, of a file that
benchmarks/peers/make_gguf.py writes: its embeddings cost no less. Each runs in its own process, all
of them once a round, in an order that turns. Ratios are of speed, Freight to the other, within a
round; intervals are those of order statistics, of at least 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from line_process import LineProcess

SHAPE = {  # Qwen/Qwen3-Embedding-0.6B
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151669,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}
FREIGHT = {
    "freight-bf16": None,
    "freight-fp8": "fp8",
    "freight-int8": "int8",
    "freight-int4": "int4",
}
TORCH = {"torch-bf16": "bfloat16", "torch-float32": "float32"}


def write_model(folder: Path) -> None:
    """Write the model as sentence-transformers does, with the demo's tokenizer."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    import freight

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, dtype="bfloat16")
    body = folder / "body"
    transformers.Qwen3Model(config).to(torch.bfloat16).save_pretrained(body)
    demo = Path(freight.__file__).parent / "demo" / "tokenizer.json"
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(demo), pad_token="<|begin_of_text|>"
    ).save_pretrained(body)
    modules = [Transformer(str(body)), Pooling(SHAPE["hidden_size"], "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"))


def texts_of(count: int, tokens: int, seed: int) -> list[str]:
    """Texts of more than `tokens` tokens each, which are cut."""
    numbers = random.Random(seed)
    words = ("memory", "scale", "a token", "of the cache", "rounds", "to eight bits", "and back")
    return [" ".join(numbers.choice(words) for _ in range(tokens)) for _ in range(count)]


def embed_with(name: str, folder: str, tokens: int, threads: int) -> Any:
    """Return a function of texts that embeds them."""
    if name in FREIGHT:
        from freight import LLM

        llm = LLM(
            folder,
            quantization=FREIGHT[name],
            max_model_len=tokens,
            threads=threads,
            kv_cache_memory="512MiB",
        )
        return lambda texts: llm.embed(texts, truncate_prompt_tokens=tokens)
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    dtype = getattr(torch, TORCH[name])
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
    model.max_seq_length = tokens
    return lambda texts: model.encode(texts, batch_size=len(texts), show_progress_bar=False)


def work(name: str, folder: str, tokens: int, threads: int) -> None:
    """Embed the texts of each line, and answer the seconds."""
    if name == "llama.cpp":
        embed = embed_with_llama(folder, tokens, threads)
    else:
        embed = embed_with(name, folder, tokens, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        count, seed = json.loads(line)
        texts = texts_of(count, tokens, seed)
        begin = time.perf_counter()
        embed(texts)
        print(json.dumps(time.perf_counter() - begin), flush=True)


def embed_with_llama(path: str, tokens: int, threads: int) -> Any:
    """Return a function that prefills as many prompts of random tokens as there are texts."""
    import run_xllamacpp
    from llama_model import Model

    lib = run_xllamacpp.library()
    params = lib.llama_context_default_params()
    model = Model(lib, path, 1, tokens, params)
    lib.llama_set_n_threads(model.context, threads, threads)
    numbers = random.Random(0)

    def embed(texts: list[str]) -> None:
        for _ in texts:
            model.forget()
            model.step([[numbers.randrange(4000) for _ in range(tokens)]], 0)

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--rows", default="freight-bf16,freight-int8,torch-bf16,torch-float32")
    parser.add_argument("--llama", help="PYTHON=FILE.gguf")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, str(args.model), args.tokens, args.threads)
        return
    if not (args.model / "model" / "modules.json").exists():
        write_model(args.model)
    rows = args.rows.split(",")
    commands = {}
    for row in rows:
        commands[row] = [sys.executable, __file__, "--worker", row, "--model", args.model / "model"]
    if args.llama:
        python, _, file = args.llama.partition("=")
        rows.append("llama.cpp")
        commands["llama.cpp"] = [python, __file__, "--worker", "llama.cpp", "--model", file]
    sizes = ["--tokens", str(args.tokens), "--threads", str(args.threads)]
    running = {
        row: LineProcess(row, [*map(str, command), *sizes], os.environ)
        for row, command in commands.items()
    }
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for turn in range(args.rounds + 1):
        order = rows[turn % len(rows) :] + rows[: turn % len(rows)]
        for row in order:
            running[row].tell([args.texts, turn])
            elapsed = float(running[row].answer())
            if turn:  # the first warms up
                seconds[row].append(elapsed)
        print(f"round {turn} of {args.rounds}", file=sys.stderr)
    for process in running.values():
        process.end()
    report(args, rows, seconds)


def report(args: argparse.Namespace, rows: list[str], seconds: dict[str, list[float]]) -> None:
    """Print a table, and write the figures."""
    from freight.lab.bench.serving_figures import interval
    from freight.settings.device import cpu_name

    others = [row for row in rows if row not in FREIGHT]
    print(f"{args.texts} texts of {args.tokens} tokens, {args.threads} threads, {cpu_name()}\n")
    print(f"| row | tokens/s | {' | '.join(f'to {row}' for row in others)} |")
    print(f"|---|---:|{'---|' * len(others)}")
    figures = {}
    for row in rows:
        speed = args.texts * args.tokens / statistics.median(seconds[row])
        cells = []
        ratios_of = {}
        for other in others:
            ratios = [taken / own for own, taken in zip(seconds[row], seconds[other], strict=True)]
            low, high, _ = interval(ratios)
            ratios_of[other] = [statistics.median(ratios), low, high]
            cells.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
        figures[row] = {"tokens_per_second": speed, "ratios": ratios_of, "seconds": seconds[row]}
        print(f"| {row} | {speed:.0f} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": cpu_name(), "rows": figures}, indent=1))


if __name__ == "__main__":
    main()
