"""Generate with transformers, and store keys and values in FP8: about half the cache memory.

    python examples/fp8_cache_transformers.py [MODEL]

The model and `generate` stay transformers' own; only the cache is Freight's. MODEL is a folder or a
hub id that AutoModelForCausalLM loads. Without one it is the model that ships with Freight.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import freight
from freight.transformers import FP8Cache

DEMO = Path(freight.__file__).parent / "demo"
TEXT = (DEMO / "heldout.txt").read_text()[:1200]


def main(name: str = str(DEMO)) -> None:
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer(TEXT, return_tensors="pt")
    length = inputs["input_ids"].shape[1]

    plain = DynamicCache(config=model.config)
    fp8 = FP8Cache(model.config)  # scales of the checkpoint, or measured for each token
    for cache in (plain, fp8):
        ids = model.generate(
            **inputs, past_key_values=cache, do_sample=False, min_new_tokens=16, max_new_tokens=16
        )
        print(f"{type(cache).__name__}: {tokenizer.decode(ids[0, length:])!r}")

    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    print(f"DynamicCache {held:,} bytes, FP8Cache {fp8.nbytes:,} bytes: {fp8.nbytes / held:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
