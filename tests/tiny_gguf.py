"""Tiny llama models as GGUF files, with weights in blocks and a tokenizer of bytes: they generate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.gguf_files import INT32, STRING, Stored, Tensor, gguf_bytes
from tokenizers import pre_tokenizers

F32 = 0
Q4_1 = 3
Q8_0 = 8
Q6_K = 14
# Bytes of a block, its inputs, and where its float16 numbers are
LAYOUTS = {Q4_1: (20, 32, (0, 2)), Q8_0: (34, 32, (0,)), Q6_K: (210, 256, (208,))}
HIDDEN = 64
VOCAB = 257
END = VOCAB - 1
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (256, HIDDEN),
    "blk.0.ffn_up.weight": (256, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, 256),
}


def metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of the tiny model. `changes`: keys with '__' for '.'; None leaves one out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": Stored(STRING, [*alphabet, "<end>"]),
        "tokenizer.ggml.token_type": Stored(INT32, [1] * len(alphabet) + [3]),
        "tokenizer.ggml.merges": Stored(STRING, []),
        "tokenizer.ggml.eos_token_id": END,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def blocks(kind: int, shape: tuple[int, ...], seed: int) -> bytes:
    """Random rows of blocks, with small scales."""
    size, inputs, floats = LAYOUTS[kind]
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) // inputs
    data = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    for at in floats:
        scales = torch.rand(count, 1, generator=generator) * 1e-2
        data[:, at : at + 2] = scales.half().view(torch.uint8)
    return data.numpy().tobytes()


def tensors(types: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """The tensors of the tiny model. `types`: those that differ from Q4_1, Q8_0 (embedding) and
    Q6_K (down).
    """
    result = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        kind = Q4_1 if len(shape) == 2 else F32
        kind = {"token_embd.weight": Q8_0, "blk.0.ffn_down.weight": Q6_K}.get(name, kind)
        kind = (types or {}).get(name, kind)
        data = torch.ones(shape).numpy().tobytes() if kind == F32 else blocks(kind, shape, seed)
        result[name] = Tensor(kind, shape, data)
    return result


def tiny_bytes(
    types: Mapping[str, int] | None = None,
    replaced: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> bytes:
    """The file. `replaced`: tensors in the place of its own."""
    return gguf_bytes(metadata(**changes), {**tensors(types), **(replaced or {})})


def write_tiny(
    path: Path,
    types: Mapping[str, int] | None = None,
    replaced: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    path.write_bytes(tiny_bytes(types, replaced, **changes))
    return path
