"""The payloads of blocks: the same bytes for any number of ranks, put where each rank's heads are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rank_follower import parts_of
from torch import Tensor

from freight.cache.arena import Arena
from freight.cache.pool import KVPool, allocate_pool
from freight.cache.spec import cache_spec
from freight.cache.store.pages import GroupBytes, OtherRanks
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.reference_set import REFERENCE
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.delta_net.spec import DeltaNetConfig, DeltaNetNames
from freight.model.mixers.dividing import Rank
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig, KimiDeltaNames
from freight.model.mixers.latent.spec import IndexerConfig, LatentConfig
from freight.model.mixers.mamba2.spec import Mamba2Config, MambaNames
from freight.model.mixers.short_conv.spec import ShortConvConfig, ShortConvNames
from freight.settings.engine import KVCacheConfig, LayerKVFormat, PageLayout

BLOCKS = 3
MIXERS = (
    AttentionConfig(4, 2, 8, 16, 1.0),
    AttentionConfig(4, 4, 8, 8, 1.0),
    LatentConfig(4, None, 128, 8, 8, 8, 1.0),
    LatentConfig(4, 16, 128, 8, 8, 8, 1.0, indexer=IndexerConfig(2, 16, 8), chosen_by=3),
    DeltaNetConfig(2, 4, 4, 6, 4),
    KimiDeltaConfig(4, 4, 4),
    Mamba2Config(1, 4, 4, 8, 4, norm_groups=1),
    Mamba2Config(4, 8, 4, 8, 4, norm_groups=4),
    ShortConvConfig(12, 3),
)
KINDS = (
    LayerKVFormat(Format.INT8, Granularity.TOKEN),
    LayerKVFormat(Format.BFLOAT16, None),
    LayerKVFormat(Format.INT8, Granularity.GROUP),
    LayerKVFormat(Format.INT8, Granularity.TOKEN),
    *[LayerKVFormat(Format.BFLOAT16, None)] * 5,
)


def model() -> ModelConfig:
    """A layer with each of `MIXERS`."""
    made = parse_model_config({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48,
        "intermediate_size": 24, "num_hidden_layers": len(MIXERS), "num_attention_heads": 4,
        "vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    })  # fmt: skip
    layers = (replace(one, mixer=mixer) for one, mixer in zip(made.layers, MIXERS, strict=True))
    return replace(made, layers=tuple(layers))


def pool_of(layout: PageLayout, ranks: int, in_arena: bool) -> tuple[KVPool, Tensor]:
    kv = KVCacheConfig(
        Format.INT8, Granularity.GROUP, ScaleSource.DYNAMIC, None,
        layers=KINDS, layout=layout, state=Format.INT8,
    )  # fmt: skip
    spec = cache_spec(kv, model(), 16, Format.BFLOAT16, 16, 64, ranks)
    num_blocks = (BLOCKS,) * len(spec.groups)
    arena = Arena(torch.zeros(Arena.bytes_for(spec, num_blocks), dtype=torch.uint8))
    empty = arena.empty if in_arena else None
    return allocate_pool(spec, kv, num_blocks, REFERENCE, empty=empty), arena.memory


def bytes_of(part: Tensor) -> Tensor:
    """[…, bytes of a value]"""
    return part.contiguous()[..., None].view(torch.uint8)


def owned(mixer: Any, name: str, rank: int, size: int) -> tuple[int, list[int]]:
    """Where a rank's share of a part is: dimension and indices, by the weights that it reads."""
    if isinstance(mixer, LatentConfig):
        return 2, [0]
    if isinstance(mixer, AttentionConfig):
        heads = range(rank * mixer.num_heads // size, (rank + 1) * mixer.num_heads // size)
        return 2, sorted({head * mixer.num_kv_heads // mixer.num_heads for head in heads})
    names = TensorNames()
    cut = dict(mixer.pieces(48, names, Rank(rank, size)))

    def rows(tensor: str) -> list[int]:
        return [row for piece in cut[tensor] for row in range(1 << 10)[piece[-1]]]

    heads_of: Any
    match mixer:
        case DeltaNetConfig():
            heads_of = names.of(DeltaNetNames)
            key_heads, columns = mixer.key_heads, heads_of.conv
        case Mamba2Config():
            heads_of = names.of(MambaNames)
            key_heads, columns = mixer.groups, f"{heads_of.conv}.weight"
        case KimiDeltaConfig():
            heads_of = names.of(KimiDeltaNames)
            key_heads, columns = mixer.heads, ""
        case _:
            return 2, rows(f"{names.of(ShortConvNames).conv}.weight")
    if name == "columns" and columns:
        return 2, rows(columns)
    if name == "columns":
        of_qkv = enumerate(names.of(KimiDeltaNames).conv)
        return 2, [index * mixer.size + row for index, conv in of_qkv for row in rows(conv)]
    own = rows(heads_of.a_log)
    if name == "k":
        own = sorted({head * key_heads // mixer.heads for head in own})
    return 1 if name in ("state", "scale") else 2, own


def fill(pool: KVPool) -> None:
    generator = torch.Generator().manual_seed(1)
    for layer in pool.layers:
        for part in parts_of(layer).values():
            values = torch.randint(0, 256, bytes_of(part).shape, generator=generator)
            part.copy_(values.to(torch.uint8).view(part.dtype).squeeze(-1))


def group_bytes(pool: KVPool, others: OtherRanks | None = None) -> list[GroupBytes]:
    return [GroupBytes(pool, index, others) for index in range(len(pool.spec.groups))]


def moved(sources: Sequence[GroupBytes], targets: Sequence[GroupBytes]) -> None:
    for source, target in zip(sources, targets, strict=True):
        payloads = [np.frombuffer(source.read(block), np.uint8) for block in range(BLOCKS)]
        target.write([*range(BLOCKS)], np.stack(payloads))


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_together_what_one_has(size: int, layout: PageLayout) -> None:
    """Pages of heads and latents, and states of each kind; with fewer KV heads, and keys, than
    ranks. What ranks wrote reads the same by one.
    """
    alone, _ = pool_of(layout, 1, in_arena=False)
    fill(alone)
    made = [pool_of(layout, size, in_arena=True) for _ in range(size)]
    layers = model().layers
    shares = {
        index: {
            name: tuple(layer.mixer.cache_shares(Rank(rank, size))[name] for rank in range(size))
            for name in layer.mixer.cache_shares(Rank(0, size))
        }
        for index, layer in enumerate(layers)
        if layer.mixer is not None
    }
    others = OtherRanks(tuple(memory for _, memory in made[1:]), shares)
    of_one, of_ranks = group_bytes(alone), group_bytes(made[0][0], others)
    assert [one.layout for one in of_one] == [one.layout for one in of_ranks]
    moved(of_one, of_ranks)
    for index, layer in enumerate(layers):
        for name, whole in parts_of(alone.layers[index]).items():
            for rank, (pool, _) in enumerate(made):
                dim, own = owned(layer.mixer, name, rank, size)
                expected = bytes_of(whole).index_select(dim, torch.tensor(own))
                found = bytes_of(parts_of(pool.layers[index])[name])
                assert torch.equal(found, expected), (index, name, rank)
    again, _ = pool_of(layout, 1, in_arena=False)
    moved(of_ranks, group_bytes(again))
    for ours, theirs in zip(alone.layers, again.layers, strict=True):
        for name, part in parts_of(ours).items():
            assert torch.equal(bytes_of(part), bytes_of(parts_of(theirs)[name])), name
