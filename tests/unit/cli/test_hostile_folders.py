"""Folders that somebody wrote to harm whoever opens them: each command ends soon, in a few lines,
without a traceback, and prints nothing that a terminal takes as a command.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freight.checkpoint.reader import resolve_model

Change = Callable[[Path], None]
Run = Callable[..., Any]

ESCAPE = "\x1b[31m\x1b]0;owned\x07\u202e"
MILLION = 10**6


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def tokenizer(file: str = "tokenizer.json", **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def tensor(name: str) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), name: torch.zeros(3)}, file)

    return change


def shards(names: list[str]) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {f"a{number}": name for number, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def replaced(count: int, pattern: dict[str, str], content: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [one] * count}


def compressed(**values: Any) -> Change:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return config(quantization_config={**declared, "config_groups": {"a": group}, **values})


HOSTILE: dict[str, Change] = {
    "escapes in model_type": config(model_type=ESCAPE),
    "escapes in architectures": config(architectures=[ESCAPE]),
    "escapes in keys": config(**{f"key{ESCAPE}": 1, "[red]a[/red]": 2, "a\nerror: b": 3}),
    "escapes in hidden_act": config(hidden_act=ESCAPE),
    "escapes in a tensor's name": tensor(f"x{ESCAPE}"),
    "escapes in a shard's name": shards([f"a{ESCAPE}.safetensors"]),
    "escapes in a module's name": compressed(ignore=[ESCAPE], config_groups={ESCAPE: ESCAPE}),
    "escapes in a token": tokenizer(
        "tokenizer_config.json", eos_token=f"e{ESCAPE}", add_bos_token=True
    ),
    "many layers": config(num_hidden_layers=10**9),
    "many layers of a hybrid": config(
        model_type="granitemoehybrid",
        architectures=["GraniteMoeHybridForCausalLM"],
        num_hidden_layers=2**31 - 1,
    ),
    "many layers of transformers'": config(
        model_type="stablelm", architectures=["StableLmForCausalLM"], num_hidden_layers=10**9
    ),
    "many labels": config(
        model_type="stablelm", architectures=["StableLmForCausalLM"], num_labels=10**9
    ),
    "many kinds of layers": config(layer_types=["full_attention"] * 100_000),
    "a large vocabulary": config(vocab_size=10**12),
    "many ends": config(eos_token_id=list(range(MILLION))),
    "many keys": config(**{f"key_{number}": number for number in range(200_000)}),
    "a long name": config(model_type="x" * MILLION),
    "deep nesting": config(rope_scaling=json.loads("[" * 900 + "]" * 900)),
    "many ignored modules": compressed(ignore=[f"model.layers.{n}.x" for n in range(100_000)]),
    "many expressions": compressed(ignore=[f"re:.*{n}x" for n in range(100_000)]),
    "many shards": shards([f"m{number}.safetensors" for number in range(50_000)]),
    "growing text": tokenizer(normalizer=replaced(12, {"String": "a"}, "a" * 10)),
    "growing out of nothing": tokenizer(normalizer=replaced(40, {"Regex": ""}, "a")),
    "repeated tokens": tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 20_000,
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {},
        }
    ),
}

COMMANDS = (
    ("inspect",),
    ("plan", "--memory", "1GiB"),
    ("generate", "--prompt", "a a a", "--max-tokens", "1", "--max-model-len", "32"),
    ("quantize", "OUT", "--kv-cache", "none"),
    ("audit",),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_every_command_ends_soon_and_says_little(freight: Run, name: str, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in resolve_model("demo").iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, folder / file.name)
    HOSTILE[name](folder)
    for verb, *more in COMMANDS:
        rest = [str(tmp_path / "out") if part == "OUT" else part for part in more]
        began = time.thread_time()
        answer = freight(verb, str(folder), *rest)
        seconds = time.thread_time() - began
        text = answer.out + answer.err
        assert answer.code in (0, 1, 2), (verb, text[-2000:])
        assert seconds < 5, (verb, seconds)
        assert "Traceback" not in text, (verb, text[-2000:])
        assert len(text.splitlines()) <= 100, (verb, text[:300])
        assert len(text) <= 20_000, (verb, text[:300])
        marks = [mark for mark in text if not (mark.isprintable() or mark in "\n\t")]
        assert not marks, (verb, marks[0], text[:300])
