"""Tensor names of a model: its family's (`model/config/families/`), with the checkpoint's prefixes."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.config.tensor_names import PREDICTS, TensorNames, not_run
from freight.model.mixers.attention.spec import AttentionNames

ARCHITECTURES = {row.architecture: row.tensors for row in FAMILIES.values()}


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return the names of this model's tensors, and patterns of those that are not read."""
    if config.foreign is not None:
        return TensorNames(embedding=config.foreign.embedding, head=config.foreign.head)
    names = ARCHITECTURES[config.architecture]
    (body, head) = config.prefixes
    if names.interleaved and config.separate_experts:
        common = TensorNames()
        names = replace(
            names, interleaved=False, expert=common.expert, expert_gate_up=common.expert_gate_up
        )
    unused = [(pattern, PREDICTS) for pattern in prediction_patterns(config)]
    unused += not_run("vision", *_experts_for_pictures(config, names))
    for index, mixer in config.attention.items():
        if mixer.kv_from is not None:
            of_attention = names.of(AttentionNames)
            unread = (*of_attention.qkv[1:], of_attention.k_norm.removesuffix("weight"))
            reason = f"the layer reads the keys and values of layer {mixer.kv_from}"
            unused += [
                (f"{body}{names.layer.format(index)}{name.rstrip('.')}.*", reason)
                for name in unread
            ]
    return replace(
        names,
        unused=(*names.unused, *unused),
        embedding=body + names.embedding,
        norm=body + names.norm,
        layer=body + names.layer,
        head=head + names.head,
        positions=body + names.positions,
        token_types=body + names.token_types,
        embedded_norm=body + names.embedded_norm,
        project_in=body + names.project_in,
        project_out=body + names.project_out,
        per_layer_table=body + names.per_layer_table,
        per_layer_projection=body + names.per_layer_projection,
        per_layer_norm=body + names.per_layer_norm,
    )


def skipped_parts(config: ModelConfig, tensors: Collection[str]) -> dict[str, int]:
    """Count the `tensors` that the decoder does not need, by the reason that `TensorNames.unused`
    gives.
    """
    unused = () if config.foreign is not None else tensor_names(config).unused
    reasons = {
        name: reason for pattern, reason in unused for name in fnmatch.filter(tensors, pattern)
    }
    return dict(Counter(reasons.values()))


def _experts_for_pictures(config: ModelConfig, names: TensorNames) -> list[str]:
    """Return patterns of the experts whose numbers follow those of text
    (`TensorNames.for_pictures`).
    """
    mixtures = [
        layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, MoEConfig)
    ]
    count = max((moe.num_experts for moe in mixtures), default=0) if names.for_pictures else 0
    return [f"*.{names.expert.format(number)}*" for number in range(count, 2 * count)]


def prediction_patterns(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of the tensors of layers that predict further tokens, where these are numbered
    after the model's.
    """
    family = FAMILIES.get(config.model_type)
    form = None if family is None else family.predicting
    if form is not None and not form.follows:
        return ()
    layer = config.prefixes[0] + ARCHITECTURES[config.architecture].layer
    later = range(config.num_layers, config.num_layers + config.prediction_layers)
    return tuple(f"{layer.format(index)}*" for index in later)
