"""The indexer of a layer of latent attention, which chooses the keys that attention reads (DSA,
DeepSeek-V3.2-Exp, DeepSeek-AI 2025).

For the input x of the layer and the normed latent c of q, with H heads of D channels:

    q = rope(wq_b c), [H, D]            k = rope(LayerNorm(wk x)), [D], one for all heads
    w = (weights_proj x) H^-0.5 D^-0.5  score of key s = sum over heads h of w_h max(0, q_h . k_s)

LayerNorm has a weight, a bias and an eps of 1e-6. The rope has the angles of attention's and rotates
the first channels of a head, whose pairs may be others than attention's (`IndexerConfig`). The
highest scores among the token's own key and those before are chosen.

Sources: `Indexer` of DeepSeek-V3.2-Exp (inference/model.py), which rotates and quantizes q and k as
`reference_sparse.index_vectors` does, and whose README of 2025-11-17 corrects the pairs of the rope;
`DeepseekV32Indexer` and `GlmMoeDsaIndexer` of transformers 5.23, which leave q and k as they are.
Keys of a rope with pairs (2i, 2i + 1) are stored in another order of channels than there, as those of
attention are, so their Hadamard products are others, of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import PagedKV
from freight.kernels.interface import KernelSet
from freight.model.building import Builder
from freight.model.layers.linear import Projection
from freight.model.layers.rope import half_pairs
from freight.model.mixers.latent.spec import IndexerConfig, LatentConfig, LatentNames
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary

_EPS = 1e-6


@dataclass(frozen=True)
class Indexer:
    """What chooses the keys of a layer.

    q, k, weights           wq_b, wk and weights_proj
    norm_weight, norm_bias  [channels]: of the norm of k
    rotary                  that of attention
    """

    config: IndexerConfig
    q: Projection
    k: Projection
    weights: Projection
    norm_weight: Tensor
    norm_bias: Tensor
    rotary: Rotary
    kernels: KernelSet

    def __call__(
        self, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: PagedKV
    ) -> Tensor | None:
        """Store this step's keys, and choose: the result of `PagedKV.choose`.

        x: [num_tokens, hidden_size]; latent: the normed latent of q, [num_tokens, q_rank]
        """
        config = self.config
        q = self.q(latent, batch.adapters).unflatten(1, (config.num_heads, config.head_dim))
        norm = self.norm_weight, self.norm_bias, _EPS
        k = self.kernels.add_layer_norm(self.k(x, batch.adapters), None, *norm)[1]
        assert isinstance(k, Tensor)
        factor = (config.num_heads * config.head_dim) ** -0.5
        weights = self.weights(x, batch.adapters).float() * factor
        return kv.choose(q, k, weights, self.rotary, batch, config.topk)


def build_indexer(
    mixer: LatentConfig, builder: Builder, prefix: str, rotary: Rotary
) -> Indexer | None:
    """Build the indexer of the layer whose tensors begin with `prefix`; None if it has none."""
    config = mixer.indexer
    if config is None:
        return None
    names = builder.names.of(LatentNames)
    weight = builder.tensor(f"{prefix}{names.index_norm}.weight")
    bias = builder.tensor(f"{prefix}{names.index_norm}.bias")
    of_q = of_k = None
    if config.interleaved:
        of_q = half_pairs(config.num_heads, config.head_dim, mixer.rotated)
        of_k = half_pairs(1, config.head_dim, mixer.rotated)
        weight = weight[of_k]
        bias = bias[of_k]
    return Indexer(
        config=config,
        q=builder.kept([prefix + names.index_q], of_q),
        k=builder.kept([prefix + names.index_k], of_k),
        weights=builder.kept([prefix + names.index_weights]),
        norm_weight=weight,
        norm_bias=bias,
        rotary=rotary,
        kernels=builder.kernels,
    )
