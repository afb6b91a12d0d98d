"""Opening a checkpoint: config, scheme and KV scales read and checked, and no weight. The one way in for the engine,
calibration, evaluation, benchmarks and `freight inspect`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freight.cache.pool import cache_spec
from freight.cache.spec import KVCacheSpec
from freight.checkpoint.kv_scales import read_kv_scales, read_scale_json
from freight.checkpoint.layouts import read_scheme
from freight.checkpoint.rank_export import refuse_to_run
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.config.engine import EngineArgs, EngineConfig
from freight.config.families import FAMILIES
from freight.config.kv_source import kv_source, uniform_scales
from freight.config.model import ModelConfig, parse_model_config, stop_token_ids
from freight.config.presets import shape_config
from freight.config.resolve import check, resolve
from freight.device import DeviceFacts, Threads, choose_threads, probe
from freight.errors import CheckpointError, ConfigError, choices
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales, Scheme
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.models.decoder import LanguageModel
from freight.models.expert_names import as_stored, present_experts
from freight.models.loader import load_model
from freight.models.random_weights import random_model
from freight.models.weight_bytes import weight_bytes
from freight.tokenizer import Tokenizer

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose headers and scale tensors have been read and checked."""

    checkpoint: Checkpoint
    model: ModelConfig
    scheme: Scheme
    kv_scales: KVScales

    def uncentered_scales(self) -> KVScales:
        """The KV scales of the checkpoint's tensors alone, which are valid without centers."""
        return read_kv_scales(self.checkpoint, self.model, self.scheme, extras=False)


def open_checkpoint(model: str, revision: str | None = None) -> OpenCheckpoint:
    """Open `model`: 'demo', a folder or a hub id. Raises ConfigError or CheckpointError."""
    return open_folder(resolve_model(model, revision), model)


def open_folder(path: Path, name: str) -> OpenCheckpoint:
    """Open the checkpoint in `path`, which the user named `name`."""
    refuse_to_run(path, name)
    checkpoint = Checkpoint(path)
    config = read_model_config(checkpoint.config, checkpoint.names)
    scheme = read_scheme(checkpoint.config, checkpoint.hf_quant_config)
    present_experts(checkpoint, config, scheme)
    return OpenCheckpoint(checkpoint, config, scheme, read_kv_scales(checkpoint, config, scheme))


def read_model_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
    """What a config.json describes: a row of Freight's, else a model of transformers that can be run. `tensors` are the
    names of the checkpoint's tensors.

    Raises CheckpointError for a key of a row's that stands in the way, and for what is neither.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES:
        return as_stored(parse_model_config(config, tensors), tensors)
    from freight.models.fallback_probe import foreign_config  # transformers' modeling code takes seconds to import

    return foreign_config(config)


def require_native(model: ModelConfig, name: str, what: str) -> None:
    """Raises CheckpointError for a model that runs through transformers: `what` needs Freight's own decoder."""
    if model.foreign is not None:
        raise CheckpointError(
            f"{name} is of model_type {model.model_type!r}, which runs through transformers' modules; {what} is "
            f"implemented for Freight's own decoder: {choices(FAMILIES)}"
        )


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint whose headers and scale tensors have been read and checked, and no weight yet.

    `checkpoint` is None for a model of random weights, which has no tokenizer and no stop ids.
    """

    args: EngineArgs
    checkpoint: Checkpoint | None
    model: ModelConfig
    scheme: Scheme
    kv_scales: KVScales
    device: DeviceFacts

    def resolve(self, args: EngineArgs) -> EngineConfig:
        """`args` resolved for this checkpoint; they may differ from those it was opened with in cache options only."""
        source, scales = kv_source(args), self.kv_scales
        if source.file is not None:
            scales = read_scale_json(source.file, self.model)
        elif source.values is not None:
            scales = uniform_scales(source.values, self.model.num_layers)
        if self.model.foreign is not None and any(layer and layer.k_center for layer in scales.layers):
            raise ConfigError(
                f"the KV scales have centers of keys, which are subtracted before keys are rotated; modules of "
                f"transformers ({self.model.architecture}) rotate them first. Use --kv-scales dynamic"
            )
        return resolve(args, self.model, self.scheme, scales, self.device)

    def threads(self, config: EngineConfig) -> Threads:
        """What everything that computes with this model should be inside of."""
        return choose_threads(config.threads, self.device.cores)

    def kernels(self, config: EngineConfig) -> KernelSet:
        return select_kernels(config.kernels, config.device, config.fp8_attention)

    def load(self, config: EngineConfig) -> LanguageModel:
        """Read the weights, or draw them, with the threads of `config`. Logs their size and the seconds it took."""
        begin = time.perf_counter()
        with self.threads(config):
            decoder = self._load(config)
        seconds = time.perf_counter() - begin
        logger.info("loading weights took %.3g GB and %.2f s", weight_bytes(decoder).total / 1e9, seconds)
        return decoder

    def _load(self, config: EngineConfig) -> LanguageModel:
        kernels = self.kernels(config)
        if kernels.note:
            logger.warning("%s", kernels.note)
        formats, length = (config.compute_format, config.weight_format), config.max_model_len
        logger.info("%s", describe_weights(*formats, self.scheme))
        if self.model.foreign is not None:
            return self._load_foreign(kernels, config)
        if self.checkpoint is None:
            return random_model(self.model, kernels, *formats, length, config.device, config.seed)
        return load_model(self.checkpoint, self.model, kernels, *formats, length, config.device, self.scheme)

    def _load_foreign(self, kernels: KernelSet, config: EngineConfig) -> LanguageModel:
        from freight.models.fallback import load_foreign

        assert self.checkpoint is not None
        formats, length = (config.compute_format, config.weight_format), config.max_model_len
        loaded = load_foreign(self.checkpoint, self.model, kernels, *formats, length, config.device, self.scheme)
        logger.info(
            "model: %s of transformers over Freight's cache, checked against its own attention. Not promised: the same "
            "bits for a row whatever is computed beside it (chunks, batches, prefix hits)",
            self.model.architecture,
        )
        return loaded

    def cache_spec(self, config: EngineConfig) -> KVCacheSpec:
        return cache_spec(config.kv, self.model, config.block_size)

    def stop_token_ids(self) -> frozenset[int]:
        if self.checkpoint is None:
            return frozenset()
        ids = stop_token_ids(self.checkpoint.config, self.checkpoint.generation_config)
        return ids if self.model.foreign is None else ids | frozenset(self.model.eos_token_ids)

    def load_tokenizer(self) -> Tokenizer | None:
        """The model's own, or the one named; `revision` is the model's, so another repository comes at its newest."""
        args = self.args
        if self.checkpoint is None:
            return None
        if args.skip_tokenizer_init:
            logger.info("no tokenizer (skip_tokenizer_init): prompts are token ids, and outputs have no text")
            return None
        if args.tokenizer in (None, args.model):
            return Tokenizer.load(self.checkpoint.path)
        return Tokenizer.load(resolve_model(args.tokenizer))


def open_model(args: EngineArgs) -> OpenModel:
    """Open the checkpoint that `args.model` names. Raises ConfigError or CheckpointError."""
    check(args)  # a contradiction between settings needs neither checkpoint nor device to be seen
    stored = open_checkpoint(args.model, args.revision)
    device = probe(args.device)
    if device.note:
        logger.info("%s", device.note)
    return OpenModel(args, stored.checkpoint, stored.model, stored.scheme, stored.kv_scales, device)


def open_random(args: EngineArgs, shape: str) -> OpenModel:
    """A model with random weights instead: `shape` is a preset's name or a config.json. Raises ConfigError."""
    check(args)
    model = parse_model_config(shape_config(shape))
    return OpenModel(args, None, model, Scheme(), KVScales((None,) * model.num_layers), probe(args.device))


def describe_weights(compute_format: Format, weight_format: Format, scheme: Scheme) -> str:
    """The line at start about the weights."""
    if scheme.weight_format is not None:
        return f"{scheme.weights}, as stored ({scheme.method}); those left out: {compute_format}"
    if not weight_format.is_fp8:
        return f"weights: {weight_format}"
    rounded = f"weights: {weight_format}, rounded as they load, one scale per output row"
    return f"{rounded}; embedding and head: {compute_format}"
