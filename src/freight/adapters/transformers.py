"""FP8Cache: a KV cache in FP8 for transformers' `generate`.

    from freight.transformers import FP8Cache

    model.generate(**inputs, past_key_values=FP8Cache(model.config))

It stores the same bytes and scales as Freight's engine for the same keys and values. `update`
returns stored values, for new tokens as well, so attention sees the same values for a token in
every step. transformers' attention takes full tensors in the compute dtype, so each layer's keys
and values are decoded in every step: the cache saves memory, not time.

Keys arrive after their rotary embedding, as the engine stores them. Centers of keys are subtracted
before it, so they cannot be used here; the scales for keys without centers are. No gradient passes
through the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from freight.base.fields import JsonDict
from freight.base.options import choose
from freight.cache.contiguous import Storage, StoredTokens
from freight.cache.pages import expand_scale
from freight.checkpoint.kv_scales import read_scale_json
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import COMPUTE_FORMATS, Format, Granularity
from freight.fp8.scheme import KVScales, Scheme
from freight.model.config.keys import EVERY_KEY
from freight.model.config.model import RopeConfig
from freight.model.config.parse import parse_model_config
from freight.model.layers.rope import half_pairs
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.open import OpenCheckpoint, open_checkpoint
from freight.settings.device import probe
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.kv_source import kv_source, uniform_scales
from freight.settings.resolve import resolve_kv_cache
from freight.settings.skip_layers import (
    FLAG,
    StoredLayer,
    check_skipped,
    nothing_left,
    skipped_layers,
)

logger = logging.getLogger("freight")

KV_DTYPES = (
    *("fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"),
    "fp8_per_token_head",  # vLLM's name of fp8 with kv_scales="dynamic"
)


class FP8Layer(DynamicLayer):
    """A layer that attends to all tokens. `keys` and `values` are the stored FP8 values; `tokens`
    has the scales.
    """

    def __init__(self, k: Storage, v: Storage, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.storage = (k, v)
        self.tokens: tuple[StoredTokens, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(side.num_bytes for side in self.tokens)

    def __getstate__(self) -> JsonDict:
        """Leave out the views of stored values: pickle cannot write FP8 tensors, and copies would
        not share memory.
        """
        return self.__dict__ | {"keys": None, "values": None}

    def __setstate__(self, state: JsonDict) -> None:
        self.__dict__.update(state)
        self._show()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, for states of these shapes and on their device."""
        states = (key_states, value_states)
        tokens = tuple(StoredTokens(*pair) for pair in zip(self.storage, states, strict=True))
        super().lazy_initialization(key_states, value_states)
        self.tokens = tokens
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [batch, num_kv_heads, new tokens, head_dim], and return all
        stored ones.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v = self.tokens
        k.append(key_states)
        v.append(value_states)
        self._show()
        return k.read(key_states.dtype), v.read(value_states.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. `tokens_to_remove` is their negated number, as for transformers'
        layers. Raises ConfigError for a positive number.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}): write crop(-N) to remove the last N tokens"
            )
        self._keep(self.get_seq_length(), -tokens_to_remove)

    def reset(self) -> None:
        """Forget everything; the next `update` starts from an empty layer."""
        self.keys = self.values = None
        self.tokens = ()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times, next to each other."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], dtype=torch.int64, device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by these rows of it: indices, or a mask."""
        for side in self.tokens:
            side.select(indices)
        self._show()

    def _keep(self, last: int, but: int = 0) -> None:
        for side in self.tokens:
            side.keep(last, but)
        self._show()

    def _show(self) -> None:
        """Set `keys` and `values` to views for transformers' code, which reads lengths and devices
        from them.
        """
        if self.is_initialized:
            self.keys, self.values = [side.stored for side in self.tokens]


class FP8SlidingLayer(FP8Layer, DynamicSlidingWindowLayer):
    """A layer with a window. It keeps the last `sliding_window` - 1 tokens: the next one sees these
    and itself.

    With `record_past`, which transformers sets for assisted generation, it keeps all tokens until
    `crop` is called.
    """

    def __init__(self, k: Storage, v: Storage, sliding_window: int) -> None:
        super().__init__(k, v, sliding_window=sliding_window)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values like `FP8Layer.update`, and return the tokens that the new ones
        see, as `get_mask_sizes` counts them.
        """
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        if not self.record_past:
            self._keep(self.sliding_window - 1)
        visible = self.sliding_window - 1 + key_states.shape[2]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, and those that no later token sees.

        Raises ConfigError for a positive number, and if tokens that become visible again were
        already dropped: `activate_past_recording` keeps them.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}): write crop(-N) to remove the last N tokens"
            )
        if not self.is_initialized:
            return
        removed = min(-tokens_to_remove, self.cumulative_length)
        length = self.cumulative_length - removed
        window = self.sliding_window - 1
        if self.tokens[0].num_tokens - removed < min(length, window):
            raise ConfigError(
                f"crop({tokens_to_remove}) after {self.cumulative_length} tokens: a layer with a window of "
                f"{self.sliding_window} has only {self.tokens[0].num_tokens} of them; call the cache's "
                "activate_past_recording() before the tokens that are to be removed"
            )
        self._keep(window, removed)
        self.cumulative_length = length

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0


class FP8Cache(Cache):
    """A cache for `generate` and `forward` of transformers' decoder models that stores keys and
    values in FP8.

    config          the model's: `model.config`
    kv_cache_dtype  `fp8` or `fp8_e4m3` (E4M3 in the device's variant), `fp8_e4m3fn`,
                    `fp8_e4m3fnuz`, `fp8_e5m2`; `fp8_per_token_head` is `fp8` with `dynamic` scales
    kv_scales       as for `freight generate`. `auto`: the checkpoint's scales, else one per token
                    and KV head, measured when it is stored; E5M2 has none. `dynamic`: scales per
                    token. `checkpoint`: the checkpoint's. `unit`: 1.0. Or a kv_cache_scales.json,
                    or numbers: `0.03`, `0.03,0.02`
    kv_cache_dtype_skip_layers  layers that keep the dtype of their keys and values: numbers, or
                                `sliding_window`
    model           folder or hub id whose scales `auto` and `checkpoint` use; by default the one
                    that `config` was loaded from

    `kv_cache` holds the resolved cache and the reason of the choice. Raises ConfigError for an
    unknown value, a contradiction, and layers that are not attention; CheckpointError if scales are
    damaged, or missing in some layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kv_cache_dtype: str = "fp8",
        kv_scales: str | PathLike[str] = "auto",
        model: str | PathLike[str] | None = None,
        kv_cache_dtype_skip_layers: Sequence[str | int] = (),
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"FP8Cache's first argument is a {type(config).__name__}: give it model.config"
            )
        if kv_cache_dtype in (*COMPUTE_FORMATS, "auto"):
            raise ConfigError(
                f"kv_cache_dtype {kv_cache_dtype!r}: FP8Cache stores FP8; use transformers' DynamicCache"
            )
        choose("kv_cache_dtype", kv_cache_dtype, KV_DTYPES)
        layers = DynamicCache(config=config).layers
        _check(layers)
        args = EngineArgs(
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_dtype_skip_layers=kv_cache_dtype_skip_layers,
            kv_scales=str(kv_scales),
        )
        self.kv_cache, of_layers = _decide(config, args, model, layers)
        logger.info("KV cache: %s, scales %s %s", *_described(self.kv_cache))
        super().__init__(
            layers=[_stored_in_fp8(*pair) for pair in zip(layers, of_layers, strict=True)]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache holds: FP8 values, scales, and spare room for further
        tokens.
        """
        return sum(_num_bytes(layer) for layer in self.layers)

    def __repr__(self) -> str:
        format, source, _ = _described(self.kv_cache)
        return (
            f"FP8Cache({format}, scales {source}, {len(self.layers)} layers, {self.nbytes} bytes)"
        )


Sides = tuple[Storage, Storage] | None  # of keys and values; None for a layer that is not quantized


def _num_bytes(layer: object) -> int:
    if isinstance(layer, FP8Layer):
        return layer.num_bytes
    num_bytes = 0
    for name in ("keys", "values"):
        side = getattr(layer, name, None)
        if side is not None:
            num_bytes += side.nbytes
    return num_bytes


def _described(kv: KVCacheConfig) -> tuple[str, str, str]:
    source = str(kv.scale_source)
    if kv.scales is not None:
        source += f", per {kv.granularity}"
    note = kv.note
    if note:
        note = f"({note})"
    return kv.describe(), source, note


def _decide(
    config: PreTrainedConfig,
    args: EngineArgs,
    model: str | PathLike[str] | None,
    stored: Sequence[object],
) -> tuple[KVCacheConfig, list[Sides]]:
    """Decide the storage of each layer of `stored`, those of a DynamicCache, by the rules of
    `settings.resolve`.
    """
    num_layers = len(stored)
    word = args.kv_scales
    skipped = _skipped(args, stored)
    scale_source = kv_source(args)
    if scale_source.word == "group":
        raise ConfigError(
            "kv_scales='group' has a scale for 128 channels of a latent (MLA): transformers' cache stores a latent in "
            "two parts; use kv_scales='dynamic'"
        )
    scheme = Scheme()
    scales = KVScales((None,) * num_layers)
    shape = None
    if scale_source.file is not None:
        shape = parse_model_config(config.to_dict(), ignore_keys=EVERY_KEY)
        scales = read_scale_json(scale_source.file, shape)
    elif scale_source.values is not None:
        shape = parse_model_config(config.to_dict(), ignore_keys=EVERY_KEY)
        scales = uniform_scales(scale_source.values, num_layers)
    elif word in ("auto", "checkpoint"):
        opened = _open(config, word, model)
        if opened is not None:
            scheme = opened.scheme
            scales = _without_centers(opened)
            shape = opened.model
    kv = resolve_kv_cache(
        args, _dtype_of(config), scheme, scales, probe("auto").native_e4m3, skipped
    )
    if kv.scales is None or shape is None:
        storage = Storage(kv.format, kv.granularity is Granularity.TOKEN)
        alike: list[Sides] = [(storage, storage)] * num_layers
        for index in skipped:
            alike[index] = None
        return kv, alike
    if len(shape.layers) != num_layers:
        raise ConfigError(
            f"KV scales of {len(shape.layers)} layers, but the model has {num_layers}; name the model's folder, "
            "FP8Cache(config, model=FOLDER)"
        )
    if len(shape.attention) < len(shape.paged):
        raise ConfigError(
            "the KV scales of a model with latent attention (MLA) are for keys and values in one: transformers' cache "
            "stores a latent in two parts; use kv_scales='dynamic'"
        )
    sides: list[Sides] = []
    for index, layer in enumerate(kv.scales.layers):
        if layer is None:  # skipped: `resolve_kv_cache` refuses other layers without scales
            sides.append(None)
            continue
        mixer = shape.attention[index]
        keys = Storage(kv.format, False, _key_scale(layer.k, mixer, shape.ropes))
        sides.append((keys, Storage(kv.format, False, _value_scale(layer.v, mixer))))
    return kv, sides


def _skipped(args: EngineArgs, stored: Sequence[object]) -> frozenset[int]:
    """Return the layers of `stored` that are not quantized. Raises ConfigError for names of layers
    that cannot be skipped.
    """
    names = args.kv_cache_dtype_skip_layers
    check_skipped(names, args.kv_cache_dtype)
    layers = {}
    storing = set()
    for index, layer in enumerate(stored):
        layers[index] = StoredLayer(getattr(layer, "sliding_window", None))
        if isinstance(layer, DynamicLayer):
            storing.add(index)
    skipped = skipped_layers(names, layers, len(stored))
    for index in skipped - storing:
        raise ConfigError(
            f"{FLAG} {index}: layer {index} stores no keys and values; skip the layer that it reads"
        )
    if names and skipped == storing:
        raise nothing_left(names)
    return skipped


def _dtype_of(config: PreTrainedConfig) -> Format:
    """Return the format in which the model's default cache would store."""
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if name in map(str, COMPUTE_FORMATS):
        return Format(name)
    return Format.BFLOAT16


def _value_scale(scales: tuple[float, ...], mixer: AttentionConfig) -> Tensor:
    return expand_scale(scales, mixer.num_kv_heads, mixer.v_dim)


def _key_scale(
    scales: tuple[float, ...], mixer: AttentionConfig, ropes: Sequence[RopeConfig]
) -> Tensor:
    """Return scales of keys in the order of the checkpoint's channels, which may differ from
    Freight's (`RopeConfig.interleaved`).
    """
    scale = expand_scale(scales, mixer.num_kv_heads, mixer.k_dim)
    if mixer.rope is None or not ropes[mixer.rope].interleaved:
        return scale
    return scale[:, half_pairs(1, mixer.k_dim, ropes[mixer.rope].rotary_dim).argsort()]


def _open(
    config: PreTrainedConfig, word: str, model: str | PathLike[str] | None
) -> OpenCheckpoint | None:
    """Open the checkpoint with the requested scales; None for a model that was not loaded from one.

    Keys of its config.json that Freight would refuse are ignored, because transformers computes the
    model.
    """
    name = str(model or config.name_or_path or "")
    if not name:
        if word == "checkpoint":
            raise ConfigError(
                "kv_scales='checkpoint', but config was not loaded from one: name it, FP8Cache(config, model=FOLDER)"
            )
        return None
    revision = None
    if not model:
        revision = getattr(config, "_commit_hash", None)
    try:
        return open_checkpoint(name, revision, EVERY_KEY)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{error}; kv_scales='dynamic' needs no checkpoint") from error


def _without_centers(opened: OpenCheckpoint) -> KVScales:
    if any(layer is not None and layer.k_center for layer in opened.kv_scales.layers):
        return opened.uncentered_scales()
    return opened.kv_scales


def _stored_in_fp8(layer: Any, sides: Sides) -> Any:
    """Return the layer that replaces one of `DynamicCache`."""
    if sides is None:
        return layer
    if type(layer) is DynamicLayer:
        return FP8Layer(*sides)
    if type(layer) is DynamicSlidingWindowLayer:
        return FP8SlidingLayer(*sides, layer.sliding_window)
    return layer  # a DummyLayer, which has no keys, or reads those of another layer


def _check(layers: Sequence[object]) -> None:
    for index, layer in enumerate(layers):
        kind = type(layer)
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer) and kind.__name__ != "DummyLayer":
            raise ConfigError(
                f"layer {index} keeps its state in a {kind.__name__}: FP8Cache has layers of attention, with "
                "and without a window; use transformers' DynamicCache for this model"
            )
