"""How many tokens a step takes at most, and how long prompts may make it, where no option says it."""

from __future__ import annotations

import pytest
from tests.unit.config.test_resolve import CPU, GPU, decide

from freight.settings.engine import EngineArgs
from freight.settings.resolve import for_serving

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("model", "facts", "tokens"),
    [
        ({}, CPU, 512),
        ({}, GPU, 8192),
        (QWEN3_MOE, CPU, 1024),  # 64 rows for each of 128 experts, of which a token takes 8
        (QWEN3_MOE | {"num_experts_per_tok": 6}, CPU, 1536),  # 1,365 would do: a multiple of 512
        (
            QWEN3_MOE | {"num_experts": 256, "num_experts_per_tok": 2},
            CPU,
            2048,
        ),  # 8,192 would make a step too long
        (QWEN3_MOE | {"num_experts": 8, "num_experts_per_tok": 2}, CPU, 512),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1]}, CPU, 512),
        (QWEN3_MOE, GPU, 8192),
    ],
)
def test_a_step_has_enough_tokens_for_the_rows_of_experts(model, facts, tokens):
    assert decide(model=model, facts=facts).max_num_batched_tokens == tokens
    assert decide(model=model, facts=facts, max_num_batched_tokens=96).max_num_batched_tokens == 96


@pytest.mark.parametrize(
    ("given", "on_a_cpu", "on_a_gpu"), [(None, 0.5, 0.0), (0.0, 0.0, 0.0), (2.0, 2.0, 2.0)]
)
def test_a_server_on_a_cpu_limits_the_time_of_a_step(given, on_a_cpu, on_a_gpu):
    args = EngineArgs(max_step_seconds=given)
    assert (
        decide(max_step_seconds=for_serving(args, "cpu").max_step_seconds).max_step_seconds
        == on_a_cpu
    )
    assert (
        decide(max_step_seconds=for_serving(args, "cuda").max_step_seconds).max_step_seconds
        == on_a_gpu
    )
    assert decide(max_step_seconds=given).max_step_seconds == (given or 0.0)
