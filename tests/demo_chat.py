"""The model that ships, with a chat template: what tests of chat serve. Its weights are a link."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "src" / "freight" / "demo"
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n"
    "{% for call in message.tool_calls or [] %}"
    "call {{ call.function.name }} {{ call.function.arguments }}\n"
    "{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def demo_with_chat_template(folder: Path, positions: int = 1024) -> Path:
    """Fill `folder` with the demo model and a template that writes `role: content` lines; returns
    it.

    positions: of the model; with more than it was trained for, an answer can be too long for any
    machine to end it before it is disturbed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json"):
        shutil.copyfile(DEMO / name, folder / name)
    model = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


def demo_with_tokens(
    folder: Path, texts: Mapping[int, str], special: bool, config: Mapping[str, Any]
) -> Path:
    """The demo model in `folder` with its last tokens, of which no other is made, renamed to these texts; returns
    it. `config`: what else its tokenizer's has.
    """
    demo_with_chat_template(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    model["vocab"] = {texts.get(number, name): number for name, number in model["vocab"].items()}
    model["merges"] = model["merges"][: -len(texts)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **plain, "special": special}
        for number, text in texts.items()
    ]
    file.write_text(json.dumps(tokenizer))
    add_to(folder / "tokenizer_config.json", config)
    return folder


def add_to(file: Path, values: Mapping[str, Any]) -> None:
    """Add these values to an object of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(values)))
