"""Lightning attention against transformers' module of MiniMax-01, between the layers of a Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.parity.random_models import freight_logits, tokens
from tests.parity.variants import SHAPE
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from freight import LLM, SamplingParams
from freight.model.config.model import ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.mixers.lightning.spec import LightningConfig, lightning_rates

LIGHTNING = (0, 2)  # the layers with it; layer 1 has attention


class Wrapped(MiniMaxLightningAttention):
    """The module, called and answering as a Llama's attention."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return super().forward(hidden_states, (hidden_states, hidden_states), None)[0], None


def derive(config: object, model: ModelConfig) -> ModelConfig:
    layers = list(model.layers)
    for index in LIGHTNING:
        mixer = LightningConfig(16, lightning_rates(4, index, len(layers)))
        layers[index] = replace(layers[index], mixer=mixer)
    return replace(model, layers=tuple(layers))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, nn.Module]:
    """A random model, and its folder, of a family that this test alone has."""
    monkeypatch.setitem(FAMILIES, "lightning", replace(FAMILIES["llama"], derive=derive))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    of_module = MiniMaxConfig(**SHAPE, block_size=16, layer_types=["linear_attention"] * 3)
    for index in LIGHTNING:
        model.model.layers[index].self_attn = Wrapped(of_module, index)
    model = model.eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(("norm" in name) + 0.12 * torch.randn(parameter.shape))
    save_file(
        {name: tensor.detach() for name, tensor in parameters.items()},
        tmp_path / "model.safetensors",
    )
    config = model.config.to_dict() | {"model_type": "lightning", "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_float32_logits_equal_transformers(made: tuple[Path, nn.Module], kernels: str) -> None:
    folder, model = made
    ids = tokens()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    logits = freight_logits(folder, ids, "float32", kernels)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_chunks_and_prefixes_change_no_bit(made: tuple[Path, nn.Module]) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=7, logprobs=2, ignore_eos=True)
    answers = []
    for most in (256, 32):
        options: dict[str, Any] = {"kv_cache_memory": "4MiB", "max_num_batched_tokens": most}
        llm = LLM(str(made[0]), skip_tokenizer_init=True, state_every=64, **options)
        for _ in range(2):  # the second time its prefix is found
            output = llm.generate([{"prompt_token_ids": tokens()}], params)[0].outputs[0]
            answers.append((list(output.token_ids), repr(output.logprobs)))
    assert answers == [answers[0]] * 4
