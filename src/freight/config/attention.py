"""The attention of each layer, out of a config.json: windows, ropes, heads that differ by layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freight.config.family import Family
from freight.config.fields import flag, integer, number
from freight.config.layer import AttentionConfig, OutputGate
from freight.errors import CheckpointError, choices

MOST_LAYERS = 10_000  # a damaged number would take all memory, one layer after the other


def parse_mixers(config: Mapping[str, Any], family: Family, hidden_size: int) -> tuple[AttentionConfig, ...]:
    """The attention of each layer. `config` has the family's defaults."""
    mixer = _mixer(config, family, hidden_size)
    local = 0 if family.local_theta is None else 1  # the rope of layers with a window
    num_layers = integer(config, "num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers = {num_layers} must be at most {MOST_LAYERS}")
    windows = _windows(config, family, num_layers)
    if family.own_heads:
        windows = (*windows[:-1], None)  # the last layer has none, whatever the keys say: so transformers reads them
    rotated = _rotated(config, family, len(windows))
    if family.local_rope and config.get("sliding_window") is not None:
        rotated = [window is not None for window in windows]
    mixers = [
        replace(mixer, window=window, rope=(0 if window is None else local) if rotates else None)
        for window, rotates in zip(windows, rotated, strict=True)
    ]
    if "num_attention_heads_per_layer" in family.keys:
        mixers = _with_heads(config, mixers)
    return tuple(_with_shared(config, _with_own_heads(config, mixers)) if family.own_heads else mixers)


def _with_heads(config: Mapping[str, Any], mixers: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """`mixers` with as many query heads as `num_attention_heads_per_layer` says, if it is there (Laguna)."""
    key = "num_attention_heads_per_layer"
    counts = config.get(key)
    if counts is None:
        return list(mixers)
    if not isinstance(counts, list) or len(counts) != len(mixers):
        raise CheckpointError(
            f"config.json: {key} = {counts!r} must be a list of num_hidden_layers = {len(mixers)} numbers"
        )
    heads = [integer({key: count}, key) for count in counts]
    for count in heads:
        _require_multiple(count, mixers[0].num_kv_heads, "num_key_value_heads", key)
    return [replace(mixer, num_heads=count) for mixer, count in zip(mixers, heads, strict=True)]


def _with_shared(config: Mapping[str, Any], mixers: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """`mixers` whose last `num_kv_shared_layers` read the keys and values of the last layer before them of their kind,
    with a window or without."""
    first = len(mixers) - integer(config, "num_kv_shared_layers", 0, least=0)
    found = list(mixers[: max(first, 0)])
    for index, mixer in list(enumerate(mixers))[len(found) :]:
        sources = [at for at in range(len(found)) if at < first and mixers[at].window == mixer.window]
        if not sources or mixers[sources[-1]].qkv_sizes[1:] != mixer.qkv_sizes[1:]:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers = {config['num_kv_shared_layers']}: no layer before layer {index} "
                "has keys and values of the same window and heads, which it could read"
            )
        found.append(replace(mixer, kv_from=sources[-1], v_norm=False, k_eq_v=False))
    return found


def _with_own_heads(config: Mapping[str, Any], mixers: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """`mixers` with what layers without a window have of their own (Gemma 4).

    Both spellings: `global_head_dim` and `num_global_key_value_heads`, which counts where `attention_k_eq_v` is true,
    or `per_layer_config`, which has for some layers, by index, the keys that differ.
    """
    same = flag(config, "attention_k_eq_v")
    wide = {"head_dim": config.get("global_head_dim")}
    if same and config.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = config["num_global_key_value_heads"]
    default = {str(index): wide for index, mixer in enumerate(mixers) if mixer.window is None}
    by_layer = default if config.get("per_layer_config") is None else config["per_layer_config"]
    if not isinstance(by_layer, Mapping) or not all(
        str(key).isdecimal() and int(key) < len(mixers) and isinstance(own, Mapping) and set(own) <= set(_OWN)
        for key, own in by_layer.items()
    ):
        raise CheckpointError(
            f"config.json: per_layer_config = {by_layer!r} must have, by index of a layer, objects with "
            f"{' or '.join(_OWN)} and no other key"
        )
    by_index = {int(key): own for key, own in by_layer.items()}  # transformers writes "05"
    found = []
    for index, mixer in enumerate(mixers):
        own = by_index.get(index, {})
        head_dim = _even_head_dim(own, mixer.k_dim)
        kv_heads = integer(own, "num_key_value_heads", mixer.num_kv_heads)
        _require_multiple(mixer.num_heads, kv_heads, f"num_key_value_heads of layer {index}")
        whole = same and mixer.window is None
        found.append(replace(mixer, num_kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim, k_eq_v=whole))
    for windowed in (False, True):
        sizes = sorted({mixer.k_dim for mixer in found if (mixer.window is not None) is windowed})
        if len(sizes) > 1:
            raise CheckpointError(
                f"config.json: per_layer_config = {by_layer!r}: layers {'with' if windowed else 'without'} a window "
                f"have heads of {choices(map(str, sizes))} values; one rope for all of them needs one size"
            )
    return found


_OWN = ("head_dim", "num_key_value_heads")


def _softmax_scale(config: Mapping[str, Any], family: Family, head_dim: int) -> float:
    if family.softmax_scale is not None:
        return family.softmax_scale
    if family.multipliers:
        return number(config, "attention_multiplier")
    return float(number(config, "query_pre_attn_scalar", head_dim) ** -0.5)


def _require_multiple(heads: int, kv_heads: int, key: str, heads_key: str = "num_attention_heads") -> None:
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json contradicts itself: {heads_key} = {heads} is not a multiple of {key} = {kv_heads}"
        )


def _gate(config: Mapping[str, Any], family: Family) -> OutputGate | None:
    if family.gate is None or family.gate_key is None:
        return None if family.gate is None else OutputGate(family.gate, by_head=False)
    said = config.get(family.gate_key)
    if said is not True and said not in ("per-head", "per-element"):
        raise CheckpointError(
            f"config.json: {family.gate_key} = {said!r} is not implemented; true, 'per-head' and 'per-element' are"
        )
    return OutputGate(family.gate, by_head=said != "per-element")


def _mixer(config: Mapping[str, Any], family: Family, hidden_size: int) -> AttentionConfig:
    """The attention of every layer, without window, as the keys without a kind of layer in their name say."""
    heads = integer(config, "num_attention_heads")
    # null means one KV head per attention head, as does absence where the family has no default
    kv_heads = heads if config.get("num_key_value_heads") is None else integer(config, "num_key_value_heads")
    _require_multiple(heads, kv_heads, "num_key_value_heads")
    qkv_bias, o_bias = (key in family.keys and flag(config, key) for key in family.bias_keys[:2])
    head_dim = _head_dim(config, hidden_size, heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        softmax_scale=_softmax_scale(config, family, head_dim),
        qk_norm=family.qk_norm if family.qk_norm_key is None else flag(config, family.qk_norm_key),
        qk_norm_whole=family.qk_norm_whole,
        v_norm=family.v_norm,
        qkv_bias=family.qkv_bias or qkv_bias,
        o_bias=o_bias,
        soft_cap=soft_cap(config, "attn_logit_softcapping"),
        sinks=family.sinks,
        gate=_gate(config, family),
    )


def _head_dim(config: Mapping[str, Any], hidden_size: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = integer(config, "head_dim")
    elif hidden_size % heads:
        raise CheckpointError(
            f"config.json contradicts itself: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {heads}, and there is no head_dim"
        )
    else:
        head_dim = hidden_size // heads
    return _even_head_dim({}, head_dim)


def _even_head_dim(own: Mapping[str, Any], default: int) -> int:
    head_dim = integer(own, "head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} is odd; rotary embedding rotates pairs of channels")
    return head_dim


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` decides, else `sliding_window_pattern` (every n-th layer has none), else
    `max_window_layers` (the layers before have none), else all layers have it."""
    window = config.get("sliding_window")
    if not flag(config, "use_sliding_window"):
        window = None
    elif window is not None:
        window = integer(config, "sliding_window")
    first = integer(config, "max_window_layers", 0, least=0)
    pattern = integer(config, "global_attn_every_n_layers", num_layers + 1)
    if not config.get("layer_types"):  # else EXAONE 4 has 0 there, or a word of letters: 'LLLG'
        pattern = integer(config, "sliding_window_pattern", pattern)
    default = [window is not None and i >= first and (i + 1) % pattern != 0 for i in range(num_layers)]
    if "no_rope_layers" in family.keys:  # layers that rotate see everything
        rotated = _rotated(config, family, num_layers)
        default = [window is not None and not rotates for rotates in rotated]
    layer_types = config.get("layer_types")
    if not layer_types:
        return tuple(window if slides else None for slides in default)
    kinds = {"full_attention": False, "attention": False, "sliding_attention": True}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json contradicts itself: layer_types = {layer_types!r} is not a list of "
            f"num_hidden_layers = {num_layers} entries"
        )
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in kinds:
            raise CheckpointError(
                f"config.json: layer_types has {kind!r}, which is not implemented; {choices(kinds)} are"
            )
    slides = [kinds[kind] for kind in layer_types]
    if window is None and any(slides):
        raise CheckpointError(
            "config.json contradicts itself: layer_types has 'sliding_attention', but sliding_window = "
            f"{config.get('sliding_window')!r} with use_sliding_window = {config.get('use_sliding_window')!r}"
        )
    if not family.mixed_windows and slides != default:
        raise CheckpointError(
            f"config.json: layer_types = {layer_types!r} with sliding_window = {window}: "
            f"in {family.architecture} all layers have the same window"
        )
    return tuple(window if slide else None for slide in slides)


def _rotated(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Which layers rotate queries and keys: those with a 1 in `no_rope_layers`, else all but every n-th (SmolLM3)."""
    if "no_rope_layers" not in family.keys:
        return [family.position_offset is None] * num_layers
    interval = integer(config, "no_rope_layer_interval")
    found = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= {0, 1}:
        raise CheckpointError(
            f"config.json: no_rope_layers = {found!r} must be a list of num_hidden_layers = {num_layers} entries, each "
            "0 or 1"
        )
    return [one == 1 for one in found]


def soft_cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)
