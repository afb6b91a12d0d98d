"""Mixtures of experts in Triton, routing included, against `kernels/reference_experts.py` and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replayed_ranks import of_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels import reference_experts as definition
from freight.kernels.reference_set import REFERENCE
from freight.kernels.triton import linear, route
from freight.kernels.triton.experts import FEW_ROWS, sort_slots
from freight.kernels.triton.formats import current_target
from freight.kernels.triton.triton_set import TritonKernels
from freight.operands.activation import Activation, AnyActivation, GatedActivation
from freight.operands.experts import ExpertLayers, Router
from freight.operands.routing import Routing, Scoring
from freight.operands.weight import Activations, Weight
from freight.parallel.ranks import Ranks

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = (
    5,
    2,
    136,
    64,
)  # 136: the last group of 128 inputs is not whole
SILU, KERNELS = GatedActivation.SILU, TritonKernels(current_target())


def matrices(
    outputs: int, inputs: int, blocks: bool | None, activations: Activations, device: str
) -> list[Weight]:
    """Of NUM_EXPERTS experts, in E4M3 with a scale per row or block; with None in float32."""
    made = []
    for _ in range(NUM_EXPERTS):
        weight = torch.randn(outputs, inputs) / inputs**0.5
        if blocks is None:
            made.append(Weight(weight.to(device)))
            continue
        data, scale = (quantize_blocks if blocks else quantize_rows)(weight, Format.E4M3FN)
        static = 0.017 if activations is Activations.STATIC else None
        made.append(Weight(data.to(device), scale.to(device), activations, static))
    return made


def width(function: AnyActivation) -> int:
    """Outputs of the first product."""
    return INTERMEDIATE if isinstance(function, Activation) else 2 * INTERMEDIATE


def both(
    blocks: bool | None, activations: Activations, device: str, function: AnyActivation = SILU
) -> tuple[list[Weight], list[Weight]]:
    """gate_up and down."""
    gate_up = matrices(width(function), HIDDEN, blocks, activations, device)
    return gate_up, matrices(HIDDEN, INTERMEDIATE, blocks, activations, device)


def some(
    rows: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights; expert 1 has no row."""
    ids = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:TOP_K].sort().values for _ in range(rows)])
    ids = (ids + (ids > 0)).int()
    return (
        (torch.randn(rows, HIDDEN) * 2).to(dtype).to(device),
        ids.to(device),
        torch.rand(rows, TOP_K, device=device),
    )


def packed(
    weights: tuple[list[Weight], list[Weight]],
    bias: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Any:
    return [KERNELS.pack_experts(one, add) for one, add in zip(weights, bias, strict=True)]


def one_by_one(
    weights: tuple[list[Weight], list[Weight]],
    *operands: Any,
    bias: Any = (None, None),
    function: AnyActivation = SILU,
) -> Tensor:
    """The definition, over the Triton set's `linear`, `gated` and `activated`."""
    x, ids, row_weights, base = operands
    lists = [definition.pack(KERNELS, one, add) for one, add in zip(weights, bias, strict=True)]
    return definition.experts(KERNELS, x, ids, row_weights, ExpertLayers(*lists, function), base)


@pytest.fixture
def tiles_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`linear` of few rows in the tiles of many."""
    tile_of = linear.matmul_tile
    monkeypatch.setattr(
        linear, "matmul_tile", lambda target, rows, *kind: tile_of(target, FEW_ROWS, *kind)
    )


@pytest.mark.usefixtures("tiles_of_experts")
@pytest.mark.parametrize(
    ("dtype", "blocks", "activations"),
    [
        (torch.bfloat16, False, Activations.DYNAMIC),
        (torch.bfloat16, True, Activations.DYNAMIC),
        (torch.bfloat16, False, Activations.STATIC),
        (torch.bfloat16, True, Activations.PLAIN),
        (torch.float32, False, Activations.PLAIN),
    ],
)
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED], ids=str)
def test_experts_are_products_one_by_one(dtype, blocks, activations, function, device):
    """Bit for bit, with biases and a sum to begin with; the last tile of an expert is not whole."""
    torch.manual_seed(0)
    weights = both(blocks, activations, device, function)
    bias = tuple(
        torch.randn(NUM_EXPERTS, size, device=device).to(dtype)
        for size in (width(function), HIDDEN)
    )
    x, ids, row_weights = some(4, device, dtype)
    base = torch.randn(4, HIDDEN, device=device).to(dtype)
    got = KERNELS.experts(x, ids, row_weights, ExpertLayers(*packed(weights, bias), function), base)
    assert got.dtype == dtype
    assert torch.equal(
        got, one_by_one(weights, x, ids, row_weights, base, bias=bias, function=function)
    )


@pytest.mark.parametrize("blocks", [None, True])
@pytest.mark.parametrize("function", [SILU, Activation.RELU, Activation.RELU_SQUARED], ids=str)
def test_experts_are_those_of_the_reference(blocks, function, device):
    """In float32, where no rounding to 16 bits turns into another FP8 activation."""
    torch.manual_seed(1)
    weights = both(blocks, Activations.DYNAMIC, device, function)
    x, ids, row_weights = some(3, device, torch.float32)
    got = KERNELS.experts(x, ids, row_weights, ExpertLayers(*packed(weights), function))
    lists = [REFERENCE.pack_experts(one) for one in weights]
    expected = REFERENCE.experts(x, ids, row_weights, ExpertLayers(*lists, function))
    assert (got - expected).abs().max() <= (
        2e-5 if device == "cpu" else 0.02
    ) * expected.abs().max()


def test_experts_in_sixteen_bits(device):
    torch.manual_seed(2)
    weights = tuple(
        [Weight(one.data.bfloat16()) for one in part]
        for part in both(None, Activations.PLAIN, device)
    )
    x, ids, row_weights = some(3, device)
    got = KERNELS.experts(x, ids, row_weights, ExpertLayers(*packed(weights), SILU)).float()
    lists = [REFERENCE.pack_experts([Weight(one.data.float()) for one in part]) for part in weights]
    expected = REFERENCE.experts(x.float(), ids, row_weights, ExpertLayers(*lists, SILU))
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.usefixtures("tiles_of_experts")
@pytest.mark.parametrize("rows", [1, 19])
def test_one_row_and_many_rows_of_the_same_experts(rows, device):
    """19 rows are two tiles of each expert."""
    torch.manual_seed(3)
    weights = both(False, Activations.PLAIN, device)
    x, ids, row_weights = some(rows, device, torch.float32)
    ids[:] = torch.tensor([2, 4], dtype=torch.int32)
    got = KERNELS.experts(x, ids, row_weights, ExpertLayers(*packed(weights), SILU))
    assert torch.equal(got, one_by_one(weights, x, ids, row_weights, None))


@pytest.mark.parametrize("blocks", [None, False])
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED], ids=str)
def test_the_bits_of_a_row_are_its_own(blocks, function, device):
    torch.manual_seed(4)
    stacks = packed(both(blocks, Activations.DYNAMIC, device, function))
    x, ids, row_weights = some(5, device, torch.float32 if blocks is None else torch.bfloat16)
    together = KERNELS.experts(x, ids, row_weights, ExpertLayers(*stacks, function))
    for part in (slice(1, 2), slice(2, 5)):
        alone = KERNELS.experts(
            x[part],
            ids[part].contiguous(),
            row_weights[part].contiguous(),
            ExpertLayers(*stacks, function),
        )
        assert torch.equal(alone, together[part])


@settings(max_examples=10)
@given(st.data())
def test_slots_are_sorted_and_every_tile_has_a_place(data):
    num_experts, rows = (
        data.draw(st.sampled_from([1, 4, 9])),
        data.draw(st.sampled_from([2, 4, 16])),
    )
    drawn = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=40))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = sort_slots(
        torch.tensor(drawn, dtype=torch.int32, device=device)[:, None], num_experts, rows
    )
    assert found.slots.tolist() == sorted(range(len(drawn)), key=lambda slot: drawn[slot])
    tiles = [tile for tile in found.tiles.tolist() if tile[0] >= 0]
    assert all(tile[0] == -1 for tile in found.tiles.tolist()[len(tiles) :])
    assert [place for _, begin, end in tiles for place in range(begin, end)] == list(
        range(len(drawn))
    )
    for expert, begin, end in tiles:
        assert 0 < end - begin <= rows
        assert {drawn[slot] for slot in found.slots.tolist()[begin:end]} == {expert}


def test_more_slots_than_are_looked_at_together(device):
    torch.manual_seed(5)
    ids = torch.randint(0, 9, (700, 3), dtype=torch.int32, device=device)
    found = sort_slots(ids, 9, 64)
    assert torch.equal(found.slots.long(), ids.flatten().sort(stable=True).indices)


ROUTINGS = {
    "softmax": Routing(12, 3),
    "softmax, not normed": Routing(12, 3, normed=False, factor=1.5),
    "chosen": Routing(12, 4, Scoring.CHOSEN, normed=False),
    "sigmoid": Routing(12, 3, Scoring.SIGMOID, factor=2.5),
    "groups": Routing(12, 3, Scoring.SIGMOID, num_groups=3, top_groups=2),
    "groups by their best": Routing(
        12, 3, normed=False, factor=2.5, num_groups=3, top_groups=2, group_best=1
    ),
    "groups of one": Routing(12, 3, Scoring.SIGMOID, num_groups=12, top_groups=5),
    "all": Routing(12, 12),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_choices_are_those_of_the_definition(routing, biased, device):
    """Also among equals, of which the lower id is taken."""
    torch.manual_seed(6)
    logits = torch.randn(12, 12)
    logits[:6] = logits[:6].round()
    logits[6] = 0.0
    logits[7] = torch.nan
    choice_bias = torch.linspace(-1, 1, 12).round().to(device) if biased else None
    ids, weights = route.choose(logits.to(device), routing, choice_bias)
    expected_ids, expected = definition.choose(logits.to(device), routing, choice_bias)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_route(dtype, device):
    """Logits in float32 of rows of any type; a row's bits do not depend on the others."""
    torch.manual_seed(7)
    router, bias = torch.randn(20, 100, device=device) / 10, torch.randn(20, device=device)
    x, routing = torch.randn(19, 100).to(dtype).to(device), Routing(20, 4)
    ids, weights = KERNELS.route(x, Router(Weight(router), routing, bias))
    expected_ids, expected = definition.choose(x.double() @ router.double().T + bias, routing)
    assert torch.equal(ids, expected_ids)
    assert (weights - expected).abs().max() <= 1e-6
    for part in (slice(4, 5), slice(9, 19)):
        alone = KERNELS.route(x[part], Router(Weight(router), routing, bias))
        assert torch.equal(alone[0], ids[part])
        assert torch.equal(alone[1], weights[part])


class OperationsOfTorch(TorchDispatchMode):
    """Collects what torch would run on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch._dynamo takes seconds to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in str(func)):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("activations", "launches"), [(Activations.DYNAMIC, 8), (Activations.PLAIN, 7)]
)
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED], ids=str)
def test_the_launches_follow_from_shapes(activations, launches, function, monkeypatch, device):
    """Routing and experts launch kernels alone, the same for any ids: so they can be captured, and
    wait for nothing.
    """
    stacks = packed(both(False, activations, device, function))
    x, ids, row_weights = some(3, device)
    made: list[tuple[Any, ...]] = []
    for executor, method, note in (
        (
            GridExecutor,
            "__call__",
            lambda kernel, *args, **kwargs: made.append((kernel.fn, kernel.grid)),
        ),
        (JITFunction, "run", lambda kernel, *args, grid, **kwargs: made.append((kernel.fn, grid))),
    ):
        monkeypatch.setattr(executor, method, note)
    same = torch.full_like(ids, 2)
    router = Weight(torch.randn(NUM_EXPERTS, HIDDEN, device=device))
    steps = []
    with torch.inference_mode(), OperationsOfTorch() as operations:
        for chosen in (ids, same):
            KERNELS.route(x, Router(router, Routing(NUM_EXPERTS, TOP_K)))
            KERNELS.experts(x, chosen, row_weights, ExpertLayers(*stacks, function))
            steps.append(list(made))
            made.clear()
    assert steps[0] == steps[1]
    assert len(steps[0]) == launches
    assert operations.found == []


@pytest.mark.parametrize(
    ("activations", "function"),
    [
        (Activations.DYNAMIC, SILU),
        pytest.param(Activations.STATIC, SILU, marks=pytest.mark.slow),
        pytest.param(None, Activation.GELU, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_the_bits_of_one(
    activations: Activations | None, function: AnyActivation, device: str
) -> None:
    """Each has some channels of every expert; scales of rows are those of all channels."""
    torch.manual_seed(7)
    kind = (None, Activations.PLAIN) if activations is None else (False, activations)
    weights = both(*kind, device, function)
    x, ids, row_weights = some(3, device)
    if activations is None:
        x = x.float()
    base = torch.randn_like(x)
    layers = ExpertLayers(*packed(weights), function)
    expected = KERNELS.experts(x, ids, row_weights, layers, base)

    def rows(weight: Weight, numbers: Tensor) -> Weight:
        scale = None if weight.scale is None else weight.scale[numbers]
        data = weight.data.view(torch.uint8 if scale is not None else weight.data.dtype)[numbers]
        return replace(weight, data=data.view(weight.data.dtype), scale=scale)

    def computed(ranks: Ranks) -> Tensor:
        channels = torch.arange(INTERMEDIATE).chunk(2)[ranks.rank]
        if not isinstance(function, Activation):
            channels = torch.cat((channels, channels + INTERMEDIATE))
        outputs = torch.arange(HIDDEN).chunk(2)[ranks.rank]
        parts = [
            [rows(weight, numbers.to(device)) for weight in stack]
            for stack, numbers in zip(weights, (channels, outputs), strict=True)
        ]
        kernels = replace(KERNELS, ranks=ranks)
        own = ExpertLayers(*(kernels.pack_experts(part) for part in parts), function)
        return kernels.experts(x, ids, row_weights, own, base)

    for result in of_ranks(2, 2, computed):
        assert torch.equal(result, expected)
