"""The options of ranks on several machines (nodes): --nnodes and what it needs. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from freight.base.fields import is_integer, is_number
from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.settings.engine import EngineArgs

MOST_JOIN_SECONDS = 1_000_000
# What each machine has its own of: where the model lies, and what it computes with
OWN = (
    *("model", "tokenizer", "skip_tokenizer_init", "quantization_param_path"),
    *("threads", "rank_cpus", "node_rank", "master_addr", "master_port", "join_timeout"),
    "max_step_seconds",  # of rank 0's scheduler, and a server has another default
)


def check_nodes(args: EngineArgs) -> None:
    """Raise ConfigError for options of several machines that are wrong, or contradict each other."""
    for name, value, least, most in (
        ("--nnodes", args.nnodes, 1, None),
        ("--node-rank", args.node_rank, 0, None),
        ("--master-port", args.master_port, 1, 65535),
    ):
        if not is_integer(value) or value < least or (most is not None and value > most):
            limit = ""
            if most is not None:
                limit = f", at most {most}"
            raise ConfigError(f"{name} {value!r} must be an integer ≥ {least}{limit}")
    seconds = args.join_timeout
    if not is_number(seconds) or not 0 < seconds <= MOST_JOIN_SECONDS:
        raise ConfigError(
            f"--join-timeout {seconds!r} must be seconds above 0, at most {MOST_JOIN_SECONDS:,}"
        )
    if args.nnodes > 1:
        _check_several(args)
    elif args.node_rank:
        raise ConfigError(
            f"--node-rank {args.node_rank} is for several machines: add --nnodes, or omit it"
        )


def _check_several(args: EngineArgs) -> None:
    nodes = args.nnodes
    size = args.tensor_parallel_size
    if size % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: each machine has as many ranks as the others, so --tensor-parallel-size must be a "
            f"multiple of {nodes}, and is {size}"
        )
    if args.node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {args.node_rank}: {nodes} machines have the numbers 0 to {nodes - 1}"
        )
    if not isinstance(args.master_addr, str) or not args.master_addr.strip():
        raise ConfigError(
            f"--nnodes {nodes}: add --master-addr, the address at which the others reach the machine with --node-rank 0"
        )
    if args.kv_store is not None:
        raise ConfigError(
            f"--kv-store {args.kv_store}: rank 0 maps the caches of the others, which it cannot on another machine; "
            "omit it, or --nnodes"
        )


def given(args: EngineArgs) -> dict[str, Any]:
    """Return the options as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(args), default=str))
    return values


def differences(args: EngineArgs, theirs: Mapping[str, Any]) -> list[str]:
    """Say which options of another machine, `theirs`, differ from rank 0's `args`, beside its own."""
    texts = []
    for name, ours in given(args).items():
        other = theirs.get(name)
        if name not in OWN and other != ours:
            flag = name.replace("_", "-")
            texts.append(f"--{flag} is {other!r}, that of rank 0 {ours!r}")
    return texts


def with_own(args: EngineArgs, theirs: Mapping[str, Any]) -> EngineArgs:
    """Return rank 0's `args` with what another machine has its own of."""
    return replace(args, **{name: theirs[name] for name in OWN if name in theirs})
