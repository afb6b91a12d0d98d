"""Mixtures of experts in a config.json, read as MoEConfig. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freight.base.fields import JsonObject, flag, integer, number, shortened
from freight.errors import CheckpointError
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.operands.activation import AnyActivation
from freight.operands.routing import Routing, Scoring


@dataclass(frozen=True)
class MoEFamily:
    """The description of experts in the config.json files of one model_type. A `..._key` is the key
    that holds the value.

    count            number of experts if none of `count_keys` is present; None: one is required
    count_keys       number of experts, under any of these names: those that transformers writes
                     differ from those in published files
    top_k_keys       experts per token, under any of these names
    width_key        `intermediate_size` of an expert
    scoring          `Routing.scoring`
    norm_key         whether a token's weights are divided by their sum; None: always, except where
                     the scoring already makes their sum 1
    factor_key       multiplies the weights; None: nothing does
    group_keys       number of groups, and of the groups that a token chooses from; None: one group
    group_best       `Routing.group_best`
    choice_bias      whether the router adds a bias to the scores for the choice of experts only
    shared_width_key `intermediate_size` of all shared experts together
    shared_count_key number of shared experts, each as wide as an expert
    shared_gate      whether the sigmoid of a projection to one number multiplies the result of the
                     shared experts
    router_bias      whether the router adds a bias to its logits
    bias             whether the projections of experts have biases
    activation       activation of experts; None: that of dense layers
    dense_keys       those keys of this model_type that tell which layers have no experts
                     (`layers_with_experts`)
    latent_key       `MoEConfig.latent_size`; the key may be absent or null
    switch_key       a flag that says whether there are experts, or one of `count_keys` whose number
                     may be 0; None: there always are
    parallel_experts `MoEConfig.parallel_experts`; the width of the shared feed-forward is
                     `intermediate_size`
    """

    count: int | None = None
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    width_key: str = "moe_intermediate_size"
    scoring: Scoring = Scoring.SOFTMAX
    norm_key: str | None = "norm_topk_prob"
    factor_key: str | None = None
    group_keys: tuple[str, str] | None = None
    group_best: int = 2
    choice_bias: bool = False
    shared_width_key: str | None = None
    shared_count_key: str | None = None
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    activation: AnyActivation | None = None
    dense_keys: frozenset[str] = frozenset()
    latent_key: str | None = None
    switch_key: str | None = None
    parallel_experts: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """All keys of config.json that these fields name."""
        single = (
            self.width_key,
            self.norm_key,
            self.factor_key,
            self.shared_width_key,
            self.shared_count_key,
            self.latent_key,
            self.switch_key,
        )
        listed = {*self.top_k_keys, *self.count_keys, *(self.group_keys or ()), *self.dense_keys}
        return frozenset(listed | {key for key in single if key is not None})


# The experts of DeepSeek-V3; many later models differ in the numbers only.
DEEPSEEK_EXPERTS = MoEFamily(
    256,
    scoring=Scoring.SIGMOID,
    factor_key="routed_scaling_factor",
    group_keys=("n_group", "topk_group"),
    choice_bias=True,
    shared_count_key="n_shared_experts",
    dense_keys=frozenset(("first_k_dense_replace",)),
)
# The same, for families whose files may name the kind of each layer.
DEEPSEEK_EXPERTS_BY_LAYER = replace(
    DEEPSEEK_EXPERTS, dense_keys=frozenset(("first_k_dense_replace", "mlp_layer_types"))
)


def has_experts(config: JsonObject, family: MoEFamily) -> bool:
    """Return whether any layer has experts (`MoEFamily.switch_key`)."""
    key = family.switch_key
    if key is None:
        return True
    if key in family.count_keys:
        return integer(config, key, least=0) > 0
    return flag(config, key)


def parse_moe(config: JsonObject, family: MoEFamily, activation: AnyActivation) -> MoEConfig:
    """Read the configuration of the experts, which is the same in every layer that has them.
    `activation` is that of dense layers. Raises CheckpointError for a missing or contradictory
    value.
    """
    width = integer(config, family.width_key)
    activation = family.activation or activation
    latent_size: int | None = None
    if family.latent_key is not None and config.get(family.latent_key) is not None:
        latent_size = integer(config, family.latent_key)
    return MoEConfig(
        routing=_routing(config, family),
        intermediate_size=width,
        activation=activation,
        router_bias=family.router_bias,
        choice_bias=family.choice_bias,
        bias=family.bias,
        shared=_shared(config, family, width, activation),
        shared_gate=family.shared_gate,
        parallel_experts=family.parallel_experts,
        latent_size=latent_size,
    )


def _routing(config: JsonObject, family: MoEFamily) -> Routing:
    count = integer(config, _one_of(config, family.count_keys), family.count)
    top_k = integer(config, _one_of(config, family.top_k_keys))
    groups = top_groups = 1
    if family.group_keys is not None:
        groups_key, top_groups_key = family.group_keys
        groups = integer(config, groups_key, 1)
        top_groups = integer(config, top_groups_key, 1)
    eligible = count // groups * top_groups  # experts in the chosen groups
    if count % groups or top_groups > groups or top_k > eligible:
        raise CheckpointError(
            f"config.json contradicts itself: {family.top_k_keys[0]} = {top_k}, but there are {count} experts in "
            f"{groups} groups, of which a token uses {top_groups}"
        )
    if family.norm_key is None:
        normed = family.scoring is not Scoring.CHOSEN
    else:
        normed = flag(config, family.norm_key)
    return Routing(
        num_experts=count,
        top_k=top_k,
        scoring=family.scoring,
        normed=normed,
        factor=1.0 if family.factor_key is None else number(config, family.factor_key, 1.0),
        num_groups=groups,
        top_groups=top_groups,
        group_best=family.group_best,
    )


def _one_of(config: JsonObject, keys: tuple[str, ...]) -> str:
    """Return the first of `keys` that has a value in `config`, or keys[0] if none has. Raises
    CheckpointError if their values differ.
    """
    declared = {key: config[key] for key in keys if config.get(key) is not None}
    # Compared as texts, because a value may be unhashable, such as a list.
    if len({str(value) for value in declared.values()}) > 1:
        values = ", ".join(f"{key} = {value!r}" for key, value in declared.items())
        raise CheckpointError(f"config.json contradicts itself: {values}")
    return next(iter(declared), keys[0])


def _shared(
    config: JsonObject, family: MoEFamily, width: int, activation: AnyActivation
) -> DenseConfig | None:
    if family.shared_width_key is not None:
        size = integer(config, family.shared_width_key, 0, least=0)
    elif family.shared_count_key is not None:
        size = width * integer(config, family.shared_count_key, 0, least=0)
    elif family.parallel_experts:
        size = integer(config, "intermediate_size")
    else:
        size = 0
    return DenseConfig(size, activation) if size else None


def layers_with_experts(config: JsonObject, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts; the others have a dense feed-forward.

    `mlp_layer_types` decides if it is there. Otherwise layer i has experts if it lies in the range
    of layers that may, if i + 1 is a multiple of the step, and if `mlp_only_layers` does not list
    it. Raises CheckpointError for an invalid value.
    """
    if config.get("mlp_layer_types"):
        return _are_sparse(config["mlp_layer_types"], num_layers)
    # Keys with the same meaning belong to different families.
    step = integer(config, "decoder_sparse_step", integer(config, "moe_layer_interval", 1))
    first = max(
        integer(config, key, 0, least=0)
        for key in ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    )
    last = integer(config, "moe_layer_end_index", -1, least=-1)
    end = num_layers if last == -1 else last + 1
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(not isinstance(index, int) for index in listed):
        raise CheckpointError(
            f"config.json: mlp_only_layers = {shortened(listed, 80)} must be a list of numbers"
        )
    dense = frozenset(listed)
    return [
        first <= index < end and (index + 1) % step == 0 and index not in dense
        for index in range(num_layers)
    ]


def _are_sparse(types: object, num_layers: int) -> list[bool]:
    """Return for each of `types`, the kinds of all layers, whether it is 'sparse': with experts."""
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not set(types) <= {"dense", "sparse"}
    ):
        raise CheckpointError(
            f"config.json: mlp_layer_types = {shortened(types, 80)} must be a list of num_hidden_layers = "
            f"{num_layers} entries, each 'dense' or 'sparse'"
        )
    return [kind == "sparse" for kind in types]
