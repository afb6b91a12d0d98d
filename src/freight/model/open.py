"""Opened checkpoints: config, scheme and KV scales are read and checked, weights are not.

Everything that runs a model opens it here: the engine, calibration, evaluation, benchmarks,
FP8Cache. `freight inspect` and `freight audit` read `Checkpoint` directly, because they also
describe models that cannot be run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from freight.base import openmp
from freight.base.fields import JsonObject
from freight.cache.spec import KVCacheSpec, cache_spec
from freight.checkpoint.held import HeldCheckpoint
from freight.checkpoint.kv_scales import read_kv_scales, read_scale_json
from freight.checkpoint.linears import dense_scheme
from freight.checkpoint.open import open_files, scheme_of
from freight.checkpoint.rank_export import refuse_to_run
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.errors import CheckpointError, ConfigError, choices, listed, shown
from freight.fp8.formats import Format
from freight.fp8.scheme import INT4_GROUP, KVScales, Scheme
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.model.config.dtype import DtypeSource, describe_dtype
from freight.model.config.mechanisms import refuse_mechanisms, refuse_other_encoders
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config, stop_token_ids
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.model.config.presets import shape_config
from freight.model.config.registry import FAMILIES
from freight.model.decoder import LanguageModel
from freight.model.feed_forward.expert_names import as_stored, present_experts, present_written
from freight.model.loader import load_model
from freight.model.pooling_files import gives_token_types, read_pooling
from freight.model.random_weights import random_model
from freight.model.shares import Share, share_of
from freight.model.sizes import (
    ForeignBytes,
    Layout,
    LinearOf,
    foreign_bytes,
    int4_online,
    online,
    stage_costs,
)
from freight.model.stored import with_stored_head
from freight.model.weight_bytes import weight_bytes
from freight.parallel.ranks import ALONE, Ranks
from freight.parallel.shards import scales_of_rank
from freight.parallel.stages import (
    Stage,
    StageCosts,
    require_stages,
    stage_counts,
    stages_of,
)
from freight.pooling import PoolingTask
from freight.settings.cpu_builds import FP8_IS_SLOW, build_in, multiplies_bfloat16
from freight.settings.device import (
    DeviceFacts,
    Threads,
    choose_threads,
    free_bytes,
    probe,
    require_one_kind,
    stage_devices,
)
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.kv_source import kv_source, uniform_scales
from freight.settings.resolve import check, resolve
from freight.settings.skip_layers import skipped_layers
from freight.settings.sparse import for_context
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose headers and scale tensors have been read and checked."""

    checkpoint: Checkpoint
    model: ModelConfig
    scheme: Scheme
    kv_scales: KVScales

    def uncentered_scales(self) -> KVScales:
        """Read the KV scales of the checkpoint's tensors alone, which are valid without centers."""
        return read_kv_scales(self.checkpoint, self.model, self.scheme, extras=False)


def open_checkpoint(
    model: str, revision: str | None = None, ignore_keys: Collection[str] = ()
) -> OpenCheckpoint:
    """Open `model`: 'demo', a folder or a hub id. Raises ConfigError or CheckpointError."""
    return open_folder(resolve_model(model, revision), model, ignore_keys)


def open_folder(path: Path, name: str, ignore_keys: Collection[str] = ()) -> OpenCheckpoint:
    """Open the checkpoint in `path`, a folder or a GGUF file, which the user named `name`."""
    refuse_to_run(path, name)
    checkpoint = open_files(path)
    try:
        return read_checkpoint(checkpoint, ignore_keys)
    except CheckpointError as error:
        if path.is_file():  # there is no config.json to look into
            raise CheckpointError(
                f"{path}: what its metadata says as a config.json: {error}"
            ) from error
        raise


def read_checkpoint(checkpoint: Checkpoint, ignore_keys: Collection[str] = ()) -> OpenCheckpoint:
    """Read and check headers and scale tensors. Raises ConfigError or CheckpointError."""
    config = read_model_config(
        checkpoint.config, checkpoint.names, checkpoint.stored_format, ignore_keys
    )
    scheme = dense_scheme(checkpoint, scheme_of(checkpoint))
    config = with_stored_head(checkpoint, config)
    present_written(checkpoint, config)
    present_experts(checkpoint, config, scheme)
    return OpenCheckpoint(checkpoint, config, scheme, read_kv_scales(checkpoint, config, scheme))


def read_model_config(
    config: JsonObject,
    tensors: Collection[str] = (),
    stored: Format | None = None,
    ignore_keys: Collection[str] = (),
) -> ModelConfig:
    """Read a config.json: a family of Freight's, else a model of transformers that can be run.

    `tensors`: names of the checkpoint's tensors. `stored`: dtype of those that are not quantized.
    `ignore_keys`: keys that are ignored although they change the computation
    (`model.config.keys.check_keys`).

    Raises CheckpointError for a key of the family's that is not implemented, for a mechanism that
    Freight does not have, and for an unknown model; ConfigError for keys that cannot be ignored.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES:
        return as_stored(parse_model_config(config, tensors, stored, ignore_keys), tensors)
    refuse_other_encoders(model_type)
    refuse_mechanisms(config, model_type)
    if ignore_keys:
        raise ConfigError(
            f"--ignore-config-keys {' '.join(ignore_keys)}: model_type {model_type!r} runs through transformers' "
            "modules, which read all of config.json"
        )
    # Imported here: transformers' modeling code takes seconds to import
    from freight.model.fallback_probe import foreign_config

    return foreign_config(config, stored)


def require_native(model: ModelConfig, name: str, what: str) -> None:
    """Raise CheckpointError for a model that runs through transformers: `what` needs Freight's own
    decoder.
    """
    if model.foreign is not None:
        raise CheckpointError(
            f"{name} is of model_type {model.model_type!r}, which runs through transformers' modules; {what} is "
            f"implemented for Freight's own decoder: {choices(FAMILIES)}"
        )


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint with its headers and scale tensors read and checked, and no weight yet.

    `checkpoint` is None for a model of random weights, which has no tokenizer and no stop ids.
    `model` is the whole model, also with several `ranks`, each of which has a share of it.
    """

    args: EngineArgs
    checkpoint: Checkpoint | None
    model: ModelConfig
    scheme: Scheme
    kv_scales: KVScales
    device: DeviceFacts
    ranks: Ranks = ALONE
    random_shape: str | None = None  # of random weights

    @property
    def share(self) -> Share | None:
        """What this rank has of the model; None without other ranks. Raises ConfigError as
        `parallel.shards.require_divisible`.
        """
        if self.ranks.size == 1:
            return None
        return share_of(self.model, self.ranks.rank, self.ranks.size)

    def as_rank(self, ranks: Ranks, cores: int) -> OpenModel:
        """Return the model as one of several ranks opens it, with its part of the machine."""
        free = self.device.memory_free
        if self.device.kind == "cpu":  # each rank has a GPU of its own
            free //= ranks.size // self.args.nnodes
        return replace(
            self, ranks=ranks, device=replace(self.device, cores=cores, memory_free=free)
        )

    def weight_dtype(self, config: EngineConfig) -> str:
        """Return the format of Linear weights: 'int4', 'fp8_e4m3fn', 'bfloat16', 'q4_k and q6_k'."""
        if config.int4:
            return "int4"
        if multiplies_blocks(config, self.scheme):
            return self.scheme.block_formats
        return self.scheme.weight_formats or str(config.weight_format)

    def multiplies_blocks(self, config: EngineConfig) -> bool:
        """Return whether matrices in a GGUF file's blocks are multiplied as they are stored."""
        return multiplies_blocks(config, self.scheme)

    def with_rank_scales(self, config: EngineConfig) -> EngineConfig:
        """Return `config`, resolved for the whole model, with the KV scales of this rank."""
        if config.kv.scales is None or self.ranks.size == 1:
            return config
        numbers = self.ranks.rank, self.ranks.size
        scales = scales_of_rank(config.kv.scales, self.model, *numbers)
        return replace(config, kv=replace(config.kv, scales=scales))

    def resolve(self, args: EngineArgs) -> EngineConfig:
        """Resolve `args` for this checkpoint. They may differ from the arguments that it was opened
        with in cache options only.
        """
        source = kv_source(args)
        scales = self.kv_scales
        if source.file is not None:
            scales = read_scale_json(source.file, self.model)
        elif source.values is not None:
            scales = uniform_scales(source.values, self.model.num_layers)
        if self.model.foreign is not None and any(
            layer and layer.k_center for layer in scales.layers
        ):
            raise ConfigError(
                f"the KV scales have centers of keys, which are subtracted before keys are rotated; modules of "
                f"transformers ({self.model.architecture}) rotate them first. Use --kv-scales dynamic"
            )
        config = resolve(args, self.model, self.scheme, scales, self.device)
        if config.state_every is not None:
            self.cache_spec(config)  # raises ConfigError where no layer keeps a state
        return config

    def skipped_layers(self) -> frozenset[int]:
        """Return the layers whose cache stays unquantized while others have 8 bits. Raises
        ConfigError.
        """
        return skipped_layers(
            self.args.kv_cache_dtype_skip_layers, self.model.paged, self.model.num_layers
        )

    def skipping(self, config: EngineConfig) -> EngineConfig:
        """Return `config`, whose cache is quantized in every layer, with the cache of
        `skipped_layers` unquantized.
        """
        skipped = self.skipped_layers()
        num_layers = self.model.num_layers
        return replace(config, kv=config.kv.skipping(skipped, num_layers, config.compute_format))

    def threads(self, config: EngineConfig) -> Threads:
        """Return the context that everything that computes with this model must run in."""
        return choose_threads(config.threads, self.device.cores)

    def stages(self, config: EngineConfig) -> tuple[Stage, ...]:
        """Return where this rank's layers are; none if all are on one device. Raises ConfigError for a
        model that cannot be divided so.
        """
        size = self.args.pipeline_parallel_size
        require_stages(self.model, size)
        if size == 1:
            return ()
        devices = ["cpu"] * size
        if config.device != "cpu":
            first = self.ranks.rank % (self.ranks.size // self.args.nnodes) * size
            devices = stage_devices(size, first)
        counts = stage_counts(self.model, self._stage_costs(config), size, self.args.pp_layers)
        return stages_of(counts, devices)

    def _stage_costs(self, config: EngineConfig, ranks: int = 1) -> StageCosts:
        """Return what weights take, for stages: of the whole model, or of the share of one of `ranks`."""
        layout = Layout.PLAIN if config.device != "cpu" else Layout.PACKED
        weights, linear_of = self.matrices(config)
        return stage_costs(self.model, config.compute_format, weights, linear_of, layout, ranks)

    def stage_bytes(self, config: EngineConfig) -> dict[str, int]:
        """Return the bytes of the weights on each device with stages, of this rank's share."""
        costs = self._stage_costs(config, self.ranks.size)
        of_device: dict[str, int] = {}
        for stage in self.stages(config):
            of_device[stage.device] = of_device.get(stage.device, 0) + costs.of(stage.layers)
        return of_device

    def passing_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that the first device needs while weights load, on their way to another: of
        the largest layer, or of the head.
        """
        costs = self._stage_costs(config, self.ranks.size)
        return max(*costs.layers, costs.head)

    def matrices(self, config: EngineConfig) -> tuple[Format, LinearOf]:
        """Return the format of matrices in 8 bits, and the scheme of each module's (`model/sizes.py`)."""
        if config.int4:
            return Format.E4M3FN, int4_online
        if self.scheme.weight_format is not None:
            return config.weight_format, self.scheme.linear
        if config.weight_format.is_quantized:
            return config.weight_format, online(self.model)
        if self.multiplies_blocks(config):
            return config.compute_format, self.scheme.linear
        return config.compute_format, lambda _: None

    def kernels(self, config: EngineConfig, ranks: Ranks | None = None) -> KernelSet:
        """Select the kernels for `config`; `ranks`: those that gather, if not this model's."""
        return select_kernels(
            config.kernels,
            config.device,
            config.fp8_attention,
            self.ranks if ranks is None else ranks,
            config.int8_activations,
            config.exact_products,
        )

    def load(self, config: EngineConfig, num_positions: int | None = None) -> LanguageModel:
        """Read the weights, or draw them, with the threads of `config`. Logs their size and the
        seconds it took.

        `num_positions`: the positions that will be computed, if they are fewer than
        `config.max_model_len`: tables of angles end there, with the same values.
        """
        if self.args.tensor_parallel_size != self.ranks.size:
            raise ConfigError(
                f"--tensor-parallel-size {self.args.tensor_parallel_size}: ranks serve and generate alone (freight "
                "serve, generate and chat, LLM, AsyncLLM); omit it here"
            )
        begin = time.perf_counter()
        threads = self.threads(config)
        waits = (
            openmp.long_waits(os.environ) if threads.count > 1 and config.device == "cpu" else ""
        )
        if waits:
            logger.warning("%s", waits)
        with threads:
            decoder = self._load(config, num_positions or config.max_model_len)
        if self.checkpoint is not None:
            self.checkpoint.require_unchanged()
        seconds = time.perf_counter() - begin
        logger.info(
            "loading weights took %.3g GB and %.2f s", weight_bytes(decoder).total / 1e9, seconds
        )
        return decoder

    def _load(self, config: EngineConfig, length: int) -> LanguageModel:
        kernels = self.kernels(config)
        if kernels.note:
            logger.warning("%s", kernels.note)
        formats = config.compute_format, config.weight_format
        model = self.model.for_context(config.max_model_len)
        self._log_dtype(config.compute_format)
        if self.scheme.blocks or self.scheme.decoded:
            line = describe_blocks(config, self.scheme)
        else:
            line = describe_weights(*formats, self.scheme, self.model, config.int4)
        if config.int8_activations:
            line += INT8_ACTIVATIONS
        logger.info("%s", line)
        for line in describe_inputs(config, self.scheme):
            logger.info("%s", line)
        rounds_to_fp8 = config.weight_format.is_fp8 and self.args.quantization == "fp8"
        build = build_in(kernels.name)
        if rounds_to_fp8 and build and not multiplies_bfloat16(build):
            logger.info("%s", FP8_IS_SLOW)
        if self.model.foreign is not None:
            return self._load_foreign(kernels, config)
        share = self.share
        stages = self.stages(config)
        device = stages[0].device if stages else config.device
        int4 = config.int4
        lora = config.lora
        if self.checkpoint is None:
            return random_model(
                model, kernels, *formats, length, device, config.seed, share, int4, lora, stages
            )
        scheme = self.scheme
        return load_model(
            self.checkpoint,
            model,
            kernels,
            *formats,
            length,
            device,
            scheme,
            share,
            int4,
            lora,
            stages,
        )

    def _log_dtype(self, compute: Format) -> None:
        """Log the compute dtype and its reason; warn where config.json says float32 and no tensor
        is stored so.
        """
        source = self.model.dtype_source if self.args.dtype == "auto" else DtypeSource.OPTION
        logger.info("dtype: %s", describe_dtype(compute, source))
        stored = None if self.checkpoint is None else self.checkpoint.stored_format
        asked = source is DtypeSource.OPTION
        if not asked and compute is Format.FLOAT32 and stored not in (None, Format.FLOAT32):
            logger.warning(
                "the tensors are in %s: float32 takes twice the memory and adds no precision to them; --dtype %s "
                "computes as they are stored",
                stored,
                stored,
            )

    def _load_foreign(self, kernels: KernelSet, config: EngineConfig) -> LanguageModel:
        from freight.model.fallback import load_foreign

        assert self.checkpoint is not None
        formats = (config.compute_format, config.weight_format)
        length = config.max_model_len
        loaded = load_foreign(
            self.checkpoint, self.model, kernels, *formats, length, config.device, self.scheme
        )
        logger.info(
            "model: %s of transformers over Freight's cache, checked against its own attention. Not guaranteed: the "
            "same bits for a row in other chunks or batches, or after a prefix hit",
            self.model.architecture,
        )
        return loaded

    def cache_spec(self, config: EngineConfig) -> KVCacheSpec:
        """Return the layout of the cache for `config`, as this rank has it."""
        sizes = config.compute_format, config.state_every, config.max_model_len
        drafts = 0
        if self.model.generates and not config.launches_ahead:
            drafts = config.most_drafts
        return cache_spec(config.kv, self.model, config.block_size, *sizes, self.ranks.size, drafts)

    def stop_token_ids(self) -> frozenset[int]:
        """Return the token ids that end a completion: those of the model's files, and the
        tokenizer's EOS. None for random weights.

        A base model's files often name no end of a turn where an instruct tokenizer does.
        Raises CheckpointError as `load_tokenizer`.
        """
        tokenizer = self.load_tokenizer()
        end = None if tokenizer is None else tokenizer.eos_token_id
        return self._stop_ids_of_files | frozenset(() if end is None else (end,))

    @property
    def _stop_ids_of_files(self) -> frozenset[int]:
        if self.checkpoint is None:
            return frozenset()
        ids = stop_token_ids(self.checkpoint.config, self.checkpoint.generation_config)
        if self.model.foreign is None:
            return ids
        return ids | frozenset(self.model.eos_token_ids)

    def log_stops(self) -> None:
        """Log which tokens end a completion; nothing of random weights, and where none is generated."""
        if self.checkpoint is not None and self.model.generates:
            logger.info("%s", self.describe_stops())

    def describe_stops(self) -> str:
        """Return the start-up line about the tokens that end a completion."""
        ids = self.stop_token_ids()
        if not ids:
            return (
                "no token ends a completion: neither config.json, generation_config.json nor the tokenizer names "
                "one; requests end by max_tokens, stop and stop_token_ids"
            )
        tokenizer = self.load_tokenizer()
        names = []
        for token in sorted(ids):
            text = None if tokenizer is None else tokenizer.token_string(token, False)
            by = "" if token in self._stop_ids_of_files else ", which the tokenizer alone names"
            names.append(f"{token}{'' if text is None else f' {shown(text)}'}{by}")
        return f"a completion ends with token {' or '.join(names)}"

    def tokenizer_folder(self) -> str | None:
        """Return the folder of the tokenizer, for other processes that load it; None if there is none
        or it is skipped.
        """
        if self.checkpoint is None or self.args.skip_tokenizer_init:
            return None
        named = self.args.tokenizer
        if named is None or named == self.args.model:
            return str(self.checkpoint.path)
        return str(resolve_model(named))

    def load_tokenizer(self) -> Tokenizer | None:
        """Load the model's tokenizer, or the one that `args` names; None if there is none or it is
        skipped. It is read once.

        `revision` applies to the model's own repository; another one is loaded at its newest
        commit. Raises CheckpointError.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self.checkpoint is not None and self.args.skip_tokenizer_init:
            logger.info(
                "no tokenizer (skip_tokenizer_init): prompts are token ids, and outputs have no text"
            )
        folder = self.tokenizer_folder()
        return None if folder is None else Tokenizer.load(folder)


def open_model(args: EngineArgs) -> OpenModel:
    """Open the checkpoint that `args.model` names. Raises ConfigError or CheckpointError."""
    check(args)  # first: contradictions between settings show without checkpoint and device
    return _opened(args, open_checkpoint(args.model, args.revision, args.ignore_config_keys))


def open_tensors(opened: OpenModel, tensors: Iterable[tuple[str, Tensor]]) -> OpenModel:
    """Open weights in memory as another version of a model: by the names in the files of its folder,
    all of them. Raises ConfigError or CheckpointError.
    """
    if opened.checkpoint is None:
        raise ConfigError(
            "a model of random weights has no folder that names its tensors; start with a folder"
        )
    checkpoint = HeldCheckpoint(opened.checkpoint, tensors)
    return _opened(opened.args, read_checkpoint(checkpoint, opened.args.ignore_config_keys))


def _opened(args: EngineArgs, stored: OpenCheckpoint) -> OpenModel:
    model = with_pooling(stored.checkpoint, stored.model, args.pooling)
    unread = model.unread_keys.describe()
    if unread is not None:
        logger.info("%s", unread)
    if stored.checkpoint.unread_metadata:
        keys = listed(stored.checkpoint.unread_metadata, 8)
        logger.info("metadata that decides nothing and is not read: %s", keys)
    device = probed(args)
    if device.note:
        logger.info("%s", device.note)
    model = for_context(model, args, device.kind)
    return OpenModel(args, stored.checkpoint, model, stored.scheme, stored.kv_scales, device)


def probed(args: EngineArgs) -> DeviceFacts:
    """Find the facts of the device; of GPUs that divide the layers those of the first, with the memory
    of all. Raises ConfigError for GPUs of several kinds.
    """
    device = probe(args.computes_on)
    stages = args.pipeline_parallel_size
    size = stages * args.tensor_parallel_size
    if size == 1 or device.kind == "cpu" or device.count < size:  # too few: `resolve` refuses
        return device
    require_one_kind(size, f"{size} GPUs")
    free = sum(free_bytes(stage_devices(stages)).values())
    return replace(device, memory_free=free, memory_total=stages * device.memory_total)


def with_pooling(checkpoint: Checkpoint, model: ModelConfig, option: str) -> ModelConfig:
    """Return `model` with what its folder declares about pooling, or `option` does (--pooling).

    Raises CheckpointError for a declaration that is not implemented, and ConfigError for a model
    that cannot do what is asked.
    """
    asked = None if option == "auto" else option
    pooling = read_pooling(
        checkpoint.path, checkpoint.config, model.hidden_size, asked, model.attends_both_ways
    )
    if pooling is None:
        if not model.has_head:
            raise ConfigError(
                "--pooling none: this checkpoint has no matrix of the vocabulary, so it gives no text; omit it"
            )
        return model
    if model.foreign is not None:
        raise ConfigError(
            f"{pooling.source}: pooling is implemented for Freight's own decoder, and model_type {model.model_type!r} "
            "runs through transformers' modules; --pooling none generates text with it"
        )
    outside = [token for token in pooling.token_ids if token >= model.vocab_size]
    if outside:
        raise CheckpointError(
            f"{checkpoint.path}: {pooling.source} reads the score of token {outside[0]}, which is outside the "
            f"vocabulary (0 to {model.vocab_size - 1}); fetch the model again"
        )
    logger.info("pooling: %s", describe_pooling(pooling))
    if model.token_types > 1 and gives_token_types(checkpoint.path):
        pooling = replace(pooling, token_types=model.token_types)
    if (pooling.beside or pooling.token_ids) and not model.attends_both_ways:
        return replace(model, pooling=pooling)
    return replace(model, pooling=pooling, has_head=False, tie_word_embeddings=True)


_POOLED = {
    PoolingKind.LAST: "the state of the last token",
    PoolingKind.MEAN: "the mean of all states",
    PoolingKind.CLS: "the state of the first token",
}


def describe_pooling(pooling: PoolingConfig) -> str:
    """Return the start-up line about pooling."""
    line = _POOLED[pooling.kind]
    if pooling.task is PoolingTask.EMBED:
        line += f", an embedding of {pooling.size} numbers"
        if pooling.normalize:
            line += ", normalized"
    else:
        line += f", {pooling.size} scores"
    return f"{line} ({pooling.source})"


def open_random(args: EngineArgs, shape: str) -> OpenModel:
    """Open a model with random weights: `shape` is a preset's name or a config.json. Raises
    ConfigError.
    """
    check(args)
    model = parse_model_config(shape_config(shape), ignore_keys=args.ignore_config_keys)
    device = probed(args)
    model = for_context(model, args, device.kind)
    return OpenModel(
        # what it writes is measured, and of no use: a step has the rows that it is asked for
        args.without_drafts(),
        checkpoint=None,
        model=model,
        scheme=Scheme(),
        kv_scales=KVScales((None,) * model.num_layers),
        device=device,
        random_shape=shape,
    )


INT8_ACTIVATIONS = "; inputs of those in groups: rounded to INT8 (--activations bfloat16: not)"


def multiplies_blocks(config: EngineConfig, scheme: Scheme) -> bool:
    """Return whether matrices in a GGUF file's blocks are multiplied as they are stored."""
    return bool(scheme.blocks) and config.int8_activations and not config.weight_format.is_quantized


def describe_blocks(config: EngineConfig, scheme: Scheme) -> str:
    """Return the start-up line about the weights of a GGUF file."""
    if config.int4 or config.weight_format.is_quantized:
        target = "int4" if config.int4 else str(config.weight_format)
        return (
            f"weights: {target}, rounded as they load from {scheme.counted_blocks} matrices, which are rounded "
            f"already; embedding and head: {config.compute_format}"
        )
    if not multiplies_blocks(config, scheme):
        return f"weights: {config.compute_format}, decoded as they load from {scheme.counted_blocks} matrices"
    line = f"weights: {scheme.counted_blocks} matrices, as stored (gguf)"
    decoded = {str(format) for format in scheme.blocks.values() if not format.is_multiplied}
    decoded.update(scheme.decoded)
    if decoded:
        line += (
            f", but those in {' and '.join(sorted(decoded))}: decoded to {config.compute_format}"
        )
    return line


def describe_inputs(config: EngineConfig, scheme: Scheme) -> list[str]:
    """Return a line for each way in which config.json has inputs of products rounded, and they are
    not rounded so here.
    """
    lines = []
    for linear in scheme.rounded_inputs:
        computed = f"stay in {config.compute_format}"
        if linear.bits == 4 and config.int8_activations:
            computed = "are rounded to INT8 with a scale per group of inputs"
        lines.append(
            f"inputs declared {linear.input_rounding} ({scheme.method}): here they {computed}"
        )
    return lines


def describe_weights(
    compute_format: Format,
    weight_format: Format,
    scheme: Scheme,
    model: ModelConfig,
    int4: bool = False,
) -> str:
    """Return the start-up line about the weights."""
    if model.foreign is not None and weight_format.is_fp8:
        linear_of = online(model) if scheme.weight_format is None else scheme.linear
        parts = foreign_bytes(model.foreign, compute_format, weight_format, linear_of, Layout.PLAIN)
        return _describe_parts(parts, compute_format, weight_format, scheme)
    if scheme.weight_format is not None:
        how = "as stored"
        if scheme.has_mxfp8:
            how = f"as stored but for MXFP8, which becomes {compute_format}, exactly"
        return f"{scheme.weights}, {how} ({scheme.method}); those left out: {compute_format}"
    if not weight_format.is_quantized:
        return f"weights: {weight_format}"
    rounded = f"weights: {weight_format}, rounded as they load, one scale per output row"
    if int4:
        rounded = f"weights: int4, rounded as they load, one scale per {INT4_GROUP} inputs"
    return f"{rounded}; embedding and head: {compute_format}"


def _describe_parts(parts: ForeignBytes, compute: Format, weights: Format, scheme: Scheme) -> str:
    """Say how much is in FP8 and what is not: experts that transformers stacks are not Linear
    modules.
    """
    total = parts.fp8 + parts.stacked + parts.other + parts.embeddings
    how = "rounded as they load, one scale per output row"
    if scheme.weight_format is not None:
        how = f"as stored ({scheme.method})"
    experts = (
        f"{_gb(parts.stacked)} of experts, which are stacked tensors there and no Linear modules; "
    )
    return (
        f"weights: {_gb(parts.fp8)} of {_gb(total)} ({parts.fp8 / total:.0%}) are {weights}: Linear modules, {how}. "
        f"In {compute}: {experts if parts.stacked else ''}{_gb(parts.embeddings)} of embedding and head; "
        f"{_gb(parts.other)} of routers, norms and the rest"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
