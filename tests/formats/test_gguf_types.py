"""What the types of a GGUF file's tensors mean for the model: its dtype, its blocks, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.gguf_files import Tensor
from tests.refusals import refuses
from tests.tiny_gguf import F32, HIDDEN, Q4_1, Q8_0, SHAPES, write_tiny

from freight.base.gguf import GGML_TYPES, GGUFTensor, read_gguf
from freight.checkpoint.convert import convert
from freight.checkpoint.gguf import describe as module
from freight.checkpoint.gguf.describe import block_format, describe
from freight.checkpoint.gguf.names import Change, Placed
from freight.checkpoint.gguf.reader import GGUFCheckpoint
from freight.errors import CheckpointError
from freight.fp8.block_formats import BlockFormat
from freight.fp8.formats import Format
from freight.model.open import open_folder

CODES = {kind.name: code for code, kind in GGML_TYPES.items()}


def stored(**types: str) -> dict[str, GGUFTensor]:
    """Tensors of one row of 256 values, by name."""
    return {
        name: GGUFTensor(name, GGML_TYPES[CODES[kind]], (1, 256), Path("x.gguf"), 0, 0)
        for name, kind in types.items()
    }


def test_rows_of_blocks_stay_so_unless_values_change() -> None:
    tensors = stored(a="q4_k", b="q4_k", c="q6_k", d="bf16")
    assert block_format(tensors, Placed(("a",))) is BlockFormat.Q4_K
    assert block_format(tensors, Placed(("a", "b"), rows=(1, 0))) is BlockFormat.Q4_K
    assert block_format(tensors, Placed(("a", "c"))) is None
    assert block_format(tensors, Placed(("a",), columns=(1, 0))) is None
    assert block_format(tensors, Placed(("a",), change=Change.MINUS_ONE)) is None
    assert block_format(tensors, Placed(("d",))) is None


@pytest.mark.parametrize(
    ("kind", "format"),
    [(F32, Format.FLOAT32), (Q8_0, Format.BFLOAT16), (Q4_1, Format.BFLOAT16)],
)
def test_a_model_computes_in_the_dtype_of_most_values(
    tmp_path: Path, kind: int, format: Format
) -> None:
    types = {name: kind for name, shape in SHAPES.items() if len(shape) == 2}
    model = describe(read_gguf(write_tiny(tmp_path / "tiny.gguf", types)))
    assert model.stored is format


def test_matrices_of_two_and_three_bits_are_decoded() -> None:
    decoded = {format for format in BlockFormat if not format.is_multiplied}
    assert decoded == {BlockFormat.Q2_K, BlockFormat.Q3_K}


def test_a_type_of_the_package_gguf_is_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "blk.0.ffn_down.weight"
    kind = GGML_TYPES[CODES["iq2_xs"]]
    data = bytes(SHAPES[name][0] * SHAPES[name][1] // kind.inputs * kind.bytes)
    tensor = {name: Tensor(CODES["iq2_xs"], SHAPES[name], data)}
    file = write_tiny(tmp_path / "tiny.gguf", replaced=tensor)
    assert GGUFCheckpoint(file).scheme.decoded == ("iq2_xs",)
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with refuses(CheckpointError, str(file), name, "IQ2_XS", "pip install gguf"):
        GGUFCheckpoint(file)


def test_a_type_that_nothing_decodes_is_refused(tmp_path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    kind = GGML_TYPES[CODES["q8_k"]]
    data = bytes(SHAPES[name][0] * SHAPES[name][1] // kind.inputs * kind.bytes)
    tensor = {name: Tensor(CODES["q8_k"], SHAPES[name], data)}
    file = write_tiny(tmp_path / "tiny.gguf", replaced=tensor)
    with refuses(CheckpointError, str(file), name, "Q8_K", "Q4_K"):
        GGUFCheckpoint(file)


def test_a_conversion_rounds_matrices_and_no_other_value(tmp_path: Path) -> None:
    norm = "blk.0.attn_norm.weight"
    values = torch.full((HIDDEN,), 1.25)
    values[3] = 1.0000001
    odd = {norm: Tensor(F32, (HIDDEN,), values.numpy().tobytes())}
    convert(str(write_tiny(tmp_path / "tiny.gguf", replaced=odd)), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0"
    assert torch.equal(written[f"{layer}.input_layernorm.weight"], values)
    assert written[f"{layer}.post_attention_layernorm.weight"].dtype is torch.bfloat16
    assert written[f"{layer}.mlp.down_proj.weight"].dtype is torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_fault_of_the_described_model_names_the_file(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", llama__attention__head_count_kv=0)
    with refuses(CheckpointError, str(file)):
        open_folder(file, "tiny")
