"""The kinds of mixers: which function builds the layer of each. The loader knows none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from freight.model.building import Builder, Ropes
from freight.model.decoder import AnyMixer
from freight.model.mixers.attention import layer as attention
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.delta_net import layer as delta_net
from freight.model.mixers.delta_net.spec import DeltaNetConfig
from freight.model.mixers.kimi_delta import layer as kimi_delta
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig
from freight.model.mixers.latent import layer as latent
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.mixers.mamba2 import layer as mamba2
from freight.model.mixers.mamba2.spec import Mamba2Config
from freight.model.mixers.short_conv import layer as short_conv
from freight.model.mixers.short_conv.spec import ShortConvConfig
from freight.model.mixers.spec import Mixer, MixerSpec

BUILDERS: Mapping[type[MixerSpec], Callable[[Any, Builder, str, Ropes], AnyMixer]] = {
    AttentionConfig: attention.build,
    LatentConfig: latent.build,
    DeltaNetConfig: delta_net.build,
    KimiDeltaConfig: kimi_delta.build,
    ShortConvConfig: short_conv.build,
    Mamba2Config: mamba2.build,
}


def build_mixer(mixer: Mixer, builder: Builder, prefix: str, ropes: Ropes) -> AnyMixer | None:
    """Build the mixer of the layer whose tensors begin with `prefix`; None for a layer without one."""
    if mixer is None:
        return None
    return BUILDERS[type(mixer)](mixer, builder, prefix, ropes)
