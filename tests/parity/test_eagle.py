"""EAGLE-3 heads against a plain definition, written after the loaders of vLLM and SGLang
(`llama_eagle3.py`) and speculators (`models/eagle3/`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.parity.random_models import save_random
from transformers import LlamaConfig

from freight.cache.pool import KVPool, allocate_pool
from freight.cache.spec import KVCacheSpec, layer_spec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.errors import CheckpointError, ConfigError
from freight.model.config.model import ForeignModel
from freight.model.decoder import Decoder
from freight.model.draft_head import DraftHead
from freight.model.eagle import EagleHead, load_eagle, open_eagle
from freight.model.open import OpenModel, open_model
from freight.settings.engine import EngineArgs, EngineConfig

VOCAB, SIZE, HEADS, KV_HEADS, DIM, INNER, DRAFT = 160, 64, 4, 2, 16, 96, 48
EPS, THETA = 1e-5, 5000.0
COUNT = 70
Tensors = dict[str, torch.Tensor]
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 7,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
}
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,  # as published: far fewer than the model's
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}
# SafeAILab/EAGLE's and SpecForge's
PLAIN: dict[str, Any] = {
    **LAYER,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "draft_vocab_size": DRAFT,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": DRAFT,
    "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
    "embed_requires_grad": False,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformer_layer_config": {**LAYER, "model_type": "llama", "head_dim": DIM},
    "transformers_version": "4.57.1",
}


@dataclass(frozen=True)
class Variant:
    config: dict[str, Any]
    layers: tuple[int, ...]  # whose outputs are features
    layer: str = "midlayer."
    prefix: str = ""
    own_embedding: bool = False
    whole_vocabulary: bool = False
    qk_norm: bool = False
    size: int = SIZE
    flags: dict[str, bool] = field(default_factory=dict)


def nested(**eagle_config: Any) -> dict[str, Any]:
    return {**PLAIN, "eagle_config": {**eagle_config, "use_last_layernorm": True}}


WIDE = {"hidden_size": 96, "head_dim": DIM, "target_hidden_size": SIZE}
QWEN = {**LAYER, "model_type": "qwen3", "head_dim": DIM}
VARIANTS = {
    "midlayer": Variant(PLAIN, (1, 2, 3)),  # inputs of layers 2, 7 // 2 and 7 - 3
    "prefixed": Variant(PLAIN, (1, 2, 3), prefix="model."),
    "layers": Variant(
        nested(eagle_aux_hidden_state_layer_ids=[0, 5], use_aux_hidden_state=True),
        (0, 5),
        layer="layers.0.",
        own_embedding=True,
    ),
    "last-states": Variant(nested(use_aux_hidden_state=False), ()),
    "wide": Variant({**PLAIN, **WIDE}, (1, 2, 3), own_embedding=True, size=96),
    "whole-vocabulary": Variant(
        {**PLAIN, "draft_vocab_size": None}, (1, 2, 3), whole_vocabulary=True
    ),
    "speculators": Variant(
        SPECULATORS, (0, 3, 6), layer="layers.0.", flags={"norm_before_residual": True}
    ),
    "speculators-qwen3": Variant(
        {
            **SPECULATORS,
            "transformer_layer_config": QWEN,
            "norm_before_residual": False,
            "norm_before_fc": True,
            "norm_output": True,
        },
        (0, 3, 6),
        layer="layers.0.",
        own_embedding=True,
        qk_norm=True,
        flags={"norm_before_fc": True, "norm_output": True},
    ),
    "fc-norm": Variant({**PLAIN, "fc_norm": True}, (1, 2, 3), flags={"fc_norm": True}),
}


def random_tensors(variant: Variant) -> Tensors:
    """By the names that the definition uses: those within the layer, and those around it."""
    random = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.12

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=random) * 0.1

    size = variant.size
    features = len(variant.layers) * SIZE
    tensors = {
        "input_layernorm.weight": norm(size),
        "hidden_norm.weight": norm(size),
        "post_attention_layernorm.weight": norm(size),
        "self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * size),
        "self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * size),
        "self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * size),
        "self_attn.o_proj.weight": matrix(size, HEADS * DIM),
        "mlp.gate_proj.weight": matrix(INNER, size),
        "mlp.up_proj.weight": matrix(INNER, size),
        "mlp.down_proj.weight": matrix(size, INNER),
        "norm.weight": norm(size),
        "lm_head.weight": matrix(VOCAB if variant.whole_vocabulary else DRAFT, size),
    }
    if variant.layers:
        tensors["fc.weight"] = matrix(size, features)
    if variant.qk_norm:
        tensors["self_attn.q_norm.weight"] = norm(DIM)
        tensors["self_attn.k_norm.weight"] = norm(DIM)
    if variant.own_embedding:
        tensors["embed_tokens.weight"] = matrix(VOCAB, size)
    if variant.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(features)
    if variant.flags.get("fc_norm"):
        for index in range(len(variant.layers)):
            tensors[f"fc_norm.{index}.weight"] = norm(SIZE)
    if not variant.whole_vocabulary:
        ids = torch.randperm(VOCAB, generator=random)[:DRAFT].sort().values
        tensors["d2t"] = ids - torch.arange(DRAFT)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(folder: Path, variant: Variant, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(variant.config))
    inner = ("self_attn.", "mlp.", "input_layernorm", "hidden_norm", "post_attention")
    stored = {}
    for name, tensor in tensors.items():
        prefix = "" if name in ("d2t", "t2d", "lm_head.weight") else variant.prefix
        stored[prefix + (variant.layer if name.startswith(inner) else "") + name] = tensor
    save_file(stored, folder / "model.safetensors")
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


class Definition:
    """The head over one sequence, with the keys and values of the rows before."""

    def __init__(self, tensors: Tensors, embedding: torch.Tensor, flags: dict[str, bool]) -> None:
        self.tensors, self.embedding, self.flags = tensors, embedding, flags
        self.keys = torch.zeros(0, HEADS, DIM)
        self.values = torch.zeros(0, HEADS, DIM)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """`combine_hidden_states` of vLLM."""
        w = self.tensors
        if "fc.weight" not in w:
            return features
        if self.flags.get("norm_before_fc"):
            features = rms(features, w["input_norm.weight"])
        if self.flags.get("fc_norm"):
            parts = features.split(SIZE, 1)
            features = torch.cat(
                [rms(part, w[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)], 1
            )
        return features @ w["fc.weight"].T

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
        angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        w = self.tensors
        q, k, v = [
            (x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, DIM)) for name in "qkv"
        ]
        if "self_attn.q_norm.weight" in w:
            q = rms(q, w["self_attn.q_norm.weight"])
            k = rms(k, w["self_attn.k_norm.weight"])
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = [part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v)]
        self.keys, self.values = torch.cat((self.keys, k)), torch.cat((self.values, v))
        scores = torch.einsum("qhd,khd->hqk", q, self.keys) / DIM**0.5
        later = torch.arange(len(self.keys)) > positions[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, self.values).flatten(1)
        return attended @ w["self_attn.o_proj.weight"].T

    def __call__(self, tokens: list[int], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and logits of the rows behind those so far. `tokens`: those behind each row."""
        w = self.tensors
        positions = torch.arange(len(tokens)) + len(self.keys)
        normed = rms(state, w["hidden_norm.weight"])
        embedded = rms(self.embedding[tokens], w["input_layernorm.weight"])
        if self.flags.get("norm_before_residual"):
            state = normed
        state = state + self.attention(torch.cat((embedded, normed), 1), positions)
        x = rms(state, w["post_attention_layernorm.weight"])
        gated = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        state = state + gated @ w["mlp.down_proj.weight"].T
        last = rms(state, w["norm.weight"])
        logits = last @ w["lm_head.weight"].T
        return (last if self.flags.get("norm_output") else state), logits


@dataclass(frozen=True)
class Target:
    opened: OpenModel
    config: EngineConfig
    decoder: Decoder
    embedding: torch.Tensor
    tokens: list[int]
    streams: tuple[
        torch.Tensor, ...
    ]  # of transformers: [COUNT, SIZE] behind each layer; the last normed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    model = save_random(LlamaConfig(**TARGET), folder, torch.float32)
    tokens = torch.randint(0, VOCAB, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        streams = model(tokens[None, :COUNT], output_hidden_states=True).hidden_states[1:]
        last = []
        handle = model.model.layers[-1].register_forward_hook(lambda _, __, out: last.append(out))
        model(tokens[None, :COUNT])
        handle.remove()
    args = EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True)
    opened = open_model(args)
    config = opened.resolve(args)
    decoder = opened.load(config)
    assert isinstance(decoder, Decoder)
    behind = (*(stream[0] for stream in streams[:-1]), last[0].view(COUNT, SIZE), streams[-1][0])
    embedding = model.model.embed_tokens.weight.detach()
    return Target(opened, config, decoder, embedding, tokens.tolist(), behind)


def pool_of(head: DraftHead, target: Target, length: int) -> KVPool:
    config = target.config
    layers = [
        layer_spec(mixer, config.kv.of_layer(0), config.compute_format) for mixer in head.mixers
    ]
    spec = KVCacheSpec(tuple(layers), config.block_size)
    blocks = [-(-length // config.block_size)] * len(spec.groups)
    kernels = target.decoder.kernels
    return allocate_pool(spec, config.kv, blocks, kernels, rotaries=head.rotaries)


def run(
    head: EagleHead,
    pool: KVPool,
    tokens: list[int],
    features: torch.Tensor,
    start: int,
    logits: Logits = Logits.ALL,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = prepare([SequenceSlice(tokens, start, pool.whole, logits)], pool.spec.groups)
    with torch.inference_mode():
        states = head.hidden(batch, features, pool.layers)
        return states, head.logits(states) if len(states) else states


CUTS = {"one": (COUNT,), "several": (16, 31, 64, COUNT), "tokens": tuple(range(1, COUNT + 1))}


@pytest.mark.parametrize("name", VARIANTS)
def test_states_and_logits_are_the_definitions(name: str, target: Target, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    tensors = random_tensors(variant)
    folder = write_head(tmp_path / "head", variant, tensors)
    head = load_eagle(str(folder), target.opened, target.config, target.decoder)
    assert head.feature_layers == variant.layers
    if variant.whole_vocabulary:
        assert head.vocabulary is None
        ids = torch.arange(VOCAB)
    else:
        assert head.vocabulary is not None
        ids = tensors["d2t"] + torch.arange(DRAFT)
        assert head.vocabulary.tolist() == tensors["t2d"].nonzero().flatten().tolist()
        assert torch.equal(head.vocabulary, ids)
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    features = torch.cat([target.streams[layer] for layer in variant.layers or (-1,)], 1)
    tokens = target.tokens[1:]
    definition = Definition(tensors, embedding, variant.flags)
    states, logits = definition(tokens, definition.combine(features))
    deeper = []
    state, guess = states[-1:], int(ids[logits[-1].argmax()])
    for _ in range(3):
        state, of_state = definition([guess], state)
        deeper.append((guess, state, of_state))
        guess = int(ids[of_state[-1].argmax()])

    for cuts in CUTS.values():
        pool = pool_of(head, target, COUNT + 3)
        first = 0
        state = torch.empty(0)
        for end in cuts:
            part = slice(first, end)
            given, of_rows = run(head, pool, tokens[part], features[part], first)
            torch.testing.assert_close(given, states[part], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(of_rows, logits[part], atol=1e-4, rtol=1e-4)
            assert of_rows.dtype is torch.float32
            state, first = given[-1:], end
        for depth, (guess, expected, of_expected) in enumerate(deeper):
            state, of_rows = run(head, pool, [guess], state, COUNT + depth)
            torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(of_rows, of_expected, atol=1e-4, rtol=1e-4)


def test_from_the_models_features_and_the_last_row_alone(target: Target, tmp_path: Path) -> None:
    """As the engine uses it: features of `hidden_with`, and states of the last row of a chunk."""
    variant = VARIANTS["midlayer"]
    tensors = random_tensors(variant)
    folder = write_head(tmp_path / "head", variant, tensors)
    head = load_eagle(str(folder), target.opened, target.config, target.decoder)
    spec = target.opened.cache_spec(target.config)
    blocks = [-(-COUNT // target.config.block_size)] * len(spec.groups)
    pool = allocate_pool(spec, target.config.kv, blocks, target.decoder.kernels)
    part = SequenceSlice(target.tokens[:COUNT], 0, pool.whole, Logits.LAST)
    batch = prepare([part], pool.spec.groups)
    with torch.inference_mode():
        _, features = target.decoder.hidden_with(batch, pool.layers, head.feature_layers)
    definition = Definition(tensors, target.embedding, variant.flags)
    streams = torch.cat([target.streams[layer] for layer in variant.layers], 1)
    expected, _ = definition(target.tokens[1:], definition.combine(streams))
    own = pool_of(head, target, COUNT)
    tokens = target.tokens[1:]
    state, _ = run(head, own, tokens[:31], features[:31], 0, Logits.NONE)
    assert state.shape == (0, SIZE)
    state, _ = run(head, own, tokens[31:], features[31:], 31, Logits.LAST)
    torch.testing.assert_close(state, expected[-1:], atol=1e-4, rtol=1e-4)


Change = Callable[[dict[str, Any], Tensors], None]


def config_of(**changed: Any) -> Change:
    return lambda config, tensors: config.update(changed)


def without(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def other(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


REFUSED: dict[str, tuple[str, Change, str]] = {
    "eagle-1": ("midlayer", without("hidden_norm.weight"), "EAGLE-1 and EAGLE-2"),
    "vocabulary": ("midlayer", config_of(vocab_size=192), "vocab_size = 192, and that of the model is 160"),
    "size": ("midlayer", config_of(target_hidden_size=32), "target_hidden_size = 32"),
    "own size": ("midlayer", config_of(hidden_size=32, head_dim=DIM), "target_hidden_size = 32"),
    "layers": ("midlayer", config_of(num_hidden_layers=2), "num_hidden_layers = 2"),
    "type": ("midlayer", config_of(model_type="gemma2"), "model_type 'gemma2'"),
    "tied": ("midlayer", config_of(tie_word_embeddings=True), "tie_word_embeddings"),
    "quantized": ("midlayer", config_of(quantization_config={"quant_method": "fp8"}), "quantized"),
    "key": ("midlayer", config_of(logit_scale=0.5), "logit_scale = 0.5"),
    "nested key": ("midlayer", config_of(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "parallel": ("midlayer", config_of(eagle_config={"parallel_draft_step": 4}), "parallel_draft_step = 4"),
    "no layer": (
        "midlayer",
        config_of(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 7]}),
        "output of layer 7, and the model has layers 0 to 6",
    ),
    "embedding as a feature": (
        "speculators",
        config_of(eagle_aux_hidden_state_layer_ids=[0, 3]),
        "output of layer -1",
    ),
    "one layer": ("midlayer", config_of(eagle_config={"eagle_aux_hidden_state_layer_ids": [1]}), "64 channels"),
    "two lists": (
        "midlayer",
        config_of(
            eagle_aux_hidden_state_layer_ids=[1, 3],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3]},
        ),
        "contradicts itself",
    ),
    "no list": ("midlayer", config_of(eagle_config={"eagle_aux_hidden_state_layer_ids": 3}), "must list layers"),
    "no object": ("midlayer", config_of(eagle_config=[1]), "eagle_config = [1] must be an object"),
    "two norms": ("midlayer", config_of(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    "no d2t": ("midlayer", without("d2t", "t2d"), "no tensor d2t"),
    "d2t outside": ("midlayer", other("d2t", torch.full((DRAFT,), VOCAB - DRAFT + 1)), "they have to rise"),
    "d2t below": ("midlayer", other("d2t", torch.full((DRAFT,), -1)), "tokens from -1"),
    "d2t falls": ("midlayer", other("d2t", -torch.arange(DRAFT) + DRAFT), "they have to rise"),
    "d2t's type": ("midlayer", other("d2t", torch.zeros(DRAFT)), "d2t is F32"),
    "no fc": ("midlayer", without("fc.weight"), "fc.weight is missing"),
    "no head": ("midlayer", without("lm_head.weight"), "lm_head.weight is missing"),
    "no norm": ("midlayer", without("norm.weight"), "norm.weight is missing"),
    "left over": ("midlayer", other("fc.bias", torch.zeros(SIZE)), "fc.bias"),
    "mask": ("midlayer", other("mask_hidden", torch.zeros(1, SIZE)), "mask_hidden"),
    "wide without embedding": ("wide", without("embed_tokens.weight"), "no tensor embed_tokens.weight"),
    "wide last states": (
        "wide",
        config_of(eagle_config={"use_aux_hidden_state": False}),
        "it must be the model's, 64",
    ),
    "speculators of another kind": ("speculators", config_of(speculators_model_type="peagle"), "'peagle'"),
    "speculators' key": ("speculators", config_of(mask_token_id=7), "mask_token_id = 7"),
    "speculators' default": ("speculators", config_of(norm_before_residual=None), "lacks norm_before_residual"),
    "draft vocabulary": ("midlayer", config_of(draft_vocab_size=VOCAB + 1), "is more than vocab_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, target: Target, tmp_path: Path) -> None:
    kind, change, words = REFUSED[name]
    variant = VARIANTS[kind]
    tensors = random_tensors(variant)
    config = dict(variant.config)
    change(config, tensors)
    folder = write_head(tmp_path / "head", variant, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        open_eagle(str(folder), target.opened.model)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


def test_a_model_of_transformers_modules_has_no_features(target: Target, tmp_path: Path) -> None:
    foreign = replace(target.opened.model, foreign=ForeignModel((), (), "", "", ()))
    with pytest.raises(ConfigError, match="transformers' modules"):
        open_eagle(str(tmp_path), foreign)
