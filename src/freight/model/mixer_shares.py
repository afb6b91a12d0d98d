"""Parts of a mixer's tensors that a rank has, by kind of mixer. Imports no torch.

A rank has some heads, or channels of a short convolution, and its part of the outputs. The latents
of latent attention, which all heads read, are computed by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from freight.checkpoint.headers import Index
from freight.model.config.layer import (
    AttentionConfig,
    DeltaNetConfig,
    KimiDeltaConfig,
    LatentConfig,
    Mamba2Config,
    Mixer,
    ShortConvConfig,
)
from freight.model.config.tensor_names import TensorNames
from freight.model.mixer_parts import mixer_parts
from freight.parallel.shards import kv_part, norm_is_cut, part

Pieces = tuple[Index, ...]  # of a tensor, joined along their first dimension
Cut = tuple[str, Pieces]


def mixer_pieces(
    mixer: Mixer, hidden_size: int, names: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    """Yield the tensors of a layer's mixer that are cut, by their names within the layer, with the
    pieces of `rank`; also biases that it may not have.
    """
    if mixer is None:
        return
    yield from _PIECES[type(mixer)](mixer, hidden_size, names, rank, size)
    *_, out = mixer_parts(mixer, hidden_size, names).projections.values()
    yield from of_modules(out.modules, (hidden_size,), [part(hidden_size, rank, size)])


def of_modules(
    modules: Sequence[str], sizes: Sequence[int], rows: Sequence[slice]
) -> Iterator[Cut]:
    """Yield weight and bias of `modules` with `rows` of each projection, which has `sizes` rows; one
    module may have the rows of all.
    """
    if len(modules) == 1:
        starts = accumulate(sizes, initial=0)
        yield from _module(modules[0], *map(_moved, rows, starts))
        return
    for module, one in zip(modules, rows, strict=True):
        yield from _module(module, one)


def _module(module: str, *rows: slice) -> Iterator[Cut]:
    yield f"{module}.weight", _rows(*rows)
    yield f"{module}.bias", _rows(*rows)


def _rows(*rows: slice) -> Pieces:
    return tuple((one,) for one in rows)


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _scaled(heads: slice, each: int) -> slice:
    """Return the rows of `heads`, which have `each` rows."""
    return slice(heads.start * each, heads.stop * each)


def _attention(
    mixer: AttentionConfig, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    parts = mixer_parts(mixer, hidden_size, of_all)
    qkv = parts.projections["qkv"]
    rows = [part(qkv.sizes[0], rank, size)]
    heads = kv_part(mixer.num_kv_heads, rank, size)
    rows += [_scaled(heads, of_kv // mixer.num_kv_heads) for of_kv in qkv.sizes[1:]]
    yield from of_modules(qkv.modules, qkv.sizes, rows)
    for module, (outputs, _) in parts.kept.items():
        yield from _module(module, part(outputs, rank, size))
    for name in parts.exact:  # sinks
        yield name, _rows(part(mixer.num_heads, rank, size))


def _latent(
    mixer: LatentConfig, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    names = of_all.latent
    heads = part(mixer.num_heads, rank, size)
    q = names.q if mixer.q_rank is None else names.q_b
    yield from _module(q, _scaled(heads, mixer.nope + mixer.rotated))
    yield from _module(names.kv_b, _scaled(heads, mixer.nope + mixer.head_size))
    yield from _module(names.output_gate, heads)


def _delta_net(
    mixer: DeltaNetConfig, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    names = of_all.delta_net
    key_heads = kv_part(mixer.key_heads, rank, size)
    heads = part(mixer.heads, rank, size)
    keys = _scaled(key_heads, mixer.k_dim)
    values = _scaled(heads, mixer.v_dim)
    all_keys = mixer.key_heads * mixer.k_dim
    each = mixer.heads // mixer.key_heads
    channels = keys, _moved(keys, all_keys), _moved(values, 2 * all_keys)
    if len(names.qkvz) > 1:
        of_qkv, of_z = names.qkvz
        yield from _module(of_qkv, *channels)
        yield from _module(of_z, values)
    else:
        rows = _by_key_head(key_heads, heads, each, 2 * mixer.k_dim, mixer.v_dim)
        yield from _module(names.qkvz[0], *rows)
    if len(names.ba) > 1:
        yield from of_modules(names.ba, (mixer.heads,) * 2, (heads,) * 2)
    else:
        yield from _module(names.ba[0], *_by_key_head(key_heads, heads, each, 0, 1))
    yield names.conv, _rows(*channels)
    yield names.a_log, _rows(heads)
    yield names.dt_bias, _rows(heads)


def _by_key_head(
    key_heads: slice, heads: slice, each: int, own: int, of_head: int
) -> Sequence[slice]:
    """Return the rows of `key_heads` and `heads` where a key head has `own` rows, then twice the
    rows of its `each` heads, which have `of_head`.
    """
    side = each * of_head
    block = own + 2 * side
    if heads.start == key_heads.start * each and heads.stop == key_heads.stop * each:
        return [_scaled(key_heads, block)]
    first = key_heads.start * block  # of the only one, whose heads several ranks share
    of_heads = _moved(_scaled(heads, of_head), first + own - key_heads.start * side)
    owned = [slice(first, first + own)] if own else []
    return [*owned, of_heads, _moved(of_heads, side)]


def _kimi_delta(
    mixer: KimiDeltaConfig, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    names = of_all.kimi_delta
    heads = part(mixer.heads, rank, size)
    channels = _scaled(heads, mixer.head_dim)
    last = 0 if mixer.rank is None else 1  # values between two steps are whole on every rank
    for module in (*names.qkv, names.decay[last], names.output_gate[last]):
        yield from _module(module, channels)
    yield from _module(names.beta, heads)
    for name in (*names.conv, names.dt_bias):
        yield name, _rows(channels)
    before = (slice(None), slice(None)) if names.wide else ()
    yield names.a_log, ((*before, heads),)


def _short_conv(
    mixer: ShortConvConfig, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    names = of_all.short_conv
    channels = part(mixer.channels, rank, size)
    yield from of_modules((names.in_proj,), (mixer.channels,) * 3, (channels,) * 3)
    yield from _module(names.conv, channels)


def _mamba2(
    mixer: Mamba2Config, hidden_size: int, of_all: TensorNames, rank: int, size: int
) -> Iterator[Cut]:
    names = of_all.mamba
    heads = part(mixer.heads, rank, size)
    values = _scaled(heads, mixer.head_dim)
    all_values = mixer.heads * mixer.head_dim
    keys = _scaled(kv_part(mixer.groups, rank, size), mixer.state_size)
    all_keys = mixer.groups * mixer.state_size
    of_conv = (all_values, all_keys, all_keys), (values, keys, keys)
    yield from of_modules((names.conv,), *of_conv)
    sizes = (all_values, *of_conv[0], mixer.heads)
    yield from of_modules((names.in_proj,), sizes, (values, *of_conv[1], heads))
    for name in (names.a_log, names.skip, names.dt_bias):
        yield name, _rows(heads)
    if norm_is_cut(mixer, size):
        yield names.norm, _rows(values)


_PIECES: Mapping[type, Callable[[Any, int, TensorNames, int, int], Iterator[Cut]]] = {
    AttentionConfig: _attention,
    LatentConfig: _latent,
    DeltaNetConfig: _delta_net,
    KimiDeltaConfig: _kimi_delta,
    ShortConvConfig: _short_conv,
    Mamba2Config: _mamba2,
}
