"""Merging of a LoRA adapter into a checkpoint in 16 bits.

    merge("./llama", "./adapter", Path("out"))

Each weight that the adapter changes is computed in float32 and rounded once; every other tensor
keeps its bits. Tensors are read one at a time, so memory holds one shard and one weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freight.base.terminal import OnStage, unseen
from freight.checkpoint.adapter import Adapter
from freight.checkpoint.layouts import declaration
from freight.checkpoint.reader import Checkpoint, resolve_model, untie_stored_head, untied
from freight.checkpoint.writer import (
    CheckpointWriter,
    require_new,
    require_own_files,
    require_space,
)
from freight.errors import CheckpointError, ConfigError
from freight.model.config.parse import parse_model_config

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
# Prefixes of transformers' modules -> prefixes in files of models of text and pictures. The last two
# are of an adapter that was trained on the text model alone.
_RENAMED = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
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
    on_progress: OnStage = unseen,
) -> MergeResult:
    """Write the model with the adapter merged into the new folder `out`, with the model's config
    and other files.

    model, adapter: folders or hub ids. Raises ConfigError for a quantized model, for an adapter
    that is not merged here and for `out`; CheckpointError for files that are damaged or do not
    belong together; CapacityError for a full disk. Whatever is raised, `out` is not there.
    """
    require_new(out)
    base = Checkpoint(resolve_model(model, revision))
    if declaration(base.config) or base.hf_quant_config:
        raise ConfigError(
            f"{model} is quantized, and its rounded weights are no base for an adapter: merge into the model in 16 "
            "bits that it was made from, then quantize the result (freight quantize)"
        )
    require_own_files(base.path)
    lora = Adapter(adapter)
    require_own_files(lora.path)
    added = _untie(base, lora)
    # Written tensor -> tensor of `base` that it starts from
    sources = {name: name for name in sorted(base.names)} | added
    changes = {}
    for named, change in lora.changes.items():
        if change.copies > 1:
            raise ConfigError(
                f"{lora.path} changes {named}, the matrices of {change.copies} experts in one parameter, which is "
                "not merged here; merge it with peft's merge_and_unload"
            )
        name = _stored_name(base, lora, named, sources)
        changes[name] = change
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
            if name in changes:
                tensor = lora.merged(changes[name], tensor)
            writer.add({name: tensor})
        on_progress("merging", len(sources), len(sources))
        base.require_unchanged()
        writer.finish(base.config, base.path)
    return MergeResult(out, len(changes), len(sources), num_bytes, bool(added))


def _stored_name(base: Checkpoint, lora: Adapter, name: str, known: Mapping[str, str]) -> str:
    """Return the name in the output of the tensor that transformers calls `name`. Raises
    CheckpointError.
    """
    if name in known:
        return name
    for old, new in _RENAMED:
        stored = new + name.removeprefix(old)
        if name.startswith(old) and stored in known:
            return stored
    raise CheckpointError(
        f"{lora.path} changes {name}, and {base.path} has no such tensor: the adapter belongs to another model, or "
        "its modules are stored under other names (experts in one tensor); merge it with peft's merge_and_unload"
    )


def _untie(base: Checkpoint, lora: Adapter) -> dict[str, str]:
    """Give the head its own tensor where it is tied to the embedding and the adapter changes one of
    the two: return {its name: the embedding's}, else {}.

    An adapter adds to what one module computes. In a shared matrix it would change both modules.
    `base.config` then says that they are two, as it does where the stored head is not the embedding
    (`reader.untie_stored_head`).
    """
    changes = any(name.endswith((_HEAD, _EMBEDDING)) for name in lora.changes)
    heads = [name for name in sorted(base.names) if name.endswith(_HEAD)]
    if not (changes or heads):
        return {}
    try:
        model = parse_model_config(base.config, base.names)
        tied = model.tie_word_embeddings
        body, outer = model.prefixes
        head = outer + _HEAD
    except CheckpointError:  # a model that Freight does not run
        if not heads:
            raise
        tied = base.config.get("tie_word_embeddings") is True
        body = ""
        head = heads[0]
    if not tied:
        return {}
    embedding = _embedding(base, body)
    if untie_stored_head(base, head, embedding) or not changes:
        return {}
    if lora.ties_weights:
        raise ConfigError(
            f"{lora.path}: ensure_weight_tying is true, and the model's head is its embedding: that is not merged "
            "here; merge it with peft's merge_and_unload"
        )
    base.config = untied(base.config)
    return {head: embedding}


def _embedding(base: Checkpoint, body: str) -> str:
    """Return the name of the embedding, which may not be stored where a head is tied to it."""
    embeddings = [name for name in base.names if name.endswith(_EMBEDDING)]
    if body + _EMBEDDING in embeddings or not embeddings:
        return body + _EMBEDDING
    if len(embeddings) > 1:
        raise CheckpointError(
            f"{base.path} has {len(embeddings)} tensors *{_EMBEDDING}, and its head is tied to one of them: merge the "
            "adapter with peft's merge_and_unload"
        )
    return embeddings[0]
