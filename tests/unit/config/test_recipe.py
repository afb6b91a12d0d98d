"""Recipes of llm-compressor: each form means what `freight quantize` calls it, and nothing in it is
passed over.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.fp8.formats import Granularity
from freight.quantizer.modifier import QuantizationArgs, QuantizationModifier, Recipe
from freight.quantizer.plan import ActivationScheme, QuantizeArgs, WeightScheme, plan
from freight.quantizer.recipe import OTHER_MODIFIERS, read_recipe

DOCUMENT = (Path(__file__).parents[3] / "docs" / "quantize.md").read_text()
TABLE = re.findall(
    r"^\| `(\w+: .*)` \| `(--.*)` \|$",
    DOCUMENT.split("| recipe | `freight quantize")[1].split("| line |")[0],
    re.M,
)
FP8 = {"num_bits": 8, "type": "float"}
KV = FP8 | {"strategy": "tensor", "dynamic": False}
LINEAR = [
    f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")
] + ["lm_head"]


def of_yaml(content: str) -> Recipe:
    return read_recipe(f"quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {{{content}}}")


def group(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": FP8} | fields}
    )


def test_the_table_has_rows():
    assert len(TABLE) == 17


@pytest.mark.parametrize(("recipe", "flags"), TABLE)
def test_a_row_of_the_documentation(recipe: str, flags: str):
    options: dict[str, Any] = {}
    for part in flags.removeprefix("--").split(" --"):
        flag, _, value = part.partition(" ")
        options[flag.replace("-", "_")] = int(value) if value.isdigit() else value or True
    expected = plan(QuantizeArgs.from_options(**options))
    assert plan(of_yaml(recipe).args()) == expected


def test_forms_of_one_recipe(tmp_path: Path):
    expected = QuantizationModifier(
        targets=["Linear"], scheme="FP8", ignore=["lm_head"], kv_cache_scheme=KV
    )
    text = """
    default_stage:
      default_modifiers:
        QuantizationModifier:
          targets: [Linear]
          ignore: [lm_head]
          scheme: fp8
          kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, observer: static_minmax}
          bypass_divisibility_checks: false
          start: 0.0
    """
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = read_recipe(expected)
    assert recipe == Recipe(
        WeightScheme.TENSOR, ActivationScheme.STATIC, Granularity.TENSOR, ("Linear",), ("lm_head",)
    )
    for form in (
        text,
        str(tmp_path / "recipe.yaml"),
        tmp_path / "recipe.yaml",
        [text],
        [[expected]],
        (expected,),
    ):
        assert read_recipe(form) == recipe
    as_object = replace(
        expected, kv_cache_scheme=QuantizationArgs(**FP8, strategy="tensor"), targets="Linear"
    )
    assert read_recipe(as_object) == recipe


def test_objects_of_compressed_tensors_are_read():
    """Those classes are of pydantic, and their strings are members of enumerations."""

    class Strategy(Enum):
        TENSOR = "tensor"

    class Theirs:
        def model_dump(self) -> dict[str, Any]:
            return {
                **FP8,
                "strategy": Strategy.TENSOR,
                "dynamic": False,
                "observer": None,
                "observer_kwargs": {},
            }

    assert read_recipe(QuantizationModifier(kv_cache_scheme=Theirs())).kv is Granularity.TENSOR


@pytest.mark.parametrize("name", OTHER_MODIFIERS)
def test_other_modifiers_are_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=f"{name} is not implemented; "):
        read_recipe(
            f"a_stage:\n  a_modifiers:\n    {name}: {{}}\n    QuantizationModifier: {{scheme: FP8}}"
        )
    with pytest.raises(ConfigError, match=f"{name} is not implemented; "):
        read_recipe([type(name, (), {})()])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "quantizes nothing; add scheme='FP8'"),
        ({"scheme": "FP8_DYNAMICS"}, r"'FP8_DYNAMICS' .*did you mean FP8_DYNAMIC"),
        ({"scheme": {"FP8": ["re:.*mlp"], "FP8_DYNAMIC": ["Linear"]}}, "get different schemes"),
        ({"scheme": "FP8", "config_groups": {"FP8": ["Linear"]}}, "both scheme and config_groups"),
        ({"scheme": "FP8", "targets": 3}, "targets is 3"),
        ({"scheme": "FP8", "targets": []}, "targets is empty"),
        ({"scheme": "FP8", "ignore": ["re:("]}, "ignore: '.' is not a regular expression"),
        ({"scheme": "FP8", "input_observer": "minmax"}, "observer 'minmax'; .*static_minmax"),
        ({"scheme": "FP8", "observer": {"weights": "mse"}}, "observer 'mse'"),
        ({"scheme": "FP8", "observer": {"weight": "mse"}}, "no key 'weight'"),
        ({"scheme": "FP8", "output_observer": "static_minmax"}, "outputs are not quantized"),
        (
            {"scheme": "FP8", "kv_cache_scheme": {"num_bits": 8}},
            "type: int; Freight writes FP8 only",
        ),
        ({"scheme": "FP8", "kv_cache_scheme": KV | {"num_bits": 4}}, "num_bits: 4"),
        ({"scheme": "FP8", "kv_cache_scheme": KV | {"symmetric": False}}, "no zero point"),
        (
            {"scheme": "FP8", "kv_cache_scheme": KV | {"dynamic": True}},
            "scales per token need no recipe",
        ),
        (
            {"scheme": "FP8", "kv_cache_scheme": KV | {"strategy": "channel"}},
            "'channel'; choose tensor or attn_head",
        ),
        (
            {"scheme": "FP8", "kv_cache_scheme": KV | {"observer": "memoryless_minmax"}},
            "observer 'memoryless_minmax'",
        ),
        (
            {"scheme": "FP8", "kv_cache_scheme": KV | {"stategy": "tensor"}},
            "'stategy' .did you mean strategy",
        ),
        (
            {
                "scheme": "FP8",
                "kv_cache_scheme": KV | {"observer_kwargs": {"averaging_constant": 1}},
            },
            "observer_kwargs",
        ),
        ({"scheme": "FP8", "kv_cache_scheme": True}, "kv_cache_scheme is True, not a mapping"),
    ],
)
def test_what_a_modifier_refuses(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        QuantizationModifier(**options)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weights": None}, "has no weights"),
        ({"weights": FP8 | {"type": "int"}}, "writes INT8 with strategy channel, symmetric: true"),
        (
            {"weights": {"num_bits": 2, "strategy": "group"}},
            "num_bits: 2, type: int; .*8 and 4 bits",
        ),
        (
            {"weights": FP8 | {"strategy": "group", "group_size": 128}},
            "strategy: group, dynamic: false, group_size: 128",
        ),
        (
            {"weights": FP8 | {"strategy": "block", "block_structure": [64, 64]}},
            "block of .128, 128.",
        ),
        ({"weights": FP8 | {"dynamic": True}}, "dynamic: true; their scales are static"),
        ({"weights": FP8 | {"observer": "mse"}}, "group_0: weights has observer 'mse'"),
        (
            {"input_activations": FP8 | {"dynamic": True, "strategy": "tensor"}},
            "dynamic: true with strategy token",
        ),
        ({"input_activations": FP8 | {"strategy": "channel"}}, "strategy: channel, dynamic: false"),
        (
            {"input_activations": KV | {"observer": "minmax"}},
            "input_activations has observer 'minmax'",
        ),
        (
            {"weights": FP8 | {"strategy": "block"}, "input_activations": KV},
            "strategy group with group_size 128",
        ),
        ({"output_activations": KV}, "quantizes output_activations"),
        ({"weights": FP8 | {"actorder": "group"}}, "actorder 'group'.* use GPTQModifier"),
        ({"weights": FP8 | {"scale_dtype": "float16"}}, "weights has scale_dtype"),
        ({"weigths": KV}, "no field 'weigths' .did you mean weights"),
    ],
)
def test_what_a_group_refuses(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        group(**fields)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("a: [", "is not YAML"),
        ("just text\nand more", "not a mapping"),
        ("quant_stage:\n  quant_modifiers: 3", "quant_modifiers is 3, not a mapping"),
        ("quant_stage:\n  run_type: train", "'run_type' is not understood"),
        (
            "quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {shceme: FP8}",
            "no field 'shceme' .did you mean sch",
        ),
        ({}, "has no QuantizationModifier; give one"),
        (3, "int is unknown"),
        ("recipes/missing.yaml", "cannot be read as a file"),
        (Path("missing"), "cannot be read as a file"),
    ],
)
def test_what_is_no_recipe(recipe: object, says: str):
    with pytest.raises(ConfigError, match=says):
        read_recipe(recipe)


def test_a_long_recipe_of_nothing_ends():
    with pytest.raises(ConfigError, match="is not YAML"):
        read_recipe("a: " + "[" * 5_000)


@given(
    st.lists(
        st.sampled_from([*LINEAR, "Linear", "re:.*mlp", "re:.*layers.0", "re:mlp", "re:lm"]),
        min_size=1,
    ),
    st.lists(st.sampled_from([*LINEAR, "re:.*up_proj", "re:up_proj", "lm_head", "re:.*router"])),
)
def test_a_module_is_quantized_if_a_target_means_it_and_ignore_does_not(
    targets: list[str], ignore: list[str]
):
    def means(pattern: str, name: str) -> bool:
        return (
            bool(re.match(pattern[3:], name))
            if pattern.startswith("re:")
            else pattern in (name, "Linear")
        )

    recipe = read_recipe(QuantizationModifier(targets=targets, scheme="FP8", ignore=ignore))
    if all(any(means(target, name) for name in LINEAR) for target in targets):
        kept, idle = recipe.unquantized(LINEAR)
        assert set(LINEAR) - set(kept) == {
            name
            for name in LINEAR
            if any(means(target, name) for target in targets)
            and not any(means(one, name) for one in ignore)
        }
        assert set(idle) == {one for one in ignore if not any(means(one, name) for name in LINEAR)}
    else:
        with refuses(ConfigError, "Linear module"):
            recipe.unquantized(LINEAR)
