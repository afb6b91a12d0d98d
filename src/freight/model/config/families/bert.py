"""Encoders: BERT, RoBERTa, XLM-RoBERTa and ModernBERT. Imports no torch.

They run at the level of final states: their heads over the vocabulary are not read.
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer, number
from freight.errors import CheckpointError
from freight.model.config.deriving import with_attention
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.layer import NormKind, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionNames


def _encoder(model: ModelConfig) -> ModelConfig:
    """Return `model` as an encoder: both ways, with LayerNorm, and without a head."""
    return replace(
        model,
        attends_both_ways=True,
        norm_kind=NormKind.LAYER,
        norms_embedded=True,
        has_head=False,
        tie_word_embeddings=True,
    )


def _first_position(config: JsonObject) -> int:
    """Return the row of position 0: RoBERTa's positions begin after that of padding."""
    if config["model_type"] == "bert":
        return 0
    return integer(config, "pad_token_id", 1, least=0) + 1


def _translate(config: JsonObject) -> JsonObject:
    if flag(config, "is_decoder"):
        raise CheckpointError("config.json: is_decoder = True is not implemented; only False is")
    rows = integer(config, "max_position_embeddings")
    first = _first_position(config)
    if rows <= first:
        raise CheckpointError(
            f"config.json contradicts itself: max_position_embeddings = {rows}, of which pad_token_id = {first - 1} "
            "leaves none"
        )
    return {
        **config,
        "max_position_embeddings": rows - first,
        "rms_norm_eps": number(config, "layer_norm_eps"),
        "attention_bias": True,
        "mlp_bias": True,
    }


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Set learned positions, token types, and norms of the sums."""
    model = with_attention(_encoder(model), rope=None)
    layers = [replace(layer, norms=NormPlacement.POST) for layer in model.layers]
    return replace(
        model,
        layers=tuple(layers),
        final_norm=False,
        position_offset=_first_position(config),
        token_types=integer(config, "type_vocab_size"),
    )


def _translate_modern(config: JsonObject) -> JsonObject:
    """Map ModernBERT's keys: every n-th layer from the first on sees all tokens, the others half of
    `local_attention` on each side.
    """
    every = integer(config, "global_attn_every_n_layers")
    kinds = [
        "sliding_attention" if index % every else "full_attention"
        for index in range(integer(config, "num_hidden_layers"))
    ]
    translated = {
        **config,
        "layer_types": config.get("layer_types") or kinds,
        "sliding_window": integer(config, "local_attention") // 2 + 1,
        "use_sliding_window": True,
        "rms_norm_eps": number(config, "norm_eps"),
    }
    if config.get("rope_parameters") is None:
        translated["rope_theta"] = number(config, "global_rope_theta")
        translated["rope_local_base_freq"] = number(config, "local_rope_theta")
    return translated


def _derive_modern(config: JsonObject, model: ModelConfig) -> ModelConfig:
    first, *others = _encoder(model).layers
    return replace(
        _encoder(model),
        layers=(replace(first, raw_mixer=True), *others),
        norm_biases=flag(config, "norm_bias"),
    )


_HEADS = (
    ("*pooler.dense.*", "of a head that is not used"),
    ("cls.*", "of the vocabulary: the encoder ends with its states"),
    ("lm_head.*", "of the vocabulary: the encoder ends with its states"),
    ("*embeddings.position_ids", "numbers of positions"),
)
_LACKS = words(
    "num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters "
    "original_max_position_embeddings partial_rotary_factor attn_logit_softcapping "
    "final_logit_softcapping hidden_activation"
)
_BERT = Family(
    "BertModel",
    {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    words("type_vocab_size layer_norm_eps pad_token_id is_decoder"),
    same=("BertForMaskedLM", "BertForSequenceClassification"),
    lacks=_LACKS,
    fixed={"position_embedding_type": ("absolute",)},
    gated=False,
    bias_keys=ATTENTION_BIAS,
    translate=_translate,
    derive=_derive,
    bodies=(("bert.", ""), ("", "")),
    tensors=TensorNames(
        embedding="embeddings.word_embeddings.weight",
        positions="embeddings.position_embeddings.weight",
        layer="encoder.layer.{}.",
        mixers=(
            AttentionNames(
                qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
                o="attention.output.dense",
            ),
        ),
        gate_up=("intermediate.dense",),
        down="output.dense",
        attention_norm="attention.output.LayerNorm.weight",
        mlp_norm="output.LayerNorm.weight",
        unused=_HEADS,
    ),
)


def _roberta(name: str) -> Family:
    return replace(
        _BERT,
        architecture=f"{name}Model",
        defaults={
            **_BERT.defaults,
            "vocab_size": 50265 if name == "Roberta" else 30522,
            "pad_token_id": 1,
        },
        same=(f"{name}ForMaskedLM", f"{name}ForSequenceClassification"),
        bodies=(("roberta.", ""), ("", "")),
    )


ROWS = {
    "bert": _BERT,
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "modernbert": Family(
        "ModernBertModel",
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        words(
            "norm_eps norm_bias attention_bias mlp_bias local_attention global_attn_every_n_layers "
            "global_rope_theta local_rope_theta layer_types decoder_bias classifier_pooling classifier_bias "
            "classifier_activation layer_norm_eps position_embedding_type"  # the last two decide nothing
        ),
        same=("ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        lacks=words("num_key_value_heads head_dim rms_norm_eps hidden_act"),
        bias_keys=ATTENTION_BIAS,
        activation_key="hidden_activation",
        theta=160000.0,
        local_theta=10000.0,
        translate=_translate_modern,
        derive=_derive_modern,
        bodies=(("model.", ""), ("", "")),
        tensors=TensorNames(
            embedding="embeddings.tok_embeddings.weight",
            embedded_norm="embeddings.norm.weight",
            norm="final_norm.weight",
            mixers=(AttentionNames(qkv=("attn.Wqkv",), o="attn.Wo"),),
            gate_up=("mlp.Wi",),
            down="mlp.Wo",
            attention_norm="attn_norm.weight",
            mlp_norm="mlp_norm.weight",
            unused=(
                ("head.*", "of the vocabulary: the encoder ends with its states"),
                ("decoder.*", "of the vocabulary: the encoder ends with its states"),
            ),
        ),
    ),
}
