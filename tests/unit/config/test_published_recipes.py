"""Recipes as llm-compressor publishes them resolve to the options of `freight quantize` that do the
same, or are refused by the name of what is not done.

Each comes from a file of github.com/vllm-project/llm-compressor, which the row names; `OF_PYTHON` are
the arguments of its Python, `OF_YAML` its text.
"""

from __future__ import annotations

from typing import Any

import pytest

from freight.errors import ConfigError
from freight.quantizer import modifier, transform_modifiers
from freight.quantizer.modifier import GPTQModifier, QuantizationModifier, Recipe
from freight.quantizer.plan import QuantizeArgs, WeightScheme
from freight.quantizer.recipe import read_recipe
from freight.quantizer.transform_modifiers import (
    AWQModifier,
    SmoothQuantModifier,
    SpinQuantModifier,
)

LINEAR: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
ROUTERS = ["lm_head", "re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$"]
INT4 = {
    "weights": "int4",
    "activations": "none",
    "group_size": 128,
    "weight_observer": "minmax",
}
INT8 = {"weights": "int8", "activations": "dynamic", "weight_observer": "minmax"}
FP8_DYNAMIC = {"weights": "fp8-channel", "activations": "dynamic"}
GPTQ = {"method": "gptq", "damping": 0.01, "act_order": "static"}
NVFP4 = {
    "weights": {
        "num_bits": 4, "actorder": "static", "type": "float", "strategy": "tensor_group", "symmetric": True,
        "dynamic": False, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
        "observer": "memoryless_minmax",
    },
    "targets": ["Linear"],
}  # fmt: skip
NVFP4_INPUTS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "dynamic": "local",
    "group_size": 16, "observer": "static_minmax", "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
Python = list[tuple[str, dict[str, Any]]]

# file under examples/ -> (modifiers with their arguments, options)
OF_PYTHON: dict[str, tuple[Python, dict[str, Any]]] = {
    "quantization_w4a16/llama3_example.py": (
        [("GPTQModifier", LINEAR | {"scheme": "W4A16"})],
        INT4 | GPTQ,
    ),
    "quantization_w8a8_int8/llama3_example.py": (
        [
            ("SmoothQuantModifier", {"smoothing_strength": 0.8}),
            ("GPTQModifier", LINEAR | {"scheme": "W8A8"}),
        ],
        INT8 | GPTQ | {"method": "smoothquant,gptq", "smoothing": 0.8},
    ),
    "quantizing_moe/qwen_moe_w4a16.py": (
        [("GPTQModifier", {"targets": "Linear", "scheme": "W4A16", "ignore": ROUTERS})],
        INT4 | GPTQ,
    ),
    "awq/llama_example.py of 0.8": (
        [("AWQModifier", LINEAR | {"scheme": "W4A16_ASYM"})],
        INT4 | {"method": "awq", "asymmetric": True, "duo_scaling": "on"},
    ),
    "awq/qwen3_moe_example.py of 0.8": (
        [("AWQModifier", {"targets": ["Linear"], "scheme": "W4A16", "ignore": ROUTERS})],
        INT4 | {"method": "awq", "duo_scaling": "on"},
    ),
    "awq/llama_gptq_example.py": (
        [
            ("AWQModifier", LINEAR | {"scheme": "W4A16_ASYM"}),
            ("GPTQModifier", LINEAR | {"scheme": "W4A16_ASYM", "dampening_frac": 0.01}),
        ],
        INT4 | GPTQ | {"method": "awq,gptq", "asymmetric": True, "duo_scaling": "on"},
    ),
    "awq/fp8_dynamic_llama_example.py": (
        [
            ("AWQModifier", {"duo_scaling": "both"}),
            ("QuantizationModifier", LINEAR | {"scheme": "FP8_DYNAMIC"}),
        ],
        FP8_DYNAMIC | {"method": "awq", "duo_scaling": "both"},
    ),
    "quantization_w8a8_fp8/llama3_example.py": (
        [("QuantizationModifier", LINEAR | {"scheme": "FP8_DYNAMIC"})],
        FP8_DYNAMIC,
    ),
}

REFUSED_PYTHON: dict[str, tuple[Python, str]] = {
    "quantization_w4a8_fp8/llama3_example.py": (
        [("GPTQModifier", LINEAR | {"scheme": "W4AFP8"})],
        "'W4AFP8' is not implemented; .*choose W4A16",
    ),
    "quantization_w4a4_mxfp4/llama3_mxfp4.py": (
        [("QuantizationModifier", LINEAR | {"scheme": "MXFP4"})],
        "'MXFP4' is not implemented; .*choose MXFP4A16",
    ),
    "quantization_w4a4_fp4/llama3_gptq_example.py": (
        [
            (
                "GPTQModifier",
                {
                    "config_groups": {"group_0": NVFP4 | {"input_activations": NVFP4_INPUTS}},
                    "ignore": ["lm_head"],
                },
            )
        ],
        "input_activations are given, but beside weights in 4 bits inputs stay in 16 bits",
    ),
    "transform/spinquant_example.py": (
        [
            (
                "SpinQuantModifier",
                {
                    "rotations": ["R1", "R2", "R4"],
                    "transform_block_size": 64,
                    "transform_type": "hadamard",
                },
            ),
            ("QuantizationModifier", LINEAR | {"scheme": "W4A16"}),
        ],
        "SpinQuantModifier has the rotation R4, which is done at run time; choose R1 and R2",
    ),
    "transform/quip_example.py": (
        [
            ("QuIPModifier", {"rotations": ["v", "u"], "transform_block_size": 128}),
            ("QuantizationModifier", LINEAR | {"scheme": "W4A16"}),
        ],
        "QuIPModifier is not implemented; .*SpinQuantModifier",
    ),
}

# file -> (text, options)
OF_YAML: dict[str, tuple[str, dict[str, Any]]] = {
    "examples/quantization_kv_cache/llama3_fp8_kv_example.py": (
        """
        quant_stage:
          quant_modifiers:
            QuantizationModifier:
              ignore: ["lm_head"]
              config_groups:
                group_0:
                  weights: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
                  input_activations: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
                  targets: ["Linear"]
              kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
        """,
        {"weights": "fp8", "activations": "static", "kv_cache": "fp8", "kv_granularity": "tensor"},
    ),
    "tests/e2e/recipes/actorder/recipe_w4a16_actorder_weight.yaml": (
        """
        quant_stage:
          quant_modifiers:
            GPTQModifier:
              ignore: ["lm_head", "re:.*vision_tower.*", "re:.*visual.*"]
              actorder: "weight"
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: "int", symmetric: true, strategy: "group", group_size: 128}
                  targets: ["Linear"]
        """,
        INT4 | GPTQ,
    ),
    "tests/e2e/recipes/WNA16/recipe_w4a16_awq_asym.yaml": (
        """
        quant_stage:
          quant_modifiers:
            AWQModifier:
              duo_scaling: "both"
            QuantizationModifier:
              ignore: [lm_head]
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: int, symmetric: false, strategy: "group", group_size: 128}
                  targets: [Linear]
        """,
        INT4 | {"method": "awq", "asymmetric": True, "duo_scaling": "both"},
    ),
}

REFUSED_YAML: dict[str, tuple[str, str]] = {
    "examples/quantization_w8a8_int8/recipe.yaml": (
        """
        quant_stage:
          quant_modifiers:
            SmoothQuantModifier:
              smoothing_strength: 0.8
              mappings: [
                [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"],
                [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]
              ]
            GPTQModifier:
              sequential_update: false
              ignore: ["lm_head"]
              config_groups:
                group_0:
                  weights: {num_bits: 8, type: "int", symmetric: true, strategy: "channel"}
                  input_activations: {num_bits: 8, type: "int", symmetric: true, dynamic: true, strategy: "token"}
                  targets: ["Linear"]
        """,
        "GPTQModifier has sequential_update: false",
    ),
    "examples/quantizing_moe/deepseek_recipe_w4a16.yaml": (
        """
        quant_stage:
          quant_modifiers:
            GPTQModifier:
              ignore: [lm_head, "re:.*mlp.gate$"]
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: int, symmetric: true, strategy: channel, dynamic: false}
                  targets: [Linear]
        """,
        "group_0: weights have strategy: channel.*group_size of 128, 64 or 32",
    ),
    "examples/quantization_2of4_sparse_w4a16/2of4_w4a16_group-128_recipe.yaml": (
        """
        sparsity_stage:
          run_type: oneshot
          sparsity_modifiers:
            SparseGPTModifier: {sparsity: 0.5, mask_structure: "2:4", targets: ["Linear"], ignore: ["re:.*lm_head"]}
        quantization_stage:
          run_type: oneshot
          quantization_modifiers:
            GPTQModifier:
              ignore: ["lm_head"]
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: "int", symmetric: true, strategy: "group", group_size: 128}
                  targets: ["Linear"]
        """,
        "SparseGPTModifier is not implemented; prune with llm-compressor",
    ),
    "tests/e2e/recipes/kv_cache/gptq.yaml": (
        """
        quant_stage:
          quant_modifiers:
            GPTQModifier:
              ignore: ["lm_head"]
              actorder: null
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: "int", symmetric: true, strategy: "channel", actorder: False}
                  targets: ["Linear"]
              kv_cache_scheme: {num_bits: 8, type: float, symmetric: true, strategy: tensor}
        """,
        "strategy: channel",
    ),
    "tests/e2e/recipes/non_uniform/recipe_gptq_awq.yaml": (
        """
        quant_stage:
          quant_modifiers:
            AWQModifier:
              duo_scaling: true
              mappings:
                - smooth_layer: "re:.*input_layernorm$"
                  balance_layers: ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]
            QuantizationModifier: {ignore: ["lm_head"], scheme: "W4A16", targets: ["re:.*self_attn"]}
            GPTQModifier: {ignore: ["lm_head"], scheme: "W8A8", targets: ["re:.*mlp"], actorder: null}
        """,
        "AWQModifier has mappings of its own",
    ),
}


def of_python(parts: Python) -> Recipe:
    """Read modifiers as a script makes them: of our classes, or those that have none of ours."""
    made = []
    for name, options in parts:
        known = getattr(transform_modifiers, name, None) or getattr(modifier, name, None)
        made.append(known(**options) if known else type(name, (), options)())
    return read_recipe(made)


def as_yaml(parts: Python) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": dict(parts)}}


def args(**options: Any) -> QuantizeArgs:
    return QuantizeArgs.from_options(**{"kv_cache": "none"} | options)


@pytest.mark.parametrize("name", OF_PYTHON)
def test_a_published_script(name: str):
    parts, options = OF_PYTHON[name]
    assert of_python(parts).args() == args(**options)
    assert read_recipe(as_yaml(parts)).args() == args(**options)


@pytest.mark.parametrize("name", OF_YAML)
def test_a_published_file(name: str):
    text, options = OF_YAML[name]
    assert read_recipe(text).args() == args(**options)


@pytest.mark.parametrize("name", REFUSED_PYTHON)
def test_a_published_script_that_is_refused(name: str):
    parts, says = REFUSED_PYTHON[name]
    with pytest.raises(ConfigError, match=says):
        of_python(parts)
    with pytest.raises(ConfigError, match=says):
        read_recipe(as_yaml(parts))


@pytest.mark.parametrize("name", REFUSED_YAML)
def test_a_published_file_that_is_refused(name: str):
    text, says = REFUSED_YAML[name]
    with pytest.raises(ConfigError, match=says):
        read_recipe(text)


def test_mappings_that_are_the_default_are_taken():
    text = REFUSED_YAML["examples/quantization_w8a8_int8/recipe.yaml"][0]
    recipe = read_recipe(text.replace("sequential_update: false", "sequential_update: true"))
    expected = INT8 | GPTQ | {"method": "smoothquant,gptq", "smoothing": 0.8}
    assert recipe.args() == args(**expected)
    assert recipe.needs_data


def test_rotation_and_what_comes_after_it():
    rotated = [SpinQuantModifier(), QuantizationModifier(scheme="W4A16", ignore=["lm_head"])]
    assert read_recipe(rotated).args() == args(**INT4 | {"method": "rotation"})
    assert not read_recipe(rotated).needs_data
    recipe = read_recipe([SpinQuantModifier(), GPTQModifier(scheme="W4A16", actorder=None)])
    assert recipe.args() == args(
        **INT4 | {"method": "rotation,gptq", "damping": 0.01, "act_order": "none"}
    )


@pytest.mark.parametrize(
    ("of_modifier", "of_scheme", "order"),
    [
        ({}, None, "static"),
        ({}, "group", "group"),
        ({}, False, "static"),
        ({"actorder": None}, None, "none"),
        ({"actorder": None}, False, "none"),
        ({"actorder": "dynamic"}, None, "group"),
        ({"actorder": "weight"}, "static", "static"),
        ({"actorder": "static"}, "group", "give one of them"),
        ({"actorder": "weights"}, None, "'weights'; choose static"),
    ],
)
def test_the_order_of_gptq(of_modifier: dict[str, Any], of_scheme: object, order: str):
    """As llm-compressor 0.14 resolves it, but for "group", which only its older versions have."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": of_scheme}
    options = of_modifier | {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    if " " in order:
        with pytest.raises(ConfigError, match=order):
            GPTQModifier(**options)
        return
    assert read_recipe(GPTQModifier(**options)).act_order == order
    assert read_recipe(as_yaml([("GPTQModifier", options)])).act_order == order


def test_weights_in_four_bits_of_floats():
    for group, format_ in (
        (NVFP4, "nvfp4"),
        (
            {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "scale_dtype": "torch.uint8",
                },
            },
            "mxfp4",
        ),
    ):
        recipe = as_yaml([("GPTQModifier", {"config_groups": {"g": group}})])
        preset = as_yaml([("GPTQModifier", {"scheme": f"{format_}a16"})])
        if format_ in set(WeightScheme):
            assert read_recipe(recipe).weights == format_
            assert read_recipe(recipe) == read_recipe(preset)
        else:
            with pytest.raises(ConfigError, match=f"weights in {format_} are not implemented"):
                read_recipe(recipe)


@pytest.mark.parametrize(
    ("modifier", "says"),
    [
        (lambda: AWQModifier(n_grid=10), "AWQModifier has n_grid 10; only 20 is done"),
        (lambda: AWQModifier(duo_scaling=1), "duo_scaling 1; choose True"),
        (lambda: AWQModifier(duo_scaling="neither"), "duo_scaling 'neither'"),
        (lambda: AWQModifier(mappings=[3]), "has the mapping 3"),
        (lambda: AWQModifier(scheme="W4A15"), "'W4A15' is unknown"),
        (lambda: SmoothQuantModifier(smoothing_strength=1.5), "smoothing_strength 1.5"),
        (lambda: SmoothQuantModifier(smoothing_strength=True), "smoothing_strength True"),
        (lambda: SmoothQuantModifier(ignore=["model.norm"]), "SmoothQuantModifier has ignore"),
        (lambda: SmoothQuantModifier(algorithm="log_equalization"), "algorithm"),
        (lambda: SpinQuantModifier(rotations=["R1"]), "rotations R1; Freight does R1 and R2"),
        (lambda: SpinQuantModifier(transform_type="random-matrix"), "transform_type"),
        (lambda: SpinQuantModifier(transform_block_size=64), "transform_block_size 64"),
        (lambda: SpinQuantModifier(randomize=True), "randomize True; only False is done"),
        (lambda: GPTQModifier(scheme="W4A16", block_size=64), "block_size 64"),
        (lambda: GPTQModifier(scheme="W4A16", dampening_frac=0), "dampening_frac 0"),
        (lambda: GPTQModifier(kv_cache_scheme={"num_bits": 8, "type": "float"}), "quantizes nothi"),
        (lambda: GPTQModifier(scheme="W4A16", weight_observer="imatrix_mse"), "'imatrix_mse'"),
        (lambda: GPTQModifier(scheme={"W4A16": ["re:a"], "W8A8": ["re:b"]}), "different schemes"),
    ],
)  # fmt: skip
def test_what_a_modifier_refuses(modifier: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        modifier()


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ([AWQModifier(), SmoothQuantModifier()], "SmoothQuantModifier after another"),
        ([GPTQModifier(scheme="W4A16"), AWQModifier()], "AWQModifier after another"),
        ([AWQModifier()], "has no QuantizationModifier"),
        ([GPTQModifier(scheme="W4A16")] * 2, "2 modifiers that quantize"),
        (
            [AWQModifier(scheme="W4A16"), GPTQModifier(scheme="W4A16_ASYM")],
            "AWQModifier with a scheme",
        ),
        (
            [
                AWQModifier(),
                QuantizationModifier(kv_cache_scheme={"num_bits": 8, "type": "float"}),
            ],
            "awq, which changes nothing",
        ),
    ],
)
def test_what_a_list_refuses(recipe: list[Any], says: str):
    with pytest.raises(ConfigError, match=says):
        read_recipe(recipe)


def test_the_observer_of_weights():
    assert read_recipe(GPTQModifier(scheme="W4A16", weight_observer="mse")).weight_observer == "mse"
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "observer": "memoryless_mse"}
    group = {"g": {"targets": ["Linear"], "weights": weights}}
    recipe = QuantizationModifier(config_groups=group)
    assert read_recipe(recipe).weight_observer == "mse"
    assert read_recipe(recipe).group_size == 32
    overridden = QuantizationModifier(config_groups=group, observer={"weights": "minmax"})
    assert read_recipe(overridden).weight_observer == "minmax"
