"""Shares of models: what ranks have put together is the whole, and what does not divide is refused.

No weight is read here.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.refusals import refuses
from torch import Tensor

from freight.checkpoint.linears import StoredLinear
from freight.checkpoint.reader import Checkpoint
from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import Activations, KVScales, LayerScales
from freight.model.config.layer import DenseConfig
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.tensor_names import TensorNames
from freight.model.loader import require_whole_blocks
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.delta_net.spec import DeltaNetConfig, DeltaNetNames
from freight.model.mixers.dividing import Rank
from freight.model.open import read_model_config
from freight.model.shapes import tensor_shapes
from freight.model.shares import Share, share_of
from freight.parallel.places import parse_rank_cpus, places
from freight.parallel.shards import of_rank, require_divisible, scales_of_rank
from freight.parallel.steps import SliceNumbers, StepReader, StepWriter

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIGS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def config_of(family: str, heads: int, kv_heads: int, tied: bool, vocab: int = 101) -> ModelConfig:
    config = LLAMA | {
        "architectures": [CONFIGS[family]],
        "model_type": family,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    if family == "gemma2":
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4}
    return parse_model_config(config)


def rows_of(share: Share, name: str, count: int) -> list[int]:
    """The elements of the cut dimension that a rank has."""
    found = [list(range(count))[piece[-1]] for piece in share.pieces[name]]
    return [one for part in found for one in part]


@given(
    family=st.sampled_from(list(CONFIGS)),
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    size=st.sampled_from([2, 3, 4, 6, 12]),
    tied=st.booleans(),
    vocab=st.integers(12, 200),
)
def test_shares_together_are_the_whole(
    family: str, kv_heads: int, size: int, tied: bool, vocab: int
) -> None:
    model = config_of(family, 12, kv_heads, tied, vocab)
    if kv_heads % size and size % kv_heads:
        with pytest.raises(ConfigError, match="cannot share the"):
            of_rank(model, size)
        return
    shares = [share_of(model, rank, size) for rank in range(size)]
    whole = tensor_shapes(model)
    for share in shares:
        assert set(whole) <= set(share.shapes)
        assert share.model == shares[0].model
        for name, shape in share.shapes.items():
            if name not in share.pieces:
                assert shape == whole[name]
    for name in shares[0].pieces:
        is_head = name == shares[0].head[0]
        full = whole[shares[0].head[1] if is_head else name]
        count = full[len(shares[0].pieces[name][0]) - 1]
        rows = [rows_of(share, name, count) for share in shares]
        assert len({len(one) for one in rows}) == 1
        every = [one for of_rank_ in rows for one in of_rank_]
        assert set(every) == set(range(count)), name
        shared = kv_heads < size and ("k_proj" in name or "v_proj" in name or "qkv" in name)
        if not is_head and not shared:
            assert len(every) == count, name
    for name, shape in tensor_shapes(shares[0].model).items():  # as the smaller model has them
        if not re.search(r"o_proj|down_proj|embed|lm_head", name):
            assert shares[0].shapes[name] == shape, name


def test_a_rank_s_query_heads_attend_to_its_kv_heads() -> None:
    for heads, kv_heads, size in ((8, 4, 2), (8, 2, 4), (8, 1, 8), (8, 8, 4)):
        for rank in range(size):
            own = range(rank * heads // size, (rank + 1) * heads // size)
            needed = {head * kv_heads // heads for head in own}
            assert needed == set(range(kv_heads)[Rank(rank, size).kv_part(kv_heads)])


@pytest.mark.parametrize(
    ("change", "size", "says"),
    [
        ({}, 5, "4 attention heads of layer 0.* 1, 2 or 4"),
        ({"intermediate_size": 97}, 2, "the 97 intermediate channels of layer 0"),
        ({"hidden_size": 250, "num_attention_heads": 4}, 4, "the 250 hidden channels"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "the 3 KV heads of layer 0"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    change: dict[str, Any], size: int, says: str
) -> None:
    config = Checkpoint(FIXTURES / "base_bf16").config | change
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: .*{says}"):
        require_divisible(read_model_config(config), size)


@pytest.mark.parametrize(
    ("fixture", "size", "says"),
    [
        ("latents/deepseek_v3", 8, "4 attention heads of layer 0.* 1, 2 or 4"),
        ("hybrids/mamba2", 4, "6 heads of layer 0.* 1 or 2"),
        ("hybrids/delta_net", 8, "4 value heads of layer 0.* 1 or 2"),
        ("published/Qwen--Qwen3-Next-80B-A3B-Thinking", 3, "32 value heads of layer 0"),
        ("published/nvidia--Nemotron-H-56B-Base-8K", 3, "256 heads of layer 0"),
    ],
)
def test_layers_that_do_not_divide_are_refused_with_the_numbers(
    fixture: str, size: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        share_of(fixture_model(fixture), 0, size)


def fixture_model(fixture: str) -> ModelConfig:
    path = FIXTURES / fixture
    path = path / "config.json" if path.is_dir() else path.with_name(f"{path.name}.json")
    config = json.loads(path.read_text())
    return read_model_config(config.get("config", config))


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (4, 2), (8, 4), (8, 2), (3, 3)])
def test_ranks_share_keys_of_recurrent_layers(size: int, groups: int) -> None:
    """The rows of heads are those of the key heads that they read: in layers whose one tensor has
    the rows of a key head and its value heads beside each other, and in those with one for each.
    """
    heads, of_k, of_v = 2 * 24, 5, 3
    each = heads // groups
    mixer = DeltaNetConfig(groups, heads, of_k, of_v, 4)
    keys = [("k", key, i) for key in range(groups) for i in range(of_k)]
    values = [("v", head, i) for head in range(heads) for i in range(of_v)]

    def blocks(own: list[str], of_heads: list[str], sizes: tuple[int, int]) -> list[Any]:
        """Rows of key heads: their own parts, then those of their heads."""
        return [
            (part, at, i)
            for key in range(groups)
            for parts, ats, count in (
                (own, [key], sizes[0]),
                (of_heads, range(key * each, (key + 1) * each), sizes[1]),
            )
            for part in parts
            for at in ats
            for i in range(count)
        ]

    fused = TensorNames(mixers=(DeltaNetNames(qkvz=("qkvz",), ba=("ba",)),))
    stored = {
        "qkvz.weight": blocks(["q", "k"], ["v", "z"], (of_k, of_v)),
        "ba.weight": blocks([], ["b", "a"], (0, 1)),
        "linear_attn.in_proj_qkv.weight": keys + keys + values,
        "linear_attn.in_proj_z.weight": values,
        "linear_attn.conv1d.weight": keys + keys + values,
        "linear_attn.A_log": [("head", head, 0) for head in range(heads)],
    }
    for rank in range(size):
        own = range(rank * heads // size, (rank + 1) * heads // size)
        own_keys = {head // each for head in own}
        for names in (fused, TensorNames()):
            cut = dict(mixer.pieces(48, names, Rank(rank, size)))
            for name in stored.keys() & cut.keys():
                rows = [row for (at,) in cut[name] for row in stored[name][at]]
                wanted = [
                    row for row in stored[name] if row[1] in (own_keys if row[0] in "qk" else own)
                ]
                assert rows == wanted, name


@pytest.mark.parametrize(
    ("fixture", "size"),
    [
        ("published/deepseek-ai--DeepSeek-V3", 2),
        ("published/moonshotai--Kimi-K2-Instruct", 4),
        ("published/Qwen--Qwen3-Next-80B-A3B-Thinking", 2),
        ("published/Qwen--Qwen3.5-27B", 4),
        ("published/nvidia--Nemotron-H-56B-Base-8K", 8),
        ("hybrids/mamba2", 2),
    ],
)
def test_published_models_are_shared_without_a_row_lost(fixture: str, size: int) -> None:
    """A rank has its part of the matrices, and no more than a tenth of the model on top."""
    model = fixture_model(fixture)
    model = replace(model, layers=model.layers[:9])
    whole = tensor_shapes(model)
    shares = [share_of(model, rank, size) for rank in range(size)]
    assert len({frozenset(share.shapes.items()) for share in shares}) == 1
    for name in shares[0].pieces:
        if re.search(r"experts\.[1-9]", name):
            continue
        pieces = [piece for share in shares for piece in share.pieces[name]]
        at = next(i for i, one in enumerate(pieces[0]) if one != slice(None))
        count = shares[0].shapes.get(name, whole.get(name, ()))[at]
        rows = [row for piece in pieces for row in range(1 << 20)[piece[at]]]
        assert len(rows) == size * count, name
        assert {*rows} == {*range(whole.get(name, (len({*rows}),))[at])}, name
    total = sum(map(math.prod, whole.values()))
    own = sum(math.prod(shape) for name, shape in shares[0].shapes.items() if name in whole)
    assert total / size <= own <= total / size * 1.1


def test_blocks_that_a_later_rank_would_cut_are_refused_by_the_first() -> None:
    """It would read all its weights before it hears of it. Rank 0 begins at row 0, which is whole."""
    model = parse_model_config(LLAMA | {"intermediate_size": 384})
    name = "model.layers.0.mlp.gate_proj.weight"

    def stored(rows: int) -> dict[str, StoredLinear]:
        scale = torch.ones(-(-rows // 128), 1)
        given = (Format.E4M3FN, scale, Activations.DYNAMIC, None, None)
        return {name: StoredLinear(name, (rows, 48), *given)}

    def shares(size: int) -> list[Share]:
        return [share_of(model, rank, size) for rank in range(size)]

    for size in (1, 3):
        require_whole_blocks(shares(size), stored(384))
    with refuses(ConfigError, "rows 192 to 384", "gate_proj", "--tensor-parallel-size"):
        require_whole_blocks(shares(2), stored(384))


def test_one_rank_divides_nothing() -> None:
    model = config_of("llama", 12, 3, tied=True)
    assert of_rank(model, 1) is model


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL])
def test_scales_of_a_rank_are_those_of_its_heads(granularity: Granularity) -> None:
    model = config_of("llama", 12, 4, tied=False)
    count = granularity.num_scales(4, 4)
    k = tuple(1.0 + i for i in range(count))
    centers = tuple(float(i) for i in range(16))
    whole = KVScales((LayerScales(k, k, granularity, k_center=centers), None))
    parts = [scales_of_rank(whole, model, rank, 2).layers for rank in range(2)]
    assert [layers[1] for layers in parts] == [None, None]
    first, second = (layers[0] for layers in parts)
    assert first is not None
    assert second is not None
    assert first.k_center + second.k_center == centers
    if granularity is Granularity.TENSOR:
        assert first.k == second.k == k
    else:
        assert first.k + second.k == k
        assert first.v + second.v == k


def test_only_a_share_of_a_tensor_is_read() -> None:
    """Pieces of a stored tensor, of one that is divided already, and of a tied head."""
    source = FIXTURES / "base_bf16"
    stored = load_file(source / "model.safetensors")
    checkpoint = Checkpoint(source)
    name, head = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"

    def read(which: str) -> Tensor:
        return checkpoint.take(which, checkpoint.shape_of(which))

    checkpoint.narrow(head, ((slice(3, 5),), (slice(0, 1),)), "tied")
    checkpoint.narrow(head, ((slice(None), slice(8, 16)),))
    checkpoint.narrow(name, ((slice(64, 128),),))
    assert torch.equal(read("tied"), stored[head][[3, 4, 0]])
    assert torch.equal(read(head), stored[head][:, 8:16])
    assert torch.equal(read(name), stored[name][64:128])
    other = "model.layers.0.mlp.up_proj.weight"
    checkpoint.divide(other, {other: ((slice(2, 20),), "")})
    checkpoint.narrow(other, ((slice(1, 3),),))
    assert torch.equal(read(other), stored[other][3:5])


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6))
def test_steps_are_read_as_they_were_written(steps: list[list[int]]) -> None:
    """Tables grow, stay, shrink and change rows; a table that stays is the same object."""
    writer, reader = StepWriter(), StepReader()
    before: list[SliceNumbers] = []
    for step in steps:
        slices = [
            SliceNumbers(
                tuple(range(count + 1)),
                10 * count,
                (tuple(range(count)), tuple(range(row, row + count))),
                count % 3,
                None if count % 2 else row,
                count if count % 3 else None,
            )
            for row, count in enumerate(step)
        ]
        found = reader.decode(writer.encode(slices))
        assert found == slices
        for old, new in zip(before, found, strict=False):
            for table, other in zip(old.block_ids, new.block_ids, strict=True):
                assert table != other or table is other
        before = found


def test_a_reader_begins_anew_with_its_writer() -> None:
    writer, reader = StepWriter(), StepReader()
    slices = [SliceNumbers((1,), 4, ((7, 8),), 1, 0)]
    reader.decode(writer.encode(slices))
    writer.encode([slices[0]._replace(block_ids=((7, 8, 9),))])  # lost
    writer.clear()
    reader.clear()
    assert reader.decode(writer.encode(slices)) == slices


def test_places_of_ranks() -> None:
    nodes = (frozenset({0, 1}), frozenset({2, 3}))
    assert [place.processors for place in places(2, None, nodes, 4)] == list(nodes)
    assert [place.cores for place in places(2, None, (), 5)] == [2, 2]
    assert [place.cores for place in places(2, None, nodes, 2)] == [1, 1]  # by a CPU quota
    assert [place.processors for place in places(3, None, nodes, 4)] == [None] * 3
    assert parse_rank_cpus("0-1,4|2-3", 2) == (frozenset({0, 1, 4}), frozenset({2, 3}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0-1", "1 ranks.* 2"),
        ("0-1|", "1 ranks.* 2"),
        ("0-1|1-2", "two ranks"),
        ("first|second", "list of processors"),
        ("0,3-1|2", "list of processors"),
        ("0--1|1", "list of processors"),
        ("0|1-9999999999", "list of processors"),
    ],
)
def test_bad_processors_are_refused(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--rank-cpus {re.escape(repr(value))} .*{says}"):
        parse_rank_cpus(value, 2)


def test_processors_that_this_process_may_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="may not use processor 4095"):
        places(2, "0|4095", (), 2)


def test_every_layer_of_a_rank_is_smaller() -> None:
    model = of_rank(config_of("llama", 12, 3, tied=True), 3)
    assert not model.tie_word_embeddings
    for layer in model.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        assert isinstance(layer.feed_forward, DenseConfig)
        assert (layer.mixer.num_heads, layer.mixer.num_kv_heads) == (4, 1)
        assert layer.feed_forward.intermediate_size == 8
    assert replace(model, layers=()).hidden_size == 48
