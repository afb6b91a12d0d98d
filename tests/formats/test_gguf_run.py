"""GGUF files run: loaded whole and by rank, with another tokenizer; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_files import Tensor, gguf_bytes
from tests.refusals import refuses
from tests.stand_in_hub import stand_in_hub
from tests.tiny_gguf import F32, HIDDEN, LAYOUTS, Q8_0, metadata, tensors, write_tiny

from freight import LLM, SamplingParams
from freight.checkpoint.convert import convert
from freight.checkpoint.gguf.names import Change, Placed
from freight.checkpoint.gguf.reader import GGUFCheckpoint
from freight.checkpoint.gguf.stored import StoredBlocks, find_blocks
from freight.checkpoint.merge import merge
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.engine.fingerprint import fingerprint
from freight.errors import CheckpointError, ConfigError
from freight.fp8.block_formats import BlockFormat
from freight.fp8.blocks import decode
from freight.lab.bench.drive import linears_of
from freight.lab.bench.drive import weight_bytes as step_bytes
from freight.model.loader import present_share, tensor_shapes
from freight.model.open import open_folder, open_model
from freight.model.shares import share_of
from freight.model.sizes import Layout, loaded_bytes
from freight.model.weight_bytes import weight_bytes
from freight.operands.weight import Weight
from freight.quantizer.quantize import quantize
from freight.settings.engine import EngineArgs

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SIZES = {"kv_cache_memory": 2**20, "max_model_len": 64, "device": "cpu"}


def tokens(model: Path, **options: Any) -> list[int]:
    llm = LLM(str(model), **SIZES, **options)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0].token_ids)


def test_a_folder_made_of_it_computes_the_same(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    convert(str(file), tmp_path / "out")
    options = {"dtype": "float32", "activations": "bfloat16"}
    assert tokens(file, **options) == tokens(tmp_path / "out", dtype="float32")


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_has_its_rows_of_a_tied_head(tmp_path: Path, size: int) -> None:
    opened = open_folder(write_tiny(tmp_path / "tiny.gguf"), "tiny")
    whole = GGUFCheckpoint(opened.checkpoint.path).take_blocks(EMBEDDING)
    stored = find_blocks(opened.checkpoint, tensor_shapes(opened.model))
    share = share_of(opened.model, size - 1, size)
    cut, _ = present_share(opened.checkpoint, share, stored, {})
    rows = [rows for rows, *_ in share.pieces[HEAD]]
    head = cut[HEAD].read(opened.checkpoint, "cpu")
    assert torch.equal(head.data, torch.cat([whole[part] for part in rows]))
    columns = opened.checkpoint.take(EMBEDDING, share.shapes[EMBEDDING])
    decoded = decode(whole, BlockFormat.Q8_0)
    assert torch.equal(columns, torch.cat([decoded[piece] for piece in share.pieces[EMBEDDING]]))


def test_another_tokenizer_takes_the_place_of_one_that_is_not_read(tmp_path: Path) -> None:
    write_tiny(tmp_path / "other.gguf")
    file = write_tiny(tmp_path / "tiny.gguf", tokenizer__ggml__pre="newest")
    with refuses(CheckpointError, str(file), "newest", "--tokenizer"):
        open_model(EngineArgs(model=str(file))).load_tokenizer()
    named = EngineArgs(model=str(file), tokenizer=str(tmp_path / "other.gguf"))
    tokenizer = open_model(named).load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ab")
    bare = {key.replace(".", "__"): None for key in metadata() if key.startswith("tokenizer")}
    file = write_tiny(tmp_path / "bare.gguf", **bare)
    with refuses(CheckpointError, str(file), "--tokenizer"):
        open_model(EngineArgs(model=str(file))).load_tokenizer()
    assert open_model(EngineArgs(model=str(file), skip_tokenizer_init=True)).model.num_layers == 1


@pytest.mark.parametrize(
    ("kind", "way_out"), [("adapter", "merge"), ("mmproj", "model"), ("imatrix", "llama-quantize")]
)
def test_other_kinds_of_files_are_named(tmp_path: Path, kind: str, way_out: str) -> None:
    file = write_tiny(tmp_path / "other.gguf", general__type=kind)
    with refuses(CheckpointError, str(file), kind, way_out):
        GGUFCheckpoint(file)


def test_a_vocabulary_alone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(gguf_bytes(metadata()))
    with refuses(CheckpointError, str(file), "no tensors", "vocabulary"):
        GGUFCheckpoint(file)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.0.ffn_down.weight", "blk.0.attn_q.weight"]
)
@pytest.mark.parametrize("half", [0x7C00, 0xFE00])
def test_scales_that_are_not_finite_are_refused_decoded_or_not(
    tmp_path: Path, name: str, half: int
) -> None:
    all_tensors = tensors()
    tensor = all_tensors[name]
    size, _, floats = LAYOUTS[tensor.type]
    data = bytearray(tensor.data)
    at = len(data) - size + floats[-1]
    data[at : at + 2] = half.to_bytes(2, "little")
    all_tensors[name] = Tensor(tensor.type, tensor.shape, bytes(data))
    file = tmp_path / "bad.gguf"
    file.write_bytes(gguf_bytes(metadata(), all_tensors))
    for options in ({}, {"activations": "bfloat16"}, {"quantization": "fp8"}):
        with refuses(CheckpointError, str(file), "finite"):
            tokens(file, **options)
    with refuses(CheckpointError, str(file), name, "finite"):
        convert(str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    with refuses(ConfigError, "--revision", str(file)):
        resolve_model(str(file), "main")
    os.mkfifo(tmp_path / "pipe.gguf")
    with refuses(CheckpointError, str(tmp_path / "pipe.gguf"), "regular"):
        resolve_model(str(tmp_path / "pipe.gguf"))
    monkeypatch.chdir(tmp_path)
    with refuses(CheckpointError, "missing.gguf", "OWNER/NAME:FILE"):
        resolve_model("missing.gguf")
    with refuses(CheckpointError, "./missing.gguf", "file"):
        resolve_model("./missing.gguf")
    with refuses(CheckpointError, str(file), "convert"):
        merge(str(file), str(tmp_path), tmp_path / "out")


def test_bytes_of_a_step_are_those_of_the_blocks(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    opened = open_model(EngineArgs(model=str(file), device="cpu"))
    config = opened.resolve(opened.args)
    formats = config.compute_format, config.weight_format
    counted = step_bytes(opened.model, *formats, 1, linears_of(opened, config))
    stored = sum(len(tensor.data) for tensor in tensors().values() if tensor.type != F32)
    assert counted == stored + 3 * HIDDEN * config.compute_format.bytes


def identity(file: Path) -> str:
    opened = open_model(EngineArgs(model=str(file), device="cpu"))
    config = opened.resolve(opened.args)
    return fingerprint(opened, config, opened.kernels(config), "1")


def test_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    other = tmp_path / "other"
    other.mkdir()
    copy = other / "tiny.gguf"
    copy.write_bytes(file.read_bytes())
    assert identity(copy) == identity(file)
    data = bytearray(file.read_bytes())
    for at in (len(data) // 2, data.index(b"llama.rope.freq_base") + 26):
        data[at] ^= 1
        copy.write_bytes(data)
        assert identity(copy) != identity(file)
        data[at] ^= 1
    write_tiny(copy, {"blk.0.attn_q.weight": Q8_0})
    assert identity(copy) != identity(file)


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    read = StoredBlocks.read

    def appended(self: StoredBlocks, checkpoint: Checkpoint, device: str) -> Weight:
        with file.open("ab") as stream:
            stream.write(bytes(32))
        return read(self, checkpoint, device)

    def cut(self: StoredBlocks, checkpoint: Checkpoint, device: str) -> Weight:
        os.truncate(file, file.stat().st_size // 2)
        return read(self, checkpoint, device)

    for change, fault in ((appended, "changed"), (cut, "ends")):
        write_tiny(file)
        monkeypatch.setattr(StoredBlocks, "read", change)
        with refuses(CheckpointError, str(file), fault):
            tokens(file)


def test_a_folder_stands_for_its_one_model(tmp_path: Path) -> None:
    write_tiny(tmp_path / "mmproj-tiny.gguf")
    first = write_tiny(tmp_path / "tiny-00001-of-00002.gguf")
    write_tiny(tmp_path / "tiny-00002-of-00002.gguf")
    assert resolve_model(str(tmp_path)) == first
    write_tiny(tmp_path / "other.gguf")
    with refuses(CheckpointError, str(tmp_path), "other.gguf", first.name):
        resolve_model(str(tmp_path))


def test_loaded_bytes_are_those_that_are_planned(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    for layout, kernels in ((Layout.PACKED, "auto"), (Layout.PLAIN, "reference")):
        opened = open_model(EngineArgs(model=str(file), device="cpu", kernels=kernels))
        config = opened.resolve(opened.args)
        held = weight_bytes(opened.load(config)).total
        formats = config.compute_format, config.weight_format
        linear_of = opened.scheme.linear
        planned = loaded_bytes(opened.model, *formats, linear_of, layout, config.max_model_len)
        assert held == planned.layers + planned.embeddings


def test_values_are_in_the_form_of_the_model(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "tiny.gguf"))
    name = "blk.0.attn_q.weight"
    plain = checkpoint._values(Placed((name,)))
    changed = {
        Placed(("output_norm.weight",), change=Change.MINUS_ONE): torch.zeros(HIDDEN),
        Placed((name,), rows=range(2, 5)): plain[2:5],
        Placed((name,), rows=(5, 0)): plain[[5, 0]],
        Placed((name,), columns=(3, 1), shape=(HIDDEN, 2)): plain[:, [3, 1]],
        Placed((name,), change=Change.NEGATIVE_LOG): torch.log(-plain),
    }
    for placed, expected in changed.items():
        values = checkpoint._values(placed)
        assert torch.equal(values.nan_to_num(), expected.nan_to_num()), placed


def test_it_is_quantized_from_its_decoded_weights_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    with caplog.at_level("WARNING", logger="freight"):
        quantize(str(file), tmp_path / "out", weights="fp8")
    assert "rounded already" in caplog.text
    assert "q4_1" in caplog.text
    assert len(tokens(tmp_path / "out")) == 6
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_a_file_of_the_hub_runs_and_its_header_alone_is_read_for_a_plan(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_tiny(folder / "model-Q4_1.gguf")
    write_tiny(folder / "model-Q8_0.gguf")
    with stand_in_hub("org/model", folder) as hub:
        environ = os.environ | hub.environ | {"HF_HOME": str(tmp_path / "home")}

        def freight(*words: str) -> str:
            command = [sys.executable, "-m", "freight", *words]
            ended = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=300, check=False
            )
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        freight("plan", "org/model:Q8_0", "--memory", "1GiB", "--json")
        facts = json.loads(freight("inspect", "org/model:model-Q4_1.gguf", "--json"))
        assert facts["bytes"]["q4_1"] > 0
        assert all(asked is not None for _, asked, _ in hub.sent), "only ranges of the header"
        answer = freight(
            *("generate", "org/model:q4_1", "--prompt", "a", "--max-tokens", "4"),
            *("--kv-cache-memory", "1MiB", "--ignore-eos", "--json"),
        )
        assert json.loads(answer)
        assert ("model-Q4_1.gguf", None) in [(file, asked) for file, asked, _ in hub.sent]
        assert {file for file, _, _ in hub.sent} == {"model-Q4_1.gguf", "model-Q8_0.gguf"}
