"""What a model is that Freight has no row for: transformers' modules, run once without weights.

A causal LM of transformers gives its queries, keys and values to the function that is registered for attention. Here
that function writes down what each layer gives it: heads, their sizes, scale, window, soft cap. No tensor has any
content (device "meta"), so this takes no memory and works before a weight is read. What cannot be run over Freight's
cache is refused by name. `models/fallback.py` runs what passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from freight.config.families import FAMILIES
from freight.config.fields import token_ids
from freight.config.layer import AttentionConfig, DenseConfig, LayerConfig
from freight.config.model import ForeignModel, ModelConfig, declared_format
from freight.errors import CheckpointError, choices

PROBE = "freight_probe"
_TOKENS = 8
_LONGEST = 2**20  # positions at which a mask is compared

# what a key of config.json says that Freight's cache or its attention does not do
_REFUSED_KEYS: Mapping[str, str] = {
    "is_encoder_decoder": "an encoder beside the decoder",
    "add_cross_attention": "cross attention",
    "vision_config": "inputs other than text",
    "audio_config": "inputs other than text",
    "kv_lora_rank": "latent attention (MLA), whose cache is not implemented",
    "num_kv_shared_layers": "layers that share keys and values",
    "alibi": "biases by position (ALiBi)",
}
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "linear_conv_", "conv_")  # how keys of recurrent layers begin
_ROPES_OF_LENGTH = ("dynamic", "longrope")  # the angles of stored keys would change as a sequence grows
_HARMLESS = frozenset(("dropout", "position_ids", "cache_position", "use_cache", "output_attentions"))
_SCALING, _CAP, _WINDOW = "scaling", "softcap", "sliding_window"


def refused(model_type: object, why: str) -> CheckpointError:
    """The error for a model that does not pass."""
    return CheckpointError(
        f"config.json: model_type {model_type!r} has no row in Freight, and transformers' modules cannot be "
        f"used: {why}. Model types that need none of them: {choices(FAMILIES)}"
    )


def hf_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration object of transformers, without what it would do about quantization.

    Code that comes with a checkpoint is never run: only model types that transformers itself knows.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not implemented, and transformers {transformers.__version__} "
            f"does not know it; {choices(FAMILIES)} are, and decoders of transformers with attention over all tokens"
        )
    own = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    try:
        found = CONFIG_MAPPING[model_type].from_dict(own)
    except Exception as error:  # validators of transformers raise what they like
        raise refused(model_type, f"its configuration is not accepted: {error}") from error
    assert isinstance(found, PreTrainedConfig)
    return found


def causal_class(config: PreTrainedConfig, declared: object = None) -> type[PreTrainedModel]:
    """The class of transformers that runs the model; `declared` is `architectures` of config.json."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(config.model_type, "it is no causal language model there")
    found = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if declared and declared != [found.__name__]:
        raise refused(config.model_type, f"architectures is {declared!r}, and the causal LM is [{found.__name__!r}]")
    return found


@dataclass
class _Probe:
    """Stands where the step stands in a forward pass (`models.fallback`), and writes down the calls."""

    calls: list[_Call] = field(default_factory=list)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        self.calls.append(_Call(module, q.shape, k.shape, v.shape, getattr(mask, "mask_function", None), given))
        return torch.empty(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3], dtype=v.dtype, device=v.device), None


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    mask_function: Callable[..., Tensor] | None
    given: Mapping[str, Any]


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **given: Any) -> Any:
    """What is registered with transformers: the attention of the step that the model's caller passed."""
    step = given.pop("freight_step", None)
    mask = masks[0] if masks else given.pop("attention_mask", None)
    if step is None:
        raise CheckpointError(f"{type(module).__name__} does not pass the caller's arguments on to its attention")
    return step.attend(module, query, key, value, mask, {k: v for k, v in given.items() if v is not None})


def _marked_mask(*args: Any, mask_function: Callable[..., Tensor] | None = None, **kwargs: Any) -> Tensor:
    """Instead of a mask: an empty one that carries the rule it would have been made by."""
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE, attention)
AttentionMaskInterface.register(PROBE, _marked_mask)


def body_of(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """(name, module) of what gives the final states, before the head."""
    name = model.base_model_prefix
    body = getattr(model, name, None)
    if not isinstance(body, nn.Module):
        raise CheckpointError(f"{type(model).__name__} has no body beside its head")
    return name, body


def run_body(body: nn.Module, token_ids: Tensor, positions: Tensor, step: Any) -> Tensor:
    """Final states [num_tokens, hidden_size] of tokens laid end to end.

    The mask of ones says that no token is padding; without it transformers would look for sequences in the positions.
    """
    ones = torch.ones(1, len(token_ids), dtype=torch.bool, device=token_ids.device)
    out = body(
        input_ids=token_ids[None], position_ids=positions[None], attention_mask=ones, use_cache=False, freight_step=step
    )
    states: Tensor = out[0]
    return states[0]


def foreign_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json -> ModelConfig of a model that runs through transformers. Raises CheckpointError with the reason."""
    _refuse_recurrent(config)
    hf = hf_config(config)
    cls = causal_class(hf, config.get("architectures"))
    text = hf.get_text_config()
    _refuse_keys(hf.model_type, text, {**text.to_dict(), **config})
    hf._experts_implementation = "batched_mm"  # the one that does not ask how many tokens an expert has
    probe = _Probe()
    try:
        with torch.device("meta"), torch.inference_mode():
            model = cls._from_config(hf, attn_implementation=PROBE, dtype=torch.float32).eval()
            tokens = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
            run_body(body_of(model)[1], tokens, torch.arange(_TOKENS, dtype=torch.int64, device="meta"), probe)
    except CheckpointError as error:
        raise refused(hf.model_type, str(error)) from error
    except Exception as error:  # whatever its modules raise when they are run in this way
        raise refused(hf.model_type, f"{type(error).__name__} without weights: {str(error).splitlines()[0]}") from error
    return _model_config(config, hf, model, probe.calls)


def _refuse_recurrent(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    kind = next((kind for kind in map(str, kinds) if "attention" not in kind or "linear" in kind), None)
    key = next((key for key, value in config.items() if value and key.startswith(_RECURRENT)), None)
    if kind is not None or key is not None:
        said = f"layers of kind {kind!r}" if kind is not None else f"{key} = {_short(config.get(str(key)))}"
        raise refused(config.get("model_type"), f"{said} means recurrent layers, whose state the cache does not hold")


def _refuse_keys(model_type: str, text: PreTrainedConfig, config: Mapping[str, Any]) -> None:
    for key, why in _REFUSED_KEYS.items():
        if config.get(key):
            raise refused(model_type, f"{key} = {_short(config[key])} means {why}")
    if getattr(text, "max_position_embeddings", None) is None:
        raise refused(model_type, "config.json has no max_position_embeddings")
    ropes = str(config.get("rope_parameters")) + str(config.get("rope_scaling"))
    for kind in _ROPES_OF_LENGTH:
        if f"'{kind}'" in ropes:
            raise refused(model_type, f"its rotary embedding is {kind!r}, which changes with the length of a sequence")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "..."


def _model_config(
    config: Mapping[str, Any], hf: PreTrainedConfig, model: PreTrainedModel, calls: list[_Call]
) -> ModelConfig:
    text = hf.get_text_config()
    limit = int(text.max_position_embeddings)
    modules = _attention_modules(hf.model_type, text.num_hidden_layers, model, calls)
    mixers = [_mixer(hf.model_type, name, call, limit) for name, call in zip(modules, calls, strict=True)]
    feed_forward = DenseConfig(int(getattr(text, "intermediate_size", None) or 0))
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refused(hf.model_type, "it has no embedding, or no head that is a Linear")
    tied = embedding.weight is head.weight
    return ModelConfig(
        model_type=hf.model_type,
        architecture=type(model).__name__,
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        layers=tuple(LayerConfig(mixer, feed_forward) for mixer in mixers),
        ropes=(),
        max_position_embeddings=limit,
        norm_eps=0.0,
        norm_offset=0.0,
        embedding_multiplier=None,
        tie_word_embeddings=tied,
        logit_soft_cap=None,
        checkpoint_format=declared_format({**text.to_dict(), **config}),
        bos_token_id=next(iter(token_ids({"id": text.bos_token_id}, "id", None)), None),
        eos_token_ids=token_ids({"eos_token_id": text.eos_token_id}, "eos_token_id", None),
        foreign=ForeignModel(
            attention=tuple(modules),
            tensors=tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
            embedding=names[id(embedding.weight)],
            head=names[id(head.weight)],
        ),
    )


def _attention_modules(model_type: str, num_layers: int, model: PreTrainedModel, calls: list[_Call]) -> list[str]:
    """The names of the modules that called, one for each layer in order. Raises CheckpointError for other calls."""
    names = {id(module): name for name, module in model.named_modules()}
    called = [names[id(call.module)] for call in calls]
    if not called:
        raise refused(model_type, "its attention does not go through transformers' AttentionInterface")
    layers = [int(match[1]) for name in called if (match := re.search(r"\.(\d+)\.", name))]
    if layers == list(range(num_layers)) and len(called) == num_layers:
        return called
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise refused(model_type, f"{twice} attends more than once in a pass")
    missing = next((index for index in range(num_layers) if index not in layers), None)
    if missing is None:
        raise refused(model_type, f"{len(called)} modules attend in {num_layers} layers ({called[-1]} is one)")
    prefix = called[0][: called[0].index(f".{layers[0]}.") + 1]
    block = model.get_submodule(f"{prefix}{missing}")
    parts = ", ".join(type(child).__name__ for child in block.children())
    raise refused(
        model_type, f"layer {missing} ({prefix}{missing}: {parts}) has no attention over the cache, so it is recurrent"
    )


def _mixer(model_type: str, name: str, call: _Call, limit: int) -> AttentionConfig:
    """Raises CheckpointError for arguments of attention that Freight's does not have."""
    num_heads, num_kv_heads, k_dim, v_dim = call.q[1], call.k[1], call.q[3], call.v[3]
    given = dict(call.given)
    if not given.pop("is_causal", True) or num_heads % num_kv_heads:
        raise refused(model_type, f"the attention of {name} is not causal and grouped by key heads")
    scale = given.pop(_SCALING, k_dim**-0.5)
    cap = given.pop(_CAP, None)
    given.pop(_WINDOW, None)  # the mask says what is really seen
    unknown = sorted(set(given) - _HARMLESS)
    if unknown:
        sink = " (a sink)" if unknown == ["s_aux"] else ""
        raise refused(model_type, f"the attention of {name} takes {', '.join(unknown)}{sink}")
    if call.mask_function is None:
        raise refused(model_type, f"{name} makes its own mask or bias of the scores")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        softmax_scale=float(scale),
        window=_window(model_type, name, call.mask_function, limit),
        rope=None,
        soft_cap=None if cap is None else float(cap),
    )


def _window(model_type: str, name: str, rule: Callable[..., Tensor], limit: int) -> int | None:
    """The sliding window that a mask's rule amounts to, compared at positions around its edges and between."""
    longest = min(limit, _LONGEST)
    key = torch.arange(longest, dtype=torch.int64, device="cpu")

    def seen(position: int) -> Tensor:
        one = torch.zeros((), dtype=torch.int64, device="cpu")
        return rule(one, one, one + position, key).expand(longest)

    try:
        window = int(seen(longest - 1).sum())
        for position in {0, 1, window - 1, window, window + 1, longest // 3, longest // 2 + 1, longest - 1}:
            if position < longest and not torch.equal(
                seen(position), (key <= position) & (position - key < max(window, 1))
            ):
                raise refused(model_type, f"what {name} sees is neither all tokens before nor a sliding window")
    except CheckpointError:
        raise
    except Exception as error:
        raise refused(model_type, f"the mask of {name} follows a rule that cannot be read: {error}") from error
    return None if window >= longest else window
