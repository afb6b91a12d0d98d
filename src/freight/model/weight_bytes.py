"""Memory of a loaded model, counted from its tensors as its kernels have packed them."""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.decoder import Decoder, LanguageModel
from freight.model.held_tensors import held_tensors
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.latent.layer import Latent


@dataclass(frozen=True)
class WeightBytes:
    """Memory of a loaded model: `embeddings` are the embedding and the head, `layers` all else,
    scales included.
    """

    layers: int
    embeddings: int

    @property
    def total(self) -> int:
        return self.layers + self.embeddings


def weight_bytes(model: LanguageModel) -> WeightBytes:
    """Count the bytes of the tensors of `model`, as its kernels have packed them. A tensor that is
    shared counts once.
    """
    if not isinstance(model, Decoder):
        from freight.model.fallback import TransformersModel  # which imports transformers

        assert isinstance(model, TransformersModel)
        return WeightBytes(*model.num_bytes)
    outer = held_tensors((model.embedding, model.head, model.per_layer_embeddings))
    inner = held_tensors((model.layers, model.norm))
    tables = []
    for layer in model.layers:
        if isinstance(layer.mixer, Attention | Latent):
            tables += [(rotary.cos, rotary.sin, rotary.q_factor) for rotary in layer.mixer.rotaries]
    rope = held_tensors(tuple(tables))
    return WeightBytes(
        layers=sum(size for at, size in inner.items() if at not in outer and at not in rope),
        embeddings=sum(outer.values()),
    )
