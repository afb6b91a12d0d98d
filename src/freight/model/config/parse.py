"""Read the content of a config.json as a ModelConfig. Imports no torch.

A key of config.json that decides what a model computes is either used, or has a value that disables
its feature. Otherwise it raises a CheckpointError that names it and its value, because ignoring it
could silently change the output (`keys.py`). An absent key has the default of transformers'
configuration class of that model_type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from freight.base.fields import JsonObject, check_counts, flag, integer, number, token_ids
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.model.config.attention import parse_mixers, soft_cap
from freight.model.config.dtype import checkpoint_dtype
from freight.model.config.family import Family
from freight.model.config.keys import check_keys, decoder_config, find_family, with_defaults
from freight.model.config.layer import DenseConfig, LayerConfig, MoEConfig
from freight.model.config.model import ModelConfig, RopeConfig
from freight.model.config.moe import has_experts, layers_with_experts, parse_moe
from freight.model.config.pooling import is_headless
from freight.model.config.registry import FAMILIES
from freight.model.config.rope import parse_ropes
from freight.model.mixers.latent.spec import LatentConfig
from freight.operands.activation import Activation, AnyActivation, GatedActivation

_ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation.SILU,
    "swish": GatedActivation.SILU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
    "gelu": GatedActivation.GEGLU,
}
_UNGATED: Mapping[str, Activation] = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "gelu": Activation.GELU,
}


def parse_model_config(
    config: JsonObject,
    tensors: Collection[str] = (),
    stored: Format | None = None,
    ignore_keys: Collection[str] = (),
) -> ModelConfig:
    """Read the content of a config.json. Raises CheckpointError for anything missing, contradictory
    or not implemented.

    tensors       names of the checkpoint's tensors: they show the decoder's prefix if the decoder
                  is one part of a model
    stored        dtype of the unquantized tensors, used if config.json names none
    ignore_keys   keys to ignore although they compute (`keys.check_keys`)
    """
    check_counts(config)
    outer = config
    unread = check_keys(config, ignore_keys)
    model_type, _ = find_family(config)
    family, config = decoder_config(config)
    config = with_defaults(config, family)
    config = config if family.translate is None else family.translate(config)
    headless = is_headless(_architecture(outer, family))
    prefixes = _prefixes(family, tensors)
    hidden_size = integer(config, "hidden_size")
    limit = integer(config, "max_position_embeddings")
    mixers = parse_mixers(config, family)
    feed_forwards = _feed_forwards(config, family, len(mixers))
    layers = [
        LayerConfig(*parts, family.norms) for parts in zip(mixers, feed_forwards, strict=True)
    ]
    dtype, dtype_source = checkpoint_dtype(outer, stored)
    model = ModelConfig(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        ropes=(),
        max_position_embeddings=limit,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        norm_offset=0.0,
        embedding_multiplier=float(hidden_size**0.5) if family.scales_embedding else None,
        tie_word_embeddings=headless or _tied(outer, config, family, prefixes[1], tensors),
        logit_soft_cap=soft_cap(config, "final_logit_softcapping"),
        checkpoint_format=dtype,
        dtype_source=dtype_source,
        bos_token_id=next(iter(token_ids(config, "bos_token_id", None)), None),
        eos_token_ids=token_ids(config, "eos_token_id", None),
        prefixes=prefixes,
        has_head=not headless,
        prediction_layers=max(
            [integer(config, key, 0, least=0) for key in family.next_token_keys], default=0
        ),
        rounds_multiplier=family.scales_embedding,
        wide_norms=family.wide_norms,
        ignored_keys=unread.ignored,
        unread_keys=unread,
    )
    model = model if family.derive is None else family.derive(config, model)
    model = _attending_both_ways(config, model)
    return replace(model, ropes=_ropes(config, family, model))


def _attending_both_ways(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Return the model as `is_causal` = false declares it (gte-Qwen2): transformers reads this key
    for every family.

    Raises CheckpointError for layers that only see the tokens before.
    """
    if flag(config, "is_causal", True):
        declared = "this model attends both ways"
    else:
        model = replace(model, attends_both_ways=True)
        declared = "config.json: is_causal = False"
        if any(mixer.window is not None for mixer in model.attention.values()):
            raise CheckpointError(
                f"{declared} with layers that have a sliding window is not implemented; it is where every layer sees "
                "all tokens"
            )
    if model.attends_both_ways and len(model.attention) < model.num_layers:
        raise CheckpointError(
            f"{declared}, which is implemented for layers of attention over keys and values, and model_type "
            f"{model.model_type} has others"
        )
    return model


def stop_token_ids(config: JsonObject, generation_config: JsonObject | None) -> frozenset[int]:
    """Return the ids that a model's files end a completion with: the union of `eos_token_id` in
    config.json, in the part of it that describes the language model, and in generation_config.json.

    The default of the model_type applies only if none of them has that key. The tokenizer's own end
    is not known here (`OpenModel.stop_token_ids`).
    """
    nested = (config.get(family.text_key) for family in FAMILIES.values())
    parts = [config, generation_config or {}, *(part for part in nested if isinstance(part, dict))]
    if not any("eos_token_id" in part for part in parts) and config.get("model_type") in FAMILIES:
        parts.append(find_family(config)[1].defaults)
    return frozenset(token for part in parts for token in token_ids(part, "eos_token_id", None))


def sampling_defaults(generation_config: JsonObject | None) -> dict[str, float]:
    """Return generation_config.json's sampling parameters, by SamplingParams' names.

    `do_sample` is ignored: many files that give a temperature lack it and do not mean greedy.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: (generation_config or {}).get(name) for name in names}
    return {name: value for name, value in defaults.items() if value is not None}


def _prefixes(family: Family, tensors: Collection[str]) -> tuple[str, str]:
    for body in family.bodies:
        if any(name.startswith(body[0]) for name in tensors):
            return body
    inner = family.tensors.layer.format(0)
    if any(name.startswith(inner) for name in tensors):  # the layers alone, as a class without head
        return "", ""
    return family.bodies[0]


def _architecture(config: JsonObject, family: Family) -> str:
    named = config.get("architectures") or [family.architecture]
    return str(named[0])


def _tied(
    outer: JsonObject,
    config: JsonObject,
    family: Family,
    prefix: str,
    tensors: Collection[str],
) -> bool:
    """Return whether the head is the embedding. If the decoder is one part of a model, transformers
    reads the outer key, whose default is true; a stored head is used all the same.
    """
    if family.text_type is not None and outer.get("tie_word_embeddings") is None and tensors:
        forms = ("weight", "qweight", "weight_packed", "_weight_qdata")
        return not any(f"{prefix}lm_head.{form}" in tensors for form in forms)
    return flag(config, "tie_word_embeddings")


def _ropes(config: JsonObject, family: Family, model: ModelConfig) -> tuple[RopeConfig, ...]:
    """Build the ropes, indexed by `AttentionConfig.rope`. A rope that no layer uses gets the head
    size of the first layer.
    """
    mixers = list(model.paged.values())
    # True for no mixers as well
    unrotated = all(isinstance(mixer, LatentConfig) and mixer.rope is None for mixer in mixers)
    if model.position_offset is not None or unrotated:
        return ()
    sizes = {mixer.rope: mixer.rope_channels for mixer in mixers}
    head_dims = tuple(sizes.get(rope, mixers[0].rope_channels) for rope in (0, 1))
    return parse_ropes(config, family, integer(config, "max_position_embeddings"), head_dims)


def _activation(config: JsonObject, family: Family) -> AnyActivation:
    """Return the activation that the family's key names. The keys that transformers does not read
    must not contradict it.
    """
    known: Mapping[str, AnyActivation] = _ACTIVATIONS if family.gated else _UNGATED
    expected = config.get(family.activation_key, "silu")
    for key in dict.fromkeys((family.activation_key, "hidden_act", "hidden_activation")):
        named = config.get(key, expected)
        if not isinstance(named, str) or named not in known:
            raise CheckpointError(
                f"config.json: {key} = {named!r} is not implemented; {choices(known)} are"
            )
        if known[named] is not known.get(expected):
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {named!r}, but {family.activation_key} is {expected!r}"
            )
    return known[expected]


def _feed_forwards(
    config: JsonObject, family: Family, num_layers: int
) -> list[DenseConfig | MoEConfig]:
    """Build the feed-forward of each layer."""
    activation = _activation(config, family)
    described = family.moe if family.moe is not None and has_experts(config, family.moe) else None
    experts = [False] * num_layers if described is None else layers_with_experts(config, num_layers)
    dense: DenseConfig | MoEConfig | None = None
    if not all(experts):
        dense = DenseConfig(
            integer(config, "intermediate_size"), activation, flag(config, family.bias_keys[2])
        )
    if described is None:
        assert dense is not None
        return [dense] * num_layers
    moe = parse_moe(config, described, activation)
    return [moe if sparse else dense or moe for sparse in experts]
