"""The config.json of a GGUF file, from its metadata. Imports no torch.

The result is what a publisher's folder of the model has, and `model/config` reads it with its own
rule. Every key `ARCH.*` is read, or refused because it computes, or listed as not read. An absent
key has llama.cpp's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freight.base.fields import JsonDict, JsonObject, is_integer, shortened
from freight.checkpoint.gguf.architectures import ROWS, Row
from freight.checkpoint.gguf.keys import Keys, ReadValues, Shapes, layer_count
from freight.checkpoint.gguf.ropes import rope_parameters
from freight.errors import CheckpointError, choices

_EMBEDDING = "token_embd.weight"
_BIASES = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_up.bias", "ffn_down.bias"),
}
_SIZES = {
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
}
# Tokens that end a turn or a text
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# llama.cpp's tokens of begin and end for a kind of tokenizer, where the file names none
_TOKENS: Mapping[str, tuple[int | None, int | None]] = {
    "llama": (1, 2),
    "gpt2": (11, 11),
    "gemma4": (None, 1),
}


# What files are that llama.cpp writes beside models: general.type -> what to do
_OTHER_KINDS = {
    "adapter": "a LoRA adapter is read as PEFT writes it: freight merge BASE ADAPTER OUT",
    "mmproj": "it has the projector of pictures, which are not read; name the model's own file",
    "imatrix": "it has what llama-quantize weights errors with; name the model's own file",
}


@dataclass(frozen=True)
class GGUFConfig:
    """The description of a GGUF's model.

    architecture   llama.cpp's name of it
    config         content of the config.json
    unread         keys of the metadata about the model that are not read, and do not compute
    """

    architecture: str
    config: JsonObject
    unread: tuple[str, ...]


def config_of(metadata: Mapping[str, Any], shapes: Shapes, values: ReadValues) -> GGUFConfig:
    """Return the config.json of a GGUF file. It has no dtype: that is for the tensors to say.

    metadata   the file's; arrays are lists
    shapes     shape of each tensor, outermost dimension first
    values     reads the float32 values of a small tensor: of `ropes.ROPE_TENSORS`

    Raises CheckpointError for an architecture that has no row, and for a key that is missing,
    contradictory, or computes and is not implemented.
    """
    _require_model(metadata)
    architecture = metadata.get("general.architecture")
    row = ROWS.get(architecture) if isinstance(architecture, str) else None
    if row is None:
        raise CheckpointError(
            f"GGUF: general.architecture = {shortened(architecture)} is not implemented; {choices(ROWS)} are"
        )
    if not shapes:
        raise CheckpointError(
            "GGUF: the file has no tensors, perhaps a vocabulary alone; name the file of a model"
        )
    assert isinstance(architecture, str)
    keys = Keys(architecture, metadata, shapes, values)
    config = _common(keys, row)
    for name, key in row.keys.items():
        config[key] = keys.integer(name)
    if row.scoring is not None:
        keys.require("expert_gating_func", (0, row.scoring), row.scoring)
    if row.finish is not None:
        config |= row.finish(keys, config)
    return GGUFConfig(architecture, config, keys.unread())


def _require_model(metadata: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file that is no model, with the way out."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        way_out = _OTHER_KINDS.get(kind) if isinstance(kind, str) else None
        raise CheckpointError(
            f"GGUF: general.type = {shortened(kind)}, so the file is no model; "
            f"{way_out or 'name the file of a model'}"
        )


def _common(keys: Keys, row: Row) -> JsonDict:
    """Return the keys that all architectures have."""
    keys.require("attention.causal", (True,), True)
    layers, predicting = layer_count(keys)
    hidden = keys.integer("embedding_length")
    heads = keys.same("attention.head_count", layers)
    if not heads:
        keys.refuse("attention.head_count", "an integer > 0 is")
    config: JsonDict = {
        "model_type": row.model_type,
        "architectures": [row.architecture],
        "vocab_size": _vocabulary(keys),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not keys.has("output.weight"),
        **_special_tokens(keys.metadata),
        **row.constants,
    }
    if predicting and row.predicting is not None:
        config[row.predicting] = predicting
    config |= _sizes(keys, row, layers, heads, hidden)
    config["rope_parameters"] = rope_parameters(
        keys, config["head_dim"] if row.whole_rope else None, row.yarn
    )
    for bias in row.biased:
        tensors = _BIASES[bias]
        config[bias] = any(any(keys.layers_with(name, layers)) for name in tensors)
    return config


def _sizes(keys: Keys, row: Row, layers: int, heads: int, hidden: int) -> JsonDict:
    """Return the size of heads, the number of KV heads, and the width of the feed-forward."""
    share = hidden // heads
    head_dim = keys.integer("attention.key_length", share)
    if not head_dim:
        keys.refuse("attention.key_length", "an integer > 0 is")
    if row.whole_rope:
        keys.require("attention.value_length", (head_dim,), share)
    sizes: JsonDict = {"head_dim": head_dim, "num_key_value_heads": heads}
    for name, key in _SIZES.items():
        if name not in row.by_layer and keys.get(name) is not None:
            sizes[key] = keys.same(name, layers)
    return sizes


def _vocabulary(keys: Keys) -> int:
    """Return the rows of the embedding. Raises CheckpointError for another `vocab_size`."""
    rows = keys.rows(_EMBEDDING)
    keys.require("vocab_size", (rows,), rows)
    return rows


def _special_tokens(metadata: Mapping[str, Any]) -> JsonDict:
    """Return the tokens of begin and end: those of a turn end a completion too."""
    usual = _TOKENS.get(str(metadata.get("tokenizer.ggml.model")), (None, None))
    begin = metadata.get("tokenizer.ggml.bos_token_id", usual[0])
    ends = [metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    ends[0] = usual[1] if ends[0] is None else ends[0]
    ids = [*dict.fromkeys(token for token in ends if token is not None)]
    for token in (*ids, begin):
        if token is not None and not is_integer(token):
            raise CheckpointError(f"GGUF metadata: {shortened(token)} is not the id of a token")
    return {"bos_token_id": begin, "eos_token_id": ids[0] if len(ids) == 1 else ids or None}
