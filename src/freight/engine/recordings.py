"""Decode steps as recorded calls of the CPU kernels: one call of C for all of a step, with the bits
of an ordinary one.

A recording begins with the embedding and ends with the head's product. What bounds the logits
behind that, a divisor or a soft cap, is torch's and stays outside; so does a head with clipped
inputs. A model with operations of torch between its other kernels is not recorded: its
steps run as they were written (`kernels/cpu/recording.py`).
"""

from __future__ import annotations

import logging
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import Replay
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.recording import Arena, Recorded, Recording, record
from freight.model.decoder import Decoder
from freight.operands.batch import ForwardBatch

MAX_NUM_SEQS = 64  # beyond, a step's products take so long that Python between them does not count

Part = TypeVar("Part")

logger = logging.getLogger("freight")


class CpuRecordings:
    """A `Capture` on the CPU. Steps are not padded, which would cost time here: each number of rows
    is recorded. Which sequences they belong to is read when a step is replayed.

    All recordings share an arena: the outputs that are alive at one moment, for `max_num_seqs`
    rows.
    """

    largest_first = False
    several_rows = True
    generation = 0

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        kernels: CpuKernels,
        max_num_seqs: int,
        feature_layers: tuple[int, ...] | None = None,
    ) -> None:
        """feature_layers: of a head that drafts (`DraftHead`); None: features are not wanted."""
        self.max_num_seqs = min(max_num_seqs, MAX_NUM_SEQS)
        self.model = model
        self.pool = pool
        self.arena = Arena(self.max_num_seqs)
        self.obstacle = ""  # why this model is not recorded
        self.feature_layers = feature_layers
        self.features: Tensor | None = None  # of the step that ran last
        self._kernels = kernels

    def bucket_of(self, num_seqs: int) -> int:
        return num_seqs

    def capture(self, batch: ForwardBatch) -> Replay:
        return CpuStep(self, batch)

    def record(self, batch: ForwardBatch) -> Recorded:
        def step(library: Library) -> Tensor:
            kernels = replace(self._kernels, library=library)
            kv_cache = with_kernels(self.pool.layers, kernels)
            model = with_kernels(self.model, kernels)
            if self.feature_layers is None:
                return model.by_kernels(batch, kv_cache)
            hidden, self.features = model.hidden_with(batch, kv_cache, self.feature_layers)
            return model.head_by_kernels(hidden)

        recorded = record(self._kernels.library, self.arena, step)
        if recorded.obstacle and not self.obstacle:
            self.obstacle = recorded.obstacle
            logger.debug("decode steps are not recorded: %s", recorded.obstacle)
        return recorded


class CpuStep:
    """One step over `batch`, recorded when it first runs, and again for another number of threads."""

    def __init__(self, owner: CpuRecordings, batch: ForwardBatch) -> None:
        self._owner = owner
        self._batch = batch
        # by threads, with the features that a replay writes
        self.recordings: dict[int, tuple[Recording, Tensor | None]] = {}

    def __call__(self) -> Tensor:
        """float32 logits [num_seqs, vocab_size]. Raises what an ordinary step raises."""
        owner = self._owner
        model = owner.model
        if owner.obstacle and owner.feature_layers is not None:
            layers = owner.feature_layers
            hidden, owner.features = model.hidden_with(self._batch, owner.pool.layers, layers)
            return model.logits(hidden)
        if owner.obstacle:
            return model.forward(self._batch, owner.pool.layers)
        threads = torch.get_num_threads()  # the arguments of each call have it
        if threads in self.recordings:
            recording, owner.features = self.recordings[threads]
            return model.logits_of(recording.replay())
        recorded = owner.record(self._batch)
        if recorded.recording is not None:
            self.recordings[threads] = recorded.recording, owner.features
        return model.logits_of(recorded.output)


def with_kernels(part: Part, kernels: CpuKernels) -> Part:
    """`part`, of a model or a cache, or a tuple of parts, with all operations by `kernels`; tensors
    are shared.
    """
    if isinstance(part, tuple) and type(part) is tuple:  # and no NamedTuple
        return type(part)(with_kernels(value, kernels) for value in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {}
    for field in fields(part):
        before = getattr(part, field.name)
        after: object = kernels
        if field.name != "kernels":
            after = with_kernels(before, kernels)
        if after is not before:
            changed[field.name] = after
    if not changed:
        return part
    return replace(part, **changed)
