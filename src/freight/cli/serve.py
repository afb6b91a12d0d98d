"""`freight serve`: a server for the clients of OpenAI's API and of TGI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.base.start_log import log_to_stderr
from freight.cli.options import (
    Flag,
    Function,
    Values,
    check_random_weights,
    option,
    replace_parameter,
    takes_engine_options,
)
from freight.errors import ConfigError, install
from freight.settings.engine import EngineArgs

if TYPE_CHECKING:
    from freight.serve.processes.client import WorkerOptions
    from freight.serve.settings import ServerSettings

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")

SERVER_FLAGS = (
    Flag("host", str, "Where to listen.", "ADDRESS", default="127.0.0.1"),
    Flag("port", int, "Where to listen; 0 takes a free one.", "PORT", default=8000),
    Flag(
        "served_model_name",
        list[str],
        "What clients call the model; may be repeated.",
        "NAME",
        default=[],
    ),
    Flag(
        "api_key", list[str], "A key that clients need; may be repeated.", "[NAME:]KEY", default=[]
    ),
    Flag("api_key_file", Path | None, "Keys, one a line.", "FILE"),
    Flag(
        "shared_prefix_cache",
        bool,
        "Clients with different keys share cached prefixes.",
        default=False,
    ),
    Flag("ssl_certfile", Path | None, "Serve HTTPS with this certificate (chain), in PEM.", "FILE"),
    Flag("ssl_keyfile", Path | None, "Its key, in PEM; default: in the same file.", "FILE"),
    Flag(
        "ssl_keyfile_password", str | None, "Of an encrypted key; rather in the variable.", "TEXT"
    ),
    Flag("insecure", bool, "Listen on a public address without a key.", default=False),
    Flag(
        "max_queue",
        int,
        "Completions that may wait beside those that run; then 429.",
        "COUNT",
        default=256,
    ),
    Flag("max_connections", int, "Open connections at most.", "COUNT", default=1024),
    Flag("request_timeout", float | None, "Longest time for one answer.", "SECONDS"),
    Flag(
        "write_timeout",
        float,
        "Longest time in which a client reads nothing of its answer.",
        "SECONDS",
        default=60.0,
    ),
    Flag(
        "template_timeout",
        float,
        "Longest time for one chat template or grammar.",
        "SECONDS",
        default=10.0,
    ),
    Flag(
        "max_events_per_second",
        float,
        "Events of one stream; faster tokens share one. 0: any.",
        "RATE",
        default=50.0,
    ),
    Flag(
        "drain_timeout", float, "Time for running answers after SIGTERM.", "SECONDS", default=30.0
    ),
    Flag(
        "restart_engine",
        bool,
        "Start a new engine when its process ends or is stalled, instead of ending.",
        default=False,
    ),
    Flag(
        "stall_timeout",
        float,
        "Silence after which the engine is stalled; 0: any.",
        "SECONDS",
        default=60.0,
    ),
    Flag(
        "chat_template",
        Path | None,
        "A Jinja file to use instead of the model's own template.",
        "FILE",
    ),
    Flag(
        "tool_call_parser",
        str | None,
        "The form of tool calls; else the chat template decides.",
        "NAME",
    ),
    Flag(
        "reasoning_parser",
        str | None,
        "The form of reasoning; else the chat template decides.",
        "NAME",
    ),
    Flag(
        "reasoning_budget",
        int | None,
        "Tokens of reasoning an answer has at most; -1: no limit.",
        "COUNT",
    ),
    Flag(
        "enable_auto_tool_choice",
        bool,
        "Accepted and always so: tools need no option.",
        default=False,
    ),
    Flag(
        "unknown_fields",
        str,
        "What to do with unknown fields of requests.",
        "refuse|ignore",
        default="refuse",
    ),
    Flag(
        "strict_schemas",
        bool,
        "Refuse JSON schemas that a grammar cannot enforce whole.",
        default=False,
    ),
    Flag(
        "enable_tokenizer_info_endpoint",
        bool,
        "Answer /tokenizer_info, which shows the chat template.",
        default=False,
    ),
    Flag(
        "enable_weight_updates",
        bool,
        "Answer /pause, /sleep and /update_weights_from_disk.",
        default=False,
    ),
    Flag(
        "allow_origin",
        list[str],
        "Web pages of this origin may call; may be repeated.",
        "ORIGIN",
        default=[],
    ),
    Flag(
        "old_metrics",
        bool,
        "Export metrics also under the names that older dashboards read.",
        default=False,
    ),
    Flag(
        "kv_events_config",
        str | None,
        "Publish what the cache gains and loses, for routers.",
        "JSON",
    ),
    Flag(
        "otlp_traces_endpoint",
        str | None,
        "Send a span for each request to this collector, by OTLP over HTTP.",
        "URL",
    ),
    Flag("log_format", str, "How the log is written.", "text|json", default="text"),
)


MODELS_FLAGS = (
    Flag(
        "models",
        Path | None,
        "Several models in one server: those of a folder or of a TOML file.",
        "DIR|FILE",
    ),
    Flag("models_memory", str | None, "Weights and caches of all loaded models.", "BYTES|24GiB"),
    Flag("models_max", int, "Models that are loaded at once.", "COUNT", default=4),
    Flag(
        "models_turn",
        float,
        "Time that a busy model keeps its place while another waits.",
        "SECONDS",
        default=30.0,
    ),
)


def require_packages(verb: str) -> None:
    """Raise ConfigError where the packages are missing that `verb` shares with a server."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"freight {verb} needs {', '.join(missing)}: {install('server')}")


def takes_server_options(names: Sequence[str]) -> Callable[[Function], Function]:
    """Replace the command's parameter `server: dict` by those options of the server, by their
    names.
    """
    return _takes([flag for flag in SERVER_FLAGS if flag.field in names], "server")


def _takes(flags: Sequence[Flag], parameter: str) -> Callable[[Function], Function]:
    """Replace the command's `parameter: dict` by these options."""

    def build(values: Values) -> Values:
        return {parameter: {flag.field: values.pop(flag.field) for flag in flags}}

    def replaced(command: Function) -> Function:
        options = [flag.parameter(flag.default, flag.envvar) for flag in flags]
        return replace_parameter(command, parameter, options, build)

    return replaced


@partial(takes_engine_options, without=())
@_takes(MODELS_FLAGS, "several")
@takes_server_options([flag.field for flag in SERVER_FLAGS])
def serve(
    args: EngineArgs,
    server: Values,
    several: Values,
    random_weights: Annotated[
        str | None,
        option("SHAPE", "Random weights of a known shape, to measure: llama-1b, …"),
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, TGI's, metrics and a page."""
    if several["models"] is not None:
        raise typer.Exit(_serve_several(args, server, several, random_weights))
    if random_weights is not None:
        check_random_weights(args.model, random_weights)  # before anything is started
    if args.node_rank:
        raise typer.Exit(_join(args, random_weights, server["restart_engine"]))
    if server["enable_weight_updates"] and args.tensor_parallel_size > 1:
        raise ConfigError(
            f"--enable-weight-updates: weights of several ranks do not change, and --tensor-parallel-size is "
            f"{args.tensor_parallel_size}; leave it out, and start again for other weights"
        )
    require_packages("serve")
    from freight.serve.lifecycle import run

    settings = settings_of(server)
    raise typer.Exit(run(settings, worker_options(args, settings, random_weights)))


def _serve_several(
    args: EngineArgs, server: Values, several: Values, random_weights: str | None
) -> int:
    """Serve several models; return the exit status."""
    from freight.cli.several import declared_models, limits_of

    if random_weights is not None:
        raise ConfigError(
            f"--random-weights is {random_weights!r} and --models is given: give one of the two"
        )
    require_packages("serve")
    from freight.serve.several.serve import run_several

    settings = settings_of(server)
    limits = limits_of(several)
    return run_several(settings, declared_models(several["models"], args, settings), limits)


def _join(args: EngineArgs, random_weights: str | None, again: bool) -> int:
    """Compute for rank 0 of another machine; return the exit status."""
    from freight.engine.node import join_rank_0
    from freight.serve.processes.children import SECRETS

    for name in SECRETS:  # the same environment may be given to all machines; ranks need no key
        os.environ.pop(name, None)
    log_to_stderr()
    return join_rank_0(args, random_weights, again)


def settings_of(server: Values) -> ServerSettings:
    """Return the settings for the values of SERVER_FLAGS, by their fields. Raises ConfigError."""
    from freight.serve.settings import ServerSettings

    values = dict(server)
    for name, field in _LISTS.items():
        values[name] = tuple(values.pop(field))
    values["tokenizer_info"] = values.pop("enable_tokenizer_info_endpoint")
    return ServerSettings(**values)


def worker_options(
    args: EngineArgs, settings: ServerSettings, random_weights: str | None = None
) -> WorkerOptions:
    """Return the options of the engine's process of a server."""
    from freight.serve.processes.client import WorkerOptions

    return WorkerOptions(
        {field.name: getattr(args, field.name) for field in fields(args)},
        random_weights,
        log_format=settings.log_format,
        events_per_second=settings.max_events_per_second,
        stall_timeout=settings.stall_timeout,
        cache_events=settings.kv_events is not None,
    )


# settings by option
_LISTS = {"names": "served_model_name", "api_keys": "api_key", "allow_origins": "allow_origin"}
