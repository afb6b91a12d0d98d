"""TensorNames: the names of a checkpoint's tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Names = TypeVar("Names")


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names. `{}` is the index of a layer or an expert. If a checkpoint stores several
    projections of a field as one tensor, in the order of the field, the field has that one name.

    embedding, norm, layer, head   names after the prefix in `ModelConfig.prefixes`
    mixers                         names of kinds of mixers (`model/mixers/*/spec.py`) where they
                                   are not the kind's usual ones
    positions                      learned embedding of positions, in models that have it; after
                                   the prefix
    token_types, embedded_norm     embedding of token types, and norm after the embedding, in models
                                   that have them; after the prefix
    project_in, project_out        Linear modules after the embedding and before the head, in models
                                   that have them; after the prefix
    router, choice_bias            router of a mixture of experts, and its bias
    choice_bias_outer              dimensions of `choice_bias` before the dimension of experts
    expert                         prefix of an expert; the names of its projections follow
    expert_gate_up                 like `gate_up`: up alone in experts without a gate
    shared                         prefix of the shared feed-forward; `gate_up` and `down` follow
    interleaved                    whether the experts of a layer are one tensor [experts, inputs,
                                   outputs] for each projection, with a bias [experts, outputs], and
                                   the outputs of gate and up alternate. With
                                   `ModelConfig.separate_experts` the experts have the names of
                                   other families
    stacked                        `gate_up` and `down`, or gate, up and down, in checkpoints with
                                   one 3-D tensor of all experts for each
    stacked_turned                 whether these may be [experts, inputs, outputs]
    latent_in, latent_out          Linear modules before and after the experts, with
                                   `MoEConfig.latent_size`
    router_scale, expert_scale     factors of the router's input and of the experts' weights, with
                                   `MoEConfig.parallel_experts`
    experts_norm, shared_post, experts_post
                                   norms before the experts, after the shared feed-forward and after
                                   the experts, with `MoEConfig.parallel_experts`
    attention_norm, mlp_norm       norms of mixer and feed-forward (`NormPlacement`); both may have
                                   the same name if a layer has one of the two only
    attention_post, mlp_post       norms of the outputs, in layers that have them
                                   (`NormPlacement.has_outputs`)
    for_pictures                   whether as many experts for pictures follow, with a separate
                                   router and a second row of the choice bias; routers are then
                                   stored as [inputs, experts] (ERNIE 4.5 VL)
    scalar                         factor of a layer's output, in models that have it
    per_layer_table, per_layer_projection, per_layer_norm
                                   per-layer embeddings of all layers, in models that have them
                                   (`LayerConfig.per_layer`); after the prefix
    per_layer_gate, per_layer_down, per_layer_post
                                   their modules within a layer
    unused                         (pattern, reason) of tensors that the decoder does not need
    also                           (name that transformers writes, name here) of modules within a
                                   layer
    """

    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    layer: str = "layers.{}."
    head: str = "lm_head.weight"
    positions: str = "embed_positions.weight"
    token_types: str = "embeddings.token_type_embeddings.weight"
    embedded_norm: str = "embeddings.LayerNorm.weight"
    project_in: str = "project_in"
    project_out: str = "project_out"
    mixers: tuple[object, ...] = ()
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_outer: tuple[int, ...] = ()
    for_pictures: bool = False
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    interleaved: bool = False
    stacked: tuple[str, ...] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stacked_turned: bool = False
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    latent_in: str = "mlp.fc1_latent_proj"
    latent_out: str = "mlp.fc2_latent_proj"
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
    per_layer_table: str = "embed_tokens_per_layer.weight"
    per_layer_projection: str = "per_layer_model_projection"
    per_layer_norm: str = "per_layer_projection_norm.weight"
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_down: str = "per_layer_projection"
    per_layer_post: str = "post_per_layer_input_norm.weight"
    unused: tuple[tuple[str, str], ...] = ()
    also: tuple[tuple[str, str], ...] = ()

    def of(self, kind: type[Names]) -> Names:
        """Return the names of a kind of mixer."""
        for names in self.mixers:
            if isinstance(names, kind):
                return names
        return kind()

    @property
    def outer(self) -> frozenset[str]:
        """Names of the matrices outside of the layers."""
        projections = (
            f"{name}.weight"
            for name in (self.project_in, self.project_out, self.per_layer_projection)
        )
        return frozenset(
            (
                self.embedding,
                self.positions,
                self.token_types,
                self.head,
                self.per_layer_table,
                *projections,
            )
        )


NORMED_OUTPUTS = TensorNames(
    attention_post="post_attention_layernorm.weight",
    mlp_post="post_feedforward_layernorm.weight",
)


def not_run(part: str, *patterns: str) -> tuple[tuple[str, str], ...]:
    """Build the entries of `TensorNames.unused` for a part of the model outside its text model."""
    return tuple(
        (pattern, f"of the {part} model: Freight runs the text model alone") for pattern in patterns
    )


VISION_TOWER = not_run("vision", "*vision_tower.*", "*multi_modal_projector.*")
VISUAL = not_run("vision", "*visual.*")
PREDICTS = "of a layer that predicts further tokens"  # a reason in `TensorNames.unused`
