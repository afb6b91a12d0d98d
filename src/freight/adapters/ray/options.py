"""The options of `build`: those of `freight serve` by their names, and those of the replicas.

`serve run freight.ray:app name=value` hands over texts, a configuration file of `serve deploy` hands
over numbers and lists. Both are read by the types of the options.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import yaml

from freight.base.fields import JsonDict, JsonObject
from freight.base.options import require_known
from freight.base.other_engines.instead import instead_of
from freight.cli.options import ENGINE_FLAGS, NODES, Flag, read_value, takes_text
from freight.cli.serve import SERVER_FLAGS, settings_of
from freight.errors import ConfigError
from freight.serve.settings import ServerSettings
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check

# options of `freight serve` that say how it listens, and how long it lives
_HOW = "Ray listens: http_options of Ray Serve"
_NOT_HERE = {
    **dict.fromkeys(("host", "port", "max_connections", "write_timeout"), _HOW),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"), _HOW),
    "insecure": "Ray listens, and nothing checks its address: give api_key or api_key_file",
    **dict.fromkeys(NODES, "all ranks of a replica are on one machine of Ray; leave it out"),
    "kv_events_config": "all replicas would take one endpoint, and the front knows prefixes by itself; leave it out",
    "enable_weight_updates": "a change would reach one replica of several: deploy the new weights; leave it out",
    "restart_engine": "a replica ends with its engine, and Ray starts another one",
}

REPLICA_FLAGS = (
    Flag("num_replicas", int, "Replicas, where their number is fixed."),
    Flag("min_replicas", int | None, "Replicas at least; with max_replicas their number varies."),
    Flag("max_replicas", int | None, "Replicas at most."),
    Flag("target_requests", float | None, "Running requests of a replica that are wanted."),
    Flag("upscale_delay", float, "Seconds of more load before there are more replicas."),
    Flag("downscale_delay", float, "Seconds of less load before there are fewer."),
    Flag("num_cpus", float | None, "Processors that Ray reserves for a rank; also its threads."),
    Flag("num_gpus", float, "GPUs that Ray reserves for a replica."),
    Flag("front_replicas", int, "Processes that clients' requests go through."),
    Flag("front_cpus", float, "Processors that Ray reserves for each of these."),
    Flag(
        "prefix_slack", int, "Requests that the replica with the prefix may have more than others."
    ),
)


@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are, and what each gets. Raises ConfigError.

    num_replicas     their number, where it is fixed
    min_replicas, max_replicas  the bounds of a number that follows the load; both or neither
    target_requests  running requests of a replica, beyond which there are more replicas; None: 0.8 of
                     `max_num_seqs`
    upscale_delay, downscale_delay  seconds for which the load must ask for more or fewer replicas
    num_cpus         processors that Ray reserves for each rank of a replica (`tensor_parallel_size`, 1
                     without it), and its OMP_NUM_THREADS, which is its number of threads without
                     `threads`; None: `threads`, or 1
    num_gpus         GPUs for a replica: one for each stage of each rank
    front_replicas   processes of the front
    front_cpus       processors that Ray reserves for each
    prefix_slack     requests that the replica with the longest prefix may have more than the least
                     busy one, and still gets the next
    """

    num_replicas: int = 1
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_requests: float | None = None
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    num_cpus: float | None = None
    num_gpus: float = 0.0
    front_replicas: int = 1
    front_cpus: float = 1.0
    prefix_slack: int = 4

    def __post_init__(self) -> None:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ConfigError("give both min_replicas and max_replicas, or num_replicas alone")
        if self.min_replicas is not None and self.max_replicas is not None:
            if not 1 <= self.min_replicas <= self.max_replicas:
                raise ConfigError(
                    f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                    "they must be 1 or more, in this order"
                )
            if self.num_replicas != 1:
                raise ConfigError("num_replicas is for a fixed number: leave it out, or the bounds")
        for name, least in (
            ("num_replicas", 1),
            ("front_replicas", 1),
            ("upscale_delay", 0),
            ("downscale_delay", 0),
            ("num_cpus", 0),
            ("num_gpus", 0),
            ("front_cpus", 0),
            ("prefix_slack", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if self.target_requests is not None and not self.target_requests > 0:
            raise ConfigError(f"target_requests is {self.target_requests}; it must be more than 0")


@dataclass(frozen=True)
class Options:
    """What a replica is made of."""

    engine: EngineArgs
    settings: ServerSettings
    replicas: ReplicaOptions

    @property
    def keyed(self) -> bool:
        """Whether each API key has a part of the prefix cache of its own."""
        settings = self.settings
        has_keys = bool(settings.api_keys) or settings.api_key_file is not None
        return has_keys and not settings.shared_prefix_cache


def read_options(options: JsonObject) -> Options:
    """Read the options of `build`. Raises ConfigError for an unknown name, with what to use instead,
    and for a value that its option does not take.
    """
    flags = {flag.field: flag for flag in (*ENGINE_FLAGS, *REPLICA_FLAGS)}
    flags |= {flag.field: flag for flag in SERVER_FLAGS}
    for name in options:
        if name in _NOT_HERE:
            raise ConfigError(f"{name} is an option of freight serve alone: {_NOT_HERE[name]}")
        if name in flags:
            continue
        instead = instead_of(name)
        if instead is not None:
            raise ConfigError(f"unknown option {name!r}: {instead}")
    require_known(options, ["model", *flags], {})
    values = {name: _read(flags[name], value) for name, value in options.items() if name != "model"}
    engine = EngineArgs(
        model=str(options.get("model", "demo")),
        **{flag.field: values[flag.field] for flag in ENGINE_FLAGS if flag.field in values},
    )
    check(engine)
    server = {flag.field: values.get(flag.field, flag.default) for flag in SERVER_FLAGS}
    names = [field.name for field in fields(ReplicaOptions)]
    replicas = ReplicaOptions(**{name: values[name] for name in names if name in values})
    _check_gpus(engine, replicas.num_gpus)
    return Options(engine, settings_of(server), replicas)


def _check_gpus(engine: EngineArgs, num_gpus: float) -> None:
    """Raise ConfigError unless a replica has as many GPUs as it computes on. One sees no others."""
    ranks = engine.tensor_parallel_size
    stages = engine.pipeline_parallel_size
    if ranks * stages == 1:
        return
    on_cpus = engine.device == "cpu" or (stages == 1 and engine.device == "auto")
    if num_gpus == ranks * stages or (num_gpus == 0 and on_cpus):
        return
    raise ConfigError(
        f"num_gpus is {num_gpus:g}, tensor_parallel_size {ranks}, pipeline_parallel_size {stages}: a replica computes "
        f"on one GPU for each stage of each rank; give num_gpus={ranks * stages}"
    )


def reserved(options: Options) -> JsonDict:
    """Return what Ray reserves for a replica, as options of its deployment. Ranks are processes of its
    engine, not actors of Ray, so all of them are on its machine: a placement group has a bundle for
    each, the first of which is the replica's own. All GPUs are in the replica's own, because a process
    sees those of its actor alone; one process computes on all stages of a rank.
    """
    ranks = options.engine.tensor_parallel_size
    num_cpus = options.replicas.num_cpus or options.engine.threads or 1
    num_gpus = options.replicas.num_gpus
    made: JsonDict = {"ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}}
    if ranks * options.engine.pipeline_parallel_size == 1:
        return made
    bundles = [{"CPU": num_cpus} for _ in range(ranks)]
    if num_gpus:
        bundles = [{"CPU": ranks * num_cpus, "GPU": num_gpus}]
    return made | {
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
    }


def _read(flag: Flag, value: object) -> Any:
    """Read a value by the type of its option, a number from a text as well. Raises ConfigError."""
    if isinstance(value, str) and not takes_text(flag):
        return read_value(flag, yaml.safe_load(value))
    return read_value(flag, value)
