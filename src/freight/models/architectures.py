"""Tensor names of each architecture. Differences between models are data: their hyperparameters are in ModelConfig.

A new family of the same block is a row here and one in `config/families.py` (docs/add-a-model.md); a new file is only
for a new block.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from freight.config.layer import AttentionConfig
from freight.config.model import ModelConfig


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names; `{}` is the layer's index. Projections of one field may also be stored as one tensor, in the
    order of their names: then the field has that name alone.

    embedding, norm, layer, head, positions, project_in, project_out   follow `ModelConfig.prefixes`
    positions                      learned embedding of positions, in models that have it
    project_in, project_out        Linear modules behind the embedding and before the head, in models that have them
    router, choice_bias            of a mixture of experts; `expert` is followed by the expert's index, and by the names
                                   of its projections, and `shared` by those of `gate_up` and `down`
    interleaved                    the experts of a layer are one tensor [experts, inputs, outputs] for each projection,
                                   with its bias [experts, outputs]; of gate and up, one output of each in turn. With
                                   `ModelConfig.separate_experts` they have the names that other families' experts have
    head_gate                      of what attention returns (`AttentionConfig.gate`)
    sinks                          of attention, in models that have them
    stacked                        `gate_up` and `down` of all experts, where a checkpoint has a 3-D tensor of each
    stacked_turned                 whether these may be [experts, inputs, outputs]
    router_scale, expert_scale     where `MoEConfig.beside`: they multiply the router's input and experts' weights
    experts_norm, shared_post, experts_post   the norm before the experts then, and those behind the shared
                                   feed-forward and the experts
    attention_post, mlp_post       norms of the outputs, in layers that have them (`NormPlacement.has_outputs`)
    choice_bias_outer              dimensions of `choice_bias` before that of experts
    scalar                         what the output of a layer is multiplied by, in models that have it
    own_table, own_projection, own_norm   of what each token has for each layer, in models that have it
                                   (`LayerConfig.input`); they follow `ModelConfig.prefixes`
    own_gate, own_down, own_post   the same within a layer
    unused                         patterns of tensors that the decoder does not need, with the reason
    """

    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    layer: str = "layers.{}."
    head: str = "lm_head.weight"
    positions: str = "embed_positions.weight"
    project_in: str = "project_in"
    project_out: str = "project_out"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    head_gate: str = "self_attn.g_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_outer: tuple[int, ...] = ()
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    interleaved: bool = False
    stacked: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stacked_turned: bool = False
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2.weight"
    shared_post: str = "post_feedforward_layernorm_1.weight"
    experts_post: str = "post_feedforward_layernorm_2.weight"
    attention_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    attention_post: str = ""
    mlp_post: str = ""
    scalar: str = "layer_scalar"
    own_table: str = "embed_tokens_per_layer.weight"
    own_projection: str = "per_layer_model_projection"
    own_norm: str = "per_layer_projection_norm.weight"
    own_gate: str = "per_layer_input_gate"
    own_down: str = "per_layer_projection"
    own_post: str = "post_per_layer_input_norm.weight"
    unused: tuple[tuple[str, str], ...] = ()

    def qkv_of(self, mixer: AttentionConfig) -> tuple[str, ...]:
        """The modules of q, k and v that a layer has: those of `AttentionConfig.projected_sizes`, or one for all."""
        return self.qkv if len(self.qkv) == 1 else self.qkv[: len(mixer.projected_sizes)]

    @property
    def outer(self) -> frozenset[str]:
        """Matrices outside of the layers."""
        projections = (f"{name}.weight" for name in (self.project_in, self.project_out, self.own_projection))
        return frozenset((self.embedding, self.positions, self.head, self.own_table, *projections))


_SANDWICH = TensorNames(
    mlp_norm="pre_feedforward_layernorm.weight",
    attention_post="post_attention_layernorm.weight",
    mlp_post="post_feedforward_layernorm.weight",
)
_GEMMA4 = replace(
    _SANDWICH,
    router="router.proj",
    expert="experts.{}.",
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    shared="mlp.",
)

_OUTPUT = TensorNames(
    attention_post="post_attention_layernorm.weight",
    mlp_post="post_feedforward_layernorm.weight",
)

_VISION = tuple(
    (pattern, "of the vision model: Freight runs the text model alone")
    for pattern in ("*vision_tower.*", "*multi_modal_projector.*")
)
_VISUAL = (("*visual.*", _VISION[0][1]),)
_CHAT_VISION = tuple((pattern, _VISION[0][1]) for pattern in ("vision_model.*", "mlp1.*"))
_AUDIO = tuple(
    (pattern, "of the audio model: Freight runs the text model alone")
    for pattern in ("*audio_tower.*", "*embed_audio.*")
)
_EMBED_VISION = (("*embed_vision.*", _VISION[0][1]),)
_MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
_GLM4 = TensorNames(
    gate_up=("mlp.gate_up_proj",),
    attention_post="post_self_attn_layernorm.weight",
    mlp_post="post_mlp_layernorm.weight",
)
_PHI4MM = TensorNames(  # text goes through the matrices alone, without their adapters
    qkv=("self_attn.qkv_proj.base_layer",),
    o="self_attn.o_proj.base_layer",
    gate_up=("mlp.gate_up_proj.base_layer",),
    down="mlp.down_proj.base_layer",
    unused=(
        ("model.embed_tokens_extend.*", "of the models of pictures and sound: Freight runs the text model alone"),
        ("*.lora_[AB].*", "of an adapter for pictures or sound: Freight runs the text model alone"),
    ),
)
ARCHITECTURES = {
    "LlamaForCausalLM": TensorNames(),
    "MistralForCausalLM": TensorNames(),
    "Ministral3ForCausalLM": TensorNames(),
    "Mistral3ForConditionalGeneration": TensorNames(unused=_VISION),
    "Qwen2ForCausalLM": TensorNames(),
    "Qwen3ForCausalLM": TensorNames(),
    "Qwen2MoeForCausalLM": TensorNames(),
    "Qwen3MoeForCausalLM": TensorNames(),
    "MixtralForCausalLM": _MIXTRAL,
    "GptOssForCausalLM": TensorNames(
        router="mlp.router", expert="mlp.experts.", expert_gate_up=("gate_up_proj",), interleaved=True
    ),
    "Gemma2ForCausalLM": _SANDWICH,
    "Gemma3ForCausalLM": _SANDWICH,
    "Gemma3ForConditionalGeneration": replace(_SANDWICH, unused=_VISION),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, unused=_VISION + _EMBED_VISION + _AUDIO),
    "Gemma4UnifiedForCausalLM": _SANDWICH,
    "Gemma4UnifiedForConditionalGeneration": replace(_SANDWICH, unused=_EMBED_VISION + _AUDIO),
    "Phi3ForCausalLM": TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "Glm4MoeForCausalLM": TensorNames(shared="mlp.shared_experts."),
    "MiniMaxM2ForCausalLM": replace(_MIXTRAL, choice_bias="block_sparse_moe.e_score_correction_bias"),
    "HYV3ForCausalLM": TensorNames(router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_mlp."),
    "Ernie4_5_MoeForCausalLM": TensorNames(
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        choice_bias_outer=(1,),
        shared="mlp.shared_experts.",
    ),
    "ArceeForCausalLM": TensorNames(gate_up=("mlp.up_proj",)),
    "Olmo2ForCausalLM": _OUTPUT,
    "Olmo3ForCausalLM": _OUTPUT,
    "Exaone4ForCausalLM": _OUTPUT,
    "AfmoeForCausalLM": TensorNames(
        head_gate="self_attn.gate_proj",
        router="mlp.router.gate",
        choice_bias="mlp.expert_bias",
        shared="mlp.shared_experts.",
        mlp_norm="pre_mlp_layernorm.weight",
        attention_post="post_attention_layernorm.weight",
        mlp_post="post_mlp_layernorm.weight",
    ),
    "LagunaForCausalLM": TensorNames(choice_bias="mlp.experts.e_score_correction_bias"),
    "MellumForCausalLM": TensorNames(unused=(("mtp.*", "of a layer that predicts further tokens"),)),
    "Ernie4_5ForCausalLM": TensorNames(),
    "SeedOssForCausalLM": TensorNames(),
    "SmolLM3ForCausalLM": TensorNames(),
    "GraniteForCausalLM": TensorNames(),
    "GraniteMoeForCausalLM": TensorNames(
        router="block_sparse_moe.router.layer",
        expert="block_sparse_moe.experts.{}.",
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    "GlmForCausalLM": TensorNames(gate_up=("mlp.gate_up_proj",)),
    "Glm4ForCausalLM": _GLM4,
    "Glm4vForConditionalGeneration": replace(_GLM4, unused=_VISUAL),
    "Glm46VForConditionalGeneration": replace(_GLM4, unused=_VISUAL),
    "Glm4vMoeForConditionalGeneration": TensorNames(shared="mlp.shared_experts.", unused=_VISUAL),
    "Qwen2_5_VLForConditionalGeneration": TensorNames(unused=_VISUAL),
    "Qwen3VLForConditionalGeneration": TensorNames(unused=_VISUAL),
    "Qwen3VLMoeForConditionalGeneration": TensorNames(stacked_turned=True, unused=_VISUAL),
    "InternVLForConditionalGeneration": TensorNames(unused=_VISION),
    "InternS1ForConditionalGeneration": TensorNames(unused=_VISION),
    "InternVLChatModel": TensorNames(unused=_CHAT_VISION),
    "Phi4MMForCausalLM": _PHI4MM,
    "OPTForCausalLM": TensorNames(
        norm="final_layer_norm.weight",
        o="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
        attention_norm="self_attn_layer_norm.weight",
        mlp_norm="final_layer_norm.weight",
    ),
}


def tensor_names(config: ModelConfig) -> TensorNames:
    """The names of this model's tensors."""
    if config.foreign is not None:
        return TensorNames(embedding=config.foreign.embedding, head=config.foreign.head)
    names, (body, head) = ARCHITECTURES[config.architecture], config.prefixes
    if names.interleaved and config.separate_experts:
        common = TensorNames()
        names = replace(names, interleaved=False, expert=common.expert, expert_gate_up=common.expert_gate_up)
    unused = [(pattern, "of a layer that predicts further tokens") for pattern in prediction_patterns(config)]
    for index, layer in enumerate(config.layers):
        if layer.mixer.kv_from is not None:
            own = (*names.qkv[1:], names.k_norm.removesuffix("weight"))
            reason = f"the layer reads the keys and values of layer {layer.mixer.kv_from}"
            unused += [(f"{body}{names.layer.format(index)}{name.rstrip('.')}.*", reason) for name in own]
    return replace(
        names,
        unused=(*names.unused, *unused),
        embedding=body + names.embedding,
        norm=body + names.norm,
        layer=body + names.layer,
        head=head + names.head,
        positions=body + names.positions,
        project_in=body + names.project_in,
        project_out=body + names.project_out,
        own_table=body + names.own_table,
        own_projection=body + names.own_projection,
        own_norm=body + names.own_norm,
    )


def skipped_parts(config: ModelConfig, tensors: Collection[str]) -> dict[str, int]:
    """The number of `tensors` that the decoder does not need, by the reason that `TensorNames.unused` gives."""
    unused = () if config.foreign is not None else tensor_names(config).unused
    reasons = {name: reason for pattern, reason in unused for name in fnmatch.filter(tensors, pattern)}
    return dict(Counter(reasons.values()))


def prediction_patterns(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the tensors of layers that predict further tokens."""
    layer = config.prefixes[0] + ARCHITECTURES[config.architecture].layer
    behind = range(config.num_layers, config.num_layers + config.prediction_layers)
    return tuple(f"{layer.format(index)}*" for index in behind)
