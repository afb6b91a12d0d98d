"""Quantize a model by a recipe of llm-compressor: FP8 weights, and scales for an FP8 KV cache.

    python examples/quantize_recipe.py OUT [MODEL [TEXT]]

MODEL has 16-bit weights. TEXT is a file like what the model will see: the cache's scales are
measured on it. Without them the demo model and its own calibration text are taken. OUT is in
compressed-tensors' format, which vLLM, SGLang and Freight load.
"""

from __future__ import annotations

import sys
from pathlib import Path

import freight
from freight import LLM, SamplingParams
from freight.llm_compressor import oneshot

DEMO = Path(freight.__file__).parent / "demo"
RECIPE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      targets: [Linear]
      scheme: FP8_DYNAMIC
      ignore: [lm_head]
      kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
"""


def main(out: str, model: str = str(DEMO), text: str = str(DEMO / "calibration.txt")) -> None:
    samples = [{"text": part} for part in Path(text).read_text().split("\n\n\n") if part.strip()]
    oneshot(
        model=model,
        recipe=RECIPE,
        dataset=samples,
        num_calibration_samples=32,
        max_seq_length=256,
        output_dir=out,
    )

    llm = LLM(out, kv_cache_memory="64MiB")  # the checkpoint says that its cache is FP8
    cache = llm.kv_cache_info()
    print(f"cache: {cache['dtype']}, scales: {cache['scale_source']}")
    answer = llm.generate("def main(", SamplingParams(temperature=0.0, max_tokens=16))[0]
    print(repr(answer.outputs[0].text))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python examples/quantize_recipe.py OUT [MODEL [TEXT]]")
    main(*sys.argv[1:])
