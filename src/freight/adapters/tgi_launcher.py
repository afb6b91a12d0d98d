"""`freight --model-id MODEL …`: TGI's launcher. It is `freight serve`, and also takes TGI's flags
and variables.

A command line that begins with an option has this form. A flag of TGI that does what one of ours
does is passed on under our name. TGI's variables (`MODEL_ID`, `KV_CACHE_DTYPE`, `PORT`, …) rank
below `FREIGHT_…` and flags. `HOSTNAME` is not among them, because every container sets it. What is
ignored without harm is named at start; anything else is refused. No verb reads these variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import typer
from typer.main import get_command

from freight.base.fields import JsonObject
from freight.base.other_engines.instead import SHORT, as_flag, spelled
from freight.base.other_engines.tgi import TGI_OPTIONS
from freight.cli.options import CONTEXT, Command, Values, replace_parameter
from freight.cli.serve import serve
from freight.errors import ConfigError

_NOT_READ = ("hostname", "env")  # as variables
_INTEGERS = (
    *("port", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "speculate"),
    *("tensor_parallel_size", "master_port"),
)
_LISTS = ("api_key", "allow_origin")


@dataclass
class LauncherRequest:
    """What flags and variables of TGI ask for.

    argv          the command line with our names
    defaults      our options -> values, from variables
    variables     our options -> the variables that their defaults come from, as shown to the user
    concurrent    requests that run or wait at most
    unused        flags and variables that are ignored, with the reason
    """

    argv: list[str] = field(default_factory=list)
    defaults: Values = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    concurrent: tuple[str, int] | None = None
    unused: list[str] = field(default_factory=list)


def launch(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Serve as `argv` and TGI's variables in `environ` say. Raises ConfigError; ends by SystemExit."""
    request = read(argv, environ)

    def build(values: Values) -> Values:
        ctx: typer.Context = values["ctx"]
        _check_form(ctx, values)
        _apply_concurrent(ctx, values, request)
        _say(ctx, request)
        return {"model": None}

    settings = {**CONTEXT, "allow_extra_args": True}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=Command, context_settings=settings)(
        replace_parameter(serve, "model", [], build)
    )
    get_command(app).main(args=request.argv, prog_name="freight", default_map=request.defaults)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> LauncherRequest:
    """TGI's flags and variables, in our names. Raises ConfigError for what Freight cannot do."""
    request = LauncherRequest()
    flags = set()
    tokens = iter(argv)
    for token in tokens:
        name, value = _flag(token, tokens)
        if name is None:
            request.argv.append(token)
        else:
            flags.add(name)
            _take_flag(request, name, value)
    for name in TGI_OPTIONS:
        value = environ.get(name.upper(), "")
        if value and name not in flags and name not in _NOT_READ:
            _take_variable(request, name, value)
    return request


def _flag(token: str, tokens: Iterator[str]) -> tuple[str | None, str]:
    """(name, value) of a flag that only TGI has, whose value may be the next token; (None, '') for
    any other token.
    """
    spelling, equals, value = token.partition("=")
    is_short = token in SHORT["TGI"]
    if not is_short and not token.startswith("--"):
        return None, ""
    name = SHORT["TGI"].get(token, spelling.removeprefix("--").replace("-", "_"))
    if name not in TGI_OPTIONS or (TGI_OPTIONS[name].field == name and not is_short):
        return None, ""
    if TGI_OPTIONS[name].switch:
        return name, value or "true"
    if not equals:
        value = next(tokens, "")
    if not value:
        raise ConfigError(f"{token} needs a value")
    return name, value


def _take_flag(request: LauncherRequest, name: str, value: str) -> None:
    option = TGI_OPTIONS[name]
    if value in option.asks:
        return
    if name == "lora_adapters":
        request.argv.append("--enable-lora")
        for module in _modules(as_flag(name), value):
            request.argv += [as_flag("lora_modules"), module]
    elif option.field is not None:
        request.argv += [as_flag(option.field), value]
    elif name == "json_output":
        request.argv += ["--log-format", "json"]
    elif name == "max_concurrent_requests":
        request.concurrent = as_flag(name), _count(as_flag(name), value)
    else:
        _pass_over(request, name, as_flag(name), value)


def _take_variable(request: LauncherRequest, name: str, value: str) -> None:
    option = TGI_OPTIONS[name]
    variable = name.upper()
    if value.lower() in option.asks:
        return
    if name == "json_output":
        ours = "log_format"
        request.defaults["log_format"] = "json"
    elif name == "max_concurrent_requests":
        if request.concurrent is None:
            request.concurrent = variable, _count(variable, value)
        return
    elif option.field is not None:
        if option.field in _INTEGERS and not value.isdecimal():
            raise ConfigError(f"{variable} {value!r} must be an integer")
        ours = option.field
        request.defaults[option.field] = value
        if name == "lora_adapters":
            request.defaults["enable_lora"] = True
            request.defaults[option.field] = _modules(variable, value)
        if option.field in _LISTS:
            request.defaults[option.field] = value.split(",")
    else:
        _pass_over(request, name, variable, value)
        return
    request.variables[ours] = variable
    if name != "api_key":
        request.variables[ours] += f"={value}"


def _modules(spelling: str, value: str) -> list[str]:
    """Return TGI's list of adapters, 'ID,NAME=PATH', as the texts of --lora-modules; an id is its own
    name. Raises ConfigError for a revision, which adapters have none of here.
    """
    modules = []
    for text in value.split(","):
        name, equals, path = text.strip().partition("=")
        path = path if equals else name
        if "@" in path:
            raise ConfigError(
                f"{spelling} {value}: an adapter's revision cannot be chosen; download it, and give its folder"
            )
        modules.append(json.dumps({"name": name, "path": path}))
    return modules


def _pass_over(request: LauncherRequest, name: str, spelling: str, value: str) -> None:
    """Note what is ignored. Raises ConfigError where that would break a promise."""
    option = TGI_OPTIONS[name]
    instead = spelled(option.instead, as_flag)
    if not option.harmless:
        written = spelling
        if not option.switch:
            written += f" {value}"
        raise ConfigError(f"{written}: {instead}")
    request.unused.append(f"{spelling} ({instead.removesuffix(': omit it')})")


def _count(spelling: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{spelling} {value!r} must be an integer ≥ 1")
    return int(value)


def _check_form(ctx: typer.Context, values: JsonObject) -> None:
    if ctx.args:
        raise ConfigError(
            f"{ctx.args[0]!r}: a command line that begins with an option is TGI's and takes options only; a verb comes "
            "first, as in freight generate demo --prompt TEXT"
        )
    if not values["model_id"] and values["random_weights"] is None:
        raise ConfigError("a server needs --model-id MODEL; freight --help lists the verbs")


def _apply_concurrent(ctx: typer.Context, values: Values, request: LauncherRequest) -> None:
    """Requests that run (`max_num_seqs`) and those that wait (`max_queue`) become TGI's number
    together.
    """
    if request.concurrent is None:
        return
    spelling, count = request.concurrent
    source = _source(ctx, "max_queue")
    if source == "COMMANDLINE" and spelling.startswith("--"):
        raise ConfigError(
            f"{spelling} and --max-queue both bound the requests that wait: give one of the two"
        )
    if source == "COMMANDLINE" or (source == "ENVIRONMENT" and not spelling.startswith("--")):
        return
    values["max_num_seqs"] = min(values["max_num_seqs"], count)
    values["max_queue"] = count - values["max_num_seqs"]
    if not spelling.startswith("--"):
        request.variables[""] = f"{spelling}={count}"


def _say(ctx: typer.Context, request: LauncherRequest) -> None:
    """Print one line on stderr: which variables of TGI act, and what is ignored."""
    acting = []
    for ours, source in request.variables.items():
        if not ours or _source(ctx, ours) == "DEFAULT_MAP":
            acting.append(source)
    parts = []
    if acting:
        parts.append(f"from TGI's variables: {', '.join(acting)}")
    if request.unused:
        parts.append(f"not used: {', '.join(request.unused)}")
    if parts:
        typer.echo(f"freight: {'; '.join(parts)}", err=True)


def _source(ctx: typer.Context, name: str) -> str:
    """Say where the value of an option comes from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP or
    DEFAULT.
    """
    source = ctx.get_parameter_source(name)
    if source is None:
        return "DEFAULT"
    return source.name
