"""A gather between GPUs that reach each other's memory: each rank stores its columns into the
buffers of all.

In turn t a rank stores its columns, by row, into slot t % 2 of every rank's buffer, so that each slot
becomes the whole matrix. Then it sets its flag in every buffer to t, waits until the flags in its own
buffer have come to t, and copies its slot. `parallel/peers.py` says where what is.

Fences. A flag is set with release semantics, and read with acquire semantics, both for the whole
system: what a rank stored before it set a flag is seen by whoever has seen the flag. With the scope of
one GPU, stores might still be on their way to the other one.

Two slots are enough. A rank stores into slot t % 2 again in turn t + 2. Its kernel of turn t + 1 has
ended then, so the flags of all had come to t + 1. Each rank sets those in its own kernel of turn
t + 1, which begins when its kernel of turn t has ended, and that one has read the slot. One slot is
not enough: a rank whose turn t has ended stores the columns of turn t + 1 while another one may still
read those of turn t. tests/kernels/triton/push_model.py goes through all orders of two and of three
ranks.

Programs. Each has an equal share of every rank's part, and flags of its own, one from each rank: what
it copies is what the same program of each rank stored. So no program waits for another one of its
rank. A turn's programs differ with its sizes, so a slot may be rewritten by other programs than those
that read it. That takes no more flags, for the argument is about kernels: all programs of turn t have
ended before any of turn t + 1 begins. The last program to end counts the turn, in the memory of the
device, so a captured launch goes on counting. All programs are on the device at once, as PROGRAMS of
one warp are few; otherwise those of two ranks might wait for others that never begin. One warp, since
a wait for a wave's stores on AMD covers no other wave of its program. Launches of one rank are made
in one stream, and without programmatic dependent launch, which would begin a kernel early.

A flag is set by an exchange and read by adding 0, which every version of Triton has with both
semantics and scopes. Between GPUs that takes atomics over their link: NVLink and xGMI have them.

Leaving. While it waits, a program looks at a word in the host's memory. If that is set, it ends the
turn: its output is undefined, LEFT in the buffer and STATUS in the host's page say so, and later turns
store nothing and end at once. For a rank that goes on without waiting might overwrite what another
one still reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.parallel import peers
from freight.parallel.peers import PROGRAMS, Layout, Peers

TURN = tl.constexpr(peers.TURN)
LEAVING = tl.constexpr(peers.LEAVING)
LEFT = tl.constexpr(peers.LEFT)
FLAGS = tl.constexpr(peers.FLAGS)
FAILED = tl.constexpr(peers.FAILED)
STATUS = tl.constexpr(peers.STATUS)
LOOK = tl.constexpr(64)  # looks at the flags for each at the host's word, which is over PCIe
# Words that a program loads before it stores them: of rows that are whole vectors of 16 bytes, and of
# others, each of whose words takes an address of its own
TILES = (1024, 256)


@triton.jit
def _slot(peers_ptr, rank, turn, like, SLOTS: tl.constexpr, STRIDE: tl.constexpr):
    """Return the slot of this turn in the buffer of `rank`, as a pointer to words of `like`."""
    place = tl.load(peers_ptr + rank) + SLOTS + turn % 2 * STRIDE
    return tl.multiple_of(place.to(like), 16)


@triton.jit
def _place(index, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where words `index` of the first rank's part are in the matrix of all."""
    return index + index // COLUMNS * ((SIZE - 1) * COLUMNS)


@triton.jit
def _store_columns(
    part_ptr, peers_ptr, rank, turn, begin, end, num_words, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store words of this rank's part into the slots of all, its own last: tiles `begin` to `end`."""
    for tile in range(begin, end):
        index = tile * TILE + tl.arange(0, TILE)
        live = index < num_words
        words = tl.load(part_ptr + index, mask=live)
        place = rank * COLUMNS + _place(index, SIZE, COLUMNS)
        for step in range(SIZE):  # ranks begin with different ones
            slot = _slot(peers_ptr, (rank + 1 + step) % SIZE, turn, part_ptr.dtype, SLOTS, STRIDE)
            tl.store(slot + place, words, mask=live)


@triton.jit
def _set_flags(peers_ptr, rank, turn, program, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Set this program's flag in the buffers of all, after all that its threads stored."""
    tl.debug_barrier()
    other = tl.arange(0, RANKS)
    live = other < SIZE
    buffers = tl.load(peers_ptr + other, mask=live, other=0).to(tl.pointer_type(tl.int64))
    turns = tl.zeros([RANKS], tl.int64) + turn
    flags = buffers + FLAGS + program * SIZE + rank
    tl.atomic_xchg(flags, turns, mask=live, sem="release", scope="sys")


@triton.jit
def _wait(own, page, turn, program, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Wait for the flags of all in this rank's buffer; return 0, or the host's word if that is set."""
    other = tl.arange(0, RANKS)
    live = other < SIZE
    flags = own + FLAGS + program * SIZE + other
    none = tl.zeros([RANKS], tl.int64)
    failed = tl.full([], 0, tl.int64)
    missing = tl.full([], 1, tl.int32)
    looks = tl.full([], 0, tl.int32)
    while (missing > 0) & (failed == 0):
        arrived = tl.atomic_add(flags, none, mask=live, sem="acquire", scope="sys")
        missing = tl.sum(((arrived < turn) & live).to(tl.int32))
        looks += 1
        if (missing > 0) & (looks % LOOK == 0):
            failed = tl.load(page + FAILED, volatile=True)
    tl.debug_barrier()
    return failed


@triton.jit
def _copy_slot(
    out_ptr, peers_ptr, rank, turn, begin, end, num_words, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy words of every rank's part from this rank's slot: tiles `begin` to `end`."""
    slot = _slot(peers_ptr, rank, turn, out_ptr.dtype, SLOTS, STRIDE)
    for tile in range(begin, end):
        index = tile * TILE + tl.arange(0, TILE)
        live = index < num_words
        place = _place(index, SIZE, COLUMNS)
        for other in range(SIZE):
            words = tl.load(slot + other * COLUMNS + place, mask=live)
            tl.store(out_ptr + other * COLUMNS + place, words, mask=live)


@triton.jit
def _end(own, turn):
    """Count this program; the last one counts the turn."""
    tl.debug_barrier()
    ended = tl.atomic_add(own + LEAVING, 1, sem="acq_rel", scope="gpu")
    if ended == tl.num_programs(0) - 1:
        tl.store(own + LEAVING, 0)
        tl.store(own + TURN, turn)


@triton.jit(do_not_specialize=["rank", "num_rows", "share"])
def push_kernel(
    part_ptr, out_ptr, peers_ptr, rank, num_rows, share, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, STRIDE: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):  # fmt: skip
    """A program: `share` tiles of TILE words of every rank's part, which has COLUMNS in a row.

    peers_ptr: `Peers.addresses`. SLOTS, STRIDE: `Layout.slots` and `.slot_stride`. RANKS is SIZE
    padded to a power of two. SENDS and RECEIVES are both set, but where ranks run one after another.
    """
    program = tl.program_id(0)
    own = tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))
    if tl.load(own + LEFT) == 0:
        turn = tl.load(own + TURN) + 1
        num_words = num_rows * COLUMNS
        begin = program * share
        end = tl.minimum(begin + share, tl.cdiv(num_words, TILE))
        if SENDS:
            _store_columns(
                part_ptr, peers_ptr, rank, turn, begin, end, num_words, SIZE, COLUMNS, SLOTS, STRIDE, TILE
            )  # fmt: skip
            _set_flags(peers_ptr, rank, turn, program, SIZE, RANKS)
        if RECEIVES:
            page = tl.load(peers_ptr + SIZE).to(tl.pointer_type(tl.int64))
            failed = _wait(own, page, turn, program, SIZE, RANKS)
            if failed == 0:
                _copy_slot(
                    out_ptr, peers_ptr, rank, turn, begin, end, num_words, SIZE, COLUMNS, SLOTS, STRIDE, TILE
                )  # fmt: skip
            else:
                tl.store(own + LEFT, failed)
                tl.store(page + STATUS, failed)
            _end(own, turn)


WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


def push(
    part: Tensor, ranks: Peers, layout: Layout, rank: int, sends: bool = True, receives: bool = True
) -> Tensor:
    """Return the parts of all ranks side by side, [rows, size * columns], as `gathered` defines it.

    part: [rows, columns], of the same shape and dtype on every rank, which all make the same calls in
    the same order. The result fits into a slot. What ended a wait early is in `Peers.page`.
    sends, receives: both, but where ranks run one after another; the result is then undefined
    without `receives`.
    """
    rows, columns = part.shape
    out = part.new_empty(rows, layout.size * columns)
    assert out.numel() * out.element_size() <= layout.slot_bytes
    if part.numel() == 0:
        return out
    part = part.contiguous()
    row_bytes = columns * part.element_size()
    start = part.storage_offset() * part.element_size()
    size, word = next(kind for kind in WORDS if row_bytes % kind[0] == start % kind[0] == 0)
    tile = TILES[row_bytes % 16 > 0]
    tiles = cdiv(rows * row_bytes // size, tile)
    share = cdiv(tiles, PROGRAMS)
    push_kernel[(cdiv(tiles, share),)](
        part.view(torch.uint8).view(word),
        out.view(torch.uint8).view(word),
        ranks.addresses,
        rank,
        rows,
        share,
        SIZE=layout.size,
        COLUMNS=row_bytes // size,
        SLOTS=layout.slots,
        STRIDE=layout.slot_stride,
        RANKS=next_power_of_2(layout.size),
        TILE=tile,
        SENDS=sends,
        RECEIVES=receives,
        num_warps=1,
    )
    return out


def gathered(parts: list[Tensor]) -> Tensor:
    """Define the result of `push` on every rank: the parts of all, [rows, columns], side by side."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(parts[0].dtype)
