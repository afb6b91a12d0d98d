"""Weights that change while an engine lives: other ones of the same model, or none while it sleeps.

A trainer updates the weights between its steps, and takes the engine's memory meanwhile. Nothing is
changed while a request is unfinished, so every answer is of one version from its first token to its last.

An update reads and checks the headers first, gives the memory of the cache back, and loads the new
weights beside the old ones, which are dropped once the new ones are complete. Whatever fails before
that leaves the old ones. What follows from the weights is made anew with them: scales, the biases that keys are
stored without, recorded steps, the name space of the store, adapters, and the fingerprint. No block of
the cache is found again.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from freight.base.version import version
from freight.cache.pool import LayerCache, allocate_pool
from freight.checkpoint.held import HeldCheckpoint
from freight.engine.adapters import LoadedAdapter
from freight.engine.build import adapter_slots, captured_steps, describe_cache
from freight.engine.engine import CLOSE_SECONDS, Engine, Parts
from freight.engine.fingerprint import declared, fingerprint
from freight.engine.host_copy import HostCopy
from freight.engine.least_bytes import least_weight_bytes
from freight.engine.runner import ModelRunner
from freight.engine.store import Weights, open_store, prepare_store
from freight.errors import CapacityError, CheckpointError, ConfigError, RequestError, listed
from freight.kernels.interface import KernelSet
from freight.model.config.model import ModelConfig
from freight.model.decoder import LanguageModel
from freight.model.open import OpenModel, open_model, open_tensors, probed
from freight.model.pooler import Pooler
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary
from freight.parallel.stages import Stage
from freight.settings.engine import EngineConfig

logger = logging.getLogger("freight")

Source = (
    str | Iterable[tuple[str, Tensor]]
)  # a folder or a hub id; or (name, tensor) of all tensors

# What of a model's description follows from how its files were written, or is fixed at the start
_MAY_DIFFER = frozenset({"dtype_source", "checkpoint_format", "bos_token_id", "eos_token_ids"})
# What of an engine's configuration follows from how the weights are stored
_OF_WEIGHTS = ("kv", "weight_format", "int4", "int8_activations")


class Sleep(IntEnum):
    """How much of its memory an engine has given back."""

    AWAKE = 0
    CACHE = 1  # that of the cache; on a GPU the weights are in the host's memory
    WEIGHTS = 2  # that of the weights, too


class _Version:
    """Weights that were opened, and what their files say of them: those may be gone later, or others.

    in_store  what a store names them by; None without a store, and where a file is not the one that
              was opened: nothing is stored of weights that have no name
    """

    def __init__(self, opened: OpenModel, config: EngineConfig, has_store: bool) -> None:
        """Raises ConfigError for a store that cannot be used."""
        self.opened = opened
        self.config = config
        self.in_store: Weights | None = None
        if has_store:
            in_store = prepare_store(opened, config)
            with suppress(CheckpointError):
                self._require_unchanged()
                self.in_store = in_store

    @cached_property
    def fingerprint(self) -> str:
        """The engine's fingerprint with these weights, from their files at the first time. Raises
        CheckpointError where a file is not the one that was opened.
        """
        self._require_unchanged()
        return fingerprint(self.opened, self.config, self.opened.kernels(self.config), version())

    def note_fingerprint(self) -> None:
        """Have the fingerprint while the files are those that were read."""
        _ = self.fingerprint

    def _require_unchanged(self) -> None:
        if self.opened.checkpoint is not None:
            self.opened.checkpoint.require_unchanged()


class Renewal:
    """The weights of one engine.

    An exception may interrupt any method (Ctrl-C raises one anywhere). The engine has the old weights
    then or the new ones, and what is said of them is said of those; where it sleeps, it wakes up.
    """

    def __init__(self, engine: Engine, opened: OpenModel, config: EngineConfig) -> None:
        self.engine = engine
        self._version = _Version(opened, config, engine.has_store)
        self._adapters: tuple[LoadedAdapter, ...] = ()  # to load when it wakes up
        self._on_host: HostCopy | None = None

    @property
    def config(self) -> EngineConfig:
        """The decisions that the options, the weights of now and the device came to."""
        return self._version.config

    @property
    def _opened(self) -> OpenModel:
        return self._version.opened

    @property
    def level(self) -> Sleep:
        """How deep the engine sleeps."""
        return Sleep(self.engine.sleep_level)

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights of now. The first time it is asked for, of weights that
        the engine started with, it raises CheckpointError where their files are gone or have changed.
        """
        return self._version.fingerprint

    def update(self, source: Source) -> None:
        """Take other weights of the same model. An engine that sleeps goes on sleeping, with its new
        weights loaded (level 1).

        Raises ConfigError and CheckpointError for weights that do not fit, CapacityError where they
        have no room beside the old ones, RequestError while requests run. The old weights stay then.
        """
        self._require_idle()
        version = self._open(source)
        level = self.level
        try:
            self._drop_cache()
            self._check_room(version)
            model = version.opened.load(version.config, self.config.max_model_len)
            self._replace(version, model)
            if level is Sleep.AWAKE:
                self._restore()
        except BaseException:
            if level is Sleep.AWAKE and self.level is not Sleep.AWAKE:
                self._restore()
            raise

    def sleep(self, level: int = 1) -> None:
        """Give memory back. 1: the cache's, and on a GPU also that of the weights, which wait in the
        host's memory. 2: the cache's and the weights', which `wake_up` reads again from their files.

        Raises RequestError for another level, while requests run, and for an engine of several ranks.
        """
        if level not in (1, 2):
            raise RequestError(
                f"level is {level}; it must be 1 (the cache's memory) or 2 (the weights', too)"
            )
        self._require_idle()
        if self.level is Sleep.AWAKE:
            self._drop_cache()
        if level == Sleep.WEIGHTS:
            self.engine.sleep_level = Sleep.WEIGHTS
            self._set_model(_without_weights(self.engine.model))
            self._on_host = None
        elif self.level is Sleep.CACHE and self.config.device != "cpu" and self._on_host is None:
            self._on_host = HostCopy(self.engine.model)
        _collect()
        _return_memory()

    def wake_up(self, level: int = 0) -> None:
        """Take the memory again: 0, all of it; 1, that of the weights, so that the cache's stays free
        for an update. An engine that is awake stays as it is.

        Raises CheckpointError where the files of the weights are gone, or have changed.
        """
        if self.level is Sleep.WEIGHTS:
            if isinstance(self.engine.model, NoWeights):
                self._set_model(self._load_again())
            self.engine.sleep_level = Sleep.CACHE
        if level == Sleep.AWAKE and self.level is Sleep.CACHE:
            if self._on_host is not None:
                self._on_host.restore()
                self._on_host = None
            self._restore()

    def reset_prefix_cache(self) -> None:
        """Find no block of the cache again; what a store has is found still."""
        self.engine.forget_prefixes()

    def _require_idle(self) -> None:
        if self.engine.runner.num_ranks > 1:
            raise RequestError(
                "an engine of several ranks cannot change its weights or sleep; start it again, or use one rank"
            )
        if self.engine.has_head:
            raise RequestError(
                "an engine with a model or layers that draft (--speculative-config) cannot change its weights or "
                "sleep; start it again, or draft from the text of requests alone (--speculate)"
            )
        if self.engine.has_unfinished:
            count = len([group for group in self.engine.groups.values() if not group.finished])
            raise RequestError(
                f"{count} requests are unfinished, and an answer has one version of the weights: let them end, or "
                "abort them first"
            )

    def _open(self, source: Source) -> _Version:
        """Open other weights, and refuse those that do not fit."""
        if isinstance(source, str | Path):
            args = replace(self._opened.args, model=str(source), revision=None)
            opened = open_model(args)
        elif isinstance(source, Mapping):
            opened = open_tensors(self._opened, source.items())
        else:
            opened = open_tensors(self._opened, source)
        config = self._config_of(opened)
        return _Version(opened, config, config.store is not None)

    def _config_of(self, opened: OpenModel) -> EngineConfig:
        """Return the configuration with other weights. Raises ConfigError if they are of another
        model, or the cache would be another one.
        """
        differ = _differing(self._opened.model, opened.model)
        if differ:
            raise ConfigError(
                f"these weights are of another model: {listed(differ, 6)}; an update has the same architecture. Start "
                "another engine for that"
            )
        current = self.config
        asked = opened.resolve(opened.args)
        resolved = replace(
            asked,
            max_model_len=current.max_model_len,
            most_drafts=current.most_drafts,
            kv_cache_memory=current.kv_cache_memory,
        )
        changed = [
            field.name
            for field in fields(current)
            if field.name not in _OF_WEIGHTS
            and getattr(current, field.name) != getattr(resolved, field.name)
        ]
        if changed:
            values = [
                f"{name} {getattr(resolved, name)} (here {getattr(current, name)})"
                for name in changed
            ]
            raise ConfigError(
                f"these weights would change {', '.join(values)}: store them as those that were loaded, or start with "
                "the option that fixes it, such as --dtype"
            )
        # a cache is laid out before it is known which context and which drafts there are
        if opened.cache_spec(asked) != self.engine.runner.pool.spec:
            raise ConfigError(
                f"these weights would have another cache: {resolved.kv.describe()}, {resolved.kv.scale_source}, and "
                f"here it is {current.kv.describe()}, {current.kv.scale_source}; start with --kv-cache-dtype and "
                "--kv-scales that do not depend on the checkpoint"
            )
        return resolved

    def _check_room(self, version: _Version) -> None:
        """Raise CapacityError where new weights have no room beside the old ones."""
        if self.level is Sleep.WEIGHTS:
            return
        needed = least_weight_bytes(version.opened, version.config)
        free = probed(version.opened.args).memory_free
        if needed > free:
            raise CapacityError(
                f"the new weights need {needed:,} bytes beside the old ones, and {free:,} are free; put the engine to "
                "sleep at level 2 first, which drops the old ones, then update and wake it up"
            )

    def _replace(self, version: _Version, model: LanguageModel) -> None:
        """Have the engine use other weights, which are loaded, and sleep at level 1."""
        version.note_fingerprint()
        if isinstance(version.opened.checkpoint, HeldCheckpoint):
            version.opened.checkpoint.release()
        before = self._version
        try:
            self._version = version
            self._set_model(model)
        except BaseException:
            if self.engine.model is not model:
                self._version = before
            raise
        self._on_host = None
        self.engine.sleep_level = Sleep.CACHE
        _return_memory()

    def _drop_cache(self) -> None:
        """Give the cache's memory back, and close what stands on it."""
        if self.level is not Sleep.AWAKE:
            return
        self._adapters = self.engine.adapters.loaded
        self.engine.sleep_level = Sleep.CACHE
        self._set_model(self.engine.model)
        _return_memory()

    def _set_model(self, model: LanguageModel) -> None:
        """Have a model and no cache."""
        engine = self.engine
        if engine.store is not None:
            engine.store.close(CLOSE_SECONDS)
        pool = replace(engine.runner.pool, layers=())
        runner = ModelRunner(model, pool, self.config.device)
        engine.renew(Parts(runner, None, None))

    def _restore(self) -> None:
        """Allocate the cache again, and have the engine use it."""
        opened = self._opened
        config = self.config
        engine = self.engine
        model = engine.model
        kernels = opened.kernels(config)
        self._set_model(model)  # one that was interrupted here may have had a cache
        before = engine.runner.pool
        pool = allocate_pool(
            spec=before.spec,
            kv=config.kv,
            num_blocks=before.num_blocks,
            kernels=kernels,
            device=config.device,
            rotaries=model.rotaries,
            stages=model.stages,
        ).counting_drafts(config.most_drafts)
        slots = None
        if config.lora is not None:
            slots = adapter_slots(model, opened, None)
        captured = captured_steps(model, pool, kernels, config)
        store = None
        weights = self._version.in_store
        if weights is not None:
            store = open_store(opened, config, kernels, version(), weights, engine.cache, pool)
        engine.renew(Parts(ModelRunner(model, pool, config.device, captured), store, slots))
        for adapter in self._adapters:
            self._load_adapter(adapter)
        engine.sleep_level = Sleep.AWAKE
        logger.info("%s", describe_cache(pool, config))

    def _load_adapter(self, adapter: LoadedAdapter) -> None:
        try:
            self.engine.adapters.load(adapter.name, adapter.asked)
        except (CheckpointError, ConfigError, CapacityError) as error:
            logger.error("adapter %s is not loaded any more: %s", adapter.name, error)

    def _load_again(self) -> LanguageModel:
        """Read the weights again that were dropped."""
        opened = self._opened
        before = opened.checkpoint
        if before is not None:
            if before.digest():
                raise CheckpointError(
                    "the weights came from memory and were dropped; update them, from tensors or a folder, before the "
                    "engine wakes up"
                )
            before.require_unchanged()
            again = open_model(opened.args)
            assert again.checkpoint is not None
            is_same = again.checkpoint.identity == before.identity
            if not is_same or declared(again) != declared(opened) or again.model != opened.model:
                raise CheckpointError(
                    f"{before.path} has changed since it was loaded, and its weights were dropped; update the weights "
                    "before the engine wakes up"
                )
            opened = again
        return opened.load(self.config, self.config.max_model_len)


@dataclass(frozen=True)
class NoWeights:
    """Stands for a model whose weights are dropped: it computes nothing."""

    config: ModelConfig
    kernels: KernelSet
    rotaries: tuple[Rotary | None, ...] = ()
    pooler: Pooler | None = None
    stages: tuple[Stage, ...] = ()

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        raise AssertionError("the engine sleeps")

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the engine sleeps")

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        raise AssertionError("the engine sleeps")


def _without_weights(model: LanguageModel) -> NoWeights:
    return NoWeights(model.config, model.kernels)


def _differing(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Say in which fields another model differs: 'hidden_size 128 (here 64)'."""
    differ = []
    for field in fields(model):
        mine = getattr(model, field.name)
        theirs = getattr(other, field.name)
        if not field.compare or field.name in _MAY_DIFFER or mine == theirs:
            continue
        if isinstance(mine, int | float | str):
            differ.append(f"{field.name} {theirs} (here {mine})")
        else:
            differ.append(field.name)
    return differ


def _collect() -> None:
    """Collect what is left in cycles, in a process that exempts what it loaded from collection, too."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


def _return_memory() -> None:
    """Have the system get what is not used any more."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: it keeps what was freed
    if trim is not None:
        trim(0)
