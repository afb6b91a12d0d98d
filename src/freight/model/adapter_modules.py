"""The modules of a model that adapters may change.

These are the modules of `adapted.py`, whatever form the base model's weights have. Refused by name
are modules outside of the layers, routers, and a matrix that attention holds by heads.
"""

from __future__ import annotations

from freight.checkpoint.lora import AdapterModules, StackedModules
from freight.errors import ConfigError
from freight.model.adapted import adapted_modules
from freight.model.architectures import ARCHITECTURES, tensor_names
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.feed_forward.expert_modules import expert_modules
from freight.model.mixers.spec import mixer_parts

# Beginnings of names within a layer: transformers' -> those of some families' files
_RENAMED = (
    ("self_attn.forget_gate.", "self_attn."),
    ("self_attn.forget_gate.", "attention."),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.", "attention."),
)


_COMMON = TensorNames()


def adapter_modules(config: ModelConfig) -> AdapterModules:
    """Return the modules of the model. Raises ConfigError for one that runs through transformers'
    modules.
    """
    if config.foreign is not None:
        raise ConfigError(
            f"{config.architecture} runs through transformers' modules, to which adapters are not applied; merge the "
            "adapter: freight merge BASE ADAPTER OUT"
        )
    names = tensor_names(config)
    refused = _refused(config, names)
    shapes = adapted_modules(config)
    renamed = (("mlp.shared_experts.", names.shared), *_RENAMED, *names.also)
    stacked = _stacked(config, names)
    return AdapterModules(shapes, refused, renamed, config.num_layers, stacked)


def _stacked(config: ModelConfig, names: TensorNames) -> dict[str, StackedModules]:
    """Return the parameters in which transformers' model has the matrices of all experts of a layer.

    They are those of a module `experts`, whose place within the layer is that of the separate
    experts, or the one that it has in most families.
    """
    alternating = ARCHITECTURES[config.architecture].interleaved
    places = {names.expert.removesuffix("{}."), _COMMON.expert.removesuffix("{}.")}
    stacked: dict[str, StackedModules] = {}
    for index, layer in enumerate(config.layers):
        moe = layer.feed_forward
        if not isinstance(moe, MoEConfig):
            continue
        prefix = names.layer.format(index)
        experts = expert_modules(names, moe.num_experts)
        ups = tuple(tuple(prefix + module for module in expert.gate_up) for expert in experts)
        downs = tuple((prefix + expert.down,) for expert in experts)
        first = "gate_up_proj" if len(moe.up_sizes) > 1 else "up_proj"
        for place in places:
            stacked[f"{prefix}{place}{first}"] = StackedModules(ups, alternating)
            stacked[f"{prefix}{place}down_proj"] = StackedModules(downs)
    return stacked


def _refused(config: ModelConfig, names: TensorNames) -> dict[str, str]:
    """Return the modules of the model that adapters may not change -> what they are."""
    refused = {
        name.removesuffix(".weight"): "a module outside of the layers" for name in names.outer
    }
    for name in (names.embedding, names.positions, names.per_layer_table):
        refused[name.removesuffix(".weight")] = "an embedding"
    refused[names.head.removesuffix(".weight")] = "the head"
    for index, layer in enumerate(config.layers):
        prefix = names.layer.format(index)
        if isinstance(layer.feed_forward, MoEConfig):
            refused[prefix + names.router] = "a router of experts"
        parts = mixer_parts(layer.mixer, config.hidden_size, names)
        if parts.cut:
            refused[prefix + parts.cut] = "a matrix that attention holds by heads"
    return refused
