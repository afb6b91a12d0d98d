"""A kind of mixer that lives in tests alone: a running mean, the simplest layer that keeps a state.

It comes in as any kind does: a spec, a layer, and a line of `model/mixers/registry.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import SHAPE
from torch import Tensor
from transformers import LlamaConfig

from freight import LLM, SamplingParams
from freight.cache.pool import PagedState
from freight.fp8.formats import Format
from freight.model.config.model import ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.config.tensor_names import TensorNames
from freight.model.layers.linear import Projection
from freight.model.mixers import registry
from freight.model.mixers.spec import MixerParts, Projected, StateMixer, StatePart
from freight.operands.batch import ForwardBatch

MEANS, WINDOWED = (
    (0, 2),
    1,
)  # the layers with a mean; of the others, which have attention, the one with a window
LENGTH, WINDOW = 512, 40


@dataclass(frozen=True)
class MeanConfig(StateMixer):
    """out(mean of in(x) over all tokens so far), `size` channels wide."""

    size: int

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        projections = {
            "inner": Projected(("mean.in_proj",), (self.size,), hidden_size),
            "out": Projected(("mean.out_proj",), (hidden_size,), self.size),
        }
        return MixerParts(module="mean", projections=projections)

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        return (StatePart("sum", (self.size,), Format.FLOAT32),)


@dataclass(frozen=True)
class Mean:
    inner: Projection
    out: Projection

    @property
    def consumer(self) -> Any:
        return self.inner.consumer

    def __call__(self, x: Any, batch: ForwardBatch, cache: PagedState) -> Tensor:
        u, sums = self.inner(x), cache.states.parts["sum"]
        mean = torch.empty_like(u)
        for stretch in cache.stretches(batch):
            total = torch.zeros_like(sums[0]) if stretch.source is None else sums[stretch.source]
            for row in range(stretch.rows.start, stretch.rows.stop):
                total = total + u[row].float()
                mean[row] = total / (batch.positions[row] + 1)
            sums[stretch.target] = total
        return self.out(mean)


def _build(mixer: MeanConfig, builder: Any, prefix: str, ropes: object) -> Mean:
    return Mean(builder.linear(prefix, "mean.in_proj"), builder.linear(prefix, "mean.out_proj"))


def _derive(config: object, model: ModelConfig) -> ModelConfig:
    layers: list[Any] = list(model.layers)
    for index in MEANS:
        layers[index] = replace(layers[index], mixer=MeanConfig(48))
    layers[WINDOWED] = replace(
        layers[WINDOWED], mixer=replace(layers[WINDOWED].mixer, window=WINDOW)
    )
    return replace(model, layers=tuple(layers))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind, and a row whose model_type is "means"."""
    monkeypatch.setitem(registry.BUILDERS, MeanConfig, _build)  # type: ignore[arg-type]
    monkeypatch.setitem(FAMILIES, "means", replace(FAMILIES["llama"], derive=_derive))  # type: ignore[arg-type]


def save_means(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random model of four layers: mean, attention in a window, mean, attention."""
    save_random(
        LlamaConfig(**{**SHAPE, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}),
        folder,
        dtype,
    )
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for index in MEANS:
        layer = f"model.layers.{index}."
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(f"{layer}self_attn.")
        }
        for name, shape in (("in_proj", (48, 64)), ("out_proj", (64, 48))):
            tensors[f"{layer}mean.{name}.weight"] = (
                0.3 * torch.randn(shape, generator=generator)
            ).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "means"}))
    return folder


IDS = tokens(300)
CACHES: dict[str, dict[str, Any]] = {
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
    "fp8-token": {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"},
}
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, seed=7, logprobs=2, ignore_eos=True)
PROMPTS = [
    IDS[:count] for count in (300, 1, 63, 64, 65, 130, 16, 15, 129, 200, 7, 33, 250, 128, 100, 192)
]


def engine(folder: Path, cache: str = "bfloat16", **options: Any) -> LLM:
    options = {"kv_cache_memory": "4MiB", "state_every": 64, **CACHES[cache], **options}
    return LLM(str(folder), skip_tokenizer_init=True, **options)


def said(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = DRAWN) -> list[Any]:
    """Tokens and log-probabilities of each prompt, to the bit."""
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    assert not any(one.outputs[0].finish_reason == "error" for one in outputs)
    return [(list(one.outputs[0].token_ids), repr(one.outputs[0].logprobs)) for one in outputs]


def plain_answers(folder: Path, caches: Collection[str] = tuple(CACHES)) -> dict[str, list[Any]]:
    """By cache, what each of PROMPTS gives alone, without hits, its prompt in one step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch)
        made = {}
        for cache in caches:
            llm = engine(folder, cache, enable_prefix_caching=False, max_num_batched_tokens=LENGTH)
            made[cache] = [said(llm, [ids])[0] for ids in PROMPTS]
        return made
