"""ServerSettings: the options of `freight serve` besides those of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError
from freight.serve.answers.call_families import check_parser
from freight.serve.observe.kv_events import KVEventsConfig
from freight.serve.observe.traces import read_endpoint
from freight.serve.processes.pulse import STALL_TIMEOUT


@dataclass(frozen=True)
class ServerSettings:
    """The options of the server. Raises ConfigError for a value out of its range.

    names            names that clients use for the model; empty: the name it was loaded by
    port             0 takes a free one
    api_keys         'KEY' or 'NAME:KEY' each
    ssl_certfile     a certificate (chain) in PEM, and ssl_keyfile its key: serve HTTPS
    insecure         serve a public address without a key
    max_queue        completions that wait in addition to those that run; beyond them 429
    request_timeout  seconds from arrival to the end of an answer; None: no limit
    write_timeout    seconds without the client reading its answer, after which its connection is
                     dropped
    template_timeout seconds that the chat template may take for one conversation, and the compiler
                     for one grammar
    max_events_per_second  of one stream: tokens that come faster share an event; 0: an event for
                           every step
    drain_timeout    seconds that running requests have after SIGTERM
    restart_engine   start a new engine process when one exits or stalls, instead of exiting
    stall_timeout    seconds without a sign of life after which the engine's process counts as
                     stalled; 0: never
    chat_template    a file with a Jinja template to use instead of the model's own
    tool_call_parser, reasoning_parser  names of `call_families`; None: by the model's chat template
    reasoning_budget tokens of thoughts that an answer has at most, unless its request says otherwise;
                     None or -1: no limit
    unknown_fields   'refuse' or 'ignore': request fields that no API of this server has
    strict_schemas   refuse a JSON schema that a grammar can enforce only in part, instead of
                     reporting the ignored keywords
    tokenizer_info   serve /tokenizer_info
    enable_weight_updates  serve /pause, /sleep, /update_weights_from_disk and what belongs to them
    allow_origins    origins whose web pages may call the server (CORS)
    old_metrics      also export the names that older dashboards read
    kv_events_config  what `kv_events` is read from: a JSON object
    otlp_traces_endpoint  where a span for each request is sent, a URL of OTLP over HTTP; None: nowhere
    """

    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    shared_prefix_cache: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: str | None = None
    insecure: bool = False
    max_queue: int = 256
    max_connections: int = 1024
    request_timeout: float | None = None
    write_timeout: float = 60.0
    template_timeout: float = 10.0
    max_events_per_second: float = 50.0
    drain_timeout: float = 30.0
    restart_engine: bool = False
    stall_timeout: float = STALL_TIMEOUT
    chat_template: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_budget: int | None = None
    enable_auto_tool_choice: bool = False  # no effect: always on here; other servers need the flag
    unknown_fields: str = "refuse"
    strict_schemas: bool = False
    tokenizer_info: bool = False
    enable_weight_updates: bool = False
    allow_origins: tuple[str, ...] = ()
    old_metrics: bool = False
    log_format: str = "text"
    kv_events_config: str | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"--port is {self.port}; it must be 0 to 65535, where 0 takes a free one"
            )
        for name, least in (
            ("max_queue", 0),
            ("max_connections", 1),
            ("drain_timeout", 0),
            ("stall_timeout", 0),
            ("max_events_per_second", 0),
        ):
            if not getattr(self, name) >= least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must be {least} or more")
        for name in ("request_timeout", "write_timeout", "template_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {seconds}; it must be more than 0 seconds"
                )
        if self.reasoning_budget is not None and self.reasoning_budget < -1:
            raise ConfigError(
                f"--reasoning-budget is {self.reasoning_budget}; it must be -1 or more; -1 is no limit"
            )
        if self.reasoning_budget == -1:
            object.__setattr__(self, "reasoning_budget", None)
        check_parser("--tool-call-parser", self.tool_call_parser)
        check_parser("--reasoning-parser", self.reasoning_parser)
        if self.unknown_fields not in ("refuse", "ignore"):
            raise ConfigError(
                f"--unknown-fields is {self.unknown_fields!r}; it must be refuse or ignore"
            )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"--log-format is {self.log_format!r}; it must be text or json")
        self.kv_events  # noqa: B018  # refuses what cannot be read
        if self.otlp_traces_endpoint is not None:
            read_endpoint(self.otlp_traces_endpoint)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How KV events are published; None: they are not. Raises ConfigError."""
        if self.kv_events_config is None:
            return None
        config = KVEventsConfig.read(self.kv_events_config)
        return config if config.is_on else None
