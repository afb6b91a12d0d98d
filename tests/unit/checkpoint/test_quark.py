"""The declaration of Quark's native export: specifications by class and group, and what is refused.

Keys and values are those of Quark's `Config.to_dict`.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.formats.forms import STATIC, TOKEN, quark

from freight.checkpoint.producers.quark import read_quark
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, WeightScales

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}


def everywhere(**more: Any) -> dict[str, Any]:
    """The declaration whose `global_quant_config` has these parts."""
    return quark("per_tensor", None, global_quant_config=more)


@pytest.mark.parametrize(
    ("weight", "scales", "block"),
    [
        ({"qscheme": "per_channel", "ch_axis": 0}, WeightScales.ROW, None),
        ({"qscheme": "per_group", "ch_axis": 1, "group_size": 128}, WeightScales.BLOCK, (1, 128)),
        ({"qscheme": "per_group", "ch_axis": -1, "group_size": 64}, WeightScales.BLOCK, (1, 64)),
        ({"qscheme": "per_block", "block_size": [128, 128]}, WeightScales.BLOCK, (128, 128)),
    ],
)
def test_scales_of_weights(
    weight: dict[str, Any], scales: WeightScales, block: tuple[int, int] | None
) -> None:
    rule = read_quark(everywhere(weight=FP8 | weight)).rules[-1].linear
    assert rule is not None
    assert (rule.scales, rule.activations) == (scales, Activations.PLAIN)
    if block is not None:
        assert tuple(rule.block) == block


@pytest.mark.parametrize("name", ["torch.nn.Linear", "nn.Linear", "Linear"])
def test_a_class_comes_before_all_modules(name: str) -> None:
    by_class = {name: {"weight": FP8, "input_tensors": TOKEN}, "Conv1d": {"weight": FP8}}
    rules = read_quark(quark("per_tensor", STATIC, layer_type_quant_config=by_class)).rules
    expected = [Activations.DYNAMIC, Activations.STATIC]
    assert [rule.linear.activations for rule in rules if rule.linear is not None] == expected


OUTPUT = {"output_tensors": FP8}
PER_HEAD = {"output_tensors": FP8 | {"qscheme": "per_channel"}}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            everywhere(input_tensors=FP8),
            "global_quant_config quantizes input_tensors but no weight",
        ),
        (everywhere(weight=FP8 | {"is_dynamic": True}), "weight with is_dynamic true"),
        (everywhere(weight=FP8 | {"dtype": "int4"}), "weight of dtype 'int4'"),
        (
            everywhere(weight=FP8 | {"qscheme": "per_channel", "ch_axis": 1}),
            "weight per_channel with ch_axis 1 is not",
        ),
        (
            everywhere(weight=FP8 | {"qscheme": "per_group", "ch_axis": 0, "group_size": 128}),
            "weight per_group with ch_axis 0 is not",
        ),
        (
            everywhere(weight=FP8, input_tensors=FP8 | {"qscheme": "per_channel"}),
            "input_tensors of static per_channel",
        ),
        (everywhere(weight=FP8, **OUTPUT), r"global_quant_config\.output_tensors is not"),
        (
            quark("per_tensor", None, layer_quant_config={"*o_proj": OUTPUT}),
            r"layer_quant_config\['\*o_proj'\]\.output_tensors is not implemented",
        ),
        (
            quark("per_tensor", None, kv_cache_quant_config={"*k_proj": PER_HEAD}),
            r"\['\*k_proj'\]\.output_tensors of per_channel is not",
        ),
    ],
)
def test_what_is_not_implemented_is_named(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_quark(declared)


def test_outputs_of_q_proj_are_not_the_cache_s() -> None:
    """Quark's recipes for the cache list them with those of k_proj and v_proj."""
    of = {"*q_proj": OUTPUT}
    assert not read_quark(quark("per_tensor", None, layer_quant_config=of)).kv_static
    of["*k_proj"] = of["*v_proj"] = OUTPUT
    assert read_quark(quark("per_tensor", None, layer_quant_config=of)).kv_static
