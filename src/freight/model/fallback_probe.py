"""Probe of a model without a row in Freight: transformers' modules, run once without weights.

A causal LM of transformers passes its queries, keys and values to the registered attention
function. Here that function records what each layer passes: heads, their sizes, scale, window, soft
cap. Tensors are on device "meta" and have no content, so the probe takes no memory and works before
a weight is read. What cannot run over Freight's cache is refused by name. `model/fallback.py` runs
the models that pass.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from freight.base.fields import JsonObject, check_counts, token_ids
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.model.config.dtype import DtypeSource, checkpoint_dtype
from freight.model.config.layer import DenseConfig, LayerConfig
from freight.model.config.mechanisms import refuse_uncompared
from freight.model.config.model import ForeignModel, ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.fallback_ropes import refuse_lost_rope, settle_ropes
from freight.model.fallback_words import (
    OTHER_ATTENTION,
    refuse_keys,
    refuse_recurrent,
    refused,
    why_not_built,
    why_not_run,
)
from freight.model.mixers.attention.spec import AttentionConfig

PROBE = "freight_probe"
_TOKENS = 8
_LONGEST = 2**20  # positions up to which a mask is compared

_OWN_CODE = " (auto_map names code in the checkpoint, which is never run here; vLLM runs it with --trust-remote-code)"
_HARMLESS = frozenset(
    ("dropout", "position_ids", "cache_position", "use_cache", "output_attentions")
)
_SCALING = "scaling"
_CAP = "softcap"
_WINDOW = "sliding_window"


def hf_config(config: JsonObject) -> PreTrainedConfig:
    """Build transformers' configuration object, without quantization, which Freight handles itself.

    Code that comes with a checkpoint is never run: only model types that transformers itself knows
    are accepted. Raises CheckpointError for another type, and for a config.json that transformers
    does not accept.
    """
    model_type = config.get("model_type")
    refuse_uncompared(model_type)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not implemented, and transformers {transformers.__version__} "
            f"does not know it{_OWN_CODE if 'auto_map' in config else ''}; {choices(FAMILIES)} are, and decoders of "
            "transformers with attention over all tokens"
        )
    values = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }
    try:
        # A copy: from_dict writes into `rope_scaling`
        parsed = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))
        parsed.get_text_config()
    except Exception as error:  # validators of transformers raise what they like
        raise refused(model_type, f"its configuration is not accepted: {error}") from error
    assert isinstance(parsed, PreTrainedConfig)
    return parsed


def causal_class(config: PreTrainedConfig, declared: object = None) -> type[PreTrainedModel]:
    """Return transformers' class for the model; `declared` is `architectures` of config.json.
    Raises CheckpointError where they disagree.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(config.model_type, "it is no causal language model there")
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    # Files older than transformers' own class name the class of their remote code:
    # PhiMoEForCausalLM, or InternLM3ForCausalLM where the class is Llama's
    names = (model_class.__name__.lower(), config.model_type.replace("_", "") + "forcausallm")
    if declared and str(declared).lower() not in [str([name]) for name in names]:
        raise refused(
            config.model_type,
            f"architectures is {declared!r}, and the causal LM is [{model_class.__name__!r}]",
        )
    return model_class


@dataclass
class _Probe:
    """A stand-in for the step of a forward pass (`model.fallback`) that records the calls."""

    calls: list[_Call] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        given: JsonObject,
    ) -> tuple[Tensor, None]:
        self.calls.append(
            _Call(module, q.shape, k.shape, v.shape, getattr(mask, "mask_function", None), given)
        )
        return torch.empty(
            *q.shape[:1], q.shape[2], q.shape[1], v.shape[3], dtype=v.dtype, device=v.device
        ), None


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    mask_function: Callable[..., Tensor] | None
    given: JsonObject


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any
) -> Any:
    """Attend for transformers: call the step that the model's caller passed as `freight_step`."""
    step = options.pop("freight_step", None)
    mask = masks[0] if masks else options.pop("attention_mask", None)
    if step is None:
        raise CheckpointError(
            f"{type(module).__name__} does not pass the caller's arguments on to its attention"
        )
    return step.attend(
        module, query, key, value, mask, {k: v for k, v in options.items() if v is not None}
    )


def _marked_mask(
    *args: Any,
    mask_function: Callable[..., Tensor] | None = None,
    q_length: int,
    kv_length: int,
    **kwargs: Any,
) -> Tensor:
    """Return a mask without content that carries its rule, `mask_function`."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE, attention)
AttentionMaskInterface.register(PROBE, _marked_mask)


def body_of(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return (name, module) of the part that computes the final states, before the head. Raises
    CheckpointError if the model has none.
    """
    for name in (model.base_model_prefix, "model"):
        body = model._modules.get(name)
        if body is not None:
            return name, body
    raise CheckpointError(
        f"{type(model).__name__} has no module that gives final states, apart from its head"
    )


def run_body(body: nn.Module, token_ids: Tensor, positions: Tensor, step: Any) -> Tensor:
    """Return final states [num_tokens, hidden_size] of tokens laid end to end.

    The mask of ones says that no token is padding; without it transformers would look for sequences
    in the positions.
    """
    ones = torch.ones(1, len(token_ids), dtype=torch.bool, device=token_ids.device)
    out = body(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=ones,
        use_cache=False,
        freight_step=step,
    )
    states: Tensor = out[0]
    return states[0]


def foreign_config(config: JsonObject, stored: Format | None = None) -> ModelConfig:
    """Read config.json as the ModelConfig of a model that runs through transformers.

    `stored` is the dtype of the tensors that are not quantized, used where config.json names none.
    Raises CheckpointError with the reason if the model cannot run so.
    """
    check_counts(config)
    refuse_recurrent(config)
    hf = hf_config(config)
    _require_language_model(config, hf)
    cls = causal_class(hf, config.get("architectures"))
    refuse_lost_rope(hf, config)
    refuse_keys(hf.model_type, {**hf.get_text_config().to_dict(), **config})
    # The one implementation that does not read how many tokens each expert has
    hf._experts_implementation = "batched_mm"
    probe = _Probe()
    try:
        with torch.device("meta"), torch.inference_mode():
            model = cls._from_config(hf, attn_implementation=PROBE, dtype=torch.float32).eval()
    except Exception as error:  # whatever its constructors raise
        raise refused(hf.model_type, why_not_built(hf, cls, PROBE, error)) from error
    limit = getattr(hf.get_text_config(), "max_position_embeddings", None)
    settle_ropes(hf.model_type, model, limit)
    try:
        with torch.device("meta"), torch.inference_mode():
            tokens = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
            run_body(
                body_of(model)[1],
                tokens,
                torch.arange(_TOKENS, dtype=torch.int64, device="meta"),
                probe,
            )
    except CheckpointError as error:
        raise refused(hf.model_type, str(error)) from error
    except Exception as error:  # whatever its modules raise when they are run in this way
        raise refused(hf.model_type, why_not_run(model, error)) from error
    return _model_config(checkpoint_dtype(config, stored), hf, model, probe.calls)


def _require_language_model(config: JsonObject, hf: PreTrainedConfig) -> None:
    """Raise CheckpointError for a model of several parts, which transformers does not run as a
    causal LM.
    """
    if type(hf) in MODEL_FOR_CAUSAL_LM_MAPPING or "text_config" not in type(hf).sub_configs:
        return
    if not config.get("text_config"):
        raise CheckpointError(
            f"config.json lacks text_config, in which a model of type {hf.model_type!r} describes its language model"
        )
    raise refused(
        hf.model_type,
        "it has several parts, and Freight runs the language model of those that have a row",
    )


def _model_config(
    dtype: tuple[Format, DtypeSource],
    hf: PreTrainedConfig,
    model: PreTrainedModel,
    calls: list[_Call],
) -> ModelConfig:
    text = hf.get_text_config()
    modules = _attention_modules(hf.model_type, text.num_hidden_layers, model, calls)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise refused(
            hf.model_type,
            "its configuration has no max_position_embeddings, the largest number of positions",
        )
    if limit < 1:
        raise CheckpointError(f"config.json: max_position_embeddings = {limit} must be at least 1")
    mixers = [
        _mixer(hf.model_type, name, call, limit) for name, call in zip(modules, calls, strict=True)
    ]
    feed_forward = DenseConfig(int(getattr(text, "intermediate_size", None) or 0))
    # A tied parameter has its first name
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
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
        checkpoint_format=dtype[0],
        dtype_source=dtype[1],
        bos_token_id=next(iter(token_ids({"id": text.bos_token_id}, "id", None)), None),
        eos_token_ids=token_ids({"eos_token_id": text.eos_token_id}, "eos_token_id", None),
        foreign=ForeignModel(
            attention=tuple(modules),
            tensors=tuple(
                (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
            ),
            embedding=names[id(embedding.weight)],
            head=names[id(head.weight)],
            linears=tuple(
                f"{name}.weight"
                for name in plain_linears(model)
                if model.get_submodule(name) is not head
            ),
        ),
    )


def plain_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's Linear modules, without subclasses, which compute something
    else.
    """
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def _attention_modules(
    model_type: str, num_layers: int, model: PreTrainedModel, calls: list[_Call]
) -> list[str]:
    """Return the names of the modules that attended, one for each layer in order. Raises
    CheckpointError for any other pattern of calls.
    """
    names = {id(module): name for name, module in model.named_modules()}
    called = [names[id(call.module)] for call in calls]
    if not called:
        raise refused(model_type, OTHER_ATTENTION)
    layers = [int(match[1]) for name in called if (match := re.search(r"\.(\d+)\.", name))]
    if layers == list(range(num_layers)) and len(called) == num_layers:
        return called
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise refused(model_type, f"{twice} attends more than once in a pass")
    missing = next((index for index in range(num_layers) if index not in layers), None)
    if missing is None:
        raise refused(
            model_type,
            f"{len(called)} modules attend in {num_layers} layers ({called[-1]} is one of them)",
        )
    prefix = called[0][: called[0].index(f".{layers[0]}.") + 1]
    block = model.get_submodule(f"{prefix}{missing}")
    parts = ", ".join(type(child).__name__ for child in block.children())
    raise refused(
        model_type,
        f"layer {missing} ({prefix}{missing}: {parts}) has no attention over the cache, so it is recurrent",
    )


def _mixer(model_type: str, name: str, call: _Call, limit: int) -> AttentionConfig:
    """Build a layer's config from its call. Raises CheckpointError for arguments of attention that
    Freight's does not have.
    """
    num_heads = call.q[1]
    num_kv_heads = call.k[1]
    k_dim = call.q[3]
    v_dim = call.v[3]
    options = dict(call.given)
    if not options.pop("is_causal", True) or num_heads % num_kv_heads:
        raise refused(model_type, f"the attention of {name} is not causal and grouped by key heads")
    scale = options.pop(_SCALING, k_dim**-0.5)
    cap = options.pop(_CAP, None)
    options.pop(_WINDOW, None)  # the mask decides what is seen
    unknown = sorted(set(options) - _HARMLESS)
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
    """Return the sliding window that a mask's rule amounts to, None for all tokens before.

    The rule is compared at positions around the window's edges and between. Raises CheckpointError
    for any other rule.
    """
    longest = min(limit, _LONGEST)
    key = torch.arange(longest, dtype=torch.int64, device="cpu")

    def seen(position: int) -> Tensor:
        scalar = torch.zeros((), dtype=torch.int64, device="cpu")
        return rule(scalar, scalar, scalar + position, key).expand(longest)

    try:
        window = int(seen(longest - 1).sum())
        edges = {0, 1, window - 1, window, window + 1}
        between = {longest // 3, longest // 2 + 1, longest - 1}
        for position in edges | between:
            if position < longest and not torch.equal(
                seen(position), (key <= position) & (position - key < max(window, 1))
            ):
                raise refused(
                    model_type,
                    f"{name} sees neither all tokens before nor a sliding window",
                )
    except CheckpointError:
        raise
    except Exception as error:
        raise refused(model_type, f"the mask of {name} depends on more than positions") from error
    return None if window >= longest else window
