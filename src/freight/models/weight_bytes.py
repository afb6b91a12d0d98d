"""Memory of a loaded model, counted from its tensors as its kernels have packed them."""

from __future__ import annotations

from dataclasses import dataclass

from freight.layers.attention import Attention
from freight.layers.latent import Latent
from freight.models.decoder import Decoder, LanguageModel
from freight.models.held_tensors import held_tensors


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
        from freight.models.fallback import TransformersModel  # which imports transformers

        assert isinstance(model, TransformersModel)
        return WeightBytes(*model.num_bytes)
    outer = held_tensors((model.embedding, model.head, model.per_layer_embeddings))
    inner = held_tensors((model.layers, model.norm))
    mixers = [layer.mixer for layer in model.layers]
    rotaries = [
        rotary
        for mixer in mixers
        if isinstance(mixer, Attention | Latent)
        for rotary in mixer.rotaries
    ]
    rope = held_tensors(tuple((rotary.cos, rotary.sin, rotary.q_factor) for rotary in rotaries))
    return WeightBytes(
        layers=sum(size for at, size in inner.items() if at not in outer and at not in rope),
        embeddings=sum(outer.values()),
    )
