"""EAGLE-3 heads (arXiv:2503.01840): one layer over the features of another model's layers.

A row has the features of a token and the embedding of the one behind it. `fc` makes a state of the
features. Attention takes the two side by side, each normed, and its result is added to the state;
the feed-forward follows as in any layer. The sum, not normed, is the state of the row behind, for
which there are no features yet. Logits are of a part of the vocabulary: `d2t` has the id of each, less
its place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.cache.pool import LayerCache, PagedState
from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.errors import CheckpointError, ConfigError
from freight.kernels.interface import KernelSet
from freight.model.architectures import tensor_names
from freight.model.config.eagle import EAGLE_FC, EagleConfig, parse_eagle
from freight.model.config.model import ModelConfig
from freight.model.decoder import Decoder, DecoderLayer, LanguageModel, Residual, computing_on
from freight.model.layers.embedding import Embedding, LogitsHead
from freight.model.layers.linear import Projection
from freight.model.layers.norm import Norm
from freight.model.layers.rope import build_ropes
from freight.model.loader import ModelBuilder, builder_of_share, present_share
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.dividing import Rank
from freight.model.mixers.registry import build_mixer
from freight.model.mixers.spec import Mixer
from freight.model.moved import Mover
from freight.model.open import OpenModel
from freight.model.shapes import tensor_shapes
from freight.model.shares import share_of_eagle
from freight.model.sources import CheckpointSource
from freight.operands.batch import ForwardBatch
from freight.operands.packed import as_tensor
from freight.operands.rotary import Rotary
from freight.parallel.ranks import ALONE, Ranks
from freight.settings.engine import EngineConfig

logger = logging.getLogger("freight")

_HIDDEN_NORM = "hidden_norm.weight"
_INPUT_NORM = "input_norm.weight"
_FC_NORM = "fc_norm.{}.weight"
_IDS = "d2t"


@dataclass(frozen=True)
class EagleHead:
    """A `DraftHead`.

    fc                    makes a state of features; None: features are states
    fc_norms              weights of the norms of equal parts of the features, one after another
    input_norms           weights of the norms of the embedding, and of the state
    rest                  what follows attention: the feed-forward, with its norm
    norm_before_residual, norm_output   as in `EagleConfig`
    device                where it is, if the model's layers are on several devices
    """

    mixer: AttentionConfig
    feature_layers: tuple[int, ...]
    vocabulary: Tensor | None
    embedding: Embedding
    fc: Projection | None
    fc_norms: tuple[Tensor, ...]
    input_norms: tuple[Tensor, Tensor]
    attention: Attention
    rest: DecoderLayer
    norm: Norm
    head: LogitsHead
    norm_before_residual: bool
    norm_output: bool
    device: str | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.mixer,)

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        return (self.attention.rotary,)

    @property
    def read(self) -> object:
        return self.fc, self.attention, self.rest, self.head

    def hidden(
        self,
        batch: ForwardBatch,
        features: Tensor | None,
        kv_cache: Sequence[LayerCache],
        depth: int = 0,
    ) -> Tensor:
        assert features is not None
        (cache,) = kv_cache
        assert cache is not None
        assert not isinstance(cache, PagedState), "its layer has attention"
        kernels = self.embedding.kernels
        eps = self.norm.eps
        with computing_on(self.device):
            batch = batch.on(self.device or "")
            embedded = self.embedding(batch.token_ids, batch.positions)
            state = self._state(features, embedded.shape[1])
            of_embedding, of_state = self.input_norms
            inputs = kernels.join(((embedded, of_embedding), (state, of_state)), eps)
            if self.norm_before_residual:
                state = kernels.join(((inputs[:, embedded.shape[1] :], None),))
            attended = self.attention(inputs, batch, cache)
            stream = Residual(state, attended)
            if (
                len(batch.logit_rows) < batch.num_tokens
            ):  # of the others only keys and values are read
                stream = stream.rows(batch.logit_rows)
            if len(stream.x) == 0:
                return stream.x
            summed, normed = self.rest(stream, batch, None).normed(self.norm)
            return as_tensor(normed) if self.norm_output else summed

    def _state(self, features: Tensor, size: int) -> Tensor:
        """Return the states of rows, [num_tokens, size], of their features or of what `hidden`
        returned.
        """
        if self.fc is None or features.shape[1] == size:
            return features
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), 1)
            normed = tuple(zip(parts, self.fc_norms, strict=True))
            features = self.embedding.kernels.join(normed, self.norm.eps)
        return self.fc(features)

    def logits(self, states: Tensor) -> Tensor:
        with computing_on(self.device):
            if not self.norm_output:
                states = as_tensor(self.norm(states, None)[1])
            return self.head(states)


def attention_of(model: ModelConfig) -> AttentionConfig:
    """Return the attention of a head's one layer."""
    return model.attention[0]


@dataclass(frozen=True)
class OpenEagle:
    """A head whose files are checked, and no weight read yet but the ids of `vocabulary`."""

    checkpoint: Checkpoint
    config: EagleConfig
    shapes: dict[str, Shape]
    vocabulary: Tensor | None

    @property
    def mixer(self) -> AttentionConfig:
        """Its attention, of which the cache keeps keys and values."""
        return attention_of(self.config.model)

    def _builder(
        self, config: EngineConfig, kernels: KernelSet, device: str, ranks: Ranks
    ) -> ModelBuilder:
        """Return the builder of its parts, or of those of a rank."""
        formats = config.compute_format, config.compute_format
        source = CheckpointSource(self.checkpoint, *formats, device)
        names = tensor_names(self.config.model)
        if ranks.size == 1:
            return ModelBuilder(source, self.config.model, names, self.shapes, kernels)
        share = share_of_eagle(self.config, self.shapes, Rank(ranks.rank, ranks.size))
        present_share(self.checkpoint, share, {}, {})
        return builder_of_share(source, share, names, kernels)

    def load(self, config: EngineConfig, decoder: LanguageModel, ranks: Ranks = ALONE) -> EagleHead:
        """Read the weights, in the compute dtype, to the device of the last layers of `decoder`, the
        model that it guesses for; its kernels compute. Of several `ranks` each has its part.
        """
        assert isinstance(decoder, Decoder), "refused by `open_eagle`"
        device = decoder.last_device or config.device
        kernels = decoder.kernels
        builder = self._builder(config, kernels, device, ranks)
        names = builder.names
        of_context = self.config.model.for_context(config.max_model_len)
        ropes = build_ropes(of_context.ropes, config.max_model_len, device)
        prefix = names.layer.format(0)
        layer = builder.config.layers[0]
        attention = build_mixer(layer.mixer, builder, prefix, ropes)
        assert isinstance(attention, Attention)
        rest = DecoderLayer(
            mixer_norm=None,
            mixer=None,
            mixer_post=None,
            mlp_norm=builder.norm(prefix + names.mlp_norm),
            mlp=builder.feed_forward(layer.feed_forward, prefix),
            mlp_post=None,
        )
        norms = [names.attention_norm, _HIDDEN_NORM]
        of_embedding, of_state = [builder.norm_weight(prefix + name) for name in norms]
        fc_norms = [builder.norm_weight(name) for name in _fc_norms(self.config)]
        vocabulary = self.vocabulary
        fc = builder.outer("fc")
        head = EagleHead(
            mixer=attention_of(builder.config),
            feature_layers=self.config.feature_layers,
            vocabulary=None if vocabulary is None else vocabulary.to(device),
            embedding=self._embedding(builder, decoder.embedding, device),
            fc=None if fc is None else builder.whole(fc),
            fc_norms=tuple(fc_norms),
            input_norms=(of_embedding, of_state),
            attention=attention,
            rest=rest,
            norm=builder.norm(names.norm),
            head=LogitsHead(
                kernels.pack(builder.source.head(names.head, builder.shapes[names.head])),
                kernels,
                gathered=None if builder.share is None else self.config.draft_vocab_size,
            ),
            norm_before_residual=self.config.norm_before_residual,
            norm_output=self.config.norm_output,
            device=decoder.last_device,
        )
        self.checkpoint.require_unchanged()
        return head

    def _embedding(self, builder: ModelBuilder, of_model: Embedding, device: str) -> Embedding:
        """Build the head's embedding: its own, or the rows of the model's as they are stored, which
        vLLM shares as well (`v1/spec_decode/eagle.py`).
        """
        if builder.names.embedding in self.shapes:
            return builder.embedding()
        rows = replace(
            of_model, multiplier=None, projection=None, positions=None, norm=None, last_norm=None
        )
        return Mover(device)(rows)


def open_eagle(folder: str, target: ModelConfig) -> OpenEagle:
    """Open the head in `folder`, or of a hub id, that guesses for the model `target`.

    Raises ConfigError for a model that runs through transformers, and CheckpointError for files that
    are damaged, for a head of another kind or of another model, and for tensors that are missing,
    misshapen or left over.
    """
    if target.foreign is not None:
        raise ConfigError(
            f"an EAGLE-3 head takes states of a model's layers, and {target.architecture} runs through transformers' "
            "modules, which do not give them; omit the head"
        )
    path = resolve_model(folder)
    checkpoint = Checkpoint(path)
    _rename(checkpoint)
    _refuse_others(checkpoint)
    try:
        config = parse_eagle(checkpoint.config, checkpoint.names, checkpoint.stored_format, target)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    unread = config.model.unread_keys.describe()
    if unread is not None:
        logger.info("%s: %s", path, unread)
    shapes = _shapes(checkpoint, config, target)
    checkpoint.check(shapes)
    checkpoint.skip("t2d", "the tokens of d2t once more")
    vocabulary = _vocabulary(checkpoint, config)
    checkpoint.finish(pending=shapes)
    return OpenEagle(checkpoint, config, shapes, vocabulary)


def load_eagle(
    folder: str, target: OpenModel, config: EngineConfig, decoder: LanguageModel
) -> EagleHead:
    """Open and read the head in `folder` that guesses for `decoder`, which is `target`, loaded. Raises
    as `open_eagle`.
    """
    return open_eagle(folder, target.model).load(config, decoder)


def _rename(checkpoint: Checkpoint) -> None:
    """Present all tensors by speculators' names: others call the layer `midlayer` (vLLM renames it so,
    `llama_eagle3.py`), and SGLang also reads names that begin with `model.`.
    """
    for name in sorted(checkpoint.names):
        renamed = name.removeprefix("model.")
        if renamed.startswith("midlayer."):
            renamed = renamed.replace("midlayer.", "layers.0.", 1)
        if renamed != name:
            checkpoint.divide(name, {renamed: ((), renamed.rpartition(".")[0])})


def _refuse_others(checkpoint: Checkpoint) -> None:
    if not any(name.endswith(_HIDDEN_NORM) for name in checkpoint.names):
        raise checkpoint.fault(
            f"no tensor {_HIDDEN_NORM}, which each EAGLE-3 head has: heads of EAGLE-1 and EAGLE-2, and other models, "
            "are not read as heads"
        )
    for key in ("quantization_config", "compression_config"):
        if checkpoint.config.get(key):
            raise checkpoint.fault(
                f"config.json has {key}: quantized EAGLE-3 heads are not implemented; give one in 16 bits"
            )


def _fc_norms(config: EagleConfig) -> dict[str, int]:
    """Return the names of the norms of features, with their channels."""
    size = config.target_hidden_size
    count = len(config.feature_layers)
    if config.norm_before_fc and count:
        return {_INPUT_NORM: count * size}
    return {_FC_NORM.format(index): size for index in range(count if config.fc_norm else 0)}


def _shapes(checkpoint: Checkpoint, config: EagleConfig, target: ModelConfig) -> dict[str, Shape]:
    """Return every tensor of the head but `d2t`."""
    model = config.model
    size = model.hidden_size
    names = tensor_names(model)
    prefix = names.layer.format(0)
    shapes = tensor_shapes(model)
    mixer = model.attention[0]
    for module in mixer.parts(size, names).projections["qkv"].modules:
        outputs, inputs = shapes[f"{prefix}{module}.weight"]
        shapes[f"{prefix}{module}.weight"] = (outputs, 2 * inputs)
    shapes[prefix + _HIDDEN_NORM] = (size,)
    shapes[names.head] = (config.draft_vocab_size, size)
    if config.feature_layers:
        features = len(config.feature_layers) * config.target_hidden_size
        shapes[EAGLE_FC] = (size, features)
    shapes |= {name: (channels,) for name, channels in _fc_norms(config).items()}
    if names.embedding not in checkpoint.names:
        of_target = target.embedding_size or target.hidden_size
        if of_target != size:
            raise checkpoint.fault(
                f"no tensor {names.embedding}, and the model's embedding has {of_target} channels where the head takes "
                f"{size}; fetch the head again"
            )
        del shapes[names.embedding]
    return shapes


def _vocabulary(checkpoint: Checkpoint, config: EagleConfig) -> Tensor | None:
    """Read `d2t`. Raises CheckpointError for ids that are no tokens, or do not rise."""
    size = config.draft_vocab_size
    whole = config.model.vocab_size
    if _IDS not in checkpoint.names:
        if size == whole:
            return None
        raise checkpoint.fault(
            f"no tensor {_IDS}, which says for which {size} of the {whole} tokens the head has logits"
        )
    entry = checkpoint.entry(_IDS)
    if entry.dtype not in ("I64", "I32") or entry.shape != (size,):
        raise checkpoint.fault(
            f"{_IDS} is {entry.dtype} of shape {list(entry.shape)}, expected is I64 of {[size]}"
        )
    offsets = checkpoint.copy(_IDS).to(torch.int64)
    ids = offsets + torch.arange(size, dtype=torch.int64, device="cpu")
    if int(ids[0]) < 0 or int(ids[-1]) >= whole or bool((ids.diff() <= 0).any()):
        raise checkpoint.fault(
            f"{_IDS} gives tokens from {int(ids.min())} to {int(ids.max())}: they have to rise, from 0 to {whole - 1}"
        )
    return None if size == whole else ids
