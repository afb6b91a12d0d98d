"""Mixtures of experts in a config.json, read as MoEConfig. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freight.config.fields import JsonObject, flag, integer, number
from freight.config.layer import DenseConfig, MoEConfig
from freight.errors import CheckpointError
from freight.operands.activation import AnyActivation
from freight.operands.routing import Routing, Scoring


@dataclass(frozen=True)
class MoEFamily:
    """The description of experts in the files of one model_type. A `..._key` is the key of
    config.json that holds the value.

    count            number of experts if none of `count_keys` is present
    count_keys       number of experts; any of these, because transformers writes other names than
                     the hub's files have
    top_k_keys       experts per token
    width_key        `intermediate_size` of an expert
    norm_key         whether a token's weights are divided by their sum; None: they are, unless
                     their sum is 1 anyway
    factor_key       multiplies the weights
    group_keys       number of groups, and of the groups that a token chooses from
    group_best       `Routing.group_best`
    choice_bias      whether the router has a bias for the choice
    shared_width_key `intermediate_size` of all shared experts together
    shared_count_key number of shared experts, each as wide as an expert
    shared_gate      whether a projection to one number weights the shared experts
    router_bias      whether the router adds a bias to its logits
    bias             whether the projections of experts have biases
    activation       activation of experts, if `hidden_act` does not name it
    latent_key       `MoEConfig.latent_size`; absent or null: the experts take the token itself
    switch_key       whether there are experts, or their number, which may be 0; None: there are
    beside           `MoEConfig.beside`; the width of the shared feed-forward is `intermediate_size`
    dense_keys       the keys that identify layers without experts, of `decoder_sparse_step`,
                     `mlp_only_layers`, `first_k_dense_replace`, `num_dense_layers`,
                     `mlp_layer_types`, `moe_layer_start_index`, `moe_layer_end_index`,
                     `moe_layer_interval`
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
    beside: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """All keys of config.json that these fields name."""
        named = (
            self.width_key,
            self.norm_key,
            self.factor_key,
            self.shared_width_key,
            self.shared_count_key,
            self.latent_key,
            self.switch_key,
        )
        lists = {*self.top_k_keys, *self.count_keys, *(self.group_keys or ()), *self.dense_keys}
        return frozenset(lists | {key for key in named if key is not None})


# the experts of DeepSeek-V3, which later models have in other numbers
DEEPSEEK_EXPERTS = MoEFamily(
    256,
    scoring=Scoring.SIGMOID,
    factor_key="routed_scaling_factor",
    group_keys=("n_group", "topk_group"),
    choice_bias=True,
    shared_count_key="n_shared_experts",
    dense_keys=frozenset(("first_k_dense_replace",)),
)
# the same, for families whose files may list the layers with experts
DEEPSEEK_EXPERTS_BY_LAYER = replace(
    DEEPSEEK_EXPERTS, dense_keys=frozenset(("first_k_dense_replace", "mlp_layer_types"))
)


def has_experts(config: JsonObject, family: MoEFamily) -> bool:
    """Return whether there are experts at all (`MoEFamily.switch_key`)."""
    key = family.switch_key
    if key is None:
        return True
    return integer(config, key, least=0) > 0 if key in family.count_keys else flag(config, key)


def parse_moe(config: JsonObject, family: MoEFamily, activation: AnyActivation) -> MoEConfig:
    """Read the configuration of the experts, the same in every layer that has them. Raises
    CheckpointError for a missing or contradictory value.
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
        beside=family.beside,
        latent_size=latent_size,
    )


def _routing(config: JsonObject, family: MoEFamily) -> Routing:
    count = integer(config, _one_of(config, family.count_keys), family.count)
    top_k = integer(config, _one_of(config, family.top_k_keys))
    groups, top_groups = (integer(config, key, 1) for key in family.group_keys or ("", ""))
    if count % groups or top_groups > groups or top_k > count // groups * top_groups:
        raise CheckpointError(
            f"config.json contradicts itself: {family.top_k_keys[0]} = {top_k} of {count} experts in {groups} groups, "
            f"of which {top_groups} are chosen"
        )
    return Routing(
        num_experts=count,
        top_k=top_k,
        scoring=family.scoring,
        normed=family.scoring is not Scoring.CHOSEN
        if family.norm_key is None
        else flag(config, family.norm_key),
        factor=1.0 if family.factor_key is None else number(config, family.factor_key, 1.0),
        num_groups=groups,
        top_groups=top_groups,
        group_best=family.group_best,
    )


def _one_of(config: JsonObject, keys: tuple[str, ...]) -> str:
    """Return a key that is present, or the first. Raises CheckpointError for values that differ."""
    named = {key: config[key] for key in keys if config.get(key) is not None}
    if len(set(map(str, named.values()))) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: {', '.join(f'{key} = {value!r}' for key, value in named.items())}"
        )
    return next(iter(named), keys[0])


def _shared(
    config: JsonObject, family: MoEFamily, width: int, activation: AnyActivation
) -> DenseConfig | None:
    if family.shared_width_key is not None:
        size = integer(config, family.shared_width_key, 0, least=0)
    elif family.shared_count_key is not None:
        size = width * integer(config, family.shared_count_key, 0, least=0)
    elif family.beside:
        size = integer(config, "intermediate_size")
    else:
        size = 0
    return DenseConfig(size, activation) if size else None


def layers_with_experts(config: JsonObject, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts; the others have a dense feed-forward."""
    if config.get("mlp_layer_types"):
        return _sparse_types(config["mlp_layer_types"], num_layers)
    step = integer(config, "decoder_sparse_step", integer(config, "moe_layer_interval", 1))
    first = max(
        integer(config, key, 0, least=0)
        for key in ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    )
    last = integer(config, "moe_layer_end_index", -1, least=-1)
    end = num_layers if last == -1 else last + 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(index, int) for index in dense):
        raise CheckpointError(f"config.json: mlp_only_layers = {dense!r} must be a list of layers")
    return [
        first <= index < end and (index + 1) % step == 0 and index not in dense
        for index in range(num_layers)
    ]


def _sparse_types(types: object, num_layers: int) -> list[bool]:
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not set(types) <= {"dense", "sparse"}
    ):
        raise CheckpointError(
            f"config.json: mlp_layer_types = {types!r} must be a list of num_hidden_layers = {num_layers} entries, "
            "each 'dense' or 'sparse'"
        )
    return [kind == "sparse" for kind in types]
