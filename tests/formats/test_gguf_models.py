"""Every architecture of GGUF files runs, with its matrices as they are stored, in the memory that a
plan counts.
"""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.formats.gguf_files import NAMES
from tests.gguf_files import Tensor, gguf_bytes
from tests.gguf_models import write_model

from freight import LLM, SamplingParams
from freight.base.gguf import read_gguf
from freight.checkpoint.config_only import gguf_model
from freight.checkpoint.gguf.reader import decoded
from freight.fp8.block_formats import BlockFormat
from freight.model.open import open_model
from freight.model.sizes import Layout, loaded_bytes
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs

TYPES = tuple(format for format in BlockFormat if format.inputs == 32)


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_runs_with_its_matrices_as_stored(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, name, ("q8_0", "q8_0") if "moe" in name or "mixtral" in name else TYPES)
    llm = LLM(
        str(file),
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory="4MiB",
        kv_cache_dtype="fp8",
    )
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, ignore_eos=True)
    (result,) = llm.generate([[5, 17, 200, 31]], params)
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 4
    for entry in logprobs:
        assert all(math.isfinite(choice.logprob) for choice in entry.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_what_is_loaded(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, name, TYPES)
    described = gguf_model(str(file))
    assert described is not None
    args = EngineArgs(str(file), skip_tokenizer_init=True, max_model_len=64)
    opened = open_model(args)
    config = opened.resolve(args)
    counted = loaded_bytes(
        opened.model,
        config.compute_format,
        config.weight_format,
        described.scheme.linear,
        Layout.PACKED,
        64,
    )
    held = weight_bytes(opened.load(config))
    assert counted.layers == held.layers
    assert counted.embeddings == held.embeddings


def test_experts_whose_gate_and_up_have_different_blocks_are_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "qwen3-moe", ("q4_0", "q8_0", "q5_1"))
    args = EngineArgs(str(file), skip_tokenizer_init=True, max_model_len=64)
    opened = open_model(args)
    with caplog.at_level("INFO", logger="freight"):
        opened.load(opened.resolve(args))
    assert "gate and up have different blocks" in caplog.text


def test_a_type_of_two_bits_is_decoded_by_its_package(tmp_path: Path) -> None:
    inputs, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.IQ2_XS]
    numbers = random.Random(7)
    data = bytearray(numbers.randbytes(320 * size))
    for block in range(0, len(data), size):
        struct.pack_into("<e", data, block, 0.01)
    tensors = {"token_embd.weight": Tensor(17, (320, inputs), bytes(data))}
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_bytes({"general.architecture": "llama"}, tensors))
    tensor = read_gguf(file).tensors["token_embd.weight"]
    expected = gguf.dequantize(
        np.frombuffer(bytes(data), dtype=np.uint8).reshape(320, size),
        gguf.GGMLQuantizationType.IQ2_XS,
    )
    rows = torch.frombuffer(data, dtype=torch.uint8).view(320, size)
    assert torch.equal(decoded(rows, tensor), torch.from_numpy(expected))
