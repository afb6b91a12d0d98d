"""Shapes by name or by file."""

from __future__ import annotations

import json
import math

import pytest
from tests.refusals import refuses

from freight.checkpoint.config_only import read_config_only
from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS, shape_config
from freight.model.shapes import tensor_shapes


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-1b", 1.0e9), ("llama-1b-128k", 1.5e9), ("llama-8b", 8.03e9), ("llama-70b", 70.55e9)],
)
def test_presets_have_the_size_they_are_named_for(name, size):
    config = parse_model_config(shape_config(name))
    c = config
    mixer, intermediate = c.layers[0].mixer, c.layers[0].feed_forward.intermediate_size
    attention = 2 * c.hidden_size * mixer.k_dim * (mixer.num_heads + mixer.num_kv_heads)
    layer = attention + 3 * c.hidden_size * intermediate
    total = c.num_layers * layer + 2 * c.vocab_size * c.hidden_size
    assert total == pytest.approx(size, rel=0.02)
    assert not c.tie_word_embeddings
    assert c.checkpoint_format is Format.BFLOAT16
    assert c.layers[0].mixer.num_kv_heads == 8


@pytest.mark.parametrize(("name", "size"), [("qwen3.5-0.8b", 0.8e9), ("qwen3.5-9b", 9e9)])
def test_presets_with_states_have_the_size_they_are_named_for(name, size):
    config = parse_model_config(shape_config(name))
    assert sum(map(math.prod, tensor_shapes(config).values())) == pytest.approx(size, rel=0.07)
    assert [
        index for index, layer in enumerate(config.layers) if index in config.attention
    ] == list(range(3, config.num_layers, 4))


def test_llama_1b_is_the_shape_that_benchmarks_compare():
    c = parse_model_config(PRESETS["llama-1b"])
    mixer, intermediate = c.layers[0].mixer, c.layers[0].feed_forward.intermediate_size
    heads = (mixer.num_heads, mixer.num_kv_heads, mixer.k_dim)
    shape = (c.hidden_size, c.num_layers, intermediate, *heads, c.vocab_size)
    assert shape == (2048, 16, 8192, 32, 8, 64, 8192)


def test_a_shape_from_a_file_or_a_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS["llama-8b"]))
    assert shape_config(str(file)) == shape_config(str(tmp_path)) == PRESETS["llama-8b"]


@pytest.mark.parametrize(
    ("name", "parameters", "active", "context"),
    [
        ("qwen3-30b-a3b", 30.53e9, 3.35e9, 40960),
        ("qwen3-coder-30b-a3b", 30.53e9, 3.35e9, 262144),
        ("mixtral-8x7b", 46.70e9, 12.88e9, 32768),
        ("glm-4.7-flash", 29.94e9, 3.90e9, 202752),
    ],
)
def test_presets_with_experts_have_the_published_number_of_parameters(
    name, parameters, active, context
):
    config = parse_model_config(shape_config(name))
    shapes = tensor_shapes(config)
    assert sum(map(math.prod, shapes.values())) == pytest.approx(parameters, rel=0.002)
    routing = config.layers[-1].feed_forward.routing
    share = {
        tensor: routing.top_k / routing.num_experts if ".experts." in tensor else 1
        for tensor in shapes
    }
    assert sum(
        math.prod(shape) * share[tensor] for tensor, shape in shapes.items()
    ) == pytest.approx(active, rel=0.01)
    assert config.max_position_embeddings == context


@pytest.mark.parametrize(
    ("shape", "layers", "vocabulary"),
    [
        ("qwen3-30b-a3b:8", 8, 8192),
        ("qwen3-30b-a3b:8:151936", 8, 151936),
        ("llama-8b:1:500", 1, 500),
        ("opt-125m:2", 2, 8192),
    ],
)
def test_a_preset_with_fewer_layers_is_the_same_but_for_these_and_the_vocabulary(
    shape, layers, vocabulary
):
    whole = PRESETS[shape.partition(":")[0]]
    assert shape_config(shape) == {**whole, "num_hidden_layers": layers, "vocab_size": vocabulary}
    assert read_config_only(shape) == (shape_config(shape), None)


@pytest.mark.parametrize("numbers", ["", "0", "x", "-1", "1:2:3", "²", "1:"])
def test_a_number_of_layers_that_is_none_is_refused(numbers):
    with pytest.raises(ConfigError, match=r"NAME:LAYERS.*llama-8b:8"):
        shape_config(f"llama-8b:{numbers}")


def test_what_is_no_shape_is_refused(tmp_path):
    with refuses(ConfigError, "'lama-8b'", "did you mean llama-8b", "llama-1b", "CONFIG.json"):
        shape_config("lama-8b")
    file = tmp_path / "shape.json"
    for content, says in (
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[1]", "list, not a JSON object"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=says):
            shape_config(str(file))
