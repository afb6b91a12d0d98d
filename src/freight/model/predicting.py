"""Layers of a checkpoint that predict further tokens, as a head that drafts: loaded beside the model, whose
embedding and output head they share.

At a position, such a layer takes the state of the token there and the embedding of the token behind it:
x = projection([norm(embedding), norm(state)]), a decoder layer over x, and a norm (DeepSeek-V3, section
2.2, arXiv:2412.19437). The state is the final one of the model, normed, or this norm's own result, which
vLLM (`deepseek_mtp.py`, 055e47c) and SGLang (`deepseek_nextn.py`, 0114f9c) feed back to draft more tokens.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.cache.pool import LayerCache
from freight.checkpoint.gguf.stored import StoredBlocks, find_blocks
from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.errors import ConfigError, listed
from freight.fp8.cast import torch_dtype
from freight.kernels.interface import KernelSet
from freight.model.architectures import tensor_names
from freight.model.building import Ropes
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.predicting import PredictingConfig, published_predicting
from freight.model.config.tensor_names import PREDICTS, TensorNames
from freight.model.decoder import Decoder, DecoderLayer, Residual
from freight.model.feed_forward.expert_names import present_layer
from freight.model.layers.embedding import Embedding, LogitsHead
from freight.model.layers.linear import Projection
from freight.model.layers.norm import Norm
from freight.model.layers.rope import build_ropes
from freight.model.loader import (
    ModelBuilder,
    builder_of_share,
    computed_blocks,
    present_share,
    require_groups,
    require_whole_blocks,
)
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.dividing import Rank
from freight.model.mixers.spec import Mixer
from freight.model.open import OpenModel
from freight.model.shapes import predicting_shapes
from freight.model.shares import share_of_predicting
from freight.model.sources import CheckpointSource, Stored, WeightSource
from freight.model.stored import find_matrices
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import as_tensor
from freight.operands.rotary import Rotary
from freight.settings.engine import EngineConfig

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class PredictingLayer:
    """One layer. `embedding_norm` and `features_norm`: weights [hidden_size] of norms with `eps`."""

    embedding_norm: Tensor
    features_norm: Tensor
    eps: float
    projection: Projection
    decoder: DecoderLayer
    norm: Norm


@dataclass(frozen=True)
class PredictingHead:
    """A `DraftHead` of these layers. `embedding` and `head` are the model's.

    seen   [max_positions, 1] in the compute dtype: the factor of the embedding by position; None: 1
    """

    config: PredictingConfig
    layers: tuple[PredictingLayer, ...]
    embedding: Embedding
    head: LogitsHead
    seen: Tensor | None
    kernels: KernelSet

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.config.layer.mixer,) * len(self.layers)

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        mixers = (layer.decoder.mixer for layer in self.layers)
        return tuple(mixer.rotary if isinstance(mixer, Attention) else None for mixer in mixers)

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        return ()

    @property
    def vocabulary(self) -> Tensor | None:
        return None

    @property
    def read(self) -> object:
        return self.layers, self.head

    def hidden(
        self,
        batch: ForwardBatch,
        features: Tensor | None,
        kv_cache: Sequence[LayerCache],
        depth: int = 0,
    ) -> Tensor:
        """Return the states, normed. `depth` chooses the layer, from the first one again behind the
        last, and with it the part of `kv_cache`.
        """
        assert features is not None, "these layers take states"
        index = depth % len(self.layers)
        layer = self.layers[index]
        embedded = self.embedding(batch.token_ids, batch.positions)
        if self.seen is not None:
            factors = self.kernels.lookup(self.seen, batch.positions)
            embedded = self.kernels.gate(embedded, factors, GateFunction.IDENTITY)
        parts = [(embedded, layer.embedding_norm), (features, layer.features_norm)]
        if self.config.form.features_first:
            parts.reverse()
        stream = Residual(layer.projection(self.kernels.join(parts, layer.eps)))
        stream = layer.decoder(stream, batch, kv_cache[index])
        if len(batch.logit_rows) < len(stream.x):
            stream = stream.rows(batch.logit_rows)
        _, normed = stream.normed(layer.norm)
        return as_tensor(normed)

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states)


def load_predicting(
    opened: OpenModel, config: EngineConfig, decoder: Decoder, num_positions: int | None = None
) -> PredictingHead:
    """Read the layers that predict further tokens, after `opened` was loaded with `config` as `decoder`,
    in its formats. `num_positions` as in `OpenModel.load`.

    Of several ranks each has its part of the layers. Raises ConfigError as `require_predicting`;
    CheckpointError, before a weight is read, for tensors that are missing, misshapen or left over.
    """
    predicting = require_predicting(opened, config)
    checkpoint = opened.checkpoint
    assert checkpoint is not None
    kernels = decoder.kernels
    length = num_positions or config.max_model_len
    with opened.threads(config):
        builder = _builder(checkpoint, predicting, opened, config, decoder)
        ropes = build_ropes(decoder.config.ropes, length, config.device)
        indices = range(len(predicting.prefixes))
        layers = tuple(_layer(builder, predicting, index, ropes) for index in indices)
        seen = None
        if predicting.form.masks_first:
            dtype = torch_dtype(config.compute_format)
            seen = torch.ones(length, 1, dtype=dtype, device=config.device)
            seen[0] = 0
    checkpoint.require_unchanged()
    logger.info("%d layers that predict further tokens draft", len(layers))
    head = decoder.logits_head
    return PredictingHead(predicting, layers, decoder.embedding, head, seen, kernels)


def require_predicting(opened: OpenModel, config: EngineConfig) -> PredictingConfig:
    """Return the layers of `opened` that predict further tokens. Raises ConfigError if there are none
    that are read, and for a model on several devices.
    """
    tensors = frozenset[str]() if opened.checkpoint is None else opened.checkpoint.names
    predicting = published_predicting(opened.model, tensors)
    if predicting is None:
        raise ConfigError(
            f"{opened.args.model} has no layers that predict further tokens, or none that are read (model_type "
            f"{opened.model.model_type}); draft with ngram or suffix"
        )
    if opened.stages(config):
        raise ConfigError(
            "layers that predict further tokens run on one device: choose one GPU, or draft with ngram or suffix"
        )
    return predicting


def _builder(
    checkpoint: Checkpoint,
    predicting: PredictingConfig,
    opened: OpenModel,
    config: EngineConfig,
    decoder: Decoder,
) -> ModelBuilder:
    """Find and check the tensors of the layers; return the builder of their parts."""
    kernels = decoder.kernels
    scheme = opened.scheme
    model = replace(opened.model, layers=(predicting.layer,), ropes=decoder.config.ropes)
    names = tensor_names(model)
    mlp = predicting.layer.feed_forward
    if isinstance(mlp, MoEConfig):
        channels = mlp.expert_channels(model.hidden_size)
        for prefix in predicting.prefixes:
            present_layer(checkpoint, prefix, mlp, channels, names, scheme)
    shapes = predicting_shapes(model, predicting)
    # Whatever config.json declares: tools leave these layers in 16 bits, and do not list them
    matrices, needed = find_matrices(checkpoint, scheme, shapes, free=frozenset(shapes))
    _require_all_read(checkpoint, predicting, names, needed)
    require_groups(kernels, matrices.four, config.int4)
    stored: dict[str, Stored] = {**matrices.linears, **matrices.four}
    if kernels.multiplies_blocks and not config.weight_format.is_quantized:
        stored |= _blocks(checkpoint, model, predicting, shapes)
    packed = matrices.packed
    share = None
    size = opened.ranks.size
    if size > 1:
        of_all = [share_of_predicting(model, predicting, Rank(rank, size)) for rank in range(size)]
        require_whole_blocks(of_all, matrices.linears)
        share = of_all[opened.ranks.rank]
        stored, packed = present_share(checkpoint, share, stored, packed)
    source: WeightSource = CheckpointSource(
        checkpoint,
        config.compute_format,
        config.weight_format,
        config.device,
        stored,
        rounds=scheme.weight_format is None,
        packed=packed,
        keeps_mxfp4=kernels.packs_mxfp4,
        int4=config.int4,
    )
    if share is None:
        return ModelBuilder(source, model, names, shapes, kernels)
    return builder_of_share(source, share, names, kernels)


def _blocks(
    checkpoint: Checkpoint,
    model: ModelConfig,
    predicting: PredictingConfig,
    shapes: Mapping[str, Shape],
) -> dict[str, StoredBlocks]:
    """Return the matrices that are computed in a GGUF file's blocks. model: with one such layer alone."""
    names = tensor_names(model)
    outside = {
        name: size for name, size in shapes.items() if not name.startswith(predicting.prefixes)
    }
    blocks = find_blocks(checkpoint, outside)
    for prefix in predicting.prefixes:
        own = {name: size for name, size in shapes.items() if name.startswith(prefix)}
        blocks |= computed_blocks(checkpoint, model, replace(names, layer=prefix), own)
    return blocks


def _require_all_read(
    checkpoint: Checkpoint,
    predicting: PredictingConfig,
    names: TensorNames,
    needed: Container[str],
) -> None:
    """Raise CheckpointError for a weight or a bias of the layers that nothing reads: they compute
    something else. (Scales of matrices were found with these.)
    """
    form = predicting.form
    skipped = [pattern for pattern, reason in names.unused if reason != PREDICTS]
    roots = predicting.prefixes if form.outside is None else (form.outside,)
    left = []
    for name in sorted(checkpoint.names):
        if not name.startswith(roots) or not name.endswith((".weight", ".bias")) or name in needed:
            continue
        is_copy = any(f".{copy}." in name for copy in form.copies)
        if not is_copy and not any(fnmatch.fnmatch(name, pattern) for pattern in skipped):
            left.append(name)
    if left:
        raise checkpoint.fault(
            f"{len(left)} tensors belong to no layer that predicts further tokens as the model_type has them: "
            f"{listed(left, 20)}; draft with ngram or suffix"
        )


def _layer(
    builder: ModelBuilder, predicting: PredictingConfig, index: int, ropes: Ropes
) -> PredictingLayer:
    form = predicting.form
    config = builder.config
    assert builder.divisor == 1
    of_layer = replace(builder, names=replace(builder.names, layer=predicting.prefixes[index]))
    return PredictingLayer(
        embedding_norm=builder.norm_weight(predicting.weight(index, form.embedding_norm)),
        features_norm=builder.norm_weight(predicting.weight(index, form.features_norm)),
        eps=config.norm_eps,
        projection=builder.whole(builder.kept([predicting.module(index, form.projection)])),
        decoder=of_layer.layer(0, ropes),
        norm=builder.norm(predicting.weight(index, form.norm)),
    )
