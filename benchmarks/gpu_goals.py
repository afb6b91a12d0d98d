"""Goals of the GPU table in docs/benchmarks.md: the aim, the result, and the limiting resource.

A `Row` is what `freight bench … --json` prints. `Results` has the rows of each command by its name;
those of `freight bench kernels` by "kernels". Rows with `error` count as not measured. Loads no
torch.

The limiting resource follows from counters if a row has them (`issue_active`, `dram`: percent of
all cycles and of the memory's peak, as ncu reads them), else from the row's figures: bandwidth
relative to a copy's, launches times the time of an empty launch, and operations per second relative
to the fastest product that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Results = dict[str, list[Row]]

ENOUGH = 0.85  # of a copy's bandwidth, or of the fastest product: counts as the limit
NOTABLE = 0.25  # share of a row's time above which launches count as the limit
ISSUES = 45.0  # percent of cycles with an instruction issued: kernels of small tiles reach 50 to 65


@dataclass(frozen=True)
class Goal:
    """A line of the table. `find` raises LookupError for what was not measured; `row` finds the row
    that the line is about.

    `unit`: "" for a share, " x" for how many times as fast or as much.
    """

    what: str
    aim: float | None
    unit: str
    find: Callable[[Results], float | str]
    row: Callable[[Results], Row] | None = None


def kernel(results: Results, name: str, form: str, shape: tuple[int, ...]) -> Row:
    """Return the row of `freight bench kernels` with this format and a shape that begins so; the
    last of several.
    """
    for row in reversed(results["kernels"]):
        if "error" in row or (row["kernel"], row["format"]) != (name, form):
            continue
        if row["shape"][: len(shape)] == list(shape):
            return row
    raise KeyError(f"no row of {name}, {form}, {shape}")


def engine(results: Results, command: str) -> Row:
    """Return the row of a command of one row."""
    row = results[command][-1]
    if "error" in row:
        raise KeyError(row["error"])
    return row


def binds(row: Row, results: Results) -> str:
    """Say in one sentence what keeps a row from being faster."""
    if "decode_bandwidth_fraction" in row:
        return _binds_a_step(row)
    share = row["bandwidth_fraction"]
    of_peak = _of_peak(row, results["kernels"])
    if "issue_active" in row:
        return _from_counters(row["issue_active"], row["dram"])
    waiting = (row.get("launches") or 0) * (row.get("launch_gap_us") or 0.0) / row["median_us"]
    if share >= ENOUGH:
        return f"Bandwidth binds: {share:.2f} of a copy's."
    if waiting >= NOTABLE:
        return f"Launches bind: {row['launches']} of {row['launch_gap_us']:.1f} us are {waiting:.2f} of the time."
    if of_peak >= ENOUGH:
        return f"Matrix units bind: {row['tflops']:.0f} TFLOP/s are {of_peak:.2f} of the fastest product measured."
    return (
        f"Issue or latency inside the kernel binds: bandwidth {share:.2f} of a copy's, products {of_peak:.2f} of the "
        f"fastest, launches {waiting:.2f} of the time; counters would show which."
    )


def _of_peak(row: Row, rows: list[Row]) -> float:
    """Return operations per second as a share of torch's fastest product, in FP8 for rows that
    multiply FP8.
    """
    in_fp8 = row["kernel"] in ("linear", SCALED) or "FP8 products" in row["format"]
    products = ("torch.linear", SCALED) if in_fp8 else ("torch.linear",)
    peak = max(
        (item["tflops"] for item in rows if "error" not in item and item["kernel"] in products),
        default=0.0,
    )
    return float(row["tflops"] / peak) if peak else 0.0


def _from_counters(issue: float, dram: float) -> str:
    result = (
        f"the memory is busy {dram:.0f} % and instructions issue in {issue:.0f} % of cycles (ncu)."
    )
    if dram >= 100 * ENOUGH:
        return f"Bandwidth binds: {result}"
    if issue >= ISSUES:
        return f"Instruction issue binds: {result}"
    return f"Latency binds, barriers or too few loads in flight: {result}"


def _binds_a_step(row: Row) -> str:
    share = row["decode_bandwidth_fraction"]
    step = row["decode_step_ms"]
    if share >= ENOUGH:
        return f"Bandwidth binds: {share:.2f} of it in a step of {step:.2f} ms."
    return (
        f"A step takes {step:.2f} ms, {share * step:.2f} ms at full bandwidth; the rest are kernels below it and what "
        "the host does between steps."
    )


def share(what: str, aim: float, name: str, form: str, shape: tuple[int, ...]) -> Goal:
    """Make a goal for the share of a copy's bandwidth."""

    def row(results: Results) -> Row:
        return kernel(results, name, form, shape)

    return Goal(what, aim, "", lambda results: float(row(results)["bandwidth_fraction"]), row)


def faster(
    what: str,
    aim: float | None,
    fast: tuple[str, str],
    slow: tuple[str, str],
    shape: tuple[int, ...],
) -> Goal:
    """Make a goal for the speed of one kernel and format relative to another, at one shape."""

    def row(results: Results) -> Row:
        return kernel(results, *fast, shape)

    def find(results: Results) -> float:
        return float(kernel(results, *slow, shape)["median_us"] / row(results)["median_us"])

    return Goal(what, aim, " x", find, row)


BATCH = (64, 1, 8192)
LONG = (1, 1, 131072)
PREFILL = (1, 8192, 8192)
STORE = (8192,)
PRODUCT = (8192, 8192, 8192)
STATIC = ("attention", "fp8_e4m3fn, tensor")
TOKEN = ("attention", "fp8_e4m3fn, token")
SIXTEEN = ("attention", "bfloat16")
FLASH = ("torch.sdpa", "bfloat16, FlashAttention")
IN_FP8 = ("attention", "fp8_e4m3fn, tensor, FP8 products")
BF16_PRODUCT = ("torch.linear", "bfloat16")
SCALED = "torch._scaled_mm"
KERNEL_GOALS = (
    share("decode attention, 64 x 8 k, static scales: of the copy bandwidth", 0.85, *STATIC, BATCH),
    share("… with a scale per token", 0.75, *TOKEN, BATCH),
    faster("… against BF16 pages", 1.8, STATIC, SIXTEEN, BATCH),
    faster("… against FlashAttention on BF16", 1.5, STATIC, FLASH, BATCH),
    share("decode attention, 1 x 128 k: of the copy bandwidth", 0.75, *STATIC, LONG),
    faster("prefill attention, 8 k, against FlashAttention", 0.8, STATIC, FLASH, PREFILL),
    faster("… computed in FP8", 1.2, IN_FP8, FLASH, PREFILL),
    share(
        "rotate, quantize and store, 8 k tokens: of the copy bandwidth",
        0.7,
        "rotate_store",
        STATIC[1],
        STORE,
    ),
    faster(
        "FP8 product, 8192³, activations quantized, against BF16",
        1.6,
        ("linear", "fp8_e4m3fn, activations dynamic"),
        BF16_PRODUCT,
        PRODUCT,
    ),
    faster(
        "torch._scaled_mm alone, full sums", None, (SCALED, "fp8_e4m3fn"), BF16_PRODUCT, PRODUCT
    ),
    faster(
        "torch._scaled_mm alone, fast sums",
        None,
        (SCALED, "fp8_e4m3fn, fast sums"),
        BF16_PRODUCT,
        PRODUCT,
    ),
)


def _ratio(what: str, aim: float, item: str, other: str, figure: str) -> Goal:
    def find(results: Results) -> float:
        return float(engine(results, item)[figure] / engine(results, other)[figure])

    def row(results: Results) -> Row:
        return engine(results, item)

    return Goal(what, aim, " x", find, row if "decode" in figure else None)


def _tokens_for_the_same_bytes(what: str, aim: float, command: str) -> Goal:
    def find(results: Results) -> float:
        sixteen = engine(results, "8b batch 1, BF16")["kv_cache"]
        eight = engine(results, command)["kv_cache"]
        return float(sixteen["bytes_per_token"] / eight["bytes_per_token"])

    return Goal(what, aim, " x", find)


def _of_70b(results: Results) -> str:
    fits = [engine(results, f"70b, {cache} cache")["tokens_that_fit"] for cache in ("FP8", "BF16")]
    speed = engine(results, "70b, FP8 cache")["decode_tokens_per_second"]
    return f"{fits[0]:,} tokens fit, {fits[1]:,} in BF16; {speed:.1f} tokens/s"


ALONE = "8b batch 1, FP8"
BATCHES = ("8b batch 64, FP8", "8b batch 64, BF16")
ENGINE_GOALS = (
    _ratio(
        "llama-8b, batch 64, decode, FP8 against BF16", 1.6, *BATCHES, "decode_tokens_per_second"
    ),
    _ratio(
        "llama-8b, batch 64, prefill, FP8 against BF16", 1.3, *BATCHES, "prefill_tokens_per_second"
    ),
    _tokens_for_the_same_bytes("tokens for the same bytes, static scales", 2.0, "8b, one scale"),
    _tokens_for_the_same_bytes("tokens for the same bytes, a scale per token", 1.96, ALONE),
    Goal(
        "llama-8b, batch 1, decode: of the bandwidth",
        aim=0.65,
        unit="",
        find=lambda results: float(engine(results, ALONE)["decode_bandwidth_fraction"]),
        row=lambda results: engine(results, ALONE),
    ),
    Goal("llama-70b on one card", aim=None, unit="runs", find=_of_70b),
)


def table(results: Results, goals: tuple[Goal, ...] = KERNEL_GOALS + ENGINE_GOALS) -> list[str]:
    """Return the lines of a Markdown table: every goal, its aim, the result, and the limiting
    resource.
    """
    lines = ["| | aim | found | what binds |", "|---|---:|---:|---|"]
    for goal in goals:
        aim = "" if goal.aim is None else f"{goal.aim:g}{goal.unit}"
        if goal.unit == "runs":
            aim = goal.unit
        result = "not measured"
        why = ""
        try:
            value = goal.find(results)
            result = value if isinstance(value, str) else f"{value:.2f}{goal.unit}"
            why = binds(goal.row(results), results) if goal.row else ""
        except LookupError:  # not measured, failed, or a row without this figure
            pass
        lines.append(f"| {goal.what} | {aim} | {result} | {why} |")
    return lines
