"""Measure torch's BF16 matrix products (oneDNN's) on a model's linear layers; one JSON line.

This is no engine but an upper bound for engines that compute in BF16: only the products of every
decoder layer, 512 rows at a time as in a chunk of a prefill, and `batch-size` rows, with the head's
product, as in a decode step. Each layer has its own weights, as in a model. Weights as stored and
packed beforehand are both tried, and the better result counts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import figures, parser, report

PREFILL_ROWS = 512


def layer_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return [output, input] features; Q, K and V are one product and gate and up another, as in
    engines.
    """
    hidden = config["hidden_size"]
    between = config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    return [
        (q_size + 2 * kv_size, hidden),
        (hidden, q_size),
        (2 * between, hidden),
        (hidden, between),
    ]


def products(weights: list[torch.Tensor], rows: int, packed: bool) -> Callable[[], None]:
    """Return a call that multiplies `rows` rows with every weight, one after another."""
    widths = {item.shape[1] for item in weights}
    inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16) for width in widths}
    pairs = [(inputs[item.shape[1]], item) for item in weights]
    if packed:
        pairs = [(x, torch.ops.mkldnn._reorder_linear_weight(item, rows)) for x, item in pairs]

    def plain_products() -> None:
        for x, item in pairs:
            torch.nn.functional.linear(x, item)

    linear = torch.ops.mkldnn._linear_pointwise

    def packed_products() -> None:
        for x, item in pairs:
            linear(x, item, None, "none", [], "")

    return packed_products if packed else plain_products


def seconds_of(call: Callable[[], None], repeats: int) -> list[float]:
    call()
    results = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        results.append(time.perf_counter() - begin)
    return results


def main() -> None:
    args = parser(__doc__).parse_args()
    if not torch.backends.mkldnn.is_available():
        sys.exit("this torch has no oneDNN")
    torch.set_num_threads(args.threads)
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    shapes = layer_shapes(config) * config["num_hidden_layers"]
    flops_per_token = 2 * sum(map(math.prod, shapes))
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    head = torch.randn(config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16)
    results = {}
    with torch.inference_mode():
        for packed in (False, True):
            prefill = seconds_of(products(weights, PREFILL_ROWS, packed), args.repeats)
            decode = seconds_of(
                products([*weights, head], args.batch_size, packed), args.repeats * 4
            )
            results["packed" if packed else "as stored"] = figures(
                {
                    "prefill_tokens_per_second": [PREFILL_ROWS / seconds for seconds in prefill],
                    "decode_tokens_per_second": [args.batch_size / seconds for seconds in decode],
                }
            )
    best = {}
    for figure in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        best[figure] = max(results.values(), key=lambda item: item[figure])
    ran = {
        "weights": "bfloat16",
        "prefill_rows": PREFILL_ROWS,
        "flops_per_token": flops_per_token,
        "flops_per_second": flops_per_token
        * best["prefill_tokens_per_second"]["prefill_tokens_per_second"],
        "by_weights": results,
    }
    medians = {figure: item[figure] for figure, item in best.items()}
    spread = {figure: item["spread"][figure] for figure, item in best.items()}
    report(args, "torch", f"torch {torch.__version__}", ran, medians | {"spread": spread})


if __name__ == "__main__":
    main()
