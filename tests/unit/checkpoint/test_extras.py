"""Scales per head and channel beside the weights: read back to the bit, or refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refuses

from freight.checkpoint.extras import FILE, read_extras, write_extras
from freight.checkpoint.kv_scales import read_kv_scales
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales, Scheme

Open = Callable[..., Checkpoint]


def scales(granularity: Granularity, count: int, layers: int = 2) -> KVScales:
    def values(seed: int) -> tuple[float, ...]:
        return tuple(
            (torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 1e-3).tolist()
        )

    return KVScales(
        tuple(LayerScales(values(i), values(i + 9), granularity) for i in range(layers)),
        Format.E4M3FN,
    )


@pytest.fixture
def write_model(open_tensors: Open, tmp_path: Path) -> Callable[..., Checkpoint]:
    """write_model(scales, content=…, said=…): a checkpoint with standard scales of 0.5 and these
    beside them.
    """

    def make(
        finer: KVScales, content: bytes | None = None, said: dict[str, Any] | None = None
    ) -> Checkpoint:
        declared, files = write_extras(finer)
        for name, data in files.items():
            (tmp_path / name).write_bytes(data if content is None else content)
        tensors = {
            f"model.layers.{i}.self_attn.{s}_scale": torch.tensor([0.5])
            for i in range(2)
            for s in "kv"
        }
        return open_tensors(tensors, declared if said is None else said)

    return make


@pytest.mark.parametrize(
    ("granularity", "count"), [(Granularity.HEAD, 3), (Granularity.CHANNEL, 12)]
)
def test_they_come_back_to_the_bit_and_count(
    write_model, shape, granularity: Granularity, count: int
):
    wanted = scales(granularity, count)
    got = read_kv_scales(write_model(wanted), shape, Scheme())
    assert [(layer.k, layer.v, layer.granularity) for layer in got.layers] == [
        (layer.k, layer.v, layer.granularity) for layer in wanted.layers
    ]
    assert got.format is Format.E4M3FN
    assert got.layers[1].names == (f"{FILE}:layers[1]",)


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
def test_centers_come_back_to_the_bit(write_model, shape, granularity: Granularity):
    first, second = scales(granularity, 1 if granularity is Granularity.TENSOR else 12).layers
    assert first is not None
    center = tuple((torch.arange(12) / 7 - 0.5).tolist())
    centered = (replace(first, k_center=center), second)
    opened = write_model(KVScales(centered))
    got = read_kv_scales(opened, shape, Scheme())
    assert tuple(layer and replace(layer, names=()) for layer in got.layers) == centered
    alone = read_kv_scales(opened, shape, Scheme(), extras=False)
    assert [(layer.k, layer.v, layer.k_center) for layer in alone.layers if layer] == [
        ((0.5,), (0.5,), ())
    ] * 2


def test_a_choice_by_layer_comes_back(write_model, shape):
    head = scales(Granularity.HEAD, 3).layers[1]
    for mixed, layers in (
        ((None, Granularity.HEAD), (None, head)),
        ((Granularity.TOKEN, Granularity.HEAD), (None, head)),
        ((None, None), (None, None)),
    ):
        got = read_kv_scales(write_model(KVScales(layers, mixed=mixed)), shape, Scheme())
        assert got.mixed == mixed
        assert tuple(layer and replace(layer, names=()) for layer in got.layers) == layers
        assert not got.empty


def test_without_a_name_in_config_the_file_is_not_looked_at(write_model, shape):
    opened = write_model(scales(Granularity.HEAD, 3), content=b"nonsense", said={})
    assert read_extras(opened, shape) is None
    assert read_kv_scales(opened, shape, Scheme()).layers[0].k == (0.5,)


def test_a_changed_file_is_refused(write_model, shape):
    opened = write_model(
        scales(Granularity.HEAD, 3), content=write_extras(scales(Granularity.HEAD, 3, 1))[1][FILE]
    )
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        read_kv_scales(opened, shape, Scheme()).require_valid("measure them")


def test_a_missing_file_is_refused(write_model, shape, tmp_path: Path):
    opened = write_model(scales(Granularity.HEAD, 3))
    (tmp_path / FILE).unlink()
    with refuses(CheckpointError, "cannot be read", "`freight`", "config.json"):
        read_kv_scales(opened, shape, Scheme()).require_valid("measure them")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"freight": 3}, "not understood by this version"),
        ({"freight": {"centers": {}}}, "not understood by this version"),
        ({"freight": {"kv_scales": {"file": "x.json"}}}, "not understood by this version"),
        ({"freight": {"kv_scales": {"file": "../x.json", "sha256": "0"}}}, "outside the folder"),
    ],
)
def test_what_config_says_is_checked(write_model, shape, said: dict[str, Any], says: str):
    with pytest.raises(CheckpointError, match=says):
        read_extras(write_model(scales(Granularity.HEAD, 3), said=said), shape)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": [{"k": [1.0] * 3, "v": [1.0] * 3}]}, "1 layers; the model has 2"),
        (
            {"layers": [{"k": [1.0] * 3, "v": [1.0] * 2}] * 2},
            "layer 0 has 2 scales of v, the model needs 3",
        ),
        (
            {"layers": [{"k": [1.0, 0.0, 1.0], "v": [1.0] * 3}] * 2},
            "a scale of k is not finite and above 0",
        ),
        ({"format": "fp8_e5m2"}, "for fp8_e5m2"),
        ({"granularity": "token"}, "token scales"),
        ({"granularity": "group"}, "group scales"),
        ({"granularity": "mixed", "layers": [{"granularity": "group"}] * 2}, "scales per group"),
        ({"granularity": "mixed"}, "holds no KV scales: KeyError: 'granularity'"),
        (
            {"granularity": "mixed", "layers": [{"granularity": None, "k": [1.0]}] * 2},
            "stored without static scales",
        ),
        ({"granularity": "mixed", "layers": [{"granularity": "head"}] * 2}, "does not understand"),
        ({"granularity": "mixed", "layers": [{"granularity": "row"}] * 2}, "holds no KV scales"),
        ({"granularity": "row"}, "holds no KV scales"),
        ({"layers": 3}, "holds no KV scales"),
        ({"layers": [3, 4]}, "holds no KV scales"),
        (
            {"layers": [{"k": [1.0] * 3}] * 2},
            r"has \['k'\], which this version does not understand",
        ),
        ({"layers": [{"k": [1.0] * 3, "v": [1.0] * 3, "zero": [0.0]}] * 2}, "does not understand"),
        (
            {"layers": [{"k": [1.0] * 3, "v": [1.0] * 3, "k_center": [0.0] * 3}] * 2},
            "k_center is not 12 finite numbers",
        ),
        (
            {"layers": [{"k": [1.0] * 3, "v": [1.0] * 3, "k_center": [float("inf")] * 12}] * 2},
            "k_center is not 12 finite numbers",
        ),
        (
            {"layers": [{"k": [1.0] * 3, "v": [1.0] * 3, "v_center": [0.5] * 12}] * 2},
            r"layer 0 has v_center: .* older version of Freight, .* quantize the model again with --center",
        ),
    ],
)
def test_what_the_file_holds_must_fit_the_model(
    write_model, shape, tmp_path: Path, change: dict[str, Any], says: str
):
    content = json.loads(write_extras(scales(Granularity.HEAD, 3))[1][FILE]) | change
    data = json.dumps(content).encode()
    said = {"freight": {"kv_scales": {"file": FILE, "sha256": hashlib.sha256(data).hexdigest()}}}
    with pytest.raises(CheckpointError, match=says):
        read_extras(write_model(scales(Granularity.HEAD, 3), content=data, said=said), shape)


@pytest.mark.parametrize("rotary_dim", [2, None])
def test_centers_of_channels_that_are_not_rotated_are_refused(
    write_model, shape, rotary_dim: int | None
):
    """Heads have 4 channels."""
    mixer = replace(shape.layers[0].mixer, rope=None if rotary_dim is None else 0)
    ropes = tuple(replace(rope, rotary_dim=rotary_dim or 4) for rope in shape.ropes)
    model = replace(shape, layers=(replace(shape.layers[0], mixer=mixer),) * 2, ropes=ropes)
    first, second = scales(Granularity.HEAD, 3).layers
    assert first is not None
    assert second is not None
    rotated, others = (1.0, 1.0, 0.0, 0.0) * 3, (0.0, 0.0, 0.0, -2.0) * 3
    if rotary_dim is not None:
        assert (
            read_extras(write_model(KVScales((replace(first, k_center=rotated), second))), model)
            is not None
        )
    with refuses(CheckpointError, "layer 1", "k_center", "-2.0", "channel 3", "`freight`"):
        read_extras(write_model(KVScales((first, replace(second, k_center=others)))), model)
