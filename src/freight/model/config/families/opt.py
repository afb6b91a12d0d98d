"""OPT of Meta. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer
from freight.errors import CheckpointError
from freight.model.config.deriving import with_attention
from freight.model.config.family import Family, words
from freight.model.config.layer import NormKind, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionNames


def _translate(config: JsonObject) -> JsonObject:
    # OPT has no key for the epsilon of its norms
    return {**config, "intermediate_size": integer(config, "ffn_dim"), "rms_norm_eps": 1e-5}


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Set LayerNorm, learned positions, and a separate width of the embedding if there is one."""
    norms, final_norm = _norms(config)
    model = with_attention(model, rope=None)
    layers = [replace(layer, norms=norms) for layer in model.layers]
    size = integer(config, "word_embed_proj_dim", model.hidden_size)
    return replace(
        model,
        layers=tuple(layers),
        norm_kind=NormKind.LAYER,
        final_norm=final_norm,
        position_offset=2,
        embedding_size=None if size == model.hidden_size else size,
    )


def _norms(config: JsonObject) -> tuple[NormPlacement, bool]:
    """Return the placement of norms in each layer, and whether the output of the last layer is
    normed.
    """
    if not flag(config, "layer_norm_elementwise_affine"):
        raise CheckpointError(
            "config.json: layer_norm_elementwise_affine = False is not implemented; only True is"
        )
    if flag(config, "do_layer_norm_before"):
        return NormPlacement.PRE, not flag(config, "_remove_final_layer_norm")
    return NormPlacement.POST, False


ROWS = {
    "opt": Family(
        "OPTForCausalLM",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        words(
            "ffn_dim activation_function enable_bias word_embed_proj_dim do_layer_norm_before "
            "layer_norm_elementwise_affine _remove_final_layer_norm"
        ),
        words(
            "intermediate_size hidden_act hidden_activation num_key_value_heads head_dim "
            "rms_norm_eps rope_theta rope_scaling rope_parameters "
            "original_max_position_embeddings partial_rotary_factor attn_logit_softcapping "
            "final_logit_softcapping"
        ),
        gated=False,
        activation_key="activation_function",
        bias_keys=("enable_bias",) * 3,
        translate=_translate,
        derive=_derive,
        bodies=(("model.decoder.", ""), ("decoder.", "")),  # facebook's files have the second
        tensors=TensorNames(
            norm="final_layer_norm.weight",
            mixers=(AttentionNames(o="self_attn.out_proj"),),
            gate_up=("fc1",),
            down="fc2",
            attention_norm="self_attn_layer_norm.weight",
            mlp_norm="final_layer_norm.weight",
        ),
    ),
}
