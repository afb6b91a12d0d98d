"""`make real MODEL=…`: one table of what caches and formats of weights cost any model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import published
import pytest
import real_model
import real_tables
import real_text
from package_files import digest_of
from published import Quality
from real_tables import (
    CACHES,
    WEIGHTS,
    Judged,
    Settings,
    Sizes,
    cache_memories,
    evaluate_command,
    main,
    settings_for,
    speed_commands,
    window_for,
)
from tests.tiny_gguf import write_tiny
from tests.unit.cli.conftest import freight

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.report import plain_config
from freight.lab.evaluate.safety import MIN_UNITS
from freight.model.open import OpenModel, open_model
from freight.settings.engine import EngineArgs

__all__ = ["freight"]  # the fixture is used by tests here

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "src" / "freight" / "demo")
PROSE = "\n\n".join(
    f"Question {n}: what is {n} times {n + 1}? It is {n * n + n}." for n in range(40)
)


@pytest.fixture
def in_process(
    freight: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> list[Sequence[str]]:
    """Commands run in this process, and are listed; what is fetched would go to `tmp_path`."""
    commands: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> tuple[bool, str]:
        commands.append(arguments)
        capsys.readouterr()  # what the tool printed is none of the command's output
        answer = freight(*arguments)
        assert answer.code == 0, answer.err
        return True, answer.out

    monkeypatch.setattr(real_tables, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return commands


@pytest.mark.usefixtures("in_process")
def test_a_gguf_file_in_one_table_and_as_data(tmp_path: Path) -> None:
    """Its weights are decoded to 16 bits, once, so that formats of weights can be compared."""
    file = write_tiny(tmp_path / "tiny.gguf")
    text = tmp_path / "prose.txt"
    text.write_text(PROSE)
    argv = [str(file), "--data", str(text), "--tokens", "96", "--caches", "token,tensor,e5m2"]
    argv += ["--weights", "int8,mxfp4", "--out", str(tmp_path / "out")]
    main([*argv, "--calibration-data", str(text), "--publish", str(tmp_path / "data")])
    (result,) = published.read_all(Quality, tmp_path / "data")
    settings = [(row.weights, row.cache) for row in result.rows]
    assert settings == [
        *(("as stored", cache) for cache in ("16 bits", "token", "tensor", "e5m2")),
        *((weights, cache) for weights in ("int8", "mxfp4") for cache in ("16 bits", "token")),
    ]
    assert all(row.kl > 0 and row.kl_interval is not None for row in result.rows[1:])
    assert result.text.window == 8
    assert result.text.num_units >= MIN_UNITS
    assert result.text.calibration == "prose.txt"
    assert result.model.title == "tiny.gguf"
    assert "--caches token,tensor,e5m2" in result.command
    assert str(tmp_path) not in result.command
    tables = (tmp_path / "out/tables.md").read_text()
    assert tables.count("| as stored ") == 4
    assert "Noise of computing in 16 bits: mean KL" in tables
    assert (tmp_path / "out/report/report.html").exists()
    folder = tmp_path / "cache/freight/models"
    (decoded,) = folder.iterdir()
    assert real_model.sixteen_bits(file, folder) == decoded
    assert list(folder.iterdir()) == [decoded]


def test_tables_of_speed_when_they_are_asked_for(
    in_process: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo is judged by its own text: nothing is fetched."""
    monkeypatch.setattr(real_tables, "OUTPUT", 4)
    out = tmp_path / "out"
    argv = [DEMO, "--tokens", "32", "--caches", "token", "--weights", "none", "--out", str(out)]
    main([*argv, "--speed", "--requests", "2", "--repeats", "1"])
    tables = (out / "tables.md").read_text()
    assert [arguments[0] for arguments in in_process] == ["evaluate", "bench", "bench", "bench"]
    for row in ("| as stored | token ", "| fp8_e4m3fn |", "decode_tokens_per_second"):
        assert row in tables
    assert (out / "cache-gain.svg").exists()
    assert not (tmp_path / "cache/freight/models").exists()


def test_one_run_measures_caches_and_weights(tmp_path: Path) -> None:
    judged = Judged("prose", Path("text"), "others", Path("other"))
    command = evaluate_command(
        "m", judged, Settings(CACHES, WEIGHTS), 4096, tmp_path / "report", noise=True
    )
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert {"e5m2", "int8", "unit", "centered"} < set(options["--caches"].split(","))
    assert options["--weights"] == ",".join(WEIGHTS)
    assert (options["--max-tokens"], options["--window"]) == ("4096", "341")
    assert (options["--data"], options["--calibration-data"]) == ("text", "other")


@pytest.mark.parametrize(("tokens", "window"), [(4096, 341), (600, 50), (50_000, 1024), (2, 2)])
def test_windows_are_as_long_as_intervals_allow(tokens: int, window: int) -> None:
    assert window_for(tokens) == window


def of_device(opened: OpenModel, device: str, **changes: Any) -> Settings:
    config = replace(plain_config(opened), device=device)
    facts = SimpleNamespace(model=opened.model, scheme=opened.scheme, **changes)
    return settings_for(cast("OpenModel", facts), config, CACHES, WEIGHTS)


def test_what_kernels_do_not_have_is_left_out_with_a_line() -> None:
    opened = open_model(EngineArgs(model=DEMO))
    assert of_device(opened, "cpu") == Settings(CACHES, WEIGHTS)
    settings = of_device(opened, "cuda")
    assert "int8" not in settings.caches + settings.weights
    assert {"token", "e5m2"} < set(settings.caches)
    assert "fp8-channel" in settings.weights
    assert [line.partition(": the")[0] for line in settings.left_out] == [
        "Left out: int8",
        "Left out: int8, int4-32-a16",
    ]


def test_weights_that_are_quantized_are_not_rounded_again(tiny_fp8: Path) -> None:
    opened = open_model(EngineArgs(model=str(tiny_fp8)))
    settings = of_device(opened, "cpu")
    assert settings.weights == ()
    assert "quantized already" in settings.left_out[0]


@pytest.fixture
def tiny_fp8(freight: Callable[..., Any], tmp_path: Path) -> Path:
    assert freight("quantize", DEMO, str(tmp_path / "fp8"), "--weights", "fp8").code == 0
    return tmp_path / "fp8"


def test_a_folder_of_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    source = resolve_model(str(tmp_path))
    model = real_tables.described(str(tmp_path), source)
    assert source == file
    assert (model.title, model.sha256) == (tmp_path.name, digest_of(file))
    assert real_tables.described(DEMO, Path(DEMO)).origin == "a folder"
    assert real_tables.described("org/name", tmp_path).origin == "the Hugging Face hub"


def test_the_smaller_memory_binds():
    """It holds two requests of a 16-bit cache and no third one; the larger holds all."""
    request = real_tables.INPUT + real_tables.OUTPUT
    small, large = (memory // 100 for memory in cache_memories(100, 16, 64))
    assert 2 * request <= small < 3 * request
    assert large >= 64 * request


def test_both_memories_are_compared():
    (_, gain), *_ = speed_commands("m", Path("out"), Sizes(2, 1), (1, 2))
    assert [gain[n + 1] for n, part in enumerate(gain) if part == "--compare-memory"] == ["1", "2"]


def test_what_fails_is_counted_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        real_tables, "run", lambda arguments: (arguments[0] != "evaluate", "said\n")
    )
    with pytest.raises(SystemExit, match="1 of the commands failed"):
        main([DEMO, "--speed", "--out", str(tmp_path)])
    tables = (tmp_path / "tables.md").read_text()
    assert tables.count("said") == 4
    assert tables.count("This command failed") == 1


def test_progress_of_a_command_is_seen(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """What it says on stderr is not held back; what it prints is the table's."""
    code = "import sys; print('table'); print('10 %, about 3 s left', file=sys.stderr)"
    monkeypatch.setattr(real_tables, "FREIGHT", [sys.executable, "-c", code])
    assert real_tables.run([]) == (True, "table\n")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "10 %, about 3 s left\n")


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for option in ("--data", "--calibration-data"):
        with pytest.raises(SystemExit, match=f"{option} .*none is no file"):
            main([DEMO, option, str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        main([DEMO, "--tokens", "1"])
    assert "perplexity needs at least 2" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text(PROSE)
    with pytest.raises(SystemExit, match="there is no folder"):
        main([str(tmp_path / "nowhere"), "--data", str(text)])


def test_the_texts_are_fetched_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = real_text.Texts("prose", tmp_path / "a", "others", tmp_path / "b")
    monkeypatch.setattr(real_text, "fetch", lambda *_: texts)
    args = real_tables.parsed(["org/name"])
    judged = Judged("prose", tmp_path / "a", "others", tmp_path / "b")
    assert real_tables.judged_for(args, "org/name") == judged


def test_make_passes_the_model_and_the_options():
    argv = [
        "make",
        "--dry-run",
        "--assume-old=setup",
        "real",
        "MODEL=org/name",
        "OPTIONS=--tokens 9",
    ]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'tools/real_tables.py "org/name" --tokens 9' in said
