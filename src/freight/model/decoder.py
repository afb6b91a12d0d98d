"""The decoder: embedding, layers of mixer and MLP, norm, head. Families differ in data only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from freight.cache.pool import LayerCache, LayerKV, PagedState
from freight.kernels.interface import KernelSet
from freight.model.adapters import AdapterBanks
from freight.model.building import stream_divisor
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.feed_forward.mlp import MLP
from freight.model.feed_forward.moe import MoE, ParallelExperts
from freight.model.layers.embedding import Embedding, LogitsHead
from freight.model.layers.norm import Norm
from freight.model.layers.per_layer_embeddings import PerLayerEmbedding, PerLayerEmbeddings
from freight.model.mixers.attention.layer import Attention
from freight.model.pooler import Pooler
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.rotary import Rotary
from freight.parallel.stages import Stage

Cache = TypeVar("Cache", contravariant=True)
Taken = dict[int, Tensor | None]  # the stream behind a layer, for layers that it names


class Mixer(Protocol[Cache]):
    """The part of a layer that mixes tokens (`model/mixers/`): `Attention`, recurrent layers,
    convolutions.

    `Cache` is the kind of its layer's part of the cache: `LayerKV` for attention, else `PagedState`.
    """

    @property
    def consumer(self) -> PackedWeight | None:
        """The packed weight that reads the input, as in `Linear.consumer`."""
        ...

    def __call__(self, x: Rows, batch: ForwardBatch, cache: Cache, /) -> Tensor:
        """Mix x [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`; the
        result has x's shape.

        `cache` has what the layer keeps of the tokens before.
        """
        ...


AnyMixer = Mixer[LayerKV] | Mixer[PagedState]


class Residual(NamedTuple):
    """The residual stream [num_tokens, hidden_size], with its last addition pending.

    It is x + delta (x if delta is None), or with `delta_weight` x + the RMSNorm of delta. The next
    norm does the addition, so both take one pass over the rows. `inputs` [num_tokens, layers,
    size], in models that have per-layer embeddings, are those of the next layer and the layers
    after it (`model/layers/per_layer_embeddings.py`).
    """

    x: Tensor
    delta: Tensor | None = None
    delta_weight: Tensor | None = None
    inputs: Tensor | None = None

    def normed(self, norm: Norm, consumer: PackedWeight | None = None) -> tuple[Tensor, Rows]:
        """Add the stream up; return it and its norm for `consumer` (`KernelSet`)."""
        return norm(self.x, self.delta, consumer, self.delta_weight)

    def summed(self, norm: Norm) -> Tensor:
        """Add the stream up. Only the eps of `norm` matters: kernels fuse the add and the norm, and
        the normed rows are dropped.
        """
        return self.x if self.delta is None else self.normed(norm)[0]

    def on(self, device: str) -> Residual:
        """Return the stream on `device`; the host does not wait for the copy."""
        moved = [None if part is None else part.to(device, non_blocking=True) for part in self]
        return Residual._make(moved)

    def take(self, other: Residual) -> None:
        """Copy the values of `other`, maybe of another device, into these tensors. The host does not
        wait; the devices do.
        """
        for target, source in zip(self, other, strict=True):
            if target is not None and target is not source:
                assert source is not None
                target.copy_(source, non_blocking=True)

    def rows(self, index: Tensor) -> Residual:
        """Return the stream of the rows `index`, int64, without `inputs`: for use after the last
        layer.
        """
        return self._replace(
            x=self.x[index], delta=None if self.delta is None else self.delta[index], inputs=None
        )


@dataclass(frozen=True)
class DecoderLayer:
    """A layer: x += mixer(norm(x)); x += mlp(norm(x)).

    `placement` says which tensors are normed. `mixer_post` and `mlp_post`, where not None, are the
    weights of a norm of what is added. With `NormPlacement.POST` the sums are normed instead: x =
    norm(x + mixer(x)); x = norm(x + mlp(x)). With `NormPlacement.OUTPUT` the inputs are not normed:
    x += norm(mixer(x)); x += norm(mlp(x)).

    With `raw_mixer` the input of the mixer is not normed, and `mixer_norm` only adds the stream up.

    A layer without a mixer, or without `mlp`, has only the other part and that part's norm.

    `parallel_experts` adds a mixture of experts in parallel with `mlp`; the norms of both are summed.
    `per_layer` adds the layer's own embedding of the tokens. `scalar`, [1] in the compute dtype,
    multiplies the result; it is already part of the weight of the norm of the last addition.
    """

    mixer_norm: Norm | None
    mixer: AnyMixer | None
    mixer_post: Tensor | None
    mlp_norm: Norm | None
    mlp: MLP | MoE | None
    mlp_post: Tensor | None
    placement: NormPlacement = NormPlacement.PRE
    scalar: Tensor | None = None
    per_layer: PerLayerEmbedding | None = None
    parallel_experts: ParallelExperts | None = None
    raw_mixer: bool = False

    def __call__(self, stream: Residual, batch: ForwardBatch, cache: LayerCache) -> Residual:
        """Run the layer. `cache`: what its mixer takes; None for a layer that keeps no state of the
        tokens before.
        """
        mixer = self.mixer
        mlp = self.mlp
        if mixer is not None:
            assert self.mixer_norm is not None
            x, normed = self._mixer_input(stream, self.mixer_norm, mixer.consumer)
            # `allocate_pool` makes the cache of a layer of its mixer's kind
            delta = mixer(normed, batch, cache)  # type: ignore[arg-type]
            stream = self._added(x, delta, self.mixer_norm, self.mixer_post, stream.inputs)
        if mlp is None:
            return stream
        assert self.mlp_norm is not None
        x, normed = self._input(stream, self.mlp_norm, mlp.consumer)
        delta = mlp(normed, batch.adapters)
        weight = self.mlp_post
        inputs = stream.inputs
        if self.parallel_experts is not None:
            delta = self.parallel_experts(x, delta, batch.adapters)
        if self.per_layer is not None:
            assert inputs is not None
            x, _ = Residual(x, delta, weight).normed(self.mlp_norm)
            delta = self.per_layer(x, inputs[:, 0], batch.adapters)
            weight = self.per_layer.post
            inputs = inputs[:, 1:]
        if self.scalar is not None:
            x = self.mlp_norm.kernels.gate(x, self.scalar[None], GateFunction.IDENTITY)
        return self._added(x, delta, self.mlp_norm, weight, inputs)

    def _mixer_input(
        self, stream: Residual, norm: Norm, consumer: PackedWeight | None
    ) -> tuple[Tensor, Rows]:
        """Add the stream up; return it and the input of the mixer."""
        if not self.raw_mixer:
            return self._input(stream, norm, consumer)
        x = stream.summed(norm)
        return x, x

    def _input(
        self, stream: Residual, norm: Norm, consumer: PackedWeight | None
    ) -> tuple[Tensor, Rows]:
        """Add the stream up; return it and the input of a part."""
        if self._norms_inputs:
            return stream.normed(norm, consumer)
        x = stream.x if self._norms_sums else stream.summed(norm)
        return x, x

    def _added(
        self, x: Tensor, delta: Tensor, norm: Norm, weight: Tensor | None, inputs: Tensor | None
    ) -> Residual:
        """Return the stream after a part that adds `delta`."""
        if self._norms_sums:
            return Residual(as_tensor(Residual(x, delta).normed(norm)[1]), inputs=inputs)
        return Residual(x, delta, weight, inputs)

    # Kept, because reading a member of an enum takes ten times as long, and each step asks often.
    @cached_property
    def _norms_inputs(self) -> bool:
        return self.placement in (NormPlacement.PRE, NormPlacement.SANDWICH)

    @cached_property
    def _norms_sums(self) -> bool:
        return self.placement is NormPlacement.POST

    @property
    def last_norm(self) -> Norm:
        """The norm of the layer's last part, whose eps is that of the stream."""
        norm = self.mixer_norm if self.mlp is None else self.mlp_norm
        assert norm is not None
        return norm

    def whole(
        self, x: Tensor, batch: ForwardBatch, cache: LayerCache, inputs: Tensor | None = None
    ) -> Tensor:
        """Run the layer alone, for work that goes through a model layer by layer: x and the result
        are complete sums.

        inputs: [num_tokens, 1, size], this layer's embeddings, in models that have them.
        """
        x, _ = self(Residual(x, inputs=inputs), batch, cache).normed(self.last_norm)
        return x


class LanguageModel(Protocol):
    """A model that the engine runs: `Decoder`, or transformers' modules (`model/fallback.py`)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> KernelSet: ...

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]: ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Where the layers are; none if all is on one device."""
        ...

    @property
    def pooler(self) -> Pooler | None:
        """What makes a vector of a prompt's states; None: the model only generates."""
        ...

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return its final states, as `Decoder.hidden` does."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final states, as `Decoder.logits` does."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return its logits, as `Decoder.forward` does."""
        ...


@dataclass(frozen=True)
class Decoder:
    """A complete model. Parameters are final at construction. `head` is None in a model that only
    pools, with `pooler`. `banks` have the adapters; None: it takes none. `stages`: where the layers
    are; none if all is on one device.
    """

    config: ModelConfig
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None
    head: LogitsHead | None
    per_layer_embeddings: PerLayerEmbeddings | None = None
    banks: AdapterBanks | None = None
    pooler: Pooler | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def kernels(self) -> KernelSet:
        """The kernels of all parts."""
        return self.embedding.kernels

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding of each layer's queries and keys, None for a layer without one.
        Layers with the same rope share its tables.
        """
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.rotary if isinstance(mixer, Attention) else None for mixer in mixers)

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return float32 logits [num_logit_rows, vocab_size]; K and V go into
        `kv_cache`.
        """
        return self.logits(self.hidden(batch, kv_cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of final states [num_rows, hidden_size]."""
        with computing_on(self.last_device):
            return self.logits_head(hidden)

    @property
    def logits_head(self) -> LogitsHead:
        """The head of a model that generates."""
        assert self.head is not None, "a model without a head gives no logits"
        return self.head

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return its final states [num_logit_rows, hidden_size]; K and V go into
        `kv_cache`.

        They are normed, if the model has a last norm. Logits take far more memory than these, so
        their rows can be computed a few at a time.
        """
        return self.layers_over(self.begin(batch), batch, kv_cache)

    def hidden_with(
        self, batch: ForwardBatch, kv_cache: Sequence[LayerCache], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run one step as `hidden`; return its states, and features of all rows (`DraftHead`).

        layers   layers of which features are wanted: [num_tokens, len(layers) * hidden_size], the
                 residual stream behind each, as the model has it: not divided (`building.py`). None
                 of them: final states of all rows, [num_tokens, hidden_size]
        """
        taken: Taken = dict.fromkeys(layers)
        stream = self._through(self.begin(batch), batch, kv_cache, taken)
        with computing_on(self.last_device):
            if not layers:
                states = self._normed(stream)
                rows = batch.on(self.last_device or "").logit_rows
                return states if len(rows) == len(states) else states[rows], states
            parts = [(self._on_last(taken[index]), None) for index in layers]
            features = self.kernels.join(parts)
            divisor = stream_divisor(self.config)
            if divisor != 1:
                features = features * divisor
        return self.end(stream, batch), features

    def by_kernels(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run the part of `forward` that kernels alone compute: up to the head's product, or up to
        the head where torch has a part in that.
        """
        return self.head_by_kernels(self.hidden(batch, kv_cache))

    def head_by_kernels(self, hidden: Tensor) -> Tensor:
        """Run the part of the head that kernels alone compute, of final states."""
        head = self.logits_head
        return head.product(hidden) if head.begins_with_kernels else hidden

    def logits_of(self, computed: Tensor) -> Tensor:
        """Run the rest of `forward` after `by_kernels`; return float32 logits [num_logit_rows,
        vocab_size].
        """
        head = self.logits_head
        if head.begins_with_kernels:
            return head.bounded(computed)
        return head(computed)

    def begin(self, batch: ForwardBatch) -> Residual:
        """Return the stream that the first layer takes: the rows of the embedding, and per-layer
        embeddings of the tokens.
        """
        with computing_on(self.stages[0].device if self.stages else None):
            embedded = self.embedding(batch.token_ids, batch.positions, batch.token_types)
            if self.per_layer_embeddings is None:
                return Residual(embedded)
            return Residual(embedded, inputs=self.per_layer_embeddings(embedded, batch.token_ids))

    def layers_over(
        self, stream: Residual, batch: ForwardBatch, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        """Run the layers and the last norm over what `begin` returned: the rest of `hidden`."""
        return self.end(self._through(stream, batch, kv_cache), batch)

    def _through(
        self,
        stream: Residual,
        batch: ForwardBatch,
        kv_cache: Sequence[LayerCache],
        taken: Taken | None = None,
    ) -> Residual:
        if not self.stages:
            return self._layers(stream, range(len(self.layers)), batch, kv_cache, taken)
        for stage in self.stages:
            stream = self.run_stage(stage, stream.on(stage.device), batch, kv_cache, taken)
        return stream

    def run_stage(
        self,
        stage: Stage,
        stream: Residual,
        batch: ForwardBatch,
        kv_cache: Sequence[LayerCache],
        taken: Taken | None = None,
    ) -> Residual:
        """Run the layers of one stage over the stream, which is on its device. `taken`: gets the
        stream behind those of its keys that are layers of this stage.
        """
        with computing_on(stage.device):
            return self._layers(stream, stage.layers, batch.on(stage.device), kv_cache, taken)

    @property
    def last_device(self) -> str | None:
        """Where final states and logits are, and what makes them; None: where all is."""
        return self.stages[-1].device if self.stages else None

    def _layers(
        self,
        stream: Residual,
        indices: range,
        batch: ForwardBatch,
        kv_cache: Sequence[LayerCache],
        taken: Taken | None,
    ) -> Residual:
        assert len(kv_cache) == len(self.layers)
        for index in indices:
            stream = self.layers[index](stream, batch, kv_cache[index])
            if taken is not None and index in taken:
                taken[index] = stream.summed(self.layers[index].last_norm)
        return stream

    def _on_last(self, taken: Tensor | None) -> Tensor:
        assert taken is not None, "a layer that is not there"
        return taken if self.last_device is None else taken.to(self.last_device, non_blocking=True)

    def end(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return the final states of the rows that have logits, from the stream behind the layers."""
        with computing_on(self.last_device):
            rows = batch.on(self.last_device or "").logit_rows
            if len(rows) < len(stream.x):
                stream = stream.rows(rows)
            return self._normed(stream)

    def _normed(self, stream: Residual) -> Tensor:
        if self.norm is None:
            return stream.summed(self.layers[-1].last_norm)
        _, normed = stream.normed(self.norm)
        return as_tensor(normed)


def computing_on(device: str | None) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on `device`; on a CPU there is nothing to say."""
    if device is None or device == "cpu":
        return nullcontext()
    return torch.cuda.device(device)
