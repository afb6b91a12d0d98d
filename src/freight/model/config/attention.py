"""The attention of each layer, read from a config.json: windows, ropes, heads that differ by layer.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer, number, shortened
from freight.errors import CheckpointError, choices, shown
from freight.model.config.family import Family
from freight.model.mixers.attention.spec import AttentionConfig


def parse_mixers(config: JsonObject, family: Family) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer, including the layers whose mixer `derive` replaces
    (`Family.other_layers`).

    `config` has the family's defaults.
    """
    mixer = _mixer(config, family)
    local = 0 if family.local_theta is None else 1  # index of the rope of layers with a window
    num_layers = integer(config, "num_hidden_layers")
    windows = _windows(config, family, num_layers)
    return tuple(
        replace(mixer, window=window, rope=0 if window is None else local) for window in windows
    )


def require_multiple(
    heads: int, kv_heads: int, key: str, heads_key: str = "num_attention_heads"
) -> None:
    """Raise CheckpointError unless `heads` is a multiple of `kv_heads`; both keys are named."""
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json contradicts itself: {heads_key} = {heads} is not a multiple of {key} = {kv_heads}"
        )


def _mixer(config: JsonObject, family: Family) -> AttentionConfig:
    """Build the attention of every layer, without a window, from the keys that name no kind of
    layer.
    """
    heads = integer(config, "num_attention_heads")
    # null means one KV head per attention head, as does absence where the family has no default
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = integer(config, "num_key_value_heads")
    require_multiple(heads, kv_heads, "num_key_value_heads")
    qkv_bias, o_bias = [key != "" and flag(config, key) for key in family.bias_keys[:2]]
    head_dim = parse_head_dim(config)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        softmax_scale=float(number(config, "query_pre_attn_scalar", head_dim) ** -0.5),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or qkv_bias,
        o_bias=o_bias,
        soft_cap=soft_cap(config, "attn_logit_softcapping"),
    )


def parse_head_dim(config: JsonObject) -> int:
    """Return the channels of a head: `head_dim`, else the heads' share of `hidden_size`. Raises
    CheckpointError if they are odd, or if no integer is.
    """
    if config.get("head_dim") is not None:
        return even_head_dim({}, integer(config, "head_dim"))
    hidden_size = integer(config, "hidden_size")
    heads = integer(config, "num_attention_heads")
    if hidden_size % heads:
        raise CheckpointError(
            f"config.json contradicts itself: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {heads}, and there is no head_dim"
        )
    return even_head_dim({}, hidden_size // heads)


def even_head_dim(keys: JsonObject, default: int) -> int:
    """Return `head_dim`, or `default`. Raises CheckpointError for an odd one."""
    head_dim = integer(keys, "head_dim", default)
    if head_dim % 2:
        raise CheckpointError(
            f"config.json: head_dim = {head_dim} is odd; rotary embedding rotates pairs of channels"
        )
    return head_dim


def _windows(config: JsonObject, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: `layer_types` decides, else `sliding_window_pattern` (every
    n-th layer has none), else `max_window_layers` (the layers before it have none), else every
    layer has it.
    """
    window = config.get("sliding_window")
    if not flag(config, "use_sliding_window"):
        window = None
    elif window is not None:
        window = integer(config, "sliding_window")
    first = integer(config, "max_window_layers", 0, least=0)
    pattern = integer(config, "global_attn_every_n_layers", num_layers + 1)
    # with layer_types, EXAONE 4 has other values in this key: 0, or letters such as 'LLLG'
    if not config.get("layer_types"):
        pattern = integer(config, "sliding_window_pattern", pattern)
    slides_by_index = [
        window is not None and i >= first and (i + 1) % pattern != 0 for i in range(num_layers)
    ]
    layer_types = config.get("layer_types")
    if not layer_types:
        return tuple(window if slides else None for slides in slides_by_index)
    kinds = {"full_attention": False, "attention": False, "sliding_attention": True}
    kinds |= dict.fromkeys(family.other_layers, False)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json contradicts itself: layer_types = {shortened(layer_types, 80)} is not a list of "
            f"num_hidden_layers = {num_layers} entries"
        )
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in kinds:
            raise CheckpointError(
                f"config.json: layer_types has {shown(kind)}, which is not implemented; {choices(kinds)} are"
            )
    slides = [kinds[kind] for kind in layer_types]
    if window is None and any(slides):
        raise CheckpointError(
            "config.json contradicts itself: layer_types has 'sliding_attention', but sliding_window = "
            f"{config.get('sliding_window')!r} with use_sliding_window = {config.get('use_sliding_window')!r}"
        )
    if not family.mixed_windows and slides != slides_by_index:
        raise CheckpointError(
            f"config.json: layer_types = {shortened(layer_types, 80)} with sliding_window = {window}: "
            f"in {family.architecture} all layers have the same window"
        )
    return tuple(window if slide else None for slide in slides)


def soft_cap(config: JsonObject, key: str) -> float | None:
    """Return the bound of a soft cap, > 0; None if it is absent or null."""
    return None if config.get(key) is None else number(config, key)
