"""Compare Freight's matrix products with torch's (oneDNN's) on a CPU, on a model's linear layers.

    python benchmarks/products_beside_torch.py --rows 512 --rows 1 [--shape llama-1b] [--rounds 20] [--threads 2]

One call is the products of every layer, each with its own weights, as in a forward pass. In a round
each kind is timed once, each round begins with another kind, and ratios are taken within a round.
*packed* weights are reordered beforehand by oneDNN for that number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.scheme import Activations
from freight.fp8.weights import quantize_rows
from freight.kernels.select import select_kernels
from freight.lab.bench.serving_figures import interval
from freight.model.config.presets import shape_config
from freight.operands.packed import PackedWeight
from freight.operands.weight import Weight
from freight.settings.device import cpu_name

Call = Callable[[], None]


def shapes_of(config: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return [outputs, inputs] of a layer's products: q, k and v are one, gate and up another."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config["head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    return [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


def calls(weights: list[Tensor], rows: int) -> Iterator[tuple[str, Call]]:
    """Yield each kind by name."""
    kernels = select_kernels("auto", "cpu")
    widths = {weight.shape[1] for weight in weights}
    inputs = {width: torch.randn(rows, width).bfloat16() for width in widths}
    xs = [inputs[weight.shape[1]] for weight in weights]

    def ours(x: Tensor, weight: PackedWeight) -> Tensor:
        return kernels.linear(x, weight, bias=None)

    linear = torch.ops.mkldnn._linear_pointwise

    def torch_packed(x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = linear(x, weight, None, "none", [], "")
        return product

    for name, activations in (
        ("Freight FP8", Activations.PLAIN),
        ("Freight FP8, W8A8", Activations.DYNAMIC),
    ):
        coded = [quantize_rows(weight.float(), Format.E4M3FN) for weight in weights]
        packed = [kernels.pack(Weight(data, scale, activations)) for data, scale in coded]
        yield name, partial(_each, ours, xs, packed)
    plain = [kernels.pack(Weight(weight)) for weight in weights]
    yield "Freight BF16", partial(_each, ours, xs, plain)
    yield "torch BF16", partial(_each, torch.nn.functional.linear, xs, weights)
    ordered = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    yield "torch BF16, packed", partial(_each, torch_packed, xs, ordered)


def _each(
    product: Callable[[Tensor, Any], Tensor], xs: Sequence[Tensor], weights: Sequence[Any]
) -> None:
    for x, weight in zip(xs, weights, strict=True):
        product(x, weight)


def rounds(kinds: list[tuple[str, Call]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each kind by round; a first round, which warms up, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in kinds}
    for turn in range(count + 1):
        first = turn % len(kinds)
        for name, call in kinds[first:] + kinds[:first]:
            begin = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, action="append", required=True)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = shape_config(args.shape)
    shapes = shapes_of(config) * config["num_hidden_layers"]
    operations = 2 * sum(out * width for out, width in shapes)
    torch.manual_seed(0)
    weights = [(torch.randn(shape) / shape[1] ** 0.5).bfloat16() for shape in shapes]
    print(
        f"{cpu_name()}, {args.threads} threads, {select_kernels('auto', 'cpu').name}, torch {torch.__version__}"
    )
    print(f"{args.shape}, {config['num_hidden_layers']} layers, {args.rounds} rounds\n")
    print(
        "| rows | | ms | GFLOP/s | speed, packed torch = 1 | interval |\n|---:|---|---:|---:|---:|---|"
    )
    with torch.inference_mode():
        for rows in args.rows:
            seconds = rounds(list(calls(weights, rows)), args.rounds)
            for name, own in seconds.items():
                median = statistics.median(own)
                ratios = [
                    other / item
                    for item, other in zip(own, seconds["torch BF16, packed"], strict=True)
                ]
                low, high, _ = interval(ratios)
                rate = operations * rows / median / 1e9
                speed = statistics.median(ratios)
                print(
                    f"| {rows} | {name} | {median * 1e3:.1f} | {rate:.0f} | {speed:.2f} | {low:.2f} to {high:.2f} |"
                )


if __name__ == "__main__":
    main()
