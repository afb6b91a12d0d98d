"""The cache of a layer: its form, its bytes per token, and the groups that layers form. Imports no
torch.

Format and granularity belong to each layer, so mixed caches need no further concept; the pool sums
bytes, scales included. A mixer says what it keeps, pages or a state (`model/mixers/spec.py`);
`groups.py` has the rules for a sequence's blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from freight.cache.groups import LayerGroup, Pages, StateBlocks, capacity_tokens
from freight.errors import ConfigError
from freight.fp8.formats import SCALE_GROUP, Format, Granularity
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import Mixer, StateMixer, StatePart
from freight.operands.tiles import STATE_TILE
from freight.parallel.shards import of_rank
from freight.settings.engine import KVCacheConfig, LayerKVFormat
from freight.settings.states import default_state

LEAST_EVERY = 64  # least tokens of a block of states by default
_MEASURED = (None, Granularity.TOKEN, Granularity.GROUP)  # granularities without static scales


@dataclass(frozen=True)
class LayerKVSpec:
    """One layer's K and V pages.

    granularity   None for 16 bits
    window        tokens that the layer sees; None: every token
    source        layer whose pages this one reads; it then has no pages. None: it has pages
    v_in_k        whether values are the last `v_dim` channels of keys, so that they take no memory
                  (`KVPages.v_in_k`)
    index_dim     channels of a key of the layer's indexer, which is stored in `format` beside the
                  pages (`IndexPages`); 0: it has none
    """

    format: Format
    granularity: Granularity | None
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    source: int | None = None
    v_in_k: bool = False
    index_dim: int = 0

    def __post_init__(self) -> None:
        grouped = self.granularity is Granularity.GROUP
        assert not grouped or (self.v_in_k and self.v_dim % SCALE_GROUP == 0), (
            "refused by name in settings.kv_source"
        )

    @property
    def values_per_token(self) -> int:
        """Values of K and V of one token; 0 for a layer that reads another's pages."""
        if self.source is not None:
            return 0
        if self.v_in_k:
            return self.num_kv_heads * self.k_dim
        return self.num_kv_heads * (self.k_dim + self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: of K and V, with measured scales in bfloat16, and of the indexer's key,
        with a float32 scale in 8 bits. `token`: one scale per KV head, for K and V separately unless
        V lies in K. `group`: scales, and the channels of K outside V, in bfloat16.
        """
        if self.source is not None:
            return 0
        return self._kv_bytes_per_token + self._index_bytes_per_token

    @property
    def _index_bytes_per_token(self) -> int:
        scale = 4 if self.index_dim and self.format.is_quantized else 0
        return self.index_dim * self.format.bytes + scale

    @property
    def _kv_bytes_per_token(self) -> int:
        if self.granularity is Granularity.GROUP:
            wide = self.k_dim - self.v_dim + self.v_dim // SCALE_GROUP
            return self.num_kv_heads * (self.v_dim * self.format.bytes + 2 * wide)
        values = self.values_per_token * self.format.bytes
        if self.granularity is not Granularity.TOKEN:
            return values
        scales = 2 * self.num_kv_heads
        if not self.v_in_k:
            scales *= 2
        return values + scales

    @property
    def bytes_per_state(self) -> int:
        return 0

    @property
    def key(self) -> Hashable:
        """Key of the layer's group: layers with equal keys form a group."""
        return "pages", self.window

    @property
    def alone(self) -> LayerKVSpec:
        """The same layer with every token of a sequence kept, in pages that it does not share."""
        return replace(self, window=None, source=None)

    def unquantized(self, format: Format) -> LayerKVSpec:
        """Return the same layer in `format`, of 16 or 32 bits."""
        return replace(self, format=format, granularity=None)

    def grouped(self, members: Mapping[int, LayerSpec], spec: KVCacheSpec) -> Pages:
        """Build the group of `members`, layers by index, which have this layer's `key`."""
        return Pages(
            tuple(members),
            sum(layer.bytes_per_token for layer in members.values()),
            self.window,
            spec.block_size,
        )


@dataclass(frozen=True)
class LayerStateSpec:
    """One layer's state: its summary of all tokens before, in a size that does not grow with them.

    It has the properties of `LayerKVSpec`. Tokens have no slots in it, and no layer reads another
    layer's state.
    """

    parts: tuple[StatePart, ...]

    source = None
    bytes_per_token = values_per_token = 0

    def taking_back(self, rows: int) -> LayerStateSpec:
        """Return the state with room for the inputs of so many rows that may be taken back: of a tile but
        its first one, all that can be.
        """
        parts = []
        for part in self.parts:
            if part.name == "columns":
                kept, channels = part.shape
                part = replace(part, shape=(kept + min(rows, STATE_TILE - 1), channels))
            parts.append(part)
        return replace(self, parts=tuple(parts))

    @property
    def bytes_per_state(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def state_format(self) -> Format | None:
        """Format of the state's matrices; None for a layer without matrices."""
        for part in self.parts:
            if part.name == "state":
                return part.format
        return None

    @property
    def float32_bytes_per_state(self) -> int:
        """Bytes of a state with its matrices in float32, which need no scales."""
        num_bytes = 0
        for part in self.parts:
            if part.name == "state":
                num_bytes += replace(part, format=Format.FLOAT32).bytes
            elif part.name != "scale":
                num_bytes += part.bytes
        return num_bytes

    @property
    def key(self) -> Hashable:
        return "states"

    @property
    def alone(self) -> LayerStateSpec:
        return self

    def unquantized(self, format: Format) -> LayerStateSpec:
        """Return the spec unchanged: the formats of pages do not apply to states."""
        return self

    def grouped(self, members: Mapping[int, LayerSpec], spec: KVCacheSpec) -> StateBlocks:
        assert spec.state_every is not None
        return StateBlocks(
            tuple(members),
            sum(layer.bytes_per_state for layer in members.values()),
            spec.state_every,
        )


LayerSpec = LayerKVSpec | LayerStateSpec  # what the cache holds of one layer


def layer_spec(
    mixer: Mixer, kind: LayerKVFormat, compute: Format, state: Format | None = None
) -> LayerSpec | None:
    """Return the cache spec of a layer with this mixer; None if it keeps nothing.

    Pages are stored as `kind`, states as `state` (None: `default_state`), all else in `compute`.
    """
    if mixer is None:
        return None
    if isinstance(mixer, StateMixer):
        return LayerStateSpec(mixer.state_parts(compute, state or default_state(compute)))
    return LayerKVSpec(
        format=kind.format,
        granularity=kind.granularity,
        num_kv_heads=mixer.num_kv_heads,
        k_dim=mixer.k_dim,
        v_dim=mixer.v_dim,
        window=mixer.window,
        source=mixer.kv_from,
        v_in_k=mixer.v_in_k,
        index_dim=mixer.index_dim,
    )


def cache_spec(
    kv: KVCacheConfig,
    model: ModelConfig,
    block_size: int,
    compute: Format | None = None,
    state_every: int | None = None,
    max_len: int | None = None,
    ranks: int = 1,
    drafts: int = 0,
) -> KVCacheSpec:
    """Build the spec of the cache of every layer of `model`, stored in the formats of `kv`, for
    sequences of up to `max_len` tokens.

    compute       compute format; None: the checkpoint's dtype
    state_every   tokens between kept states; None: `default_every`
    max_len       longest sequence in tokens; None: `max_position_embeddings`
    ranks         number of ranks; the spec is that of one of them, with its heads
    drafts        most drafts of a sequence in a step, which states have to take back

    Raises ConfigError for a `state_every` if no layer keeps a state, and as
    `parallel.shards.require_divisible`.
    """
    compute = compute or model.checkpoint_format
    if ranks > 1:  # prefixes end where they end with one rank
        model_spec = cache_spec(kv, model, block_size, compute, state_every, max_len, drafts=drafts)
        every = model_spec.state_every
        rank_model = of_rank(model, ranks)
        return cache_spec(kv, rank_model, block_size, compute, every, max_len, drafts=drafts)
    layers = []
    for index, layer in enumerate(model.layers):
        stored = layer_spec(layer.mixer, kv.of_layer(index), compute, kv.state)
        if isinstance(stored, LayerStateSpec):
            stored = stored.taking_back(drafts)
        layers.append(stored)
    spec = KVCacheSpec(tuple(layers), block_size)
    if spec.bytes_per_state == 0:
        if state_every is not None:
            raise ConfigError(
                f"--state-every {state_every}: no layer of this model ({model.model_type}) keeps a state for each "
                "sequence, there are pages of keys and values alone; omit --state-every"
            )
        return spec
    return replace(
        spec,
        state_every=state_every or default_every(spec, max_len or model.max_position_embeddings),
    )


def with_layers(
    spec: KVCacheSpec,
    mixers: Sequence[Mixer],
    kinds: Sequence[LayerKVFormat],
    compute: Format,
    ranks: int = 1,
) -> KVCacheSpec:
    """Return the cache of a model and of further layers behind it, those of a head that drafts, in the
    blocks of layers that keep every token. They have attention; kinds: the stored format of each. Of
    several `ranks` it is that of one of them, as `spec`; `mixers` are whole.
    """
    first = len(spec.layers)
    layers = []
    for mixer, kind in zip(mixers, kinds, strict=True):
        if ranks > 1 and mixer is not None:
            mixer = mixer.divided(ranks)
        layer = layer_spec(mixer, kind, compute)
        assert isinstance(layer, LayerKVSpec), "refused when it was opened"
        if layer.source is not None:
            layer = replace(layer, source=layer.source + first)
        layers.append(replace(layer, window=None))
    return replace(spec, layers=(*spec.layers, *layers))


def measured(kind: LayerKVFormat) -> LayerKVFormat:
    """Return the format of the keys and values of a layer beside the model's, for which a checkpoint
    has no static scales.
    """
    if kind.granularity in _MEASURED:
        return kind
    return replace(kind, granularity=Granularity.TOKEN)


def default_every(spec: KVCacheSpec, max_len: int) -> int:
    """Return the least power of two, from LEAST_EVERY on, at which a state takes no more memory
    than the pages of as many tokens.

    It is at most an eighth of `max_len`, so that short contexts have prefix hits as well.
    """
    longest = max(spec.block_size, STATE_TILE, 1 << max(0, (max_len // 8).bit_length() - 1))
    interval = min(max(LEAST_EVERY, spec.block_size), longest)
    while interval < longest and interval * spec.bytes_per_token < spec.bytes_per_state:
        interval *= 2
    return interval


@dataclass(frozen=True)
class KVCacheSpec:
    """The spec of all layers of one model's cache. Prefix keys are made for every `block_size`
    tokens.

    layers        specs by layer; None for a layer that keeps nothing
    state_every   tokens of a block of states; None if no layer keeps one
    """

    layers: tuple[LayerSpec | None, ...]
    block_size: int
    state_every: int | None = None

    @property
    def kept(self) -> dict[int, LayerSpec]:
        """Layers that have a part in the cache, stored or another layer's, by index."""
        return {index: layer for index, layer in enumerate(self.layers) if layer is not None}

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers with equal keys, in the order of their first layers."""
        members: dict[Hashable, dict[int, LayerSpec]] = {}
        for index, layer in self.kept.items():
            if layer.source is None:
                members.setdefault(layer.key, {})[index] = layer
        groups = []
        for layers in members.values():
            first = next(iter(layers.values()))
            groups.append(first.grouped(layers, self))
        return tuple(groups)

    @property
    def repeatable(self) -> bool:
        """True if any step that is computed again stores the same; a state would take in the tokens of a
        tile twice.
        """
        return all(group.has_slots for group in self.groups)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence in all layers."""
        return sum(layer.bytes_per_state for layer in self.kept.values())

    @property
    def state_format(self) -> Format | None:
        """Stored format of recurrent states; None if no layer keeps one."""
        for layer in self._states:
            if layer.state_format is not None:
                return layer.state_format
        return None

    @property
    def float32_bytes_per_state(self) -> int:
        """`bytes_per_state` if recurrent states were stored in float32."""
        return sum(layer.float32_bytes_per_state for layer in self._states)

    @property
    def _states(self) -> tuple[LayerStateSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, LayerStateSpec))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every layer with pages keeps."""
        return sum(layer.bytes_per_token for layer in self.kept.values())

    @property
    def values_per_token(self) -> int:
        """Values in the pages of a token that every layer keeps."""
        return sum(layer.values_per_token for layer in self.kept.values())

    def blocks_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks, by group, of a sequence of `num_tokens` tokens that releases none."""
        return tuple(-(-num_tokens // group.tokens_per_block) for group in self.groups)

    def unquantized(self, format: Format) -> KVCacheSpec:
        """Return the cache of the same layers in `format`, of 16 or 32 bits."""
        return replace(
            self, layers=tuple(layer and layer.unquantized(format) for layer in self.layers)
        )

    def tokens_in(self, memory: int) -> int:
        """Return the tokens that fit into `memory` bytes in every layer, a multiple of the block
        size; if no layer has pages, the tokens of the kept states.
        """
        if self.bytes_per_token == 0 and self.state_every is not None:
            return memory // self.bytes_per_state * self.state_every
        return memory // (self.bytes_per_token * self.block_size) * self.block_size

    def capacity_tokens(self, num_blocks: tuple[int, ...]) -> int:
        """Return the tokens of complete sequences that `num_blocks` blocks of each group hold: the
        least of the groups that keep all blocks, or of all groups if none does.
        """
        return capacity_tokens(self.groups, num_blocks)

    def bytes_of(self, num_blocks: tuple[int, ...]) -> int:
        """Return the bytes of `num_blocks` blocks in each group."""
        num_bytes = 0
        for count, group in zip(num_blocks, self.groups, strict=True):
            num_bytes += count * group.bytes_per_block
        return num_bytes
