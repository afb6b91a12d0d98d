"""The memory of a request, and the split of a cache's memory over its groups. Imports no torch.

Layers without a window need room for every token of a sequence. Layers with one (and all others
that release blocks) need room for the window only, however long the sequence. The split that serves
long sequences best has the ratio of what one sequence of `max_model_len` tokens takes, and leaves
the windows room for a few sequences. Short sequences take as many tokens of each group, and would
then wait for window blocks while other memory is free. So windows come first: they get room for as
many sequences as run at once, each with its window, and all together computing one step, but

- never so much that a request of `max_model_len` tokens does not fit, and
- more than half of the memory only if the rest holds as many complete sequences of `max_model_len`
  tokens.

Layers that keep a state for each sequence count as windows, with as many states again for prefix
hits. Layers without a window get the rest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping

from freight.cache.groups import LayerGroup
from freight.cache.spec import KVCacheSpec

# Share of the memory that is free once the weights are loaded, without --kv-cache-memory. A GPU is
# rarely shared with other processes.
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


def blocks_of_request(spec: KVCacheSpec, num_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Return the most blocks, by group, that a request holds until it has `num_tokens` tokens."""
    return tuple(group.most_blocks(num_tokens, step_tokens) for group in spec.groups)


def bytes_of_request(spec: KVCacheSpec, num_tokens: int, step_tokens: int) -> int:
    """Return the most bytes that a request holds until it has `num_tokens` tokens."""
    return spec.bytes_of(blocks_of_request(spec, num_tokens, step_tokens))


def longest_request(
    spec: KVCacheSpec, memory: int, limit: int, step_tokens: int, num_seqs: int = 1
) -> int:
    """Return the tokens of the longest request of which `num_seqs` fit into `memory` bytes at once,
    a multiple of the block size. The search ends at the first length of `limit` or more.
    """
    size = spec.block_size
    lengths = range(size, limit + size, size)
    return size * bisect_right(
        lengths, memory, key=lambda length: held_memory(spec, length, num_seqs, step_tokens)
    )


def held_memory(spec: KVCacheSpec, max_model_len: int, num_seqs: int, step_tokens: int) -> int:
    """Return the bytes that `num_seqs` requests of `max_model_len` tokens need at once."""
    return spec.bytes_of(
        tuple(group.held_by(num_seqs, max_model_len, step_tokens) for group in spec.groups)
    )


def useful_memory(
    spec: KVCacheSpec, max_model_len: int, max_num_seqs: int, step_tokens: int
) -> int:
    """Return `held_memory` plus the spare blocks of each group (`LayerGroup.spare`), in bytes."""
    return spec.bytes_of(
        tuple(_useful(group, max_model_len, max_num_seqs, step_tokens) for group in spec.groups)
    )


def memory_over(
    spec: KVCacheSpec, layers: Mapping[str, Collection[int]], free: Mapping[str, int]
) -> int:
    """Return the bytes of the largest cache of which each device's part fits into what is `free`
    there, however the cache is divided over its groups. layers: those of each device.
    """
    least = []
    for device, own_layers in layers.items():
        for own, whole in _parts(spec, own_layers):
            if own:
                least.append(free[device] * whole // own)
    return min(least, default=0)


def bytes_over(
    spec: KVCacheSpec, layers: Mapping[str, Collection[int]], memory: int
) -> dict[str, int]:
    """Return the most bytes that each device has of a cache of `memory` bytes, however that is divided
    over its groups: the least memory of each with which `memory_over` has room for it.
    """
    of_device = {}
    for device, own_layers in layers.items():
        most = 0
        for own, whole in _parts(spec, own_layers):
            most = max(most, -(-memory * own // whole))
        of_device[device] = most
    return of_device


def _parts(spec: KVCacheSpec, own_layers: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield for each group what `own_layers` have of a block, and what all its layers have."""
    for group in spec.groups:
        own = sum(_layer_bytes(spec, index) for index in group.layers if index in own_layers)
        yield own, sum(_layer_bytes(spec, index) for index in group.layers)


def _layer_bytes(spec: KVCacheSpec, index: int) -> int:
    """Bytes that a layer has of a block, in proportion to the others of its group."""
    layer = spec.layers[index]
    assert layer is not None
    return layer.bytes_per_token + layer.bytes_per_state


def split_memory(
    spec: KVCacheSpec, memory: int, max_model_len: int, max_num_seqs: int, step_tokens: int
) -> tuple[int, ...]:
    """Return the blocks of each group. `memory`, in bytes, must hold a request of `max_model_len`
    tokens.
    """
    request = blocks_of_request(spec, max_model_len, step_tokens)
    needed = spec.bytes_of(request)
    assert needed <= memory, f"a request of {max_model_len} tokens takes {needed} bytes of {memory}"
    # the layers that keep every block of a sequence
    full_bytes = 0
    all_bytes = 0
    for group in spec.groups:
        all_bytes += group.bytes_per_block
        if group.keeps_all:
            full_bytes += group.bytes_per_block
    if full_bytes in (0, all_bytes):  # only one kind
        return tuple(count * memory // needed for count in request)
    full_request = full_bytes * -(-max_model_len // spec.block_size)

    def windows(num_seqs: int) -> tuple[int, ...]:
        """Return the blocks of the windows for `num_seqs` sequences; for 0, those of a single
        request.
        """
        counts = []
        for group, alone in zip(spec.groups, request, strict=True):
            if group.keeps_all:
                counts.append(0)
            elif num_seqs:
                counts.append(_useful(group, max_model_len, num_seqs, step_tokens))
            else:
                counts.append(alone)
        return tuple(counts)

    def too_many(num_seqs: int) -> bool:
        """Return whether `num_seqs` sequences leave too little for full layers. False for 0,
        because `memory` holds a request; monotonic, because `windows` only grows.
        """
        remaining = memory - spec.bytes_of(windows(num_seqs))
        if 2 * remaining >= memory:
            return remaining < full_request
        return remaining < num_seqs * full_request

    counts = windows(bisect_left(range(max_num_seqs + 1), True, key=too_many) - 1)
    remaining = memory - spec.bytes_of(counts)
    return tuple(count or remaining // full_bytes for count in counts)


def _useful(group: LayerGroup, max_model_len: int, num_seqs: int, step_tokens: int) -> int:
    blocks = group.held_by(num_seqs, max_model_len, step_tokens)
    return blocks + group.spare(blocks)
