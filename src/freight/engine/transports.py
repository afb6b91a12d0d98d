"""How ranks gather whose kernels are called from Python: over torch.distributed, and between GPUs of
one host by kernels that write into each other's memory.

Every rank makes its own transport, from what rank 0 decided (`Start.backend` and `.slot_bytes`).
"""

from __future__ import annotations

import logging

import torch
from torch._C._distributed_c10d import Store

from freight.engine.graphs import bucket_of
from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, LayerConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.parallel.distributed import NCCL, Distributed
from freight.parallel.push import Pushed
from freight.parallel.ranks import Transport
from freight.settings.engine import EngineArgs, EngineConfig

MOST_ROWS = 64  # of a gather that is pushed; longer ones take so long that a launch does not count
_LOGIT_BYTES = 4

logger = logging.getLogger("freight")


def obstacle_to_pushing(args: EngineArgs, config: EngineConfig) -> str:
    """Say which setting keeps ranks from writing into each other's memory; '' if none does."""
    if config.device == "cpu":
        return "ranks are on CPUs"
    if args.disable_custom_all_reduce:
        return "--disable-custom-all-reduce"
    if args.nnodes > 1:
        return f"--nnodes {args.nnodes}: GPUs of several machines do not reach each other's memory"
    if args.pipeline_parallel_size > 1:
        return f"--pipeline-parallel-size {args.pipeline_parallel_size}: each rank has several GPUs"
    return ""


def slot_bytes(model: ModelConfig, config: EngineConfig, size: int) -> int:
    """Return the bytes of the largest gather that is pushed: `MOST_ROWS` rows, or those of the largest
    captured step, with the columns of all ranks. model: the whole one.
    """
    rows = min(bucket_of(config.max_num_seqs), MOST_ROWS)
    columns = [model.hidden_size]
    for layer in model.layers:
        columns += _columns(model, layer)
    logits = -(-model.vocab_size // size) * size
    return rows * max(_LOGIT_BYTES * logits, config.compute_format.bytes * max(columns))


def _columns(model: ModelConfig, layer: LayerConfig) -> list[int]:
    """Return how many columns of a row a layer gathers before its last products."""
    columns = []
    if layer.mixer is not None:
        *_, out = layer.mixer.parts(model.hidden_size, tensor_names(model)).projections.values()
        columns.append(out.columns)
    mlp = layer.feed_forward
    if isinstance(mlp, MoEConfig):
        columns.append(mlp.routing.top_k * mlp.intermediate_size)
        mlp = mlp.shared
    if isinstance(mlp, DenseConfig):
        columns.append(mlp.intermediate_size)
    return columns


def transport(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    address: str,
    backend: str,
    slot_bytes: int,
) -> Transport:
    """Return a rank's transport. Arguments: those of `Distributed`. slot_bytes: of the largest gather
    that is pushed; 0 if none is.
    """
    group = Distributed(store, rank, size, timeout, address, backend)
    if not slot_bytes:
        return group
    from freight.kernels.triton.push import push  # Triton takes long, and CPUs do without
    from freight.parallel.device_memory import open_peers

    device = torch.device("cpu")  # in Triton's interpreter
    if backend == NCCL:
        device = torch.device("cuda", torch.cuda.current_device())
    return Pushed(
        store,
        rank,
        size,
        device,
        slot_bytes,
        timeout,
        group=group,
        push=push,
        open_peers=open_peers,
    )


def log_transport(transport: Transport, obstacle: str) -> None:
    """Say how ranks gather that have met. obstacle: the setting because of which none pushes."""
    if isinstance(transport, Pushed) and transport.pushes:
        logger.info(
            "gathers of up to %.3g MiB: kernels write into the memory of all GPUs; larger ones: NCCL",
            transport.slot_bytes / 2**20,
        )
        return
    if isinstance(transport, Pushed):
        obstacle = transport.refused
    logger.info("all gathers: NCCL (%s)", obstacle)
