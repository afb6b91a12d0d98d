"""The options of `freight.ray.build`: those of `freight serve`, as texts or as values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freight.adapters.ray.options import _NOT_HERE, ReplicaOptions, read_options, reserved
from freight.cli.serve import SERVER_FLAGS
from freight.errors import ConfigError
from freight.serve.settings import ServerSettings


def test_nothing_given_is_what_freight_serve_has() -> None:
    options = read_options({})
    assert options.engine.model == "demo"
    assert options.settings == ServerSettings()
    assert options.replicas == ReplicaOptions()
    assert not options.keyed


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("max_num_seqs", "8", 8),
        ("max_num_seqs", 8, 8),
        ("enable_prefix_caching", "false", False),
        ("kv_cache_memory", "64MiB", "64MiB"),
        ("kv_cache_memory", 1 << 26, str(1 << 26)),
        ("kv_cache_dtype", "fp8", "fp8"),
        ("max_model_len", "null", None),
        ("max_step_seconds", "1", 1.0),
        ("kv_cache_dtype_skip_layers", "0,1", ("0", "1")),
    ],
)
def test_options_of_the_engine(name: str, given: Any, read: Any) -> None:
    assert getattr(read_options({name: given}).engine, name) == read


def test_options_of_the_server() -> None:
    options = read_options(
        {
            "served_model_name": "m",
            "api_key": ["a:1", "b:2"],
            "drain_timeout": "5",
            "chat_template": "/t.jinja",
            "enable_tokenizer_info_endpoint": "true",
        }
    )
    settings = options.settings
    assert settings.names == ("m",)
    assert settings.api_keys == ("a:1", "b:2")
    assert settings.drain_timeout == 5.0
    assert settings.chat_template == Path("/t.jinja")
    assert settings.tokenizer_info
    assert options.keyed
    assert not read_options({"api_key": "x", "shared_prefix_cache": True}).keyed


def test_options_of_the_replicas() -> None:
    replicas = read_options({"min_replicas": "2", "max_replicas": 3, "num_cpus": 0.5}).replicas
    assert (replicas.min_replicas, replicas.max_replicas, replicas.num_cpus) == (2, 3, 0.5)
    assert read_options({"tensor_parallel_size": "2"}).engine.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("given", "actor", "bundles"),
    [
        ({"num_gpus": 1}, {"num_cpus": 1, "num_gpus": 1.0}, None),
        ({"threads": 4}, {"num_cpus": 4, "num_gpus": 0.0}, None),
        (
            {"tensor_parallel_size": 2, "num_cpus": 3},
            {"num_cpus": 3.0, "num_gpus": 0.0},
            [{"CPU": 3.0}, {"CPU": 3.0}],
        ),
        (
            {"pipeline_parallel_size": "2", "pp_layers": "3,3", "num_gpus": "2"},
            {"num_cpus": 1, "num_gpus": 2.0},
            [{"CPU": 1, "GPU": 2.0}],
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_gpus": 4, "num_cpus": 3},
            {"num_cpus": 3.0, "num_gpus": 4.0},
            [{"CPU": 6.0, "GPU": 4.0}],
        ),
        (
            {"pipeline_parallel_size": 2, "device": "cpu"},
            {"num_cpus": 1, "num_gpus": 0.0},
            [{"CPU": 1}],
        ),
    ],
)
def test_what_ray_reserves(
    given: dict[str, Any], actor: dict[str, float], bundles: list[dict[str, float]] | None
) -> None:
    """The replica's own processors and GPUs are in the first bundle; all are on one machine."""
    made = reserved(read_options(given))
    assert made["ray_actor_options"] == actor
    assert made.get("placement_group_bundles") == bundles
    assert made.get("placement_group_strategy") == (None if bundles is None else "STRICT_PACK")
    if bundles is not None:
        assert bundles[0]["CPU"] >= actor["num_cpus"]
        assert bundles[0].get("GPU", 0) == actor["num_gpus"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": 8000}, "Ray listens"),
        ({"restart_engine": True}, "Ray starts another one"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "one machine"),
        ({"tensor_parallel_size": 0}, "tensor-parallel-size"),
        ({"tensor_parallel_size": 2, "num_gpus": 1}, "give num_gpus=2"),
        ({"pipeline_parallel_size": 2}, "give num_gpus=2"),
        ({"pipeline_parallel_size": 2, "num_gpus": 1}, "give num_gpus=2"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_gpus": 2},
            "give num_gpus=4",
        ),
        ({"pipeline_parallel_size": 2, "device": "cpu", "num_gpus": 1}, "give num_gpus=2"),
        ({"pipeline_parallel_size": 0}, "pipeline-parallel-size"),
        ({"pp_layers": "3,3"}, "pipeline-parallel-size"),
        ({"max_num_seq": 2}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "whole number"),
        ({"max_num_seqs": True}, "whole number"),
        ({"num_cpus": "fast"}, "a number"),
        ({"enable_prefix_caching": "2"}, "true or false"),
        ({"min_replicas": 2}, "both"),
        ({"min_replicas": 3, "max_replicas": 2}, "in this order"),
        ({"min_replicas": 1, "max_replicas": 2, "num_replicas": 2}, "fixed number"),
        ({"num_replicas": 0}, "1 or more"),
        ({"front_replicas": 0}, "1 or more"),
        ({"prefix_slack": -1}, "0 or more"),
        ({"target_requests": 0}, "more than 0"),
        ({"block_size": 7}, "block"),
        ({"drain_timeout": -1}, "drain-timeout"),
    ],
)
def test_what_is_refused_says_what_to_do(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(given)


def test_every_option_of_the_server_is_taken_or_refused() -> None:
    for flag in SERVER_FLAGS:
        if flag.field in _NOT_HERE:
            continue
        read_options({flag.field: flag.default})
