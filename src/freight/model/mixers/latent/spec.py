"""Latent attention: its config, tensors, pages, and what ranks divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import (
    CacheShare,
    Cut,
    Rank,
    of_module,
    page_shares,
    scaled,
    uneven,
)
from freight.model.mixers.spec import MixerParts, PagedMixer, Projected


@dataclass(frozen=True)
class LatentNames:
    """Names of latent attention within a layer (`LatentConfig`).

    q                  projection of q in models without a latent of q
    q_a, q_norm, q_b   projections and norm of q in models with one
    output_gate        projection of the gate of attention's result, in models that have it
    index_*            projections and norm of the indexer (`IndexerConfig`)
    """

    q: str = "self_attn.q_proj"
    q_a: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: str = "self_attn.kv_b_proj"
    o: str = "self_attn.o_proj"
    output_gate: str = "self_attn.g_proj"
    index_q: str = "self_attn.indexer.wq_b"
    index_k: str = "self_attn.indexer.wk"
    index_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"


@dataclass(frozen=True)
class IndexerConfig:
    """An indexer, which chooses the keys that latent attention reads (DSA, DeepSeek-V3.2-Exp,
    DeepSeek-AI 2025; `mixers/latent/indexer.py` has the formulas).

    num_heads     heads of its queries; its key is one for all of them
    head_dim      channels of a query and of a key, of which the first `LatentConfig.rotated` have
                  the rope of attention
    topk          keys that a token attends to
    interleaved   whether a checkpoint's pairs of rotated channels are (2i, 2i + 1), whatever those
                  of attention are (GLM-5), or (i, i + rotated / 2) (DeepSeek-V3.2)
    """

    num_heads: int
    head_dim: int
    topk: int
    interleaved: bool = False


@dataclass(frozen=True)
class LatentConfig(PagedMixer):
    """Latent attention (MLA, DeepSeek-V2, Liu et al. 2024): keys and values of all heads are
    projections of one latent vector of the token, which the cache holds, and one rotated part
    that the keys of all heads share.

    It is computed in the absorbed form: queries are multiplied by each head's projection of keys,
    and the result of attention by that of values. So there is one KV head. Its key is the rotated
    part followed by the latent, and its value is the latent.

    q_rank          channels of the latent of q, which is normed before q is projected from it;
                    None: q is projected from the input
    latent          channels of the latent of keys and values
    nope, rotated   unrotated and rotated channels of a query
    head_size       channels of a value of each head
    softmax_scale   multiplies q . k
    rope            index into `ModelConfig.ropes`; None: nothing is rotated, and all heads share
                    the `rotated` channels of the key unrotated (Kimi Linear)
    eps             epsilon of the norms of both latents
    output_gate     whether a sigmoid of a further projection multiplies the result of each head
                    (Ling 3.0)
    group           heads of the whole model, where these are a rank's; None: they are all
    indexer         what chooses the keys; None: the layer has none
    chosen_by       index of the layer whose indexer chooses the keys: this layer's with an indexer,
                    or one before; None: attention is dense
    """

    num_heads: int
    q_rank: int | None
    latent: int
    nope: int
    rotated: int
    head_size: int
    softmax_scale: float
    rope: int | None = 0
    eps: float = 1e-6
    output_gate: bool = False
    group: int | None = None
    indexer: IndexerConfig | None = None
    chosen_by: int | None = None

    num_kv_heads = 1
    window = None
    kv_from = None
    v_in_k = True

    @property
    def k_dim(self) -> int:  # type: ignore[override]  # derived, never set
        """Channels of a stored key."""
        return self.rotated + self.latent

    @property
    def v_dim(self) -> int:  # type: ignore[override]
        """Channels of a value, the last of the key."""
        return self.latent

    @property
    def index_dim(self) -> int:  # type: ignore[override]
        """Channels of a key of the indexer; 0 without one."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def rope_channels(self) -> int:
        """Channels of a head of q to which the rope applies."""
        return self.rotated

    @property
    def q_sizes(self) -> tuple[int, int]:
        """Values of q per token, and rows of the first projection towards q: `q_rank` of them if q
        has a latent.
        """
        size = self.num_heads * (self.nope + self.rotated)
        return size, self.q_rank or size

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(LatentNames)
        heads = self.num_heads
        of_q, first = self.q_sizes
        projections: dict[str, Projected] = {}
        norms: dict[str, int] = {}
        if self.q_rank is None:
            modules = (names.q, names.kv_a)
            projections["first"] = Projected(modules, (first, self.k_dim), hidden_size)
        else:
            modules = (names.q_a, names.kv_a)
            projections["first"] = Projected(modules, (first, self.k_dim), hidden_size)
            projections["q_b"] = Projected((names.q_b,), (of_q,), first)
            norms[names.q_norm] = first
        projections["o"] = Projected((names.o,), (hidden_size,), heads * self.head_size)
        norms[names.kv_norm] = self.latent
        unquantized = {names.kv_b: (heads * (self.nope + self.head_size), self.latent)}
        if self.output_gate:
            unquantized[names.output_gate] = (heads, hidden_size)
        of_indexer: dict[str, tuple[int, int]] = {}
        plain: dict[str, tuple[int, ...]] = {}
        if self.indexer is not None:
            assert self.q_rank is not None, "refused by name in model.config.latent"
            size = self.indexer.head_dim
            of_indexer[names.index_q] = (self.indexer.num_heads * size, self.q_rank)
            of_indexer[names.index_k] = (size, hidden_size)
            of_indexer[names.index_weights] = (self.indexer.num_heads, hidden_size)
            plain = dict.fromkeys(
                (f"{names.index_norm}.weight", f"{names.index_norm}.bias"), (size,)
            )
        return MixerParts(
            module=names.o.rpartition(".")[0],
            projections=projections,
            kept=unquantized | of_indexer,
            alone=tuple(of_indexer),
            cut=names.kv_b,
            by_head=((heads, self.latent, self.nope), (heads, self.head_size, self.latent)),
            norms=norms,
            plain=plain,
        )

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"attention heads of {where}", self.num_heads, size)

    def divided(self, size: int) -> LatentConfig:
        """Return the attention of one of `size` ranks."""
        return replace(self, num_heads=self.num_heads // size, group=self.num_heads)

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's heads. The latents, which all heads read, are whole."""
        names = all_names.of(LatentNames)
        heads = rank.part(self.num_heads)
        q = names.q if self.q_rank is None else names.q_b
        yield from of_module(q, scaled(heads, self.nope + self.rotated))
        yield from of_module(names.kv_b, scaled(heads, self.nope + self.head_size))
        yield from of_module(names.output_gate, heads)

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the only KV head, which all ranks have."""
        return page_shares(slice(0, 1))
