"""A model's config.json, and its tensors' dtype if that names none, for questions without weights.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from freight.base.fields import JsonObject
from freight.base.files import read_object
from freight.base.gguf import read_gguf
from freight.checkpoint.gguf.describe import GGUFModel, describe
from freight.checkpoint.gguf.hub import file_on_hub, header_on_hub, numbers_on_hub
from freight.checkpoint.gguf.ollama import PREFIX, ollama_model
from freight.checkpoint.gguf.places import gguf_in, is_gguf
from freight.checkpoint.headers import read_header
from freight.checkpoint.stored_dtype import safetensors_in, stored_in_folder, stored_on_hub
from freight.errors import CheckpointError, ConfigError, first_line, nearest
from freight.fp8.formats import Format
from freight.model.config.dtype import names_dtype
from freight.model.config.presets import PRESETS, is_preset, preset


def read_config_only(
    model: str, revision: str | None = None
) -> tuple[JsonObject, JsonObject | None]:
    """Read (config.json, ModelOpt's hf_quant_config.json if the folder has it) of `model`.

    `model` is a preset ('llama-8b', 'llama-8b:4'), 'demo', a folder, the path of a config.json, or
    a hub id, of which only config.json is fetched. Raises CheckpointError if there is none,
    ConfigError for a revision of anything but a hub id.
    """
    path = local_path(model)
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
    modelopt = file.with_name("hf_quant_config.json")
    return _object(file), _object(modelopt) if modelopt.is_file() else None


def gguf_model(model: str, revision: str | None = None) -> GGUFModel | None:
    """Describe the GGUF file that `model` names, from its header: a file, a folder that has one,
    'ollama:NAME', or 'OWNER/NAME:FILE.gguf' on the hub, of which the header alone is fetched.

    None for any other model. Raises CheckpointError for a file that is not read.
    """
    if model.startswith(PREFIX):
        return describe(read_gguf(ollama_model(model).file))
    path = local_path(model)
    if path.is_dir() and not is_preset(model):
        path = gguf_in(path) or path
    if path.is_file():
        return describe(read_gguf(path)) if is_gguf(path) else None
    repository, _, wanted = model.partition(":")
    if not wanted or is_preset(model):
        return None
    file = file_on_hub(repository, wanted, revision)
    header = header_on_hub(repository, file, revision)
    return describe(header, numbers_on_hub(repository, revision))


def tensors_dtype(model: str, config: JsonObject, revision: str | None = None) -> Format | None:
    """Return the dtype of the tensors that belong to `config`, the config.json of `model`, from
    their headers.

    The headers are read only where config.json names no dtype: from the folder, or from the hub by
    range requests. None: config.json names one, or the headers cannot be read.
    """
    path = local_path(model)
    if names_dtype(config) or is_preset(model):
        return None
    if path.is_file():
        return stored_in_folder(path.parent) if path.name == "config.json" else None
    return stored_in_folder(path) if path.is_dir() else stored_on_hub(model, revision)


def tensor_dtypes(model: str) -> dict[str, str] | None:
    """Return the dtype of each tensor beside the config.json of `model`, as safetensors names it, from
    the headers of a local folder; None where there are no such files. Raises CheckpointError for
    damaged ones.
    """
    path = local_path(model)
    if is_preset(model) or not path.exists():
        return None
    files = safetensors_in(path if path.is_dir() else path.parent)
    if not files:
        return None
    dtypes = {}
    for file in files:
        for name, entry in read_header(file).items():
            dtypes[name] = entry.dtype
    return dtypes


def local_path(model: str) -> Path:
    """Return the path that `model` names if it is no hub id; for 'demo' the folder of that model."""
    if model == "demo":
        return Path(__file__).resolve().parent.parent / "demo"
    try:
        return Path(model).expanduser()
    except RuntimeError:  # '~name' of a user that this machine does not have
        return Path(model)


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
    # Not hf_hub_download, which retries for half a minute without a network
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=["config.json"])
    except Exception as error:  # the client's own errors, and whatever its network stack raises
        raise CheckpointError(
            f"{model!r} is neither a preset, a folder, a config.json nor a model whose config.json could be fetched "
            f"from the Hugging Face hub{hint}; check the name and the connection, or give a config.json "
            f"({first_line(error)})"
        ) from error
    return Path(folder) / "config.json"
