"""The dtype of the weights that are not quantized, from headers of a folder and of a hub model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.stand_in_hub import StandInHub, stand_in_hub

from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.stored_dtype import stored_format, stored_in_folder

pytestmark = pytest.mark.clock

FIXTURES = Path(__file__).parents[2] / "fixtures"
GPT_OSS = (FIXTURES / "published" / "openai--gpt-oss-20b.json").read_text()
HALF = torch.float16  # which nothing assumes

LAYER = "model.layers.0."
MOE = f"{LAYER}block_sparse_moe."


@pytest.mark.parametrize(
    ("tensors", "format"),
    [
        ({"a.weight": ("BF16", 100), "b.weight": ("F32", 60)}, "bfloat16"),  # most bytes
        ({"a.weight": ("BF16", 60), "b.weight": ("F32", 100)}, "float32"),
        ({"a.weight": ("F16", 60), "b.bias": ("BF16", 2)}, "float16"),
        # a shard of experts in FP8, blocks of 128 × 128, with a router in float32: MiniMax-M2
        (
            {
                f"{MOE}experts.0.w1.weight": ("F8_E4M3", 1536 * 3072),
                f"{MOE}experts.0.w1.weight_scale_inv": ("F32", 12 * 24 * 4),
                f"{MOE}gate.weight": ("F32", 256 * 3072 * 4),
                f"{MOE}e_score_correction_bias": ("F32", 1024),
                f"{LAYER}input_layernorm.weight": ("BF16", 6144),
            },
            "bfloat16",
        ),
        # the same of a model in float32, with the scales that compressed-tensors stores in 16 bits
        ({"a.weight": ("F8_E4M3", 99), "a.weight_scale": ("BF16", 50), "norm.weight": ("F32", 4)}, "float32"),
        # MXFP4 as OpenAI stores it, and two quantized matrices with nothing but scales
        ({"experts.w_blocks": ("U8", 99), "experts.w_scales": ("U8", 9), "q_proj.weight": ("BF16", 8)}, "bfloat16"),
        ({"a.weight": ("F8_E4M3", 99), "a.weight_scale": ("F32", 4), "a.input_scale": ("F32", 4)}, None),
        # parts beside the text model
        ({"model.visual.a.weight": ("F32", 99), "model.language_model.a.weight": ("BF16", 8)}, "bfloat16"),
        ({"vision_tower.a.weight": ("F32", 99), "audio_tower.b.weight": ("F32", 9), "b.weight": ("F16", 8)}, "float16"),
        ({"rotary_emb.inv_freq": ("F32", 99), "ids": ("I64", 99), "d.weight": ("F64", 99)}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_what_counts(tensors: Mapping[str, tuple[str, int]], format: str | None) -> None:
    assert stored_format((name, *entry) for name, entry in tensors.items()) == format


@pytest.mark.parametrize(
    "name",
    sorted(path.name for path in FIXTURES.iterdir() if (path / "model.safetensors").is_file()),
)
def test_what_other_tools_wrote_is_stored_as_they_declare(name: str) -> None:
    checkpoint = Checkpoint(FIXTURES / name)
    declared = checkpoint.config.get("dtype") or checkpoint.config["torch_dtype"]
    assert checkpoint.stored_format == stored_in_folder(FIXTURES / name) == declared


def test_a_folder_with_both_forms_of_the_weights_and_a_damaged_one(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(8, dtype=HALF)}, tmp_path / "model.safetensors")
    save_file(
        {"a.weight": torch.zeros(99, dtype=torch.float32)}, tmp_path / "consolidated.safetensors"
    )
    assert stored_in_folder(tmp_path) == "float16"
    (tmp_path / "model.safetensors").write_bytes(b"none")
    assert stored_in_folder(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()
    assert stored_in_folder(tmp_path) == "float32"


TIMED = """
import sys, time
from freight.checkpoint.stored_dtype import stored_on_hub
begin = time.monotonic()
print(stored_on_hub('org/model', seconds=float(sys.argv[1])), time.monotonic() - begin)
"""


def ask(
    hub: StandInHub, home: Path, *argv: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    environ = {"HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline)), **hub.environ}
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def plan(hub: StandInHub, home: Path, offline: bool = False) -> dict[str, Any]:
    wish = ("--memory", "24GiB", "--device", "cpu", "--json")
    answer = ask(hub, home, "-m", "freight", "plan", hub.model, *wish, offline=offline)
    assert (answer.returncode, answer.stderr) == (0, "")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A hub model whose config.json names no dtype."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text(GPT_OSS)
    return tmp_path / "files"


def test_the_header_of_a_file_on_the_hub(files: Path, tmp_path: Path) -> None:
    save_file(
        {"model.embed_tokens.weight": torch.zeros(1024, 1024, dtype=HALF)},
        files / "model.safetensors",
    )
    with stand_in_hub("org/model", files) as hub:
        found = plan(hub, tmp_path / "home")
        assert (found["dtype"], found["dtype_source"]) == ("float16", "tensors")
        assert hub.sent[1:] == [("model.safetensors", "bytes=0-100000", 100_001)]
        found = plan(hub, tmp_path / "home", offline=True)  # config.json is in the client's cache
        assert (found["dtype"], found["dtype_source"]) == ("bfloat16", "assumed")
        assert len(hub.sent) == 2


def test_of_shards_that_with_the_embedding_is_asked(files: Path, tmp_path: Path) -> None:
    shards = {
        "model-1-of-3.safetensors": {f"{MOE}gate.weight": torch.zeros(64, 64)},
        "model-2-of-3.safetensors": {
            f"{MOE}experts.0.w1.weight": torch.zeros(8, dtype=torch.float8_e4m3fn)
        },
        "model-3-of-3.safetensors": {"model.embed_tokens.weight": torch.zeros(8, 8, dtype=HALF)},
    }
    for name, tensors in shards.items():
        save_file(tensors, files / name)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (files / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    with stand_in_hub("org/model", files) as hub:
        assert plan(hub, tmp_path / "home")["dtype"] == "float16"
        assert [name for name, asked, _ in hub.sent if asked] == ["model-3-of-3.safetensors"]


def test_a_dtype_in_config_json_is_all_that_is_fetched(files: Path, tmp_path: Path) -> None:
    (files / "config.json").write_text(
        json.dumps(json.loads(GPT_OSS) | {"torch_dtype": "bfloat16"})
    )
    save_file(
        {"model.embed_tokens.weight": torch.zeros(8, 8, dtype=HALF)}, files / "model.safetensors"
    )
    with stand_in_hub("org/model", files) as hub:
        assert plan(hub, tmp_path / "home")["dtype_source"] == "config.json"
        assert [name for name, *_ in hub.sent] == ["config.json"]


def test_a_hub_without_safetensors_and_one_that_does_not_answer(
    files: Path, tmp_path: Path
) -> None:
    with stand_in_hub("org/model", files) as hub:
        assert plan(hub, tmp_path / "home")["dtype_source"] == "assumed"
        save_file(
            {"model.embed_tokens.weight": torch.zeros(8, 8, dtype=HALF)},
            files / "model.safetensors",
        )
        assert ask(hub, tmp_path / "home", "-c", TIMED, "30").stdout.startswith("float16 ")
        hub.stalled.set()
        found, seconds = ask(hub, tmp_path / "home", "-c", TIMED, "0.5").stdout.split()
        assert found == "None"
        assert float(seconds) < 5  # the client alone gives up after 10
