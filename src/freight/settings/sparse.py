"""Contexts in which attention is sparse: with which settings they run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from freight.errors import ConfigError
from freight.model.config.latent import beyond_dense
from freight.model.config.model import ModelConfig
from freight.settings.engine import EngineArgs

KERNELS = "reference"  # the value of --kernels whose set has the operations (`KernelSet.sparse`)


def for_context(model: ModelConfig, args: EngineArgs, device: str) -> ModelConfig:
    """Return `model` as `args` ask for it: with indexers if --max-model-len is more than its
    `dense_limit` and --kernels has sparse attention; `model` itself otherwise, whose limit `resolve`
    holds.

    device: 'cpu' or 'cuda'. Raises ConfigError for what does not run in such contexts, and CheckpointError
    as `beyond_dense`.
    """
    limit = model.dense_limit
    length = args.max_model_len
    if limit is None or length is None or length <= limit or args.kernels != KERNELS:
        return model
    for what, way_out in _obstacles(model, args, device):
        raise ConfigError(
            f"--max-model-len {length} is more than index_topk = {limit} of config.json: sparse attention does not run "
            f"with {what} yet; {way_out}, or use at most {limit}"
        )
    return beyond_dense(model)


def _obstacles(model: ModelConfig, args: EngineArgs, device: str) -> Iterator[tuple[str, str]]:
    """Yield what does not run beside sparse attention, and how it is left out."""
    size = args.pipeline_parallel_size
    if size > 1:
        yield f"--pipeline-parallel-size {size}", "omit it"
    if device != "cpu":
        yield "a GPU", "use --device cpu"
    if args.enable_lora or args.lora_modules:
        yield "adapters (--enable-lora)", "omit them"
    if args.attention_compute == "fp8":
        yield "--attention-compute fp8", "omit it"
    if model.pooling is not None:
        yield f"pooling ({model.pooling.source})", "use --pooling none"
