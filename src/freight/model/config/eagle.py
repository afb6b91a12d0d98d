"""What the config.json of an EAGLE-3 head says (arXiv:2503.01840). Imports no torch.

Two layouts are read. One is a Llama's with further keys: SafeAILab/EAGLE, SpecForge, ModelOpt and
AngelSlim write it, and vLLM and SGLang read it (`llama_eagle3.py` in both). The other, of
vllm-project/speculators, has the layer's keys in `transformer_layer_config`
(`models/eagle3/config.py` there, `configs/speculators/algos.py` in vLLM).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from freight.base.fields import JsonObject, flag, integer, is_integer, shortened
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.model.config.family import words
from freight.model.config.keys import HARMLESS
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES

TYPES = ("llama", "qwen3")  # whose layers heads have
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_SIZES = words(f"draft_vocab_size target_hidden_size {_LAYERS}")
_FLAGS = words("use_aux_hidden_state norm_before_residual norm_before_fc fc_norm norm_output")
_OWN = _SIZES | _FLAGS | {"eagle_config"}
_SPECULATORS = "speculators_model_type"
_OF_LAYER = "transformer_layer_config"
# Of speculators' layout: what says how many tokens to guess, and how it was trained
_BESIDE = words(
    f"""
    {_SPECULATORS} {_OF_LAYER} speculators_config speculators_version architectures model_type dtype torch_dtype
    tie_word_embeddings embed_requires_grad has_no_defaults_at_init
    """
)
EAGLE_FC = "fc.weight"  # the tensor that makes a state of features
# Keys of eagle_config that are not read -> the values at which they change nothing (ModelOpt)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "has_lm_head": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}


@dataclass(frozen=True)
class EagleConfig:
    """Hyperparameters of a head.

    model                 its layer, last norm and embedding, as a model of one layer, whose
                          projections of q, k and v take twice the hidden size
    draft_vocab_size      tokens that it gives a logit
    target_hidden_size    channels of the model that it guesses for
    feature_layers        as in `DraftHead`
    norm_before_fc        whether the features of all layers are normed together
    fc_norm               whether those of each layer are
    norm_before_residual  whether the residual stream begins with the normed state
    norm_output           whether the state that it takes from itself is normed
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool


def parse_eagle(
    config: JsonObject, tensors: Collection[str], stored: Format | None, target: ModelConfig
) -> EagleConfig:
    """Read the content of a head's config.json, whose model is `target`. `tensors` and `stored` as in
    `parse_model_config`.

    Raises CheckpointError for what is missing, contradictory or not implemented, and for a head of
    another model.
    """
    nested = _object(config, "eagle_config")
    _refuse_others(nested, _SIZES | _FLAGS, "eagle_config: ")
    own = {**{key: config[key] for key in sorted(_OWN & config.keys())}, **nested}
    model = _model(_described(config), tensors, stored)
    hidden_size = model.hidden_size
    parsed = EagleConfig(
        model=model,
        draft_vocab_size=_size(own, "draft_vocab_size", model.vocab_size),
        target_hidden_size=_size(own, "target_hidden_size", hidden_size),
        feature_layers=_feature_layers(config, nested, own, target),
        norm_before_fc=flag(own, "norm_before_fc"),
        fc_norm=flag(own, "fc_norm"),
        norm_before_residual=flag(own, "norm_before_residual"),
        norm_output=flag(own, "norm_output"),
    )
    _refuse_other_target(parsed, target)
    if parsed.norm_before_fc and parsed.fc_norm:
        raise CheckpointError(
            "config.json: norm_before_fc and fc_norm are both true, and one of them norms the features"
        )
    return parsed


def _described(config: JsonObject) -> JsonObject:
    """Return the keys that describe the layer. Raises CheckpointError for a head of another kind."""
    kind = config.get(_SPECULATORS)
    if kind is None:
        return {key: value for key, value in config.items() if key not in _OWN}
    if kind != "eagle3":
        raise CheckpointError(
            f"config.json: {_SPECULATORS} = {shortened(kind, 80)} is not implemented; of speculators only 'eagle3' is"
        )
    _refuse_others(config, _OWN | _BESIDE | HARMLESS, "")
    if config.get("norm_before_residual") is None:
        # false in speculators, true in vLLM
        raise CheckpointError(
            "config.json lacks norm_before_residual, for which programs have different defaults; add it as the head "
            "was trained"
        )
    dtypes = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    return {**_object(config, _OF_LAYER), **dtypes}


def _model(described: JsonObject, tensors: Collection[str], stored: Format | None) -> ModelConfig:
    model_type = described.get("model_type")
    if model_type not in TYPES:
        raise CheckpointError(
            f"config.json: an EAGLE-3 head of model_type {shortened(model_type, 80)} is not implemented; those of "
            f"{choices(TYPES)} are"
        )
    layers = integer(described, "num_hidden_layers")
    if layers != 1:
        raise CheckpointError(
            f"config.json: num_hidden_layers = {layers}: EAGLE-3 heads of one layer alone are implemented"
        )
    if flag(described, "tie_word_embeddings"):
        raise CheckpointError(
            "config.json: tie_word_embeddings = True is not implemented for an EAGLE-3 head, which has lm_head.weight"
        )
    family = FAMILIES[model_type]
    # transformers' default of this key is true in some versions, and heads have a vocabulary of their own
    keys = {**described, "architectures": [family.architecture], "tie_word_embeddings": False}
    model = parse_model_config(keys, tensors, stored)
    if model.attends_both_ways:
        raise CheckpointError(
            "config.json: is_causal = False: a head that guesses sees no later token"
        )
    return model


def _feature_layers(
    config: JsonObject, nested: JsonObject, own: JsonObject, target: ModelConfig
) -> tuple[int, ...]:
    """Return the layers behind which the head takes the residual stream.

    In `eagle_config` a number i means the output of layer i: SGLang adds 1 to it, for a list of
    inputs (`set_eagle3_layers_to_capture`), and SpecForge and ModelOpt train so. Outside of it, as
    speculators writes it, it means the input of layer i (vLLM's `aux_hidden_state_layers`). Without
    either it is the input of layers 2, n / 2 and n - 3, in both programs and in SafeAILab/EAGLE
    (`modeling_llama_kv.py`).
    """
    if not flag(own, "use_aux_hidden_state", True):
        return ()
    count = target.num_layers
    inputs = _numbers(config, _LAYERS)
    outputs = _numbers(nested, _LAYERS)
    if not inputs and not outputs:
        inputs = (2, count // 2, count - 3)
    layers = tuple(index - 1 for index in inputs)
    if layers and outputs and layers != outputs:
        raise CheckpointError(
            f"config.json contradicts itself: {_LAYERS} = {list(inputs)} are inputs of layers, and {list(outputs)} in "
            "eagle_config are outputs of others"
        )
    layers = layers or outputs
    outside = [index for index in layers if not 0 <= index < count]
    if outside:
        raise CheckpointError(
            f"config.json: the head takes the output of layer {outside[0]}, and the model has layers 0 to {count - 1}"
        )
    return layers


def _refuse_other_target(eagle: EagleConfig, target: ModelConfig) -> None:
    for name, value, of_target in (
        ("vocab_size", eagle.model.vocab_size, target.vocab_size),
        ("target_hidden_size", eagle.target_hidden_size, target.hidden_size),
    ):
        if value != of_target:
            raise CheckpointError(
                f"config.json: {name} = {value}, and that of the model is {of_target}: the head was trained for "
                "another one"
            )
    if eagle.draft_vocab_size > target.vocab_size:
        raise CheckpointError(
            f"config.json: draft_vocab_size = {eagle.draft_vocab_size} is more than vocab_size = {target.vocab_size}"
        )
    taken = len(eagle.feature_layers) * eagle.target_hidden_size
    if not eagle.feature_layers:
        if eagle.model.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"config.json: hidden_size = {eagle.model.hidden_size} with use_aux_hidden_state = False: it must be "
                f"the model's, {target.hidden_size}"
            )
    elif taken == eagle.model.hidden_size:  # features are told from states by their size
        raise CheckpointError(
            f"config.json: features of {taken} channels, which is hidden_size: a head with so few is not implemented"
        )


def _refuse_others(part: JsonObject, known: Collection[str], where: str) -> None:
    for key, value in part.items():
        off = value is None or value is False or value in ({}, [], "", 0)
        if key not in known and not off and value not in _NEUTRAL.get(key, ()):
            raise CheckpointError(
                f"config.json: {where}{key} = {shortened(value, 80)} is not implemented for an EAGLE-3 head"
            )


def _object(config: JsonObject, key: str) -> JsonObject:
    value = {} if config.get(key) is None else config[key]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} = {shortened(value, 80)} must be an object")
    return value


def _size(config: JsonObject, key: str, default: int) -> int:
    return default if config.get(key) is None else integer(config, key)


def _numbers(config: JsonObject, key: str) -> tuple[int, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(map(is_integer, value)):
        raise CheckpointError(f"config.json: {key} = {shortened(value, 80)} must list layers")
    return tuple(value)
