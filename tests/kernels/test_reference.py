"""The reference kernels against independent definitions: torch's own operators, and their promise
about bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import decode, encode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference, reference_experts, reference_rows
from freight.kernels.reference import Fp8Products
from freight.operands.activation import GatedActivation, GateFunction
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KVPages
from freight.operands.routing import Routing, Scoring
from freight.operands.weight import Weight

SILU = GatedActivation.SILU

BLOCK = 8
GRANULARITIES = {
    Format.FLOAT32: [None],
    Format.BFLOAT16: [None],
    Format.E4M3FN: ["static", "token", None],
    Format.E4M3FNUZ: ["static", "token"],
    Format.E5M2: ["token", None],
    Format.INT8: ["token"],
}
CACHES = [(format, granularity) for format, many in GRANULARITIES.items() for granularity in many]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "format", [Format.FLOAT32, Format.E4M3FN]
)  # 16-bit products are torch's own
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 2048), (1000, 1100), (64, 512)])
def test_the_number_of_threads_changes_no_bit_of_a_product(
    threads: Callable[[int], None], format: Format, outputs: int, inputs: int
):
    x, matrix = torch.randn(5, inputs), torch.randn(outputs, inputs)
    weight = Weight(matrix.to(torch_dtype(format)))
    if format.is_fp8:
        weight = Weight(encode(matrix, 0.02, format), torch.full((outputs,), 0.02))
    found = []
    for count in (1, 2, 3, 4):
        threads(count)
        found.append(reference.linear(x, weight))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 2048), (1000, 1100), (64, 512)])
def test_the_number_of_threads_changes_no_bit_of_a_float32_result(
    threads: Callable[[int], None], outputs: int, inputs: int
):
    x, weight = (
        torch.randn(5, inputs).bfloat16(),
        Weight(torch.randn(outputs, inputs).bfloat16()),
    )
    found = []
    for count in (1, 2, 3, 4):
        threads(count)
        found.append(reference.linear(x, weight, float32=True))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 4, 128), (2, 2, 256), (8, 1, 64)])
def test_the_number_of_threads_changes_no_bit_of_attention(
    threads: Callable[[int], None], heads: int, group: int, dim: int
):
    q, k, v = (
        torch.randn(90, heads * group, dim),
        torch.randn(90, heads, dim),
        torch.randn(90, heads, dim),
    )
    found = []
    for count in (1, 2, 3, 4):
        threads(count)
        found.append(run(make_pages(Format.FLOAT32, None, heads, dim, 12), k, v, q, [90]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def make_pages(
    format: Format, granularity: str | None, heads: int, dim: int, num_blocks: int
) -> KVPages:
    """Pages full of NaN, so that anything read beyond what was written shows."""
    shape = (num_blocks, BLOCK, heads, dim)
    pages = [torch.full(shape, 0xFF, dtype=torch.uint8).view(torch_dtype(format)) if format.is_quantized
             else torch.full(shape, torch.nan, dtype=torch_dtype(format)) for _ in "kv"]  # fmt: skip
    if format in (Format.E4M3FNUZ, Format.INT8):
        pages = [page.view(torch.uint8).fill_(0x80).view(page.dtype) for page in pages]
    scales: list[torch.Tensor | None] = [None, None]
    if granularity == "static":
        scales = [torch.rand(heads, dim) * 0.02 + 0.02 for _ in "kv"]
    elif granularity == "token":
        scales = [torch.full(shape[:3], torch.nan, dtype=torch.bfloat16) for _ in "kv"]
    return KVPages(*pages, *scales, torch.zeros(2, dtype=torch.int64))


def run(pages: KVPages, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, chunks: list[int], window: int | None = None,
        blocks: list[int] | None = None, soft_cap: float | None = None,
        products: Fp8Products = Fp8Products.NONE,
        sinks: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """Attention output of one sequence stored and read in `chunks`."""
    blocks = blocks or list(range(-(-len(k) // BLOCK)))
    outputs, start = [], 0
    for count in chunks:
        rows = slice(start, start + count)
        batch = prepare(
            [SequenceSlice([0] * count, start, (blocks,), Logits.NONE)],
            [Pages((0,), 0, None, BLOCK)],
        )
        reference.store_kv(k[rows], v[rows], batch.slots[0], pages)
        outputs.append(
            reference.attention(
                q[rows],
                pages,
                batch.sequences(0),
                AttentionCall(q.shape[-1] ** -0.5, window, soft_cap, sinks),
                products=products,
            )
        )
        start += count
    return torch.cat(outputs)


def stored_values(
    pages: KVPages, blocks: list[int], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pages mean, read with numpy-like indexing: [length, heads, dim] float64 each for K
    and V.
    """
    result = []
    for page, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        values = torch.cat([page[b].double() for b in blocks])[:length]
        if pages.dynamic:
            values = values * torch.cat([scale[b].double() for b in blocks])[:length, :, None]
        elif scale is not None:
            values = values * scale.double()
        result.append(values)
    return result[0], result[1]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    length, group = len(k), q.shape[1] // k.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)
    mask = (j <= i) if window is None else (j <= i) & (i - j < window)
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    return F.scaled_dot_product_attention(
        q.double().transpose(0, 1), k, v, attn_mask=mask
    ).transpose(0, 1)


@pytest.mark.parametrize(("format", "granularity"), CACHES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "length"), [(2, 2, 32, 1), (1, 8, 64, 70), (3, 1, 40, 130)]
)
def test_attention_is_attention_over_what_is_stored(
    format, granularity, window, heads, group, dim, length
):
    torch.manual_seed(0)
    k, v = torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    q = torch.randn(length, heads * group, dim)
    blocks = torch.randperm(40)[: -(-length // BLOCK)].tolist()
    pages = make_pages(format, granularity, heads, dim, 40)
    out = run(pages, k, v, q, [length], window, blocks)
    expected = sdpa(q, *stored_values(pages, blocks, length), window)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_scores_of_keys_whose_value_is_zero(window):
    """As a key of its own whose score is the sink; a row's bits are the same in any chunks."""
    torch.manual_seed(0)
    heads, group, dim, length = 2, 3, 40, 130
    k, v, q = (torch.randn(length, n, dim) for n in (heads, heads, heads * group))
    sinks = torch.tensor([-20.0, -1.0, 0.0, 1.0, 3.0, 20.0])
    blocks = torch.randperm(40)[: -(-length // BLOCK)].tolist()
    pages = make_pages(Format.FLOAT32, None, heads, dim, 40)
    whole = run(pages, k, v, q, [length], window, blocks, sinks=sinks)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (j <= i) if window is None else (j <= i) & (i - j < window)
    keys, values = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * dim**-0.5
    beside = sinks.double()[:, None, None].expand(-1, length, 1)
    p = torch.cat((scores.masked_fill(~seen, -torch.inf), beside), -1).softmax(-1)[..., :length]
    assert torch.allclose(whole.double(), (p @ values).transpose(0, 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(run(pages, k, v, q, [1, 70, 59], window, blocks, sinks=sinks), whole)


@pytest.mark.parametrize("granularity", ["static", "token"])
@pytest.mark.parametrize("window", [None, 5])
def test_soft_capped_scores_one_row_at_a_time(granularity, window):
    """Against the formula, a row and a head at a time, in float64."""
    torch.manual_seed(0)
    heads, group, dim, length, cap = 2, 3, 32, 70, 0.7
    k, v = torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    q = torch.randn(length, heads * group, dim)
    blocks = torch.randperm(40)[: -(-length // BLOCK)].tolist()
    pages = make_pages(Format.E4M3FN, granularity, heads, dim, 40)
    out = run(pages, k, v, q, [length], window, blocks, cap)
    k, v = stored_values(pages, blocks, length)
    for i in range(length):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        for head in range(heads * group):
            s = k[seen, head // group] @ q[i, head].double() / dim**0.5
            e = torch.exp(2 * s / cap)
            p = torch.exp(cap * (e - 1) / (e + 1))
            assert torch.allclose(
                out[i, head].double(), p @ v[seen, head // group] / p.sum(), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
@pytest.mark.parametrize("granularity", ["static", "token"])
@pytest.mark.parametrize("products", [Fp8Products.SCORES, Fp8Products.BOTH])
def test_fp8_products_one_row_at_a_time(format, granularity, products):
    """Against the formula: q is rounded to E4M3 by row; over static scales so are probabilities
    times 2 ** 8 or 7.
    """
    torch.manual_seed(0)
    heads, group, dim, length = 2, 3, 32, 60
    k, v = torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    q = torch.randn(length, heads * group, dim)
    pages = make_pages(format, granularity, heads, dim, 8)
    out = run(pages, k, v, q, [length], products=products)
    blocks = list(range(8))
    k, v = stored_values(pages, blocks, length)
    for i in range(length):
        for head in range(heads * group):
            kv_head, query = head // group, q[i, head] / dim**0.5
            scale = torch.ones(dim) if pages.dynamic else pages.k_scale[kv_head]
            query = query * scale
            step = query.abs().max() / format.max
            rounded = decode(encode(query, step, format), step).double() / scale.double()
            s = k[: i + 1, kv_head] @ rounded
            p = torch.exp(s - s.max())
            used = p
            if products is Fp8Products.BOTH and granularity == "static":
                most = 256.0 if format is Format.E4M3FN else 128.0
                used = decode(encode(p.float(), 1 / most, format), 1 / most).double()
            expected = used @ v[: i + 1, kv_head] / p.sum()
            assert torch.allclose(out[i, head].double(), expected, rtol=1e-4, atol=2e-4)


def test_pages_that_are_not_e4m3_are_multiplied_as_ever():
    torch.manual_seed(0)
    k, v, q = torch.randn(40, 2, 32), torch.randn(40, 2, 32), torch.randn(40, 4, 32)
    for format in (Format.E5M2, Format.BFLOAT16):
        plain, fp8 = (
            run(make_pages(format, None, 2, 32, 5), k, v, q, [40], products=products)
            for products in (Fp8Products.NONE, Fp8Products.BOTH)
        )
        assert torch.equal(plain, fp8)


@pytest.mark.parametrize(("format", "granularity"), CACHES)
def test_what_is_stored_is_close_to_what_was_given(format, granularity):
    torch.manual_seed(1)
    k, v = torch.randn(50, 2, 64), torch.randn(50, 2, 64) * 0.5
    pages = make_pages(format, granularity, 2, 64, 8)
    run(pages, k, v, torch.zeros(50, 2, 64), [50])
    relative = {
        Format.FLOAT32: 0.0,
        Format.BFLOAT16: 2**-8,
        Format.E5M2: 2**-3,
        Format.INT8: 0.0,
    }.get(format, 2**-4)
    for got, true in zip(stored_values(pages, list(range(7)), 50), (k, v), strict=True):
        step = (
            true.abs().amax(-1, keepdim=True) / 127 if format is Format.INT8 else torch.tensor(0.0)
        )
        assert (
            (got - true).abs() <= relative * true.abs() + 0.503 * step + 0.003 * (step == 0)
        ).all()


@settings(max_examples=25)
@given(
    cache=st.sampled_from(CACHES),
    cuts=st.sets(st.integers(1, 99)),
    window=st.sampled_from([None, 3, 64]),
    seed=st.integers(0, 99),
    products=st.sampled_from(Fp8Products),
)
def test_chunks_change_no_bit(cache, cuts, window, seed, products):
    torch.manual_seed(seed)
    k, v, q = torch.randn(100, 2, 32), torch.randn(100, 2, 32), torch.randn(100, 4, 32)
    edges = [0, *sorted(cuts), 100]
    whole, pieces = make_pages(*cache, 2, 32, 13), make_pages(*cache, 2, 32, 13)
    if cache[1] == "static":
        pieces = KVPages(pieces.k, pieces.v, whole.k_scale, whole.v_scale, pieces.counters)
    a = run(whole, k, v, q, [100], window, products=products)
    b = run(
        pieces, k, v, q, [end - start for start, end in pairwise(edges)], window, products=products
    )
    assert torch.equal(a, b)
    assert torch.equal(whole.k.view(torch.uint8), pieces.k.view(torch.uint8))
    assert torch.equal(whole.v.view(torch.uint8), pieces.v.view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(part, value, window):
    """Neither the rows before it in its chunk, nor those that have it behind their window."""
    torch.manual_seed(0)
    k, v, q = torch.randn(100, 2, 8), torch.randn(100, 2, 8), torch.rand(100, 4, 8)
    clean, whole, pieces = (make_pages(Format.FLOAT32, None, 2, 8, 13) for _ in range(3))
    expected = run(clean, k, v, q, [100], window)
    (k if part == "k" else v)[70, 0] = value
    out = run(whole, k, v, q, [100], window)
    sees = torch.zeros(100, 4, dtype=torch.bool)
    sees[70 : 70 + (window or 100), :2] = True
    assert torch.equal(out[~sees], expected[~sees])
    assert not out[sees].isfinite().any()
    assert torch.equal(run(pieces, k, v, q, [70, 3, 27], window).nan_to_num(), out.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(1, 64, 48), (33, 100, 7), (70, 256, 512)]
)
def test_linear_is_linear_and_rows_do_not_see_each_other(dtype, rows, columns, outputs):
    torch.manual_seed(0)
    x, bias = torch.randn(rows, columns).to(dtype), torch.randn(outputs).to(dtype)
    weight = Weight((torch.randn(outputs, columns) / columns**0.5).to(dtype))
    out = reference.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.data.double(), bias.double())
    assert out.dtype == dtype
    magnitude = F.linear(x.double().abs(), weight.data.double().abs(), bias.double().abs())
    bound = torch.finfo(dtype).eps * exact.abs() + 8 * torch.finfo(torch.float32).eps * magnitude
    assert ((out.double() - exact).abs() <= bound).all()
    whole = reference.linear(x, weight, bias, float32=True)
    assert whole.dtype == torch.float32
    assert ((whole.double() - exact).abs() <= 8 * torch.finfo(torch.float32).eps * magnitude).all()
    for row in range(rows):
        alone = slice(row, row + 1)
        assert torch.equal(reference.linear(x[alone], weight, bias), out[alone])
        assert torch.equal(reference.linear(x[alone], weight, bias, float32=True), whole[alone])


@pytest.mark.parametrize("size", [64, 333])
def test_row_wise_operations_do_not_see_other_rows(size):
    torch.manual_seed(0)
    x, weight = torch.randn(70, 2 * size), torch.rand(2 * size)
    for operation in (
        lambda t: reference.rms_norm(t, weight, 1e-5),
        lambda t: reference.gated(t, SILU),
        lambda t: reference_rows.layer_norm(t, weight, weight.flip(0), 1e-5),
    ):
        whole = operation(x)
        assert all(
            torch.equal(operation(x[i:j]), whole[i:j])
            for i in range(0, 70, 9)
            for j in range(i + 1, 71, 7)
        )
    assert torch.allclose(
        reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (2 * size,), weight, 1e-5), atol=1e-6
    )
    expected = F.layer_norm(x + 30, (2 * size,), weight, weight.flip(0), 1e-5)
    assert torch.allclose(
        reference_rows.layer_norm(x + 30, weight, weight.flip(0), 1e-5), expected, atol=2e-5
    )
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(reference.gated(x, SILU), F.silu(gate) * up, atol=1e-6)


@pytest.mark.parametrize("function", GateFunction)
def test_a_gate_takes_no_rows(function):
    assert reference_rows.gate(torch.empty(0, 6), torch.empty(0, 2), function).shape == (0, 6)


def test_store_skips_slot_minus_one_and_counts_nan_and_clipped_values():
    pages = make_pages(Format.E4M3FN, None, 1, 4, 2)
    before = pages.k.view(torch.uint8).clone()
    k = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[torch.nan, 1e9, -1e9, 0.0]]])
    v = torch.tensor([[[torch.nan] * 4], [[torch.nan, torch.nan, 1e9, 0.0]]])
    reference.store_kv(k, v, torch.tensor([-1, 3]), pages)
    after = pages.k.view(torch.uint8)
    assert pages.counters.tolist() == [3, 3]
    assert after[0, 3, 0].tolist() == [0x7F, 0x7E, 0xFE, 0x00]
    after[0, 3] = before[0, 3]
    assert torch.equal(after, before)


def test_a_dynamic_scale_ignores_what_is_not_finite():
    pages = make_pages(Format.E4M3FN, "token", 2, 4, 1)
    k = torch.tensor([[[torch.inf, 448.0, torch.nan, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    reference.store_kv(k, k, torch.tensor([0]), pages)
    assert pages.k_scale is not None
    assert pages.k_scale[0, 0].tolist() == [1.0, 2.0**-126]
    assert pages.k[0, 0, 0].float()[:2].tolist() == [448.0, 448.0]


@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize("experts", [6, 8, 20])
def test_a_row_has_the_same_experts_and_weights_alone(scoring: Scoring, experts: int) -> None:
    logits = 3 * torch.randn(200, experts)
    routing = Routing(experts, 3, scoring, normed=scoring is Scoring.SIGMOID)
    ids, weights = reference_experts.choose(logits, routing, None)
    for row in range(200):
        alone = reference_experts.choose(logits[row : row + 1], routing, None)
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])
