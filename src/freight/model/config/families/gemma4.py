"""Gemma 4 of Google: heads by kind of layer, shared keys and values, per-layer embeddings. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer
from freight.errors import CheckpointError, choices
from freight.model.config.attention import even_head_dim, require_multiple
from freight.model.config.deriving import with_mixers
from freight.model.config.families.gemma import GEMMA_TENSORS
from freight.model.config.family import ATTENTION_BIAS, LANGUAGE_MODEL, Family, RopeForm, words
from freight.model.config.layer import (
    FeedForward,
    MoEConfig,
    NormPlacement,
    PerLayerEmbeddingConfig,
)
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import VISION_TOWER, not_run
from freight.model.mixers.attention.spec import AttentionConfig, QKNormConfig
from freight.operands.activation import GatedActivation


def _translate(config: JsonObject) -> JsonObject:
    return {**config, "query_pre_attn_scalar": 1}  # scores are not scaled


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    mixers = [replace(mixer, v_norm=True) for mixer in model.attention.values()]
    # transformers gives the last layer no window, whatever the keys say
    mixers[-1] = replace(mixers[-1], window=None, rope=0)
    model = with_mixers(model, _with_shared(config, _with_heads(config, mixers)))
    embedding, rows = _per_layer_embedding(config, model)
    layers = [replace(layer, scalar=True, per_layer=embedding) for layer in model.layers]
    if flag(config, "use_double_wide_mlp"):
        for index, layer in enumerate(layers):
            if model.attention[index].kv_from is not None:
                layers[index] = replace(layer, feed_forward=_wider(layer.feed_forward))
    return replace(model, layers=tuple(layers), per_layer_vocab_size=rows)


def _per_layer_embedding(
    config: JsonObject, model: ModelConfig
) -> tuple[PerLayerEmbeddingConfig | None, int | None]:
    """Return the per-layer embedding of a token, and the rows of its table; None for both without
    one.
    """
    size = integer(config, "hidden_size_per_layer_input", 0, least=0)
    if not size:
        return None, None
    rows = integer(config, "vocab_size_per_layer_input")
    if rows < model.vocab_size:
        raise CheckpointError(
            f"config.json contradicts itself: vocab_size_per_layer_input = {rows}, but vocab_size = "
            f"{model.vocab_size}: some tokens would have no per-layer embedding"
        )
    feed_forward = model.layers[0].feed_forward
    assert feed_forward is not None
    assert isinstance(feed_forward.activation, GatedActivation)
    return PerLayerEmbeddingConfig(size, feed_forward.activation), rows


def _wider(mlp: FeedForward) -> FeedForward:
    """Double the width, as in layers that read the keys and values of another."""
    assert mlp is not None
    if isinstance(mlp, MoEConfig):
        assert mlp.shared is not None
        return replace(
            mlp, shared=replace(mlp.shared, intermediate_size=2 * mlp.shared.intermediate_size)
        )
    return replace(mlp, intermediate_size=2 * mlp.intermediate_size)


def _with_shared(config: JsonObject, mixers: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Make the last `num_kv_shared_layers` of `mixers` read the keys and values of the last layer
    before them of their kind, with a window or without.
    """
    first = len(mixers) - integer(config, "num_kv_shared_layers", 0, least=0)
    shared = list(mixers[: max(first, 0)])
    for index, mixer in list(enumerate(mixers))[len(shared) :]:
        sources = [
            at for at in range(len(shared)) if at < first and mixers[at].window == mixer.window
        ]
        if not sources or mixers[sources[-1]].qkv_sizes[1:] != mixer.qkv_sizes[1:]:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers = {config['num_kv_shared_layers']}: layer {index} could read no "
                "keys and values: no layer before it has the same window and heads"
            )
        shared.append(replace(mixer, kv_from=sources[-1], v_norm=False, k_eq_v=False))
    return shared


def _with_heads(config: JsonObject, mixers: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Set the heads of the layers in `mixers` that differ from the others: those without a window.

    Both spellings are read: `global_head_dim` and `num_global_key_value_heads`, which only counts
    if `attention_k_eq_v` is true, or `per_layer_config`, which has the differing keys of some
    layers by index. Raises CheckpointError for other keys in it, and for layers of one kind whose
    heads differ in size.
    """
    same = flag(config, "attention_k_eq_v")
    wide = {"head_dim": config.get("global_head_dim")}
    if same and config.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = config["num_global_key_value_heads"]
    default = {str(index): wide for index, mixer in enumerate(mixers) if mixer.window is None}
    by_layer = default if config.get("per_layer_config") is None else config["per_layer_config"]
    if not isinstance(by_layer, Mapping) or not all(
        str(key).isdecimal()
        and int(key) < len(mixers)
        and isinstance(keys, Mapping)
        and set(keys) <= set(_PER_LAYER)
        for key, keys in by_layer.items()
    ):
        raise CheckpointError(
            f"config.json: per_layer_config = {by_layer!r} must have, by index of a layer, objects with "
            f"{' or '.join(_PER_LAYER)} and no other key"
        )
    by_index = {int(key): keys for key, keys in by_layer.items()}  # transformers writes "05"
    with_heads = []
    for index, mixer in enumerate(mixers):
        keys = by_index.get(index, {})
        head_dim = even_head_dim(keys, mixer.k_dim)
        kv_heads = integer(keys, "num_key_value_heads", mixer.num_kv_heads)
        require_multiple(mixer.num_heads, kv_heads, f"num_key_value_heads of layer {index}")
        k_eq_v = same and mixer.window is None
        with_heads.append(
            replace(mixer, num_kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim, k_eq_v=k_eq_v)
        )
    for windowed in (False, True):
        sizes = sorted(
            {mixer.k_dim for mixer in with_heads if (mixer.window is not None) is windowed}
        )
        if len(sizes) > 1:
            raise CheckpointError(
                f"config.json: per_layer_config = {by_layer!r}: layers {'with' if windowed else 'without'} a window "
                f"have heads of {choices(map(str, sizes))} values; one rope for all of them needs one size"
            )
    return with_heads


_PER_LAYER = ("head_dim", "num_key_value_heads")  # keys in `per_layer_config`


_EMBED_VISION = not_run("vision", "*embed_vision.*")
_AUDIO = not_run("audio", "*audio_tower.*", "*embed_audio.*")
_GEMMA4 = Family(
    "Gemma4ForCausalLM",
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "use_sliding_window": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    words(
        "attention_bias sliding_window layer_types global_head_dim num_global_key_value_heads "
        "attention_k_eq_v per_layer_config hidden_size_per_layer_input "
        "vocab_size_per_layer_input num_kv_shared_layers use_double_wide_mlp"
    ),
    bias_keys=ATTENTION_BIAS,
    moe=MoEFamily(
        count_keys=("num_experts",),
        top_k_keys=("top_k_experts",),
        norm_key=None,
        switch_key="enable_moe_block",
        parallel_experts=True,
    ),
    # with "vision", tokens of an image attend in both directions, and text as in other models
    fixed={"use_bidirectional_attention": ("vision",)},
    qk_norm=QKNormConfig(),
    norms=NormPlacement.SANDWICH,
    wide_norms=True,
    scales_embedding=True,
    activation_key="hidden_activation",
    theta=1e6,
    local_theta=1e4,
    ropes=frozenset({RopeForm.PROPORTIONAL}),
    translate=_translate,
    derive=_derive,
    tensors=replace(
        GEMMA_TENSORS,
        router="router.proj",
        expert="experts.{}.",
        stacked=("experts.gate_up_proj", "experts.down_proj"),
        shared="mlp.",
    ),
)
_UNIFIED = replace(
    _GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    defaults={key: value for key, value in _GEMMA4.defaults.items() if "per_layer_input" not in key}
    | {"max_position_embeddings": 262144, "sliding_window": 1024},
    keys=_GEMMA4.keys - words("hidden_size_per_layer_input vocab_size_per_layer_input"),
    moe=None,
    tensors=GEMMA_TENSORS,
)
_GEMMA4_OUTSIDE = words(
    "vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id "
    "boa_token_id eoa_token_index eoa_token_id audio_token_id "
    "vision_soft_tokens_per_image"
)

ROWS = {
    "gemma4_text": _GEMMA4,
    "gemma4": replace(
        _GEMMA4,
        architecture="Gemma4ForConditionalGeneration",
        bodies=LANGUAGE_MODEL,
        text_type="gemma4_text",
        wrapper_keys=_GEMMA4_OUTSIDE,
        tensors=replace(_GEMMA4.tensors, unused=VISION_TOWER + _EMBED_VISION + _AUDIO),
    ),
    "gemma4_unified_text": _UNIFIED,
    "gemma4_unified": replace(
        _UNIFIED,
        architecture="Gemma4UnifiedForConditionalGeneration",
        bodies=LANGUAGE_MODEL,
        text_type="gemma4_unified_text",
        wrapper_keys=_GEMMA4_OUTSIDE,
        tensors=replace(GEMMA_TENSORS, unused=_EMBED_VISION + _AUDIO),
    ),
}
