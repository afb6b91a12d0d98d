"""A model's config.json, and the dtype of its tensors where that names none: for questions that
need no weights.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from freight.checkpoint.stored_dtype import stored_in_folder, stored_on_hub
from freight.config.dtype import names_dtype
from freight.config.fields import JsonObject
from freight.config.presets import PRESETS, is_preset, preset
from freight.errors import CheckpointError, ConfigError, nearest
from freight.files import read_object
from freight.fp8.formats import Format


def read_config_only(
    model: str, revision: str | None = None
) -> tuple[JsonObject, JsonObject | None]:
    """(config.json, ModelOpt's hf_quant_config.json if it lies beside it) of `model`.

    That is a preset ('llama-8b', 'llama-8b:4'), 'demo', a folder, the path of a config.json, or a
    hub id, of which config.json alone is fetched. Raises CheckpointError where there is none,
    ConfigError for a revision of what has none.
    """
    path = _path(model)
    is_local = is_preset(model) or (bool(model) and path.exists())
    if is_local and revision is not None:
        raise ConfigError(
            f"--revision {revision}: {model} is not on the hub, only a hub id has revisions; omit it"
        )
    if is_preset(model):
        return preset(model), None
    if not is_local:
        return _object(_fetched(model, revision)), None
    file = path / "config.json" if path.is_dir() else path
    beside = file.with_name("hf_quant_config.json")
    return _object(file), _object(beside) if beside.is_file() else None


def tensors_dtype(model: str, config: JsonObject, revision: str | None = None) -> Format | None:
    """The dtype of the tensors beside `config`, which is the config.json of `model`, from their
    headers.

    They are read where config.json names no dtype: from the folder, or from the hub by range
    requests. None: it names one, or the headers cannot be had.
    """
    path = _path(model)
    if names_dtype(config) or is_preset(model):
        return None
    if path.is_file():
        return stored_in_folder(path.parent) if path.name == "config.json" else None
    return stored_in_folder(path) if path.is_dir() else stored_on_hub(model, revision)


def _path(model: str) -> Path:
    return (
        Path(__file__).resolve().parent.parent / "demo"
        if model == "demo"
        else Path(model).expanduser()
    )


def _object(file: Path) -> JsonObject:
    try:
        return read_object(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error


def _fetched(model: str, revision: str | None) -> Path:
    hint = nearest(model, PRESETS)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
        raise CheckpointError(f"there is no folder or config.json {model!r}{hint}")
    from huggingface_hub import (
        snapshot_download,
    )  # hf_hub_download tries for half a minute without a network

    try:
        return (
            Path(snapshot_download(model, revision=revision, allow_patterns=["config.json"]))
            / "config.json"
        )
    except Exception as error:  # the client's own errors, and whatever its network stack raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{model!r} is neither a preset, a folder, a config.json nor a model whose config.json could be fetched "
            f"from the Hugging Face hub{hint}; check the name and the connection, or give a config.json "
            f"({type(error).__name__}: {reason})"
        ) from error
