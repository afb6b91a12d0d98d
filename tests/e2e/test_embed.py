"""`freight embed` and `freight evaluate embeddings` on a tiny model with random weights."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pooling_models import save_body
from tests.refusals import assert_names, refuses

from freight import LLM
from freight.base.text_lines import read_lines
from freight.cli.embed_files import EmbeddingFile, npy_header
from freight.cli.main import main
from freight.errors import ConfigError
from freight.lab.evaluate.embeddings import compare
from freight.pooling import PoolingParams

TEXTS = [f"text {index}: {'word ' * (index % 7)}end" for index in range(40)]
OPTIONS = ["--kv-cache-memory", "8MiB", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_body(tmp_path_factory.mktemp("model"), hidden_size=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["freight", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def expected(model: Path, params: PoolingParams | None = None) -> np.ndarray:
    llm = LLM(str(model), kv_cache_memory="8MiB")
    outputs = llm.embed(TEXTS, pooling_params=params)
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)


@pytest.mark.parametrize("ending", [".npy", ".jsonl"])
def test_a_run_that_is_killed_writes_the_same_bytes(
    tmp_path: Path, model: Path, source: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / f"whole{ending}"
    assert run(monkeypatch, "embed", source, whole, model, *OPTIONS) == 0
    parted = tmp_path / f"parted{ending}"
    embed = LLM.embed
    calls: list[int] = []

    def killed(self: LLM, texts: Any, **options: Any) -> Any:
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(self, texts, **options)

    monkeypatch.setattr(LLM, "embed", killed)
    assert run(monkeypatch, "embed", source, parted, model, *OPTIONS) != 0
    part = tmp_path / f"parted{ending}.part"
    assert not parted.exists()
    with part.open("ab") as file:  # a row that was being written
        file.write(b"\x01\x02\x03")
    monkeypatch.setattr(LLM, "embed", embed)
    # an option that changes speed alone does not begin anew
    assert run(monkeypatch, "embed", source, parted, model, *OPTIONS[:2], "--max-num-seqs", 3) == 0
    assert parted.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["texts.txt", whole.name, parted.name]
    )
    if ending == ".npy":
        rows = np.load(whole, mmap_mode="r")
    else:
        lines = whole.read_text().splitlines()
        rows = np.array([json.loads(line)["embedding"] for line in lines], dtype=np.float32)
    np.testing.assert_array_equal(rows, expected(model))


def test_rows_of_weights_that_were_replaced_are_not_mixed(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = save_body(tmp_path / "model", hidden_size=64)
    embed = LLM.embed
    calls: list[int] = []

    def killed(self: LLM, texts: Any, **options: Any) -> Any:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return embed(self, texts, **options)

    out = tmp_path / "out.npy"
    monkeypatch.setattr(LLM, "embed", killed)
    assert run(monkeypatch, "embed", source, out, own, *OPTIONS) != 0
    monkeypatch.setattr(LLM, "embed", embed)
    weights = own / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(0, 0))
    capsys.readouterr()
    assert run(monkeypatch, "embed", source, out, own, *OPTIONS) == 2
    assert_names(capsys.readouterr().err, "out.npy.part", "another model")


def test_options_of_embeddings(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    out = tmp_path / "out.npy"
    options = ["--field", "body", "--dimensions", 8, "--no-normalize"]
    assert run(monkeypatch, "embed", source, out, model, *OPTIONS, *options) == 0
    params = PoolingParams(dimensions=8, normalize=False)
    np.testing.assert_array_equal(np.load(out), expected(model, params))


def test_what_embed_refuses(
    tmp_path: Path,
    model: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert run(monkeypatch, "embed", *arguments, *OPTIONS) == 2
        return capsys.readouterr().err

    assert_names(refused(source, tmp_path / "out.csv", model), "OUT", ".npy", ".jsonl")
    (tmp_path / "there.npy").touch()
    assert_names(refused(source, tmp_path / "there.npy", model), "there.npy", "exists")
    assert_names(refused(source, tmp_path / "a.npy", "demo"), "--pooling", "mean")
    long = tmp_path / "long.txt"
    long.write_text("short\n" + "word " * 400 + "\n")
    assert_names(refused(long, tmp_path / "a.npy", model), "line 2", "256")
    assert_names(refused(source, tmp_path / "a.npy", model, "--prompt-name", "x"), "x", "prompt")
    assert not [*tmp_path.glob("a.npy*")]
    assert run(monkeypatch, "embed", long, tmp_path / "a.npy", model, "--truncate", *OPTIONS) == 0
    assert np.load(tmp_path / "a.npy").shape == (2, 64)


def test_rows_of_another_run_are_refused(tmp_path: Path) -> None:
    from array import array

    out = tmp_path / "out.npy"
    row = array("f", [1.0, 2.0])
    with EmbeddingFile(out, ["a", "b"], "options") as file:
        file.write([row])
    for texts, options in ((["a", "c"], "options"), (["a", "b"], "others")):
        with refuses(ConfigError, "out.npy.part", "out.npy.part.json"):
            EmbeddingFile(out, texts, options)
    with EmbeddingFile(out, ["a", "b"], "options") as file:
        assert file.num_done == 1
        with refuses(ConfigError, "another run"):
            EmbeddingFile(out, ["a", "b"], "options")
        file.write([row])
        file.finish()
    np.testing.assert_array_equal(np.load(out), [[1, 2], [1, 2]])
    other = tmp_path / "other.npy"
    np.save(other, np.zeros((3, 5), np.float32))
    assert other.read_bytes().startswith(npy_header(3, 5))


def test_a_full_disk(
    tmp_path: Path,
    model: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows of 256 bytes find room for a file of 4 KiB alone; what is there is continued."""
    out = tmp_path / "out.npy"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal, so that a write fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        status = run(monkeypatch, "embed", source, out, model, *OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert status not in (0, 2)
    said = capsys.readouterr().err
    assert_names(said, "OUT", str(out), f"{out}.part", "cannot be written", "make room")
    assert not out.exists()
    assert run(monkeypatch, "embed", source, out, model, *OPTIONS) == 0
    np.testing.assert_array_equal(np.load(out), expected(model))


def test_lines_that_are_refused(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.txt", "", ["no line"]),
        ("a.txt", "a\n\nb\n", ["line 2", "empty"]),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', ["line 2", "text", "body", "--field"]),
        ("a.jsonl", "{\n", ["line 1", "JSON"]),
        ("a.jsonl", "3\n", ["line 1", "int"]),
    ):
        (tmp_path / name).write_text(content)
        with refuses(ConfigError, name, *said):
            read_lines(tmp_path / name, f"IN {name}")
    (tmp_path / "a.txt").write_text("a\r\nb")
    assert read_lines(tmp_path / "a.txt", "IN") == ["a", "b"]


def test_evaluate_embeddings(
    tmp_path: Path,
    model: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["evaluate", "embeddings", model, "--data", source, *OPTIONS]
    assert run(monkeypatch, *arguments, "--weights", f"int8,int4,{model}/", "--json") == 0
    int8, int4, same = json.loads(capsys.readouterr().out)["weights"]
    assert int8["weights"] == "int8"
    assert int8["texts"] == len(TEXTS)
    for name in ("cosine", "cosine_p5", "cosine_min", "overlap", "spearman", "same_top"):
        assert same[name] == pytest.approx(1, abs=1e-6)
    assert same["cosine"] > int8["cosine"] > int4["cosine"] > 0.5
    assert run(monkeypatch, *arguments, "--weights", "int8") == 0
    assert_names(capsys.readouterr().out, "weights", "Spearman", "int8", "10")
    for options in (["--weights", "int3"], ["--quantization", "fp8"]):
        assert run(monkeypatch, *arguments, *options) == 2
        assert_names(capsys.readouterr().err, *options)


def test_comparisons_are_those_of_scipy() -> None:
    """Spearman with ties, and the other figures by hand."""
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    left = torch.nn.functional.normalize(torch.randn(300, 4).round(decimals=0) + 0.1, dim=-1)
    right = torch.nn.functional.normalize(left + 0.1 * torch.randn(300, 4), dim=-1)
    score = compare("x", left, right)
    correlations, shared, same = [], [], []
    for index in range(300):
        others = [other for other in range(300) if other != index]
        first, second = (left[index] @ left[others].T, right[index] @ right[others].T)
        correlations.append(stats.spearmanr(first.numpy(), second.numpy()).statistic)
        nearest = [set(row.topk(10).indices.tolist()) for row in (first, second)]
        shared.append(len(nearest[0] & nearest[1]) / 10)
        same.append(int(first.argmax()) == int(second.argmax()))
    assert score.spearman == pytest.approx(float(np.mean(correlations)), abs=0.01)
    assert score.overlap == pytest.approx(float(np.mean(shared)), abs=0.05)
    assert score.same_top == pytest.approx(float(np.mean(same)), abs=0.05)
    cosines = (left.double() * right.double()).sum(-1)
    assert score.cosine_p5 == pytest.approx(float(np.percentile(cosines.numpy(), 5)))
