"""PredictingConfig: the layers of a checkpoint that predict further tokens, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from freight.model.config.family import PredictingForm
from freight.model.config.layer import LayerConfig
from freight.model.config.model import ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.mixers.latent.spec import LatentConfig


@dataclass(frozen=True)
class PredictingConfig:
    """Layers that predict further tokens, of which the first predicts the token behind the next one.

    form       how they are stored
    layer      the decoder layer of each: as the last of the model's with attention
    prefixes   prefix of the tensors of each
    """

    form: PredictingForm
    layer: LayerConfig
    prefixes: tuple[str, ...]

    def module(self, index: int, name: str) -> str:
        """Return the module of layer `index` that `form` calls `name`."""
        return (self.form.outside or self.prefixes[index]) + name

    def weight(self, index: int, name: str) -> str:
        """Return the weight of this module."""
        return f"{self.module(index, name)}.weight"


def published_predicting(
    model: ModelConfig, tensors: Collection[str] | None
) -> PredictingConfig | None:
    """Return the layers that predict further tokens, of a model whose checkpoint has `tensors`; None
    if it has none, or declares none, or if the family's are not read. Where no tensor is known
    (`tensors` None) they are those that config.json declares.
    """
    family = FAMILIES.get(model.model_type)
    if family is None or family.predicting is None:
        return None
    form = family.predicting
    outer = model.prefixes[0] if form.outside is None else form.outside
    first = model.num_layers if form.follows else 0
    prefixes: list[str] = []
    # Qwen3-Next has no key of their number
    keyless = tensors is not None and not family.next_token_keys
    while len(prefixes) < model.prediction_layers or keyless:
        prefix = outer + form.layer.format(first + len(prefixes))
        if tensors is not None and prefix + family.tensors.attention_norm not in tensors:
            break
        prefixes.append(prefix)
    if not prefixes:
        return None
    layer = model.layers[max(model.paged)]
    if isinstance(layer.mixer, LatentConfig):  # drafts are verified: their layers read all keys
        layer = replace(layer, mixer=replace(layer.mixer, indexer=None, chosen_by=None))
    return PredictingConfig(form, layer, tuple(prefixes))
