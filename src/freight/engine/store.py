"""The store below an engine's cache: its name space, and how it is opened.

Two engines share blocks if everything is equal that decides what a page's bytes are and mean: that
is the name space. It has the digest of all weights, which takes as long as to read them, so the
store is opened by a thread, and until then nothing is read from it or written to it. Memory and the
length of the context (beyond what the ropes make of it) decide no byte, nor do threads where the
kernels are Freight's. Where a library computes products, threads and processor count.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.cache.manager import CacheManager
from freight.cache.pool import KVPool
from freight.cache.store.folder import make_private
from freight.cache.store.pages import GroupBytes, OtherRanks
from freight.cache.store.tiers import StoreTiers
from freight.cache.store.weights import ChangedError, WeightFile, digest_of_weights
from freight.cache.stored import StoredPrefixes
from freight.checkpoint.reader import Checkpoint
from freight.engine.fingerprint import declared, is_reproducible
from freight.errors import ConfigError
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.model.mixers.dividing import CacheShare, Rank
from freight.model.mixers.spec import Mixer
from freight.model.open import OpenModel
from freight.operands.tiles import KEY_TILE, STATE_TILE
from freight.settings.cpu_builds import path_of
from freight.settings.device import cpu_name
from freight.settings.engine import EngineConfig
from freight.settings.store import StoreConfig

logger = logging.getLogger("freight")

_FORM = 1  # of records and payloads
_NICE = 10  # of the thread that reads weights


@dataclass(frozen=True)
class Weights:
    """The files of a model's weights, as they were before they were loaded; `drawn` is what stands
    for them where there are none.
    """

    files: tuple[WeightFile, ...]
    drawn: str = ""

    @staticmethod
    def of(opened: OpenModel, config: EngineConfig, head: Checkpoint | None = None) -> Weights:
        """head: files of what drafts, whose keys and values lie in the same blocks. Raises OSError."""
        files: tuple[WeightFile, ...] = ()
        drawn = f"random weights of seed {config.seed}"
        if opened.checkpoint is not None:
            files = tuple(map(WeightFile.of, opened.checkpoint.files))
            drawn = opened.checkpoint.digest()
        if head is not None:
            files += tuple(map(WeightFile.of, head.files))
            drawn += head.digest()
        return Weights(files, drawn)


def prepare_store(
    opened: OpenModel, config: EngineConfig, head: Checkpoint | None = None
) -> Weights | None:
    """Make the folder, and note which weights will be loaded; None without a store. head: as in
    `Weights.of`. Raises ConfigError.
    """
    if config.store is None:
        return None
    try:
        make_private(config.store.folder)
        return Weights.of(opened, config, head)
    except OSError as error:
        raise ConfigError(
            f"--kv-store {config.store.folder} cannot be used: {error}; name a folder that can be "
            "made and written"
        ) from None


def open_store(
    opened: OpenModel,
    config: EngineConfig,
    kernels: KernelSet,
    version: str,
    weights: Weights,
    cache: CacheManager,
    pool: KVPool,
    memories: tuple[Tensor, ...] = (),
    of_head: Sequence[Mixer] = (),
) -> StoredPrefixes:
    """Return the store of `cache`, whose memory is `pool`, and `memories` of the other ranks, from
    rank 1 on. of_head: mixers of the layers of a head that drafts, behind the model's. A thread opens
    it.
    """
    assert config.store is not None
    other_ranks = None
    if memories:
        other_ranks = _other_ranks(opened, memories, of_head)
    groups = [GroupBytes(pool, index, other_ranks) for index in range(len(pool.spec.groups))]
    tiers = StoreTiers(config.store.folder, config.store.size, config.store.memory)
    stored = StoredPrefixes(tiers, cache, groups, config.store.salted)
    decides = what_decides(opened, config, kernels, version, pool, groups)
    opener = threading.Thread(
        target=_open,
        args=(config.store, tiers, stored, decides, weights),
        name="kv-store-open",
        daemon=True,
    )
    opener.start()
    return stored


def _other_ranks(
    opened: OpenModel, memories: tuple[Tensor, ...], of_head: Sequence[Mixer]
) -> OtherRanks:
    size = opened.ranks.size
    shares: dict[int, Mapping[str, tuple[CacheShare, ...]]] = {}
    mixers = (*(layer.mixer for layer in opened.model.layers), *of_head)
    for index, mixer in enumerate(mixers):
        if mixer is None:
            continue
        by_name: dict[str, tuple[CacheShare, ...]] = {}
        for number in range(size):
            for name, share in mixer.cache_shares(Rank(number, size)).items():
                by_name[name] = (*by_name.get(name, ()), share)
        shares[index] = by_name
    return OtherRanks(memories, shares)


def what_decides(
    opened: OpenModel,
    config: EngineConfig,
    kernels: KernelSet,
    version: str,
    pool: KVPool,
    groups: Sequence[GroupBytes],
) -> dict[str, str]:
    """Return all that decides the bytes of a page, by what it is, but the weights. `name` is for
    people.
    """
    kv = config.kv
    model = opened.model.for_context(config.max_model_len)
    build = b""
    if isinstance(kernels, CpuKernels):
        build = path_of(kernels.library.build).read_bytes()
    products = ""
    if not is_reproducible(opened, kernels):
        products = library(opened, config)
    scales = None
    if kv.scales is not None:
        scales = (kv.scales.format, kv.scales.layers)
    by_group = []
    for group, stored in zip(pool.spec.groups, groups, strict=True):
        by_group.append((group.kind, group.tokens_per_block, stored.layout))
    return {
        "name": f"{model.model_type}, {kv.describe()}",
        "form": str(_FORM),
        "freight": version,
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        "kernels": f"{kernels.name} {hashlib.sha256(build).hexdigest()}",
        "products": products,
        "libc": " ".join(platform.libc_ver()),  # its expf scores experts
        "device": config.device,
        "model": repr(model),
        "declared": declared(opened),
        "formats": f"{config.compute_format} {config.weight_format}{' int4' * config.int4} {config.fp8_attention}",
        "inputs": f"int8: {config.int8_activations}",
        "cache": repr([kv.of_layer(index) for index in range(model.num_layers)]),
        "scales": repr(scales),
        "states": f"{kv.state}",
        "tiles": f"{KEY_TILE} {STATE_TILE}",
        "blocks": str(config.block_size),
        "groups": repr(by_group),
    }


def library(opened: OpenModel, config: EngineConfig) -> str:
    """Return what decides how torch and transformers sum, beside torch's version."""
    transformers = importlib.metadata.version("transformers")
    return f"{opened.threads(config).count} threads of {cpu_name()}, transformers {transformers}"


def name_space(decides: dict[str, str], weights: str) -> str:
    """Return the name of the folder for blocks of all this; `weights` is their digest."""
    content = json.dumps({**decides, "weights": weights}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _open(
    config: StoreConfig,
    tiers: StoreTiers,
    stored: StoredPrefixes,
    decides: dict[str, str],
    weights: Weights,
) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    try:
        digest = digest_of_weights(
            config.folder, weights.files, lambda: not stored.mover.is_closing
        )
    except (OSError, ChangedError) as error:
        logger.warning(
            "KV store: the weights are not the files that were loaded, or cannot be read (%s); nothing is stored",
            error,
        )
        return
    if digest is not None:
        tiers.open(name_space(decides, digest + weights.drawn), decides)
        stored.mover.opened()
