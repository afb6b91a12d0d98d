"""Models whose tokens see those after them, too, against transformers: final states of prompts of
several lengths that are computed together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.shapes import SHAPE
from tests.refusals import refuses
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from freight.cache.pool import allocate_pool
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.errors import CheckpointError
from freight.kernels.select import select_kernels
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES
from freight.model.open import open_model, read_model_config
from freight.settings.engine import EngineArgs

LENGTHS = (1, 70, 17, 130)

DECODERS: dict[str, PretrainedConfig] = {
    "embedding-gemma": Gemma3TextConfig(
        **SHAPE,
        head_dim=32,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
        use_bidirectional_attention=True,
    ),
    "qwen2-both-ways": Qwen2Config(**SHAPE, is_causal=False),
    "llama-both-ways": LlamaConfig(**SHAPE, hidden_act="gelu", is_causal=False),
}


# model types that transformers does not know -> a model that computes the same from the same weights
SAME_STATES = {"llama_bidirec": "llama-both-ways"}

# what transformers' classes of encoders have no key for
OF_ENCODERS = {key: SHAPE[key] for key in SHAPE if key != "num_key_value_heads"}
ENCODERS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**OF_ENCODERS),
    "bert-one-type": BertConfig(**OF_ENCODERS, type_vocab_size=1, layer_norm_eps=1e-5),
    "roberta": RobertaConfig(**OF_ENCODERS),
    "xlm-roberta": XLMRobertaConfig(**OF_ENCODERS, pad_token_id=1, type_vocab_size=1),
    "modernbert": ModernBertConfig(
        **{**OF_ENCODERS, "num_hidden_layers": 4},
        local_attention=32,
        global_attn_every_n_layers=3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        cls_token_id=2,
        sep_token_id=1,
    ),
    "modernbert-biases": ModernBertConfig(
        **OF_ENCODERS,
        local_attention=9,
        global_attn_every_n_layers=2,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        cls_token_id=2,
        sep_token_id=1,
    ),
}


def save_encoder(config: PretrainedConfig, folder: Path, auto: Any = AutoModel) -> PreTrainedModel:
    """An encoder with every parameter random, saved by transformers; returns the encoder itself."""
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = 0.1 if parameter.ndim == 1 else 0.12
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(is_norm + small * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model if auto is AutoModel else model.base_model


def prompts() -> list[list[int]]:
    """Prompts without the token of padding, 0 or 1: RoBERTa counts positions without it."""
    ids = [max(2, token) for token in tokens(sum(LENGTHS))]
    return [ids[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]


def freight_states(folder: Path, kernel_set: str, **options: Any) -> list[torch.Tensor]:
    """The final states of each prompt, all computed in one step: [tokens, hidden_size]."""
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        kernels=kernel_set,
        skip_tokenizer_init=True,
        **{"activations": "bfloat16", **options},
    )
    opened = open_model(args)
    assert opened.model.attends_both_ways
    config = opened.resolve(opened.args)
    decoder = opened.load(config)
    spec = opened.cache_spec(config)
    blocks = [-(-length // config.block_size) for length in LENGTHS]
    pool = allocate_pool(
        spec,
        config.kv,
        [sum(blocks)] * len(spec.groups),
        select_kernels(kernel_set),
        rotaries=decoder.rotaries,
    )
    slices = []
    for i, ids in enumerate(prompts()):
        own = range(sum(blocks[:i]), sum(blocks[: i + 1]))
        slices.append(SequenceSlice(ids, 0, [own] * len(spec.groups), Logits.ALL))
    hidden = ModelRunner(decoder, pool, "cpu").run(slices).hidden
    assert hidden is not None
    return list(hidden.split(LENGTHS))


def their_states(model: PreTrainedModel) -> list[torch.Tensor]:
    """The final states of each prompt alone, by transformers."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.1
        assert (own - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("variant", DECODERS)
def test_decoders_that_attend_both_ways(variant: str, kernels: str, tmp_path: Path):
    model = save_random(DECODERS[variant], tmp_path, torch.float32)
    assert_same(freight_states(tmp_path, kernels), their_states(model.model))


@pytest.mark.parametrize("model_type", SAME_STATES)
def test_types_that_transformers_does_not_know(model_type: str, tmp_path: Path):
    model = save_random(DECODERS[SAME_STATES[model_type]], tmp_path, torch.float32)
    file = tmp_path / "config.json"
    named = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    said = {**json.loads(file.read_text()), **named}
    del said["is_causal"]
    file.write_text(json.dumps(said))
    assert_same(freight_states(tmp_path, "auto"), their_states(model.model))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("variant", ENCODERS)
def test_encoders(variant: str, kernels: str, tmp_path: Path):
    model = save_encoder(ENCODERS[variant], tmp_path)
    assert_same(freight_states(tmp_path, kernels), their_states(model))


@pytest.mark.parametrize("variant", ["bert", "xlm-roberta", "modernbert"])
def test_encoders_within_another_model(variant: str, tmp_path: Path):
    """Their tensors have a prefix, and those of the head over the vocabulary are not read."""
    model = save_encoder(ENCODERS[variant], tmp_path, AutoModelForMaskedLM)
    assert_same(freight_states(tmp_path, "auto", pooling="mean"), their_states(model))


@pytest.mark.parametrize("model_type", ["deberta-v2", "t5", "nomic_bert"])
def test_other_encoders_are_refused_by_name(model_type: str):
    with refuses(CheckpointError, model_type, "modernbert", "sentence-transformers"):
        read_model_config({**SHAPE, "model_type": model_type})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"max_position_embeddings": 2, "model_type": "roberta"}, "max_position_embeddings"),
    ],
)
def test_what_encoders_do_not_have_is_refused(changes: dict[str, Any], named: str):
    said = {**OF_ENCODERS, "model_type": "bert", **changes}
    with refuses(CheckpointError, named):
        parse_model_config(said)


def test_windows_of_decoders_that_attend_both_ways_are_refused():
    said = {**SHAPE, "model_type": "qwen2", "is_causal": False, "use_sliding_window": True}
    with refuses(CheckpointError, "is_causal = False", "sliding window"):
        parse_model_config({**said, "sliding_window": 8, "max_window_layers": 0})
