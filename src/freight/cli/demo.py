"""`freight demo`: the main job on the model that ships, in two minutes. What `make demo` runs.

Three prompts with a 16-bit and with FP8 caches, then what the FP8 caches cost and save. Every
figure is computed now.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from freight.base import terminal
from freight.base.terminal import progress
from freight.cli.evaluate import CACHES, HELD_OUT, LEGEND
from freight.cli.options import Json, option
from freight.settings.engine import EngineArgs

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import argparse\n\ndef main():\n    parser = ",
)


def demo(
    max_tokens: Annotated[int, option("COUNT", "Tokens to generate for each prompt.", min=1)] = 32,
    as_json: Json = False,
) -> None:
    """Generate and measure with the shipped model.

    Three prompts with a 16-bit and with FP8 KV caches, then what the FP8 caches cost and save on
    held-out text.
    """

    from freight.lab.evaluate.report import as_table, compare_caches
    from freight.llm import LLM
    from freight.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    texts: dict[str, list[str]] = {}
    for dtype, scales in (("auto", "auto"), *CACHES):
        llm = LLM("demo", kv_cache_dtype=dtype, kv_scales=scales, kv_cache_memory="64MiB")
        outputs = llm.generate(list(PROMPTS), params)
        texts[str(llm.kv_cache_info()["dtype"])] = [output.outputs[0].text for output in outputs]
    if not as_json:
        for index, prompt in enumerate(PROMPTS):
            for dtype, completions in texts.items():
                terminal.write(f"--- {dtype}", dim=True)
                terminal.write(prompt, newline=False, bold=True)
                typer.echo(completions[index])
    text = HELD_OUT.read_text(encoding="utf-8")
    with progress("measuring on held-out text") as on_progress:
        scores = compare_caches(EngineArgs(model="demo"), CACHES, text, on_progress=on_progress)
    if as_json:
        caches = [asdict(score) for score in scores]
        print(json.dumps({"prompts": PROMPTS, "completions": texts, "caches": caches}))
        return
    typer.echo(f"\n{as_table(scores)}")
    typer.echo(f"{scores[0].num_tokens:,} tokens that the model has not seen. {LEGEND}")
