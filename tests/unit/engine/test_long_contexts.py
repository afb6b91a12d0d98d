"""A config.json with an enormous context: tables of angles are as long as a request can be, and no
value changes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_server import run_forked

from freight import LLM, SamplingParams
from freight.engine import build
from freight.engine.build import start_engine
from freight.errors import CapacityError
from freight.model.config.model import RopeConfig
from freight.model.decoder import Decoder
from freight.model.layers.rope import build_rope
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

BASE = Path(__file__).parents[2] / "fixtures" / "base_bf16"
DEMO = Path(build.__file__).parents[1] / "demo"
LONGEST = 2_000_000_000
FACTORS = tuple(1.0 + i / 8 for i in range(8))
ROPES = {
    "default": RopeConfig(16),
    "linear": RopeConfig(16, kind="linear", parameters={"factor": 4.0}),
    "llama3": RopeConfig(
        16,
        kind="llama3",
        parameters={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": RopeConfig(
        16,
        kind="yarn",
        parameters={
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "longrope": RopeConfig(
        16,
        kind="longrope",
        parameters={"factor": 4.0, "original_max_position_embeddings": 64},
        short_factors=FACTORS,
        long_factors=tuple(3 * factor for factor in FACTORS),
    ),
}


def with_context(folder: Path, positions: int, base: Path = BASE) -> Path:
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


def answers(model: Path, **options: Any) -> Any:
    llm = LLM(str(model), skip_tokenizer_init=True, **options)
    params = SamplingParams(
        max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True, detokenize=False
    )
    return [one.outputs for one in llm.generate([[3, 4, 5], list(range(10, 60))], params)]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("context", [60, 1000])
def test_the_values_do_not_depend_on_the_length_of_the_tables(kind: str, context: int):
    """Also of longrope, whose factors depend on the context: it is the context that decides, not
    the tables.
    """
    rope = ROPES[kind]
    long, short = build_rope(rope, context, "cpu"), build_rope(rope.for_context(context), 40, "cpu")
    assert torch.equal(long.cos[:40], short.cos)
    assert torch.equal(long.sin[:40], short.sin)
    if long.q_factor is not None:
        assert short.q_factor is not None
        assert torch.equal(long.q_factor[:40], short.q_factor)


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory": "1MiB"}, {}], ids=["memory given", "memory free"]
)
def test_an_engine_loads_tables_as_long_as_its_requests(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "memory_for_cache", lambda device: 2**20)
    model = with_context(tmp_path / "model", LONGEST)
    llm = LLM(str(model), skip_tokenizer_init=True, **options)
    decoder = llm.engine.runner.model
    assert isinstance(decoder, Decoder)
    lengths = {len(rotary.cos) for rotary in decoder.rotaries}
    assert lengths == {llm.config.max_model_len}
    assert llm.config.max_model_len * llm.engine.runner.pool.spec.bytes_per_token <= 2**20
    del llm
    assert answers(model, **options) == answers(BASE, **options)


def test_memory_that_is_freed_while_weights_are_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The tables are as long as what was free before allows."""
    amounts = iter([2**20, 2**24])
    monkeypatch.setattr(build, "memory_for_cache", lambda device: next(amounts))
    opened = open_model(
        EngineArgs(str(with_context(tmp_path / "model", LONGEST)), skip_tokenizer_init=True)
    )
    engine, config = start_engine(opened)
    assert isinstance(engine.runner.model, Decoder)
    assert config.max_model_len <= min(len(rotary.cos) for rotary in engine.runner.model.rotaries)


def test_a_context_beyond_all_memory_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = open_model(
        EngineArgs(
            str(with_context(tmp_path / "model", LONGEST)),
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
        )
    )
    loads: list[object] = []
    monkeypatch.setattr(type(opened), "load", lambda *_: loads.append(0))
    with pytest.raises(CapacityError, match=f"a context of {LONGEST} tokens"):
        start_engine(opened)
    assert not loads


def test_longrope_chooses_by_the_context_and_not_by_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Little memory is left before the weights are read: the factors are those of the model's
    context nevertheless.
    """
    opened = open_model(EngineArgs(str(BASE), skip_tokenizer_init=True, kv_cache_dtype="bfloat16"))
    half = opened.model.ropes[0].rotary_dim // 2
    rope = replace(
        ROPES["longrope"],
        rotary_dim=2 * half,
        short_factors=tuple(1.0 + i for i in range(half)),
        long_factors=tuple(2.0 + i for i in range(half)),
    )
    opened = replace(opened, model=replace(opened.model, ropes=(rope,)))
    bytes_per_token = opened.cache_spec(opened.resolve(opened.args)).bytes_per_token
    monkeypatch.setattr(build, "memory_for_cache", lambda device: 40 * bytes_per_token)
    engine, config = start_engine(opened)
    assert isinstance(engine.runner.model, Decoder)
    assert config.max_model_len < 64 < opened.model.max_position_embeddings
    expected = build_rope(rope, opened.model.max_position_embeddings, "cpu")
    cos = engine.runner.model.rotaries[0].cos
    assert torch.equal(cos, expected.cos[: len(cos)])


@pytest.mark.parametrize(
    "command",
    [
        [
            "generate",
            "MODEL",
            "--skip-tokenizer-init",
            "--prompt-token-ids",
            "3,4",
            "--max-tokens",
            "2",
        ],
        ["evaluate", "layers", "DEMO", "--data", "TEXT", "--window", "32"],
        *(
            pytest.param(
                f"evaluate caches DEMO --data TEXT --max-tokens 64 --window 32{more}".split(),
                marks=pytest.mark.slow,
            )
            for more in ("", " --no-speed --weights fp8")
        ),
        [
            "quantize",
            "MODEL",
            "OUT",
            "--kv-cache",
            "fp8",
            "--calibration-data",
            "IDS",
            "--max-seq-len",
            "32",
        ],
    ],
    ids=" ".join,
)
def test_commands_need_little_memory(tmp_path: Path, command: list[str]):
    model = with_context(tmp_path / "model", LONGEST)
    ids = tmp_path / "ids.jsonl"
    ids.write_text(
        "".join(
            json.dumps({"input_ids": [3 + (i * j) % 50 for j in range(40)]}) + "\n"
            for i in range(1, 5)
        )
    )
    text = tmp_path / "text.txt"
    text.write_text("def main(argv):\n    return [int(word) for word in argv]\n" * 20)
    demo = str(with_context(tmp_path / "demo", LONGEST, DEMO)) if "DEMO" in command else ""
    names = {
        "MODEL": str(model),
        "DEMO": demo,
        "TEXT": str(text),
        "IDS": str(ids),
        "OUT": str(tmp_path / "out"),
    }
    arguments = [names.get(word, word) for word in command]
    memory = ["--kv-cache-memory", "1MiB"] if command[0] == "generate" else []
    done = run_forked(
        [*arguments, *memory], more_memory=2**33
    )  # angles of 2e9 positions take 64 GB
    assert done.returncode == 0, done.stderr[-3000:]
