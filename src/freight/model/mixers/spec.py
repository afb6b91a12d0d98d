"""MixerSpec: a kind of mixer as data, and what all its kinds have. Imports no torch.

A kind is a frozen dataclass that answers what others ask: which tensors it has (`parts`), what the
cache keeps of the tokens before (`PagedMixer`, `StateMixer`), and what each of several ranks has of
both (`dividing.py`). The shapes of tensors (`model/shapes.py`), the bytes of a loaded model
(`model/sizes.py`), the modules that the quantizer knows (`quantizer/modules.py`) and the cache's
layout (`cache/spec.py`) follow from these answers; none of them knows a kind. `registry.py` has the
function that builds each kind's layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from freight.fp8.formats import Format
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import CacheShare, Cut, Rank, of_modules
from freight.operands.tiles import STATE_TILE


@dataclass(frozen=True)
class Projected:
    """Linear modules that share their input and are computed together.

    modules    names within the layer; one name may have the rows of several projections
    sizes      outputs of each projection
    columns    inputs
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    columns: int
    bias: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Outputs of each module."""
        return self.sizes if len(self.modules) > 1 else (sum(self.sizes),)


@dataclass(frozen=True)
class MixerParts:
    """The tensors and modules of a mixer. All names are relative to the layer.

    module        the mixer's module: KV scales are stored under it, and messages name it
    projections   by their field in the built mixer (`mixers/attention/layer.py`); these are quantized
    kept          Linear modules that stay in 16 bits -> outputs, inputs; merged, but for those
                  below
    alone         modules of `kept` with an input of their own
    cut           the module of `kept` that is split at load into the matrices of by_head
    by_head       number of matrices, outputs, inputs
    norms         the weight of an RMSNorm -> its channels
    plain         a tensor that is held in the compute dtype, whatever the matrices are -> its shape
    exact         a tensor that is held in float32 -> its shape
    made          count of float32 numbers that are made at load, not read
    factors       count of numbers in the compute dtype that are made at load
    whole         modules whose rows go head by head, regrouped at load -> rows of each part of a
                  head, inside which no block of scales may end
    """

    module: str = ""
    projections: Mapping[str, Projected] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    cut: str = ""
    by_head: tuple[tuple[int, int, int], ...] = ()
    norms: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    exact: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    made: int = 0
    factors: int = 0
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state, of one sequence: its name, shape and format."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.format.bytes


def column_part(channels: int, width: int, compute: Format) -> StatePart:
    """Build the part for the last inputs of a convolution."""
    return StatePart("columns", (width - 1, channels), compute)


def matrix_parts(
    *,
    key_heads: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    compute: Format,
    state: Format,
    by_channel: bool = False,
) -> tuple[StatePart, ...]:
    """Build the parts that `KernelSet.recurrence` keeps (`operands/states.py`). `by_channel`: each
    channel of a key has its decay.
    """
    scale = (StatePart("scale", (heads, v_dim), Format.BFLOAT16),) if state.is_quantized else ()
    return (
        StatePart("state", (heads, k_dim, v_dim), state),
        *scale,
        StatePart("k", (STATE_TILE, key_heads, k_dim), compute),
        StatePart("u", (STATE_TILE, heads, v_dim), compute),
        StatePart("decay", (STATE_TILE, heads, *((k_dim,) if by_channel else ())), Format.FLOAT32),
    )


class MixerSpec(ABC):
    """The part of a layer that works across tokens, as data.

    Its last projection returns the hidden size. A kind that several ranks can divide defines the
    last four methods; `rank_faults` refuses the others by name.
    """

    @abstractmethod
    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide, of the layer that messages call `where`."""
        kind = type(self).__name__.removesuffix("Config")
        yield f"layers like {where} ({kind}) are not divided over ranks"

    def divided(self, size: int) -> Self:
        """Return the mixer that each of `size` ranks computes."""
        raise NotImplementedError

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the pieces of `rank` as `pieces`, but for the last projection."""
        raise NotImplementedError

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return what `rank` has of each part that the cache may keep of a layer."""
        raise NotImplementedError

    def pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the tensors of a layer that are cut, by their names within it, with the pieces of
        `rank`; also biases that it may not have.
        """
        yield from self.inner_pieces(hidden_size, all_names, rank)
        *_, out = self.parts(hidden_size, all_names).projections.values()
        yield from of_modules(out.modules, (hidden_size,), [rank.part(hidden_size)])


class PagedMixer(MixerSpec):
    """A mixer that reads stored keys and values. Its layer is called with a `LayerKV`.

    num_heads      heads of queries
    num_kv_heads   heads of keys and values
    k_dim, v_dim   channels of a key and of a value
    softmax_scale  multiplies q . k
    window         sliding window in tokens; None: every key is seen
    rope           index into `ModelConfig.ropes`; None: nothing is rotated
    kv_from        index of the layer whose pages it reads; None: it has pages
    v_in_k         whether a value is the last `v_dim` channels of its key, and is not stored
    index_dim      channels of a further key, by which an indexer chooses keys; 0: there is none
    """

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    softmax_scale: float
    window: int | None
    rope: int | None
    kv_from: int | None
    v_in_k: bool = False
    index_dim: int = 0

    @property
    def rope_channels(self) -> int:
        """Channels of a head to which a rope, or its partial factor, applies."""
        return self.k_dim


class StateMixer(MixerSpec):
    """A mixer that keeps a state of each sequence. Its layer is called with a `PagedState`."""

    @abstractmethod
    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state: matrices in the format `state`, what else is not
        float32 in `compute`.
        """

    @property
    def recurrent(self) -> bool:
        """True if the state has matrices, in the format of --state-dtype."""
        parts = self.state_parts(Format.BFLOAT16, Format.BFLOAT16)
        return any(state_part.name == "state" for state_part in parts)


Mixer = PagedMixer | StateMixer | None  # None: the layer has none


def mixer_parts(mixer: Mixer, hidden_size: int, names: TensorNames) -> MixerParts:
    """Return the parts of a layer's mixer; empty for a layer without one."""
    if mixer is None:
        return MixerParts()
    return mixer.parts(hidden_size, names)
