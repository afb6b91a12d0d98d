"""The GGUF file of a model that Ollama has fetched, found by its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.gguf_files import gguf_bytes
from tests.refusals import refuses
from tests.tiny_gguf import tiny_bytes

from freight import LLM, SamplingParams
from freight.base.gguf import read_gguf
from freight.checkpoint.gguf.ollama import ollama_model
from freight.errors import CheckpointError

HUB = "registry.ollama.ai"
OTHERS = {"template": b"{{ .Prompt }}", "params": b"{}", "license": b"MIT"}


def pull(folder: Path, place: str, layers: Mapping[str, bytes] = OTHERS, **kinds: bytes) -> Path:
    """Write a model as Ollama does; return its manifest. kinds: more layers, `model` by default."""
    if "model" not in kinds and "tensor" not in kinds:
        kinds["model"] = gguf_bytes({"general.name": place})
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    entries = []
    for kind, content in {**kinds, **layers}.items():
        digest = hashlib.sha256(content).hexdigest()
        (folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        entries.append(
            {
                "mediaType": f"application/vnd.ollama.image.{kind}",
                "digest": f"sha256:{digest}",
                "size": len(content),
            }
        )
    manifest = folder / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return manifest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


PLACES = (
    f"{HUB}/library/smollm2/latest",
    f"{HUB}/library/smollm2/135m-q4_1",
    f"{HUB}/someone/tuned/v1",
    "hf.co/bartowski/Qwen3-4B-GGUF/Q4_K_M",
    "localhost:5000/library/own/latest",
)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ollama:smollm2", 0),
        ("smollm2", 0),
        ("ollama:smollm2:latest", 0),
        ("ollama:SmolLM2:135M-Q4_1", 1),
        ("ollama:library/smollm2", 0),
        (f"ollama:{HUB}/library/smollm2:135m-q4_1", 1),
        ("ollama:someone/tuned:v1", 2),
        ("ollama:hf.co/bartowski/Qwen3-4B-GGUF:Q4_K_M", 3),
        ("ollama:https://hf.co/bartowski/qwen3-4b-gguf:q4_k_m", 3),
        ("ollama:localhost:5000/library/own", 4),
    ],
)
def test_names_as_ollama_takes_them(folder: Path, name: str, place: int) -> None:
    for written in PLACES:
        pull(folder, written)
    model = ollama_model(name)
    assert read_gguf(model.file).metadata["general.name"] == PLACES[place]
    assert model.not_read == ("template", "params", "license")
    assert ollama_model(model.name) == model


def test_adapters_and_projectors_are_named(folder: Path) -> None:
    pull(folder, PLACES[0], {}, model=b"m", adapter=b"a", projector=b"p")
    assert ollama_model("smollm2").not_read == ("adapter", "projector")


def test_a_name_that_is_not_there(folder: Path) -> None:
    with refuses(CheckpointError, "ollama:smollm2:latest", str(folder), "OLLAMA_MODELS"):
        ollama_model("ollama:smollm2")
    for written in PLACES:
        pull(folder, written)
    with refuses(CheckpointError, "smollm:latest", "did you mean smollm2:latest", str(folder)):
        ollama_model("ollama:smollm")
    with refuses(CheckpointError, "someone/tuned:v1", "hf.co/bartowski/Qwen3-4B-GGUF:Q4_K_M"):
        ollama_model("ollama:tuned")
    for name in ("", "../x", "*", "smollm2:../latest", "a/b/c/d/e:f", ":"):
        with refuses(CheckpointError, "smollm2:latest") as refusal:
            ollama_model(f"ollama:{name}")
        assert "\n" not in str(refusal.value)


def test_models_without_one_gguf_file(folder: Path) -> None:
    pull(folder, PLACES[0], {}, tensor=b"t", json=b"{}")
    with refuses(CheckpointError, "ollama:smollm2:latest", "tensor", "json", "GGUF"):
        ollama_model("smollm2")
    manifest = pull(folder, PLACES[0], {})
    content = json.loads(manifest.read_text())
    content["layers"] *= 2
    manifest.write_text(json.dumps(content))
    with refuses(CheckpointError, "ollama:smollm2:latest", "2 GGUF files"):
        ollama_model("smollm2")


def test_damaged_folders(folder: Path) -> None:
    manifest = pull(folder, PLACES[0])
    file = ollama_model("smollm2").file
    file.write_bytes(b"cut")
    with refuses(CheckpointError, "ollama:smollm2:latest", str(file), "3 bytes", "ollama pull"):
        ollama_model("smollm2")
    file.unlink()
    with refuses(CheckpointError, "ollama:smollm2:latest", str(file), "ollama pull"):
        ollama_model("smollm2")
    content = json.loads(manifest.read_text())
    content["layers"][0]["digest"] = "sha256:../../../etc/passwd"
    manifest.write_text(json.dumps(content))
    with refuses(CheckpointError, "ollama:smollm2:latest", "passwd"):
        ollama_model("smollm2")
    for text in (
        "",
        "[]",
        "{}",
        '{"layers": 3}',
        '{"layers": [3]}',
        '{"layers": [{}]}',
        "[" * 9999,
    ):
        manifest.write_text(text)
        with refuses(CheckpointError, "ollama:smollm2:latest", str(manifest)) as refusal:
            ollama_model("smollm2")
        assert "\n" not in str(refusal.value)
    manifest.unlink()
    os.mkfifo(manifest)
    with refuses(CheckpointError, "ollama:smollm2:latest", str(manifest), "FIFO"):
        ollama_model("smollm2")


def test_the_folder_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    pull(tmp_path / ".ollama" / "models", PLACES[0])
    assert ollama_model("smollm2").file.is_relative_to(tmp_path)


def test_a_fetched_model_answers_and_what_is_not_read_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pull(folder, PLACES[0], model=tiny_bytes())
    with caplog.at_level("WARNING", logger="freight"):
        llm = LLM("ollama:smollm2", kv_cache_memory="1MiB", max_model_len=64)
    assert "template" in caplog.text
    (result,) = llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 3
