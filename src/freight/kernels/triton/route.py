"""Routing: the experts of each row, in two launches; see `KernelSet.route`.

`linear.matmul_kernel` computes the logits in float32, in tiles of one size, so that a row's bits do
not depend on the others. `choose_kernel` computes `kernels.reference_experts.choose`. The host does
not wait for the device, so a CUDA graph can capture both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.linear import Tile, matmul_kernel
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.experts import Router
from freight.operands.routing import Routing
from freight.operands.weight import Weight

LOGITS = Tile(16, 16, 64, 4, 3)  # small, so that even one row by 128 experts has 8 programs


@triton.jit
def _softmax(logits):
    """Return the softmax of one row. logits: -inf where there is none."""
    # At least a finite number, so that the padding of a row of NaN stays -inf.
    largest = tl.maximum(tl.max(logits, 0), -3.0e38)
    power = tl.exp(logits - largest)
    return power / tl.sum(power, 0)


@triton.jit
def _first_largest(value, free, index, END: tl.constexpr):
    """Return the index of the largest free value, of equal ones the first. END: above any index."""
    largest = tl.max(tl.where(free, value, float("-inf")), 0)
    return tl.min(tl.where(free & (value == largest), index, END), 0)


@triton.jit
def _leave_out_groups(
    rated, expert, NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Set `rated` to -inf except in the TOP_GROUPS best groups.

    A group is rated by the sum of its GROUP_BEST (1 or 2) largest values.
    """
    PER_GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group_index = tl.arange(0, GROUP_BLOCK)
    group_of = expert // PER_GROUP
    best = tl.zeros((GROUP_BLOCK,), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        member = group_of == group
        first = _first_largest(rated, member, expert, NUM_EXPERTS)
        both = tl.sum(tl.where(expert == first, rated, 0.0), 0)
        if PER_GROUP > 1 and GROUP_BEST > 1:
            remaining = member & (expert != first)
            both += tl.max(tl.where(remaining, rated, float("-inf")), 0)
        best = tl.where(group_index == group, both, best)
    free = group_index < NUM_GROUPS
    in_best = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        group = _first_largest(best, free, group_index, NUM_GROUPS)
        free = free & (group_index != group)
        in_best = in_best | (group_of == group)
    return tl.where(in_best, rated, float("-inf"))


@triton.jit
def choose_kernel(
    logits_ptr, choice_bias_ptr, ids_ptr, weights_ptr, factor, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SCORING: tl.constexpr, NORMED: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: one row. SCORING: a `Scoring`'s name."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=live, other=float("-inf"))
    scores = logits
    if SCORING == "softmax":
        scores = _softmax(logits)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    rated = scores
    if choice_bias_ptr is not None:
        rated += tl.load(choice_bias_ptr + expert, mask=live, other=0.0)
    # A NaN counts as the largest, so that a row of NaN gets valid ids, too.
    rated = tl.where(rated != rated, float("inf"), rated)
    if NUM_GROUPS > 1:
        rated = _leave_out_groups(
            rated, expert, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS, GROUP_BEST, GROUP_BLOCK
        )
    free = live
    for _ in tl.static_range(TOP_K):
        free = free & (expert != _first_largest(rated, free, expert, NUM_EXPERTS))
    chosen = live & ~free
    weights = tl.where(chosen, scores, 0.0)
    if SCORING == "chosen":
        weights = _softmax(tl.where(chosen, logits, float("-inf")))
    if NORMED:
        weights /= tl.sum(weights, 0) + 1e-20  # the sum of sigmoids may be 0
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, expert, mask=chosen)
    tl.store(weights_ptr + place, weights * factor, mask=chosen)


def logits(x: Tensor, router: Weight, bias: Tensor | None) -> Tensor:
    """Return x @ router.T + bias in float32, [rows, num_experts].

    x: [rows, hidden_size], contiguous within a row; router: float32
    """
    (rows, size) = x.shape
    experts = len(router.data)
    out = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    matmul_kernel[(cdiv(experts, LOGITS.outputs), cdiv(rows, LOGITS.rows))](
        x,
        router.data,
        None,
        None,
        bias,
        out,
        None,
        None,
        rows,
        experts,
        x.stride(0),
        SIZE=size,
        PART=size,
        X_FORMAT="",
        WEIGHT_FORMAT="",
        BLOCKS=False,
        DOT=tl.float32,
        **LOGITS.constants,
    )
    return out


def choose(
    scores: Tensor, routing: Routing, choice_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `reference_experts.choose`. scores: the logits, float32 [rows, num_experts]."""
    rows, num_experts = scores.shape
    ids = torch.empty(rows, routing.top_k, dtype=torch.int32, device=scores.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    choose_kernel[(rows,)](
        scores,
        choice_bias,
        ids,
        weights,
        routing.factor,
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        SCORING=str(routing.scoring),
        NORMED=routing.normed,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GROUP_BEST=routing.group_best,
        BLOCK=next_power_of_2(num_experts),
        GROUP_BLOCK=next_power_of_2(routing.num_groups),
        num_warps=1,
    )
    return ids, weights


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.route`. x: [rows, hidden_size]."""
    assert isinstance(router.matrix, Weight)
    scores = logits(x, router.matrix, router.bias)
    ids, weights = choose(scores, router.routing, router.choice_bias)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[ids]
    return ids, weights
