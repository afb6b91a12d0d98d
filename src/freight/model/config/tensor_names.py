"""TensorNames: the names of a checkpoint's tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.config.layer import AttentionConfig


@dataclass(frozen=True)
class AttentionNames:
    """Names of attention within a layer. `qkv` may be one name, for a tensor of all three.

    sinks         only in models that have them
    output_gate   projection of the gate of attention's result (`AttentionConfig.output_gate`)
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    output_gate: str = "self_attn.g_proj"

    def qkv_of(self, mixer: AttentionConfig) -> tuple[str, ...]:
        """Return the modules of q, k and v that a layer has: those of
        `AttentionConfig.projected_sizes`, or one for all.
        """
        if len(self.qkv) == 1:
            return self.qkv
        return self.qkv[: len(mixer.projected_sizes)]


@dataclass(frozen=True)
class LatentNames:
    """Names of latent attention within a layer (`LatentConfig`).

    q                  projection of q in models without a latent of q
    q_a, q_norm, q_b   projections and norm of q in models with one
    output_gate        projection of the gate of attention's result, in models that have it
    """

    q: str = "self_attn.q_proj"
    q_a: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: str = "self_attn.kv_b_proj"
    o: str = "self_attn.o_proj"
    output_gate: str = "self_attn.g_proj"


@dataclass(frozen=True)
class DeltaNetNames:
    """Names of a gated delta net within a layer.

    qkvz, ba   projections; a single name has the rows of all, by key head, each with its value
               heads (Qwen3-Next)
    """

    qkvz: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    ba: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    conv: str = "linear_attn.conv1d.weight"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True)
class KimiDeltaNames:
    """Names of Kimi delta attention within a layer (`KimiDeltaConfig`).

    decay, output_gate   one projection, or two in the order of their use
    conv                 convolutions of q, k and v
    wide                 whether `a_log` has the shape [1, 1, heads, 1]
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    decay: tuple[str, ...] = ("self_attn.f_a_proj", "self_attn.f_b_proj")
    beta: str = "self_attn.b_proj"
    output_gate: tuple[str, ...] = ("self_attn.g_a_proj", "self_attn.g_b_proj")
    conv: tuple[str, ...] = (
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
    )
    a_log: str = "self_attn.A_log"
    dt_bias: str = "self_attn.dt_bias"
    norm: str = "self_attn.o_norm.weight"
    out: str = "self_attn.o_proj"
    wide: bool = True


@dataclass(frozen=True)
class ShortConvNames:
    """Names of a short convolution within a layer (`ShortConvConfig`); `conv` has a weight and
    perhaps a bias.
    """

    in_proj: str = "conv.in_proj"
    conv: str = "conv.conv"
    out_proj: str = "conv.out_proj"


@dataclass(frozen=True)
class MambaNames:
    """Names of Mamba-2 within a layer (`Mamba2Config`); `conv` and the projections have a weight
    and perhaps a bias.
    """

    in_proj: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    a_log: str = "mamba.A_log"
    skip: str = "mamba.D"
    dt_bias: str = "mamba.dt_bias"
    norm: str = "mamba.norm.weight"
    out: str = "mamba.out_proj"


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names. `{}` is the index of a layer or an expert. If a checkpoint stores several
    projections of a field as one tensor, in the order of the field, the field has that one name.

    embedding, norm, layer, head   names after the prefix in `ModelConfig.prefixes`
    attention, latent, delta_net, kimi_delta, short_conv, mamba
                                   names in layers with these mixers
    positions                      learned embedding of positions, in models that have it; after
                                   the prefix
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
                                   `MoEConfig.beside`
    experts_norm, shared_post, experts_post
                                   norms before the experts, after the shared feed-forward and after
                                   the experts, with `MoEConfig.beside`
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
    project_in: str = "project_in"
    project_out: str = "project_out"
    attention: AttentionNames = AttentionNames()
    latent: LatentNames = LatentNames()
    delta_net: DeltaNetNames = DeltaNetNames()
    kimi_delta: KimiDeltaNames = KimiDeltaNames()
    short_conv: ShortConvNames = ShortConvNames()
    mamba: MambaNames = MambaNames()
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

    @property
    def outer(self) -> frozenset[str]:
        """Names of the matrices outside of the layers."""
        projections = (
            f"{name}.weight"
            for name in (self.project_in, self.project_out, self.per_layer_projection)
        )
        return frozenset(
            (self.embedding, self.positions, self.head, self.per_layer_table, *projections)
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
