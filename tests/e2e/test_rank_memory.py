"""A model that the memory of one machine does not hold is loaded by two, and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.machines import free_port

from freight.kernels.cpu import library

pytestmark = [
    pytest.mark.slow,  # writes 1 GB of weights, and reads them three times
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
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
# Each rank is a machine of its own, which has no more memory than its group. What a process has
# before it opens a model is no part of what is allowed: rank 0 enters its group then, and the limit
# of the other rank, which starts within its group, is higher by as much.
PROGRAM = """
import json, sys, threading
from dataclasses import replace
from pathlib import Path
import torch
from freight import SamplingParams
from freight.settings.engine import EngineArgs
from freight.engine import leader
from freight.engine.build import start_engine
from freight.engine.node import join_rank_0
from freight.kernels.cpu import library
from freight.model.open import open_model

def taken():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in status)["RssAnon"].split()[0]) * 1024

def enter(group, process, limit):
    name = "memory.max" if Path(group, "memory.max").exists() else "memory.limit_in_bytes"
    Path(group, name).write_text(str(limit))
    Path(group, "cgroup.procs").write_text(str(process))

def spawn(files, start=leader.spawn):
    process = start(files)
    enter(other, process.pid, before + allowed)
    return process

folder, allowed, port, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
library.load()
torch.ones(64, 64) @ torch.ones(64, 64)
before = taken()
if groups:
    enter(groups[0], 0, allowed)
args = EngineArgs(
    folder, skip_tokenizer_init=True, threads=1, kv_cache_memory="8MiB", max_model_len=128,
)
if len(groups) == 2:
    other, leader.spawn = groups[1], spawn
    args = replace(
        args, tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=port,
        join_timeout=60.0,
    )
    machine = replace(args, node_rank=1)
    threading.Thread(target=join_rank_0, args=(machine, None), daemon=True).start()
engine, _ = start_engine(open_model(args))
needed = taken() - before
params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
engine.add("a", engine.accept(list(range(1, 40)), params), params)
while engine.has_unfinished:
    engine.step()
print(json.dumps([needed, engine.output("a").outputs[0].token_ids]))
"""


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Two control groups whose memory can be limited."""
    root = Path("/sys/fs/cgroup/memory")
    root = root if root.is_dir() else Path("/sys/fs/cgroup")
    made = [root / f"freight-test-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for group in made:
            group.mkdir()
        if not list(made[0].glob("memory.*")):
            pytest.skip("control groups have no memory here")
        yield made
    except PermissionError:
        pytest.skip("this user may make no control groups")
    finally:
        for group in made:
            if group.exists():
                group.rmdir()


def write(folder: Path) -> None:
    """Write the model with random weights, 0.97 GB, a file for each layer."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    hidden, inner, kv = MODEL["hidden_size"], MODEL["intermediate_size"], 4 * 128
    layer = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
        "mlp.down_proj": (hidden, inner),
    }
    rest = {"model.embed_tokens": (512, hidden), "model.norm": (hidden,), "lm_head": (512, hidden)}
    layers = range(MODEL["num_hidden_layers"])
    files = [rest, *({f"model.layers.{i}.{name}": layer[name] for name in layer} for i in layers)]
    generator, places = torch.Generator().manual_seed(0), {}
    for number, shapes in enumerate(files):
        file = f"model-{number}.safetensors"
        tensors = {
            f"{name}.weight": torch.randn(shape, generator=generator).mul(0.02).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def run(
    folder: Path, allowed: int = 0, groups: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Answer with as many ranks as there are groups, each of which may take `allowed` bytes; with one
    rank and no limit for none.
    """
    command = [sys.executable, "-c", PROGRAM, str(folder), str(allowed), str(free_port())]
    command += map(str, groups)
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_two_machines_load_what_one_cannot(tmp_path: Path, groups: list[Path]) -> None:
    """Each has six tenths of the memory that the model needs."""
    write(tmp_path)
    alone = run(tmp_path)
    needed, tokens = json.loads(alone.stdout)
    assert needed > 900_000_000
    assert len(tokens) == 8

    allowed = needed * 6 // 10
    refused = run(tmp_path, allowed, groups[:1])
    assert refused.returncode != 0
    assert "memory" in refused.stderr
    divided = run(tmp_path, allowed, groups)
    assert divided.returncode == 0, divided.stderr
    assert json.loads(divided.stdout)[1] == tokens
