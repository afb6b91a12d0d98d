"""A model that the memory of one process does not hold is loaded by two, and answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freight.kernels.cpu import library

pytestmark = [
    pytest.mark.slow,  # draws 1 GB of weights three times
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# What a process has before it opens a model is no part of what is allowed. The other rank starts
# under the limit, and has as much before.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch
from freight import SamplingParams
from freight.config.engine import EngineArgs
from freight.engine.build import start_engine
from freight.kernels.cpu import library
from freight.models.open import open_random

def taken():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in status)["VmData"].split()[0]) * 1024

config, ranks, allowed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
library.load()
torch.ones(64, 64) @ torch.ones(64, 64)
before = taken()
if allowed:
    resource.setrlimit(resource.RLIMIT_DATA, (before + allowed, before + allowed))
args = EngineArgs(threads=1, kv_cache_memory="8MiB", max_model_len=128, tensor_parallel_size=ranks)
engine, _ = start_engine(open_random(args, config))
needed = taken() - before
params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
engine.add("a", engine.accept(list(range(1, 40)), params), params)
while engine.has_unfinished:
    engine.step()
print(json.dumps([needed, engine.output("a").outputs[0].token_ids]))
"""


def run(config: Path, ranks: int, allowed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(config), str(ranks), str(allowed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_two_ranks_load_what_one_process_cannot(tmp_path: Path) -> None:
    """Each has six tenths of the memory that the model needs."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    alone = run(config, 1, 0)
    needed, tokens = json.loads(alone.stdout)
    assert needed > 900_000_000
    assert len(tokens) == 8

    allowed = needed * 6 // 10
    refused = run(config, 1, allowed)
    assert refused.returncode != 0
    assert "memory" in refused.stderr
    divided = run(config, 2, allowed)
    assert divided.returncode == 0, divided.stderr
    assert json.loads(divided.stdout)[1] == tokens
