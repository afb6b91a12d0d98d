"""Complete a list of prompts with an FP8 KV cache, and stream one more.

    python examples/offline.py [MODEL]

MODEL is a folder, a hub id, or `demo`, the model that ships with the package.
"""

from __future__ import annotations

import sys

from freight import LLM, SamplingParams

PROMPTS = ["def main(", "import ", "class Reader:"]


def main(model: str = "demo") -> None:
    llm = LLM(model, kv_cache_dtype="fp8", kv_cache_memory="64MiB")

    # All prompts are computed together; the answers come in the order of the prompts.
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # `stream` yields the output so far after each step. A seed makes samples repeatable.
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
    written = ""
    for output in llm.stream("def close(self):", params):
        text = output.outputs[0].text
        print(text.removeprefix(written), end="", flush=True)
        written = text
    print()

    cache = llm.kv_cache_info()
    print(f"cache: {cache['dtype']}, {cache['bytes_per_token']} bytes per token")


if __name__ == "__main__":
    main(*sys.argv[1:])
