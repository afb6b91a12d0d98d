"""Checks of rotary embeddings in transformers' modules: keys that are lost, angles by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from freight.base.fields import JsonObject
from freight.model.fallback_words import refused

_TOKENS = 8  # of the probe's forward pass
# Types whose angles transformers' modules recompute in a forward pass
_ROPES_OF_LENGTH = ("dynamic", "longrope")
# Names in files of gpt_neox -> transformers' names
_ROPE_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", *_ROPE_NAMES)


def refuse_lost_rope(hf: PreTrainedConfig, config: JsonObject) -> None:
    """Raise CheckpointError for a rope parameter of config.json that transformers does not take.

    Old files have the parameters under other keys, which transformers reads for some model types
    only.
    """
    read_back = getattr(hf.get_text_config(), "rope_parameters", None) or {}
    parts = [part for part in read_back.values() if isinstance(part, Mapping)] or [read_back]
    if not read_back:
        return
    scaling = config.get("rope_scaling") or {}
    for source, keys in ((config, _ROPE_KEYS), (scaling, ("factor", "alpha"))):
        for key in keys:
            name = _ROPE_NAMES.get(key, key)
            value = source.get(key)
            if value is not None and value not in [part.get(name, 1.0) for part in parts]:
                raise refused(
                    hf.model_type,
                    f"{key} is {value!r}, and its configuration class takes {name} as {parts[0].get(name)!r}; write "
                    "the rotary embedding as rope_parameters",
                )


def settle_ropes(model_type: str, model: PreTrainedModel, limit: int | None) -> None:
    """Refuse rotary embeddings whose angles depend on the sequence length, up to `limit` tokens:
    keys are stored rotated.

    An embedding that looks at the length, and whose angles do not change, gets them fixed here for
    the probe, which has no weights.
    """
    for rope in model.modules():
        kinds = getattr(rope, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        if limit is None or not set(_ROPES_OF_LENGTH) & set(by_layer.values()):
            continue
        angles = {}
        for layer_type, kind in by_layer.items():
            angles[layer_type], long = _angles(rope, layer_type, limit)
            if not torch.equal(angles[layer_type], long):
                raise refused(
                    model_type,
                    f"its rotary embedding ({kind}) has other angles in long sequences, and stored keys are rotated",
                )
        rope.forward = _Angles({key: tuple(value.to("meta")) for key, value in angles.items()})


@dataclass(frozen=True)
class _Angles:
    """A stand-in for the `forward` of a rotary embedding: cos and sin by `layer_type`, whatever the
    positions are.
    """

    by_layer: Mapping[str | None, tuple[Tensor, ...]]

    def __call__(
        self, *args: Any, layer_type: str | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        return self.by_layer[layer_type]


def _angles(rope: Any, layer_type: str | None, limit: int) -> list[Tensor]:
    """Return cos and sin of the first positions, in a short sequence and in one of `limit` tokens.

    They are computed on the CPU, by a second instance of the module.
    """
    options = {} if layer_type is None else {"layer_type": layer_type}
    first = torch.arange(_TOKENS, dtype=torch.int64, device="cpu")[None]
    last = torch.full_like(first[:, :1], limit - 1)
    x = torch.zeros((), dtype=torch.float32, device="cpu")
    with torch.device("cpu"):
        made = type(rope)(rope.config)
        both = [
            made(x, position_ids=ids, **options) for ids in (first, torch.cat([first, last], 1))
        ]
    return [torch.stack([part[:, :_TOKENS] for part in cos_sin]) for cos_sin in both]
