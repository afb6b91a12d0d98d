"""Merging of a LoRA adapter into a checkpoint in 16 bits.

    merge("./llama", "./adapter", Path("out"))

Each weight that the adapter changes is computed in float32 and rounded once; every other tensor
keeps its bits. Tensors are read one at a time, so memory holds one shard and one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freight.checkpoint.adapter import Adapter
from freight.checkpoint.layouts import declaration
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.checkpoint.writer import (
    CheckpointWriter,
    require_new,
    require_own_files,
    require_space,
)
from freight.config.parse import parse_model_config
from freight.errors import CheckpointError, ConfigError

Progress = Callable[[str, int, int], None]  # (what, done, total)
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Prefixes of transformers' modules -> prefixes in files of models of text and pictures
_RENAMED = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge. untied: the head now has its own tensor, and shared the embedding's
    before.
    """

    path: Path
    num_changed: int
    num_tensors: int
    num_bytes: int
    untied: bool


def merge(
    model: str,
    adapter: str,
    out: Path,
    revision: str | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> MergeResult:
    """Write the model with the adapter merged into the new folder `out`, with the model's config
    and other files.

    model, adapter: folders or hub ids. Raises ConfigError for a quantized model, for an adapter
    that is not merged here and for `out`; CheckpointError for files that are damaged or do not
    belong together; CapacityError for a full disk. Whatever is raised, `out` is not there.
    """
    require_new(out)
    base = Checkpoint(resolve_model(model, revision))
    _refuse_quantized(model, base)
    require_own_files(base.path)
    lora = Adapter(adapter)
    require_own_files(lora.path)
    names, config = sorted(base.names), dict(base.config)
    # Written tensor -> tensor of `base` that it starts from
    sources = {name: name for name in names}
    untied = _untie(base, lora, sources, config)
    changes = {
        _stored_name(base, lora, name, sources): change for name, change in lora.changes.items()
    }
    for name, change in changes.items():
        entry = base.entry(sources[name])
        lora.check(name, change, entry.shape)
        if entry.dtype not in ("BF16", "F16", "F32"):
            raise ConfigError(
                f"{base.path}: {name} is stored as {entry.dtype}; merge into the model in 16 bits"
            )
    num_bytes = sum(base.entry(source).size for source in sources.values())
    require_space(out, num_bytes)
    with CheckpointWriter(out) as writer:
        for done, (name, source) in enumerate(sources.items()):
            on_progress("merging", done, len(sources))
            tensor = base.copy(source)
            writer.add({name: lora.merged(changes[name], tensor) if name in changes else tensor})
        on_progress("merging", len(sources), len(sources))
        base.require_unchanged()
        writer.finish(config, base.path)
    return MergeResult(out, len(changes), len(sources), num_bytes, untied)


def _refuse_quantized(model: str, base: Checkpoint) -> None:
    if declaration(base.config) or base.hf_quant_config:
        raise ConfigError(
            f"{model} is quantized, and its rounded weights are no base for an adapter: merge into the model in 16 "
            "bits that it was made from, then quantize the result (freight quantize)"
        )


def _stored_name(base: Checkpoint, lora: Adapter, name: str, known: Mapping[str, str]) -> str:
    """Return the name in the output of the tensor that transformers calls `name`. Raises
    CheckpointError.
    """
    spelled = [
        name,
        *(new + name.removeprefix(old) for old, new in _RENAMED if name.startswith(old)),
    ]
    found = next((one for one in spelled if one in known), None)
    if found is None:
        raise CheckpointError(
            f"{lora.path} changes {name}, and {base.path} has no such tensor: the adapter belongs to another model, or "
            "its modules are stored under other names (experts in one tensor); merge it with peft's merge_and_unload"
        )
    return found


def _untie(
    base: Checkpoint, lora: Adapter, sources: dict[str, str], config: dict[str, Any]
) -> bool:
    """Give the head its own tensor where it is tied to the embedding and the adapter changes one of
    the two.

    An adapter adds to what one module computes. In a shared matrix it would change both modules.
    Returns whether the head was untied.
    """
    ends = (_HEAD, _EMBEDDING)
    if not any(name.endswith(ends) for name in lora.changes) or any(
        name.endswith(_HEAD) for name in sources
    ):
        return False
    if not parse_model_config(base.config, base.names).tie_word_embeddings:
        return False
    if lora.ties_weights:
        raise ConfigError(
            f"{lora.path}: ensure_weight_tying is true, and the model's head is its embedding: that is not merged "
            "here; merge it with peft's merge_and_unload"
        )
    embeddings = [name for name in sources if name.endswith(_EMBEDDING)]
    if len(embeddings) != 1:
        raise CheckpointError(
            f"{base.path} has {len(embeddings)} tensors *{_EMBEDDING}, and no head: not merged here"
        )
    sources[_HEAD] = embeddings[0]
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (part is config or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
    return True
