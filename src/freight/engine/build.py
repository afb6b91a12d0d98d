"""EngineArgs -> Engine, in the order that refuses early: names, headers, configuration, tokenizer; then weights.

Nothing of the weights is read before every setting has been decided and every scale checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from freight.cache.blocks import BlockAllocator
from freight.cache.pool import KVPool, allocate_pool, same_cache_at_16_bits
from freight.cache.spec import KVCacheSpec
from freight.config.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.config.model import ModelConfig
from freight.device import DeviceFacts, probe
from freight.engine.engine import Engine
from freight.engine.graphs import DecodeGraphs
from freight.engine.intake import Intake
from freight.engine.runner import ModelRunner
from freight.engine.scheduler import Scheduler
from freight.errors import CapacityError
from freight.fp8.formats import Format
from freight.models.architectures import ARCHITECTURES
from freight.models.loader import tensor_shapes
from freight.models.open import OpenModel, open_model

logger = logging.getLogger("freight")

BeforeWeights = Callable[[Intake], object]  # refuses, by raising, what the model could not serve

# Of what is free once the weights are loaded, when --kv-cache-memory is not given; a GPU is rarely shared.
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


def build_engine(args: EngineArgs, before_weights: BeforeWeights | None = None) -> tuple[Engine, EngineConfig]:
    """`start_engine` of the model that `args` names."""
    return start_engine(open_model(args), before_weights)


def start_engine(opened: OpenModel, before_weights: BeforeWeights | None = None) -> tuple[Engine, EngineConfig]:
    """Make an opened model ready to serve.

    `before_weights` is called once all is known but the weights. Raises what it raises, and ConfigError,
    CheckpointError or CapacityError, before weights are read wherever that is decidable.
    """
    args = opened.args
    config = opened.resolve(args)
    spec = opened.cache_spec(config)
    if config.kv_cache_memory is not None:
        _check_memory(config.kv_cache_memory, _weight_bytes(opened.model, config), opened.device)
        config = _fit_context(spec, config.kv_cache_memory, config, args)
    tokenizer = opened.load_tokenizer()
    if before_weights is not None:
        before_weights(Intake(tokenizer, opened.model.vocab_size, config.max_model_len))
    decoder = opened.load(config)
    memory = config.kv_cache_memory
    if memory is None:
        useful = config.max_num_seqs * -(-config.max_model_len // config.block_size) * spec.bytes_per_block
        memory = min(memory_for_cache(config.device), useful)
        config = _fit_context(spec, memory, config, args)
    kernels = opened.kernels(config)
    rope = decoder.rope_tables
    pool = allocate_pool(spec, config.kv, spec.blocks_in(memory), kernels, config.device, rope)
    logger.info("%s", describe_cache(pool, config.kv, config.compute_format))
    if config.fp8_attention:
        logger.info("attention: products in FP8")

    allocator = BlockAllocator(pool.num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(allocator, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
    graphs = None
    if kernels.name == "triton":  # the reference asks lengths of the device while it runs, which no graph can
        graphs = DecodeGraphs(decoder, pool, config.max_num_seqs, config.max_model_len, config.device)
    runner = ModelRunner(decoder, pool, config.device, graphs)
    intake = Intake(tokenizer, opened.model.vocab_size, config.max_model_len)
    threads = opened.threads(config)
    return Engine(runner, allocator, scheduler, intake, opened.stop_token_ids(), config.seed, threads), config


def memory_for_cache(device: str) -> int:
    """Bytes that a cache would be given now on 'cpu' or 'cuda', if it could use them."""
    return int(probe(device).memory_free * MEMORY_SHARE[device])


def _fit_context(spec: KVCacheSpec, memory: int, config: EngineConfig, args: EngineArgs) -> EngineConfig:
    """The context has to fit into the cache. One that was asked for must; the model's own limit is lowered to fit."""
    tokens = spec.tokens_in(memory)
    if tokens >= config.max_model_len:
        return config
    if args.max_model_len is not None or tokens == 0:
        needed = -(-config.max_model_len // spec.block_size) * spec.bytes_per_block
        raise CapacityError(
            f"{memory:,} bytes of KV cache hold {tokens} tokens of {spec.bytes_per_token} bytes, in blocks of "
            f"{spec.block_size}; a context of {config.max_model_len} tokens (--max-model-len) does not fit. "
            f"Raise --kv-cache-memory to {-(-needed // 2**20)}MiB, or shorten it"
        )
    logger.info("context limited to the %d tokens that the KV cache holds", tokens)
    return replace(config, max_model_len=tokens)


def _weight_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes that the weights occupy at least: layers' matrices in the format they are kept in, the rest as computed."""
    names = ARCHITECTURES[model.architecture]
    matrix, other = min(config.weight_format.bytes, config.compute_format.bytes), config.compute_format.bytes
    return sum(
        math.prod(shape) * (matrix if len(shape) == 2 and name not in (names.embedding, names.head) else other)
        for name, shape in tensor_shapes(model).items()
    )


def _check_memory(asked: int, weights: int, device: DeviceFacts) -> None:
    """Pages are touched when they are first written, so a cache that is too large would end the process much later."""
    if asked + weights <= device.memory_free:
        return
    left = (device.memory_free - weights) // 2**20
    way_out = f"use at most {left}MiB, or omit it for a share of that" if left > 0 else "free memory first"
    raise CapacityError(
        f"--kv-cache-memory asks for {asked:,} bytes and the weights need {weights:,}, but of the {device.kind}'s "
        f"memory {device.memory_free:,} bytes are free; {way_out}"
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def describe_cache(pool: KVPool, kv: KVCacheConfig, compute_format: Format) -> str:
    """The line at start: format, granularity, source of the scales, tokens that fit, and what 16 bits would hold."""
    scales = f"{kv.granularity}, {kv.scale_source}" if kv.granularity else "none"
    note = f" ({kv.note})" if kv.note else ""
    memory = pool.num_blocks * pool.spec.bytes_per_block
    line = f"KV cache: {kv.format}; scales: {scales}{note}; {pool.capacity_tokens:,} tokens fit in {_mebibytes(memory)}"
    if kv.format.is_quantized:
        sixteen = compute_format if compute_format.bytes == 2 else Format.BFLOAT16
        line += f", {same_cache_at_16_bits(pool.spec, sixteen).tokens_in(memory):,} would in {sixteen}"
    return line
