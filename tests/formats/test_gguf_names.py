"""Tensors of GGUF files under Hugging Face names, against what llama.cpp's converter was given."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from tests.formats.gguf_files import NAMES, Converted, converted, undone
from torch import Tensor

from freight.checkpoint.gguf.config import GGUFConfig
from freight.checkpoint.gguf.names import (
    PREDICTS,
    SENSES,
    Change,
    Placed,
    TensorPlaces,
    by_key_head,
    exchanged,
    tensor_names,
)
from freight.errors import CheckpointError
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.predicting import published_predicting
from freight.model.feed_forward.expert_names import as_stored
from freight.model.shapes import predicting_shapes, tensor_shapes


def _opened(name: str) -> tuple[Converted, GGUFConfig, TensorPlaces, ModelConfig]:
    file = converted(name)
    gguf = file.read()
    places = tensor_names(gguf, file.shapes)
    return file, gguf, places, as_stored(parse_model_config(gguf.config), places.placed)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_model_has_a_place_of_its_shape(name: str) -> None:
    file, _, places, model = _opened(name)
    expected = tensor_shapes(model)
    assert places.placed.keys() == expected.keys()
    empty = {tensor: torch.empty(shape) for tensor, shape in file.shapes.items()}
    shapes = {tensor: tuple(undone(place, empty).shape) for tensor, place in places.placed.items()}
    assert shapes == expected
    used = {source for place in places.placed.values() for source in place.sources}
    assert used | places.skipped.keys() == file.shapes.keys()
    assert set(places.skipped) == set(file.values)


@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_the_one_that_was_converted(name: str) -> None:
    """The marks of a file say which row of which tensor each of its rows was."""
    file, _, places, _ = _opened(name)
    original = parse_model_config(file.config)
    expected = _marks(original)
    if original.architecture == "GptOssForCausalLM":
        expected = _separate(expected, original)
    tensors = {tensor: _filled(file, tensor) for tensor in file.marks}
    for tensor, place in places.placed.items():
        values = undone(place, tensors)
        along = values[0] if tensor.endswith("linear_attn.out_proj.weight") else _rows(values)
        if place.change is Change.NEGATIVE_LOG:
            # two roundings of float32: exp and log
            torch.testing.assert_close(along, expected[tensor], rtol=0, atol=2e-6)
        else:
            assert torch.equal(along, expected[tensor]), tensor


def _marks(model: ModelConfig) -> dict[str, Tensor]:
    """The marks of `make_gguf_fixtures.py`, along the dimension that they are in."""
    turned = ("linear_attn.out_proj.weight", *(f"experts.{end}" for end in _STACKED))
    marks = {}
    shapes = tensor_shapes(model)
    for number, name in enumerate(sorted(shapes)):
        size = shapes[name][-1 if name.endswith(turned) else 0]
        marks[name] = (
            torch.arange(size) / 8
            if name.endswith("A_log")
            else 1024.0 * number + torch.arange(size)
        )
    return marks


_STACKED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _separate(marks: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Divide gpt-oss's stacked experts: outputs of gate and up alternate."""
    divided = {name: mark for name, mark in marks.items() if not name.endswith(_STACKED)}
    for index in range(model.num_layers):
        prefix = f"model.layers.{index}.mlp.experts."
        for expert in range(8):
            for stored, kind in (("", "weight"), ("_bias", "bias")):
                both = marks[f"{prefix}gate_up_proj{stored}"]
                divided[f"{prefix}{expert}.gate_proj.{kind}"] = both[::2]
                divided[f"{prefix}{expert}.up_proj.{kind}"] = both[1::2]
                divided[f"{prefix}{expert}.down_proj.{kind}"] = marks[f"{prefix}down_proj{stored}"]
    return divided


def _filled(file: Converted, tensor: str) -> Tensor:
    """A tensor of a file, each row filled with its mark, or each column where these are kept."""
    shape = file.shapes[tensor]
    marks = file.marks[tensor]
    if tensor.endswith(("ssm_out.weight", "attn_k_b.weight")):
        return marks.view(*shape[:-2], 1, shape[-1]).expand(shape)
    if marks.numel() == math.prod(shape):
        return marks.view(shape)
    return marks.view(*shape[:-1], 1).expand(shape)


def _rows(values: Tensor) -> Tensor:
    """The mark of each row, which all of its values are."""
    rows = values.flatten(1) if values.ndim > 1 else values[:, None]
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return rows[:, 0]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_llama_cpp(name: str) -> None:
    """`gguf`'s own table gives each Hugging Face name the name that the file has."""
    gguf_package = pytest.importorskip("gguf")
    file, gguf, places, model = _opened(name)
    numbers = {name: number for number, name in gguf_package.MODEL_ARCH_NAMES.items()}
    table = gguf_package.get_tensor_name_map(numbers[gguf.architecture], model.num_layers)
    compared = 0
    for tensor, place in places.placed.items():
        module = re.sub(
            r"\.experts\.\d+\.", ".experts.", tensor.removesuffix(".weight").removesuffix(".bias")
        )
        stored = table.get_name(module) or table.get_name(tensor)
        if stored is not None and len(place.sources) == 1:
            compared += 1
            assert place.sources[0].removesuffix(".weight").removesuffix(".bias") == stored
    assert compared >= 0.7 * len(file.shapes)


def test_rows_of_heads_are_put_back() -> None:
    """The converter exchanges [2, half] of each head for [half, 2]."""
    order = torch.arange(24).view(3, 2, 4).transpose(1, 2).reshape(-1)  # 3 heads of 8 channels
    assert order[list(exchanged(3, 4, 2, 1))].tolist() == list(range(24))
    moved = torch.cat(
        [torch.arange(5), 5 + torch.arange(24).view(2, 3, 4).transpose(0, 1).reshape(-1)]
    )
    assert moved[list(exchanged(1, 3, 2, 4, first=5))].tolist() == list(range(29))


def test_rows_of_key_heads_are_put_together() -> None:
    """2 key heads of 2 channels, each with 3 rows of values: q, k, v, z of the first come first."""
    rows = by_key_head(2, 2, 3)
    assert rows[:10] == (0, 1, 4, 5, 8, 9, 10, 14, 15, 16)
    assert sorted(rows) == list(range(20))


def test_tensors_without_a_place_are_refused() -> None:
    file = converted("llama")
    gguf = file.read()
    for name in ("blk.0.attn_q_norm.weight", "blk.0.ffn_up.0.weight", "cls.weight", "blk.00.attn_q.weight",
                 "blk.0.attn_q.scale", "blk.x.attn_q.weight", "vv.blk.0.attn_q.weight"):  # fmt: skip
        with pytest.raises(
            CheckpointError, match=f"tensor {re.escape(name)} has no place in llama"
        ):
            tensor_names(gguf, file.shapes | {name: (4, 4)})


def test_rows_that_contradict_the_metadata_are_refused() -> None:
    file = converted("llama")
    with pytest.raises(CheckpointError, match="the metadata asks for 128 rows"):
        tensor_names(file.read(), file.shapes | {"blk.1.attn_q.weight": (64, 64)})
    moe = converted("qwen3-moe")
    with pytest.raises(CheckpointError, match="the metadata asks for 8 rows"):
        tensor_names(moe.read(), moe.shapes | {"blk.1.ffn_up_exps.weight": (4, 32, 64)})
    net = converted("qwen3-5")
    with pytest.raises(CheckpointError, match="the metadata asks for 96 rows"):
        tensor_names(net.read(), net.shapes | {"blk.0.ssm_conv1d.weight": (95, 4)})


def test_two_tensors_of_one_name_are_refused() -> None:
    file = converted("lfm2")
    with pytest.raises(CheckpointError, match=r"are both model\.embedding_norm\.weight"):
        tensor_names(file.read(), file.shapes | {"output_norm.weight": (64,)})


def test_models_of_pictures_are_skipped() -> None:
    file = converted("gemma3")
    pictures = {"v.blk.0.attn_q.weight": (4, 4), "mm.input_projection.weight": (4, 4)}
    places = tensor_names(file.read(), file.shapes | pictures)
    assert places.skipped == dict.fromkeys(pictures, SENSES)


def test_older_files_of_qwen3_next_have_one_projection() -> None:
    file = converted("qwen3-next")
    parts = ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight")
    shapes = {name: shape for name, shape in file.shapes.items() if name not in parts}
    shapes["blk.0.ssm_in.weight"] = (128, 64)
    placed = tensor_names(file.read(), shapes).placed
    assert placed["model.layers.0.linear_attn.in_proj_qkvz.weight"] == Placed(
        ("blk.0.ssm_in.weight",)
    )


def test_layers_that_predict_are_named_as_skipped() -> None:
    """Where their form is not known: of Qwen3-Next, whose converter leaves them out."""
    file = converted("qwen3-next")
    layers = file.metadata["qwen3next.block_count"]
    gguf = file.read(**{"qwen3next.nextn_predict_layers": 1})
    places = tensor_names(gguf, file.shapes)
    assert set(places.skipped.values()) == {PREDICTS}
    assert all(name.startswith(f"blk.{layers - 1}.") for name in places.skipped)
    model = as_stored(parse_model_config(gguf.config), places.placed)
    assert model.num_layers == layers - 1
    assert places.placed.keys() == tensor_shapes(model).keys()
    assert tensor_names(gguf, {**file.shapes, "blk.9.nextn.enorm.weight": (64,)}).skipped


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe"])
def test_layers_that_predict_outside_of_the_model(name: str) -> None:
    """A further block with attention, as a file of Qwen3.5 has it: all of its norms have 1 added."""
    file = converted(name)
    architecture = file.metadata["general.architecture"]
    block = file.metadata[f"{architecture}.block_count"]
    keys = {"block_count": block + 1, "nextn_predict_layers": 1}
    gguf = file.read(**{f"{architecture}.{key}": number for key, number in keys.items()})
    beside: dict[str, tuple[int, ...]] = {
        "eh_proj": (64, 128),
        "enorm": (64,),
        "hnorm": (64,),
        "shared_head_norm": (64,),
    }
    shapes = dict(file.shapes)
    attends = next(index for index in range(block) if f"blk.{index}.attn_q.weight" in shapes)
    for tensor, shape in file.shapes.items():
        if tensor.startswith(f"blk.{attends}."):
            shapes[tensor.replace(f"blk.{attends}.", f"blk.{block}.", 1)] = shape
    for module, shape in beside.items():
        shapes[f"blk.{block}.nextn.{module}.weight"] = shape
    places = tensor_names(gguf, shapes)
    model = as_stored(parse_model_config(gguf.config), places.placed)
    predicting = published_predicting(model, places.placed)
    assert predicting is not None
    expected = tensor_shapes(model) | predicting_shapes(model, predicting)
    assert places.placed.keys() == expected.keys()
    empty = {tensor: torch.empty(shape) for tensor, shape in shapes.items()}
    assert all(
        tuple(undone(place, empty).shape) == expected[tensor]
        for tensor, place in places.placed.items()
    )
    for module, target in (("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden")):
        place = places.placed[f"mtp.{target}.weight"]
        assert place == Placed((f"blk.{block}.nextn.{module}.weight",), change=Change.MINUS_ONE)
    assert places.placed["mtp.fc.weight"] == Placed((f"blk.{block}.nextn.eh_proj.weight",))
    assert places.placed["mtp.norm.weight"].change is Change.MINUS_ONE
    del shapes[f"blk.{block}.nextn.shared_head_norm.weight"]
    shared = tensor_names(gguf, shapes).placed
    assert shared["mtp.norm.weight"] == shared["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"nextn\.other\.weight has no place"):
        tensor_names(gguf, {**shapes, f"blk.{block}.nextn.other.weight": (64,)})


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma4", "qwen3-5"])
def test_joined_q_k_and_v_are_divided(name: str) -> None:
    """As `convert_hf_to_gguf.py --fuse-qkv` writes them."""
    file, gguf, places, model = _opened(name)
    shapes = dict(file.shapes)
    tensors = {tensor: _filled(file, tensor) for tensor in file.marks}
    for index in range(model.num_layers):
        for kind in ("weight", "bias"):
            parts = [f"blk.{index}.attn_{part}.{kind}" for part in "qkv"]
            if all(part in shapes for part in parts):
                joined = torch.cat([tensors[part] for part in parts])
                tensors[f"blk.{index}.attn_qkv.{kind}"] = joined
                for part in parts:
                    del shapes[part]
                shapes[f"blk.{index}.attn_qkv.{kind}"] = tuple(joined.shape)
    assert len(shapes) < len(file.shapes)
    gguf = replace(file, shapes=shapes).read()
    divided = tensor_names(gguf, shapes)
    assert divided.placed.keys() == places.placed.keys()
    for tensor, place in divided.placed.items():
        assert torch.equal(undone(place, tensors), undone(places.placed[tensor], tensors))


def test_joined_gate_and_up_of_experts_are_divided() -> None:
    file = converted("qwen3-5-moe")
    shapes = {
        name: shape
        for name, shape in file.shapes.items()
        if "gate_exps" not in name and "up_exps" not in name
    }
    shapes |= {f"blk.{index}.ffn_gate_up_exps.weight": (8, 64, 64) for index in range(3)}
    placed = tensor_names(file.read(), shapes).placed
    source = ("blk.1.ffn_gate_up_exps.weight",)
    prefix = "model.layers.1.mlp.experts.5."
    assert placed[f"{prefix}gate_proj.weight"] == Placed(source, expert=5, rows=range(32))
    assert placed[f"{prefix}up_proj.weight"] == Placed(source, expert=5, rows=range(32, 64))


def test_older_latents_are_one_matrix() -> None:
    """Files from before llama.cpp read latents directly have whole heads."""
    file = converted("deepseek-v2")
    parts = ("attn_k_b.weight", "attn_v_b.weight")
    shapes = {name: shape for name, shape in file.shapes.items() if not name.endswith(parts)}
    shapes |= {f"blk.{index}.attn_kv_b.weight": (176, 32) for index in range(3)}
    changes = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.key_length": 32,
               "attention.value_length": 20, "attention.head_count_kv": 4}  # fmt: skip
    older = replace(file, shapes=shapes)
    gguf = older.read(**{f"deepseek2.{key}": value for key, value in changes.items()})
    assert parse_model_config(gguf.config) == parse_model_config(file.read().config)
    placed = tensor_names(gguf, shapes).placed
    assert placed["model.layers.2.self_attn.kv_b_proj.weight"] == Placed(
        ("blk.2.attn_kv_b.weight",)
    )


def test_counts_that_no_tensor_can_have_are_refused() -> None:
    moe = converted("qwen3-moe")
    with pytest.raises(CheckpointError, match="20000 experts are too many"):
        tensor_names(moe.read(**{"qwen3moe.expert_count": 20000}), moe.shapes)
    net = converted("qwen3-5")
    with pytest.raises(CheckpointError, match="4 value heads are no multiple of 3 key heads"):
        tensor_names(net.read(**{"qwen35.ssm.group_count": 3}), net.shapes)


def test_value_heads_of_one_key_head_each_stay() -> None:
    """And so do models in which no layer has a state."""
    net = converted("qwen3-5")
    gguf = net.read(**{"qwen35.ssm.group_count": 4, "qwen35.ssm.state_size": 8})
    placed = tensor_names(gguf, net.shapes).placed
    assert placed["model.layers.0.linear_attn.out_proj.weight"] == Placed(("blk.0.ssm_out.weight",))
    for name in ("qwen3-5", "qwen3-next"):
        file = converted(name)
        shapes = {name: shape for name, shape in file.shapes.items() if name.startswith("blk.1.")}
        assert tensor_names(file.read(), shapes).placed
