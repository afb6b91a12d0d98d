"""The models of `freight serve --models`: a folder, a file, and what is refused before anything is
loaded.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from freight.cli.several import declared_models, limits_of
from freight.errors import ConfigError
from freight.serve.settings import ServerSettings
from freight.settings.engine import EngineArgs

SERVER = ServerSettings(reasoning_parser="qwen3")
ARGS = EngineArgs(max_num_seqs=8)


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir()
        (path / name / "config.json").write_text("{}")
    return path


def file_of(path: Path, text: str) -> Path:
    file = path / "models.toml"
    file.write_text(text)
    return file


def test_a_folder_has_a_model_for_each_checkpoint_and_gguf_file(tmp_path: Path) -> None:
    folder_of(tmp_path, "b", "a", ".hidden")
    (tmp_path / "no-model").mkdir()
    for name in (
        "c-q4.gguf",
        "d-00001-of-00002.gguf",
        "d-00002-of-00002.gguf",
        "mmproj-c.gguf",
        "readme.md",
    ):
        (tmp_path / name).touch()
    models = declared_models(tmp_path, ARGS, SERVER)
    assert {model.name: model.args.model for model in models} == {
        "a": str(tmp_path / "a"),
        "b": str(tmp_path / "b"),
        "c-q4": str(tmp_path / "c-q4.gguf"),
        "d": str(tmp_path / "d-00001-of-00002.gguf"),
    }
    assert all(model.args.max_num_seqs == 8 for model in models)
    assert all(model.settings(SERVER).reasoning_parser == "qwen3" for model in models)


def test_a_file_has_a_table_for_each_with_options_of_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path, "a")
    file = file_of(
        tmp_path,
        """
        ["a-fast"]
        path = "a"
        default = true
        kv_cache_dtype = "fp8"
        max_num_seqs = 2
        max_step_seconds = 1
        max_model_len = "1K"
        speculate = "auto"
        served_model_name = ["claude"]
        chat_template = "own.jinja"

        [demo]
        path = "demo"

        [hub]
        path = "org/name"
        enable_lora = true
        lora_modules = ["sql=./sql"]
        """,
    )
    fast, demo, hub = declared_models(file, ARGS, SERVER)
    assert fast.args == replace(
        ARGS,
        model=str(tmp_path / "a"),
        kv_cache_dtype="fp8",
        max_num_seqs=2,
        max_step_seconds=1.0,
        max_model_len=1024,
        speculate="auto",
    )
    assert fast.is_default
    assert fast.names == ("a-fast", "claude")
    assert fast.chat_template == tmp_path / "own.jinja"
    assert demo.args == ARGS
    assert not demo.is_default
    assert hub.args.model == "org/name"
    assert hub.all_names == ("hub", "sql")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]\nkv_cache_dtype = 'fp8'", r"\[a\]: path must name the model"),
        ("[a]\npath = './none'", r"\[a\]: path is './none', and there is no"),
        ("[a]\npath = 'a'\nmax_num_seq = 1", r"'max_num_seq' \(did you mean max_num_seqs\?\)"),
        ("[a]\npath = 'a'\nctx_size = 1", r"unknown option 'ctx_size'.*max_model_len"),
        ("[a]\npath = 'a'\nmodel = 'b'", r"'model' \(did you mean path\?\)"),
        ("[a]\npath = 'a'\nport = 1", "unknown option 'port'"),
        ("[a]\npath = 'a'\nmax_num_seqs = 'two'", "max_num_seqs is 'two'; it must be a whole"),
        ("[a]\npath = 'a'\nmax_model_len = 'long'", "max_model_len: 'long' is not a number"),
        ("[a]\npath = 'a'\nmax_num_seqs = true", "max_num_seqs is True; it must be a whole"),
        ("[a]\npath = 'a'\nkv_cache_dtype = 'fp9'", r"\[a\]: --kv-cache-dtype 'fp9' is unknown"),
        ("[a]\npath = 'a'\ndefault = 1", "default is 1; it must be true or false"),
        ("[a]\npath = 'a'\n[b]\npath = 'a'\nserved_model_name = 'a'", "two models are called 'a'"),
        ("[a]\npath='a'\ndefault=true\n[b]\npath='a'\ndefault=true", "'a' and 'b' are both the"),
        ("[a]\npath = 'a'\nchat_template = 3", "chat_template is 3; it must be a path"),
        (f"[a]\npath = '{'x' * 5000}'", "which cannot be one: .*too long"),
        ("[a]\npath = '~no-such-user/x'", "which cannot be one"),
        ("[a]\npath = 'a'\nx = " + "[" * 5000, "cannot be read"),
        ("[qwen2.5-7b]\npath = 'a'", r'write a name that has a dot in quotes: \["qwen2.5-7b"\]'),
        ("[a.b.c]\npath = 'a'", r'in quotes: \["a.b.c"\]'),
        ("[a.b]\nkv_cache_dtype = 'fp8'", r"\[a\]: path must name the model"),
        ("[' ']\npath = 'a'", "a model is called ' '; names are printable"),
        ('["a\\nb"]\npath = "a"', r"a model is called 'a\\nb'; names are printable"),
        ("path = 'a'", "path is no table"),
        ("[a", "cannot be read"),
        ("", "declares no model"),
    ],
)
def test_what_a_file_has_wrong_is_refused_in_words(text: str, says: str, tmp_path: Path) -> None:
    folder_of(tmp_path, "a")
    with pytest.raises(ConfigError, match=says):
        declared_models(file_of(tmp_path, text), ARGS, SERVER)


@pytest.mark.parametrize(
    ("args", "server", "says"),
    [
        (EngineArgs(model="m"), SERVER, "MODEL is 'm' and --models is given"),
        (EngineArgs(tokenizer="t"), SERVER, "--tokenizer is one model's"),
        (EngineArgs(nnodes=2), SERVER, "--models is for one machine"),
        (ARGS, ServerSettings(names=("x",)), "--served-model-name is one model's"),
    ],
)
def test_options_of_one_model_are_no_default_of_all(
    args: EngineArgs, server: ServerSettings, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        declared_models(folder_of(tmp_path, "a"), args, server)


def test_a_file_that_begins_with_a_mark_of_its_encoding_is_read(tmp_path: Path) -> None:
    file = file_of(tmp_path, "\ufeff[a]\npath = 'demo'")
    assert [model.name for model in declared_models(file, ARGS, SERVER)] == ["a"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    folder_of(tmp_path, "a")
    assert [model.name for model in declared_models(tmp_path, ARGS, SERVER)] == ["a"]
    with pytest.raises(ConfigError, match="cannot be read"):
        declared_models(tmp_path / "pipe.gguf", ARGS, SERVER)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has neither a sub-folder"):
        declared_models(tmp_path, ARGS, SERVER)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"models_memory": "much"}, "--models-memory 'much' is not an amount of memory"),
        ({"models_max": 0}, "--models-max is 0"),
        ({"models_turn": -1.0}, "--models-turn is -1.0"),
    ],
)
def test_limits_out_of_range_are_refused(changed: dict[str, object], says: str) -> None:
    given = {"models_memory": "1GiB", "models_max": 2, "models_turn": 1.0}
    assert limits_of(given).memory == 2**30
    with pytest.raises(ConfigError, match=says):
        limits_of(given | changed)
