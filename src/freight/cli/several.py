"""The models of `freight serve --models`: those in a folder, or in a TOML file with a table for each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freight.base.fields import JsonDict
from freight.base.files import read_text
from freight.base.options import require_known
from freight.base.other_engines.instead import instead_of
from freight.cli.options import ENGINE_FLAGS, NODES, Flag, Values, read_value
from freight.errors import ConfigError, shown
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check, parse_memory

if TYPE_CHECKING:
    from freight.serve.settings import ServerSettings
    from freight.serve.several.declared import DeclaredModel, ModelLimits

_OWN = ("tokenizer", "revision", "lora_modules")  # of one model, and no default of all
_OF_SERVER = (  # options of the server that are a model's own
    Flag("served_model_name", list[str], ""),
    Flag("chat_template", Path | None, ""),
    Flag("tool_call_parser", str | None, ""),
    Flag("reasoning_parser", str | None, ""),
)
_PART = re.compile(r"-(\d{5})-of-\d{5}$")  # of a GGUF file in parts
_NOT_A_MODEL = "mmproj"  # how llama.cpp's files of vision encoders begin


def declared_models(
    source: Path, args: EngineArgs, server: ServerSettings
) -> tuple[DeclaredModel, ...]:
    """Return the models of a folder or a file; `args` and `server` are the defaults of all. Raises
    ConfigError.
    """
    _check_defaults(args, server)
    if source.is_dir():
        models = tuple(_of_folder(source, args, server))
        nothing = "has neither a sub-folder with a config.json nor a *.gguf file"
    else:
        models = tuple(_of_file(source, args, server))
        nothing = "declares no model: write a table for each, [NAME] with path"
    if not models:
        raise ConfigError(f"--models {source} {nothing}")
    _check_names(source, models)
    return models


def limits_of(values: Values) -> ModelLimits:
    """Return the limits for the values of MODELS_FLAGS. Raises ConfigError."""
    from freight.serve.several.declared import ModelLimits

    memory = parse_memory(
        values["models_memory"], "--models-memory", "; omit it for a share of the free memory"
    )
    if values["models_max"] < 1:
        raise ConfigError(f"--models-max is {values['models_max']}; it must be 1 or more")
    if not values["models_turn"] >= 0:
        raise ConfigError(f"--models-turn is {values['models_turn']}; it must be 0 or more")
    return ModelLimits(memory, values["models_max"], values["models_turn"])


def _check_defaults(args: EngineArgs, server: ServerSettings) -> None:
    if args.model != "demo":
        raise ConfigError(f"MODEL is {args.model!r} and --models is given: give one of the two")
    if args.nnodes > 1:
        raise ConfigError("--models is for one machine: omit --nnodes")
    if server.names:
        raise ConfigError(
            "--served-model-name is one model's: put it into the table of --models FILE"
        )
    for is_given, flag in (
        (server.kv_events is not None, "--kv-events-config"),
        (server.enable_weight_updates, "--enable-weight-updates"),
    ):
        if is_given:
            raise ConfigError(f"{flag} is for a server of one model: omit it, or omit --models")
    for field in fields(EngineArgs):
        if field.name in _OWN and getattr(args, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"{flag} is one model's: put it into the table of --models FILE")


def _of_folder(folder: Path, args: EngineArgs, server: ServerSettings) -> Iterator[DeclaredModel]:
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith("."):
            continue
        if path.is_dir():
            if (path / "config.json").is_file():
                yield _declared(name, replace(args, model=str(path)), server)
        elif path.suffix == ".gguf" and path.is_file() and not name.startswith(_NOT_A_MODEL):
            part = _PART.search(path.stem)
            if part is None or int(part[1]) == 1:
                yield _declared(_PART.sub("", path.stem), replace(args, model=str(path)), server)


def _of_file(file: Path, args: EngineArgs, server: ServerSettings) -> Iterator[DeclaredModel]:
    try:
        tables = tomllib.loads(read_text(file, "utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--models {file} cannot be read: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"--models {file}: {name} is no table; write [NAME] before the options"
            )
        try:
            yield _of_table(name, table, file.parent, args, server)
        except ConfigError as error:
            raise ConfigError(f"--models {file}: [{name}]: {error}") from None


def _of_table(
    name: str, table: JsonDict, folder: Path, args: EngineArgs, server: ServerSettings
) -> DeclaredModel:
    flags = {flag.field: flag for flag in (*ENGINE_FLAGS, *_OF_SERVER) if flag.field not in NODES}
    values = dict(table)
    path = values.pop("path", None)
    is_default = values.pop("default", False)
    if not isinstance(path, str) or not path.strip():
        _check_dots(name, table)
        raise ConfigError("path must name the model: a folder, a GGUF file, a hub id or 'demo'")
    if not isinstance(is_default, bool):
        raise ConfigError(f"default is {shown(is_default)}; it must be true or false")
    for option in values:
        instead = None if option in flags else instead_of(option)
        if instead is not None:
            raise ConfigError(f"unknown option {option!r}: {instead}")
    require_known(values, ["path", "default", *flags], {"model": "path"})
    read = {option: read_value(flags[option], value) for option, value in values.items()}
    own = {flag.field: read.pop(flag.field) for flag in _OF_SERVER if flag.field in read}
    if own.get("chat_template") is not None:
        own["chat_template"] = folder / own["chat_template"]
    also = tuple(own.pop("served_model_name", ()))
    args = replace(args, model=_path(path, folder), **read)
    check(args)
    declared = _declared(name, args, server)
    return replace(declared, also=also, is_default=is_default, **own)


def _check_dots(name: str, table: JsonDict) -> None:
    """Raise ConfigError for a name with dots and without quotes, of which TOML makes tables in tables."""
    whole = name
    while len(table) == 1:
        part, table = next(iter(table.items()))
        whole = f"{whole}.{part}"
        if not isinstance(table, dict):
            return
        if "path" in table:
            raise ConfigError(f'write a name that has a dot in quotes: ["{whole}"]')


def _path(path: str, folder: Path) -> str:
    """Return the path of a model that a file in `folder` names; a hub id and 'demo' stay."""
    if path == "demo":
        return path
    try:
        named = folder / Path(path).expanduser()
        exists = named.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or of a user that there is not
        raise ConfigError(f"path is {shown(path)}, which cannot be one: {error}") from None
    is_path = path.startswith((".", "/", "~")) or path.endswith(".gguf") or exists
    if is_path and not exists:
        raise ConfigError(f"path is {shown(path)}, and there is no {named}")
    return str(named) if is_path else path


def _declared(name: str, args: EngineArgs, server: ServerSettings) -> DeclaredModel:
    from freight.serve.several.declared import DeclaredModel

    return DeclaredModel(
        name,
        args,
        chat_template=server.chat_template,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
    )


def _check_names(source: Path, models: tuple[DeclaredModel, ...]) -> None:
    seen: set[str] = set()
    for model in models:
        for name in model.all_names:
            if not name.strip() or not name.isprintable():
                raise ConfigError(
                    f"--models {source}: a model is called {shown(name)}; names are printable and not empty"
                )
            if name in seen:
                raise ConfigError(
                    f"--models {source}: two models are called {shown(name)}; give each a name of its own"
                )
            seen.add(name)
    defaults = [model.name for model in models if model.is_default]
    if len(defaults) > 1:
        raise ConfigError(
            f"--models {source}: {' and '.join(map(shown, defaults))} are both the default; choose one"
        )
