"""Memory under grammars that are all different: what is kept of them is bounded, and nothing else
stays behind.

Each run has a process of its own, so that what other tests left behind is not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCHEMA = """
import gc, json, sys
from pathlib import Path
import freight
from freight.kernels.cpu.linear import give_back_freed_memory
from freight.structured import StructuredOutputs

def schema(i):
    text = {"type": "string", "maxLength": 8}
    return {"type": "object", "properties": {f"name{i}": text}, "required": [f"name{i}"], "additionalProperties": False}

def memory():
    gc.collect()
    give_back_freed_memory()  # what the allocator keeps varies by 10 MiB
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
"""
COMPILED = """
from freight.engine.grammar import Grammars
from freight.text.tokenizer import Tokenizer

demo = Tokenizer.load(Path(freight.__file__).parent / "demo")
grammars = Grammars(demo, demo.vocab_size, {1})

def use(first, last):
    for i in range(first, last):
        grammars.check(StructuredOutputs(json=schema(i)))
"""
GENERATED = """
from freight import LLM, SamplingParams

llm = LLM("demo", kv_cache_memory="8MiB")

def use(first, last):
    for begin in range(first, last, 50):
        asked = [
            SamplingParams(max_tokens=1, structured_outputs={"json": schema(i)}) for i in range(begin, begin + 50)
        ]
        llm.generate(["x = "] * 50, asked)
"""
MEASURED = """
first, last = map(int, sys.argv[1:])
use(0, first)
before = memory()
use(first, last)
print(json.dumps([before, memory()]))
"""
KEPT_BYTES = 75_000  # of one compiled grammar of these, about


def grown(way: str, first: int, last: int) -> int:
    """Bytes by which the process is larger after `last` schemas than after `first`."""
    command = [sys.executable, "-c", SCHEMA + way + MEASURED, str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    return int(after - before)


@pytest.mark.parametrize(
    "way",
    [COMPILED, pytest.param(GENERATED, marks=pytest.mark.slow)],
    ids=["compiled", "generated"],
)
def test_memory_stays_flat_after_the_grammars_that_are_kept(way: str) -> None:
    assert grown(way, 280, 460) < 6 << 20 < 180 * KEPT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("way", [COMPILED, GENERATED], ids=["compiled", "generated"])
def test_memory_stays_flat_over_ten_thousand_schemas(way: str) -> None:
    assert grown(way, 1000, 11_000) < 32 << 20 < 10_000 * KEPT_BYTES
