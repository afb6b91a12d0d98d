"""Which modules each producer means by a name."""

from __future__ import annotations

import pytest

from freight.checkpoint.layouts import read_scheme
from freight.checkpoint.producers.patterns import (
    class_or_exact,
    exact,
    searched,
    wildcard,
    wildcard_or_part,
)
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, WeightScales

Q, K, GATE = (
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "model.layers.1.mlp.gate_proj",
)
HEAD = "lm_head"


@pytest.mark.parametrize(
    ("syntax", "name", "matched"),
    [
        (exact, Q, [Q]),
        (exact, "layers.1.self_attn.q_proj", [Q]),  # without `model.`
        (exact, "model.layers.11.self_attn.qkv_proj", [K]),  # merged, as other engines name it
        (exact, "model.layers.1.mlp.gate_up_proj", [GATE]),
        (exact, "model.layers.1", []),
        (exact, "q_proj", []),
        (exact, "re:.*self_attn", [Q, K]),
        (exact, "re:self_attn", []),  # from the start
        (class_or_exact, "Linear", [Q, K, GATE, HEAD]),
        (class_or_exact, "LlamaRMSNorm", []),
        (searched, "lm_head", [HEAD]),
        (searched, "model.layers.1", [Q, GATE]),  # with what lies in it, and not 11
        (searched, "layers.1.self_attn", [Q]),
        (searched, "k_proj", [K]),
        (searched, "mlp.gate", []),  # no part of a name
        (searched, r"model.layers.\d+.mlp", [GATE]),
        (searched, "re:layers.1[.].*proj", [Q, GATE]),
        (searched, "gate(", []),
        (wildcard, "*k_proj", [K]),
        (wildcard, "*.layers.1.*", [Q, GATE]),
        (wildcard, "self_attn", []),
        (wildcard, "re:.*mlp", [GATE]),
        (wildcard_or_part, "model.layers.1.*", [Q, GATE]),
        (wildcard_or_part, "*lm_head*", [HEAD]),
        (wildcard_or_part, "layers.1", [Q, GATE]),
        (wildcard_or_part, "self_attn", [Q, K]),
        (wildcard_or_part, "attn", []),
    ],
)
def test_syntaxes(syntax, name, matched):
    assert [module for module in (Q, K, GATE, HEAD) if syntax(name).match(module)] == matched


ARGS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TENSOR = LinearScheme(WeightScales.TENSOR, Activations.STATIC)
ROW = LinearScheme(WeightScales.ROW, Activations.PLAIN)


def test_a_name_counts_more_than_an_expression_and_both_more_than_a_class():
    groups = {
        "a": {"targets": ["Linear"], "weights": ARGS},
        "b": {"targets": ["re:.*mlp"], "weights": ARGS | {"strategy": "channel"}},
        "c": {"targets": [GATE, "LlamaAttention"], "weights": ARGS, "input_activations": ARGS},
        "d": {"targets": ["LlamaAttention"], "input_activations": ARGS},  # queries, keys and values
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    scheme = read_scheme({"quantization_config": said}, None)
    assert scheme.linear(GATE) == TENSOR
    assert scheme.linear("model.layers.3.mlp.up_proj") == ROW
    assert scheme.linear(Q) == LinearScheme(WeightScales.TENSOR, Activations.PLAIN)
    assert scheme.linear(HEAD) is None


def test_outputs_of_k_and_v_are_the_cache():
    group = {"targets": ["re:.*k_proj", "re:.*v_proj"], "output_activations": ARGS}
    said = {"quant_method": "compressed-tensors", "config_groups": {"kv": group}, "format": "dense"}
    scheme = read_scheme({"quantization_config": said}, None)
    assert (scheme.weight_format, scheme.kv_format, scheme.kv_static) == (None, "fp8_e4m3fn", True)
    group["targets"] = ["re:.*down_proj"]
    with pytest.raises(CheckpointError, match=r"outputs of.*down_proj"):
        read_scheme({"quantization_config": said}, None)


def test_quark_names_come_before_classes_and_all():
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    said = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": weight},
        "layer_type_quant_config": {
            "nn.Linear": {"weight": weight | {"qscheme": "per_channel", "ch_axis": 0}}
        },
        "layer_quant_config": {
            "*q_proj": {"weight": weight, "input_tensors": weight},
            "*k_proj": {"weight": None},
        },
        "exclude": ["*layers.1.mlp*"],
    }
    scheme = read_scheme({"quantization_config": said}, None)
    assert [scheme.linear(name) for name in (Q, K, GATE, HEAD)] == [TENSOR, None, None, ROW]
    weight["ch_axis"] = 1
    said["layer_type_quant_config"]["nn.Linear"]["weight"]["ch_axis"] = 1
    with pytest.raises(CheckpointError, match="ch_axis 1"):
        read_scheme({"quantization_config": said}, None)


def test_torchao_names_come_before_expressions_and_the_default():
    row = {
        "_type": "Float8WeightOnlyConfig",
        "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}},
    }
    block = {"_type": "PerBlock", "_data": {"block_size": [128, 128]}}
    blocks = {
        "_type": "Float8DynamicActivationFloat8WeightConfig",
        "_data": {"granularity": [block, block]},
    }
    names = {"_default": row, r"re:.*\.q_proj": blocks, f"{GATE}.weight": None}
    for kind, key in (
        ("ModuleFqnToConfig", "module_fqn_to_config"),
        ("FqnToConfig", "fqn_to_config"),
    ):
        quant_type = {"default": {"_type": kind, "_data": {key: names}}}
        scheme = read_scheme(
            {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}}, None
        )
        dynamic = LinearScheme(WeightScales.BLOCK, Activations.DYNAMIC, (128, 128), or_plain=True)
        plain = LinearScheme(WeightScales.ROW, Activations.PLAIN, or_plain=True)
        assert [scheme.linear(name) for name in (Q, K, GATE)] == [dynamic, plain, None]
    for data in (
        {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}},
        {"granularity": {"_type": "X"}},
    ):
        quant_type = {"default": row | {"_data": data}}
        with pytest.raises(CheckpointError, match=r"float8_e5m2|'X'"):
            read_scheme(
                {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}}, None
            )
