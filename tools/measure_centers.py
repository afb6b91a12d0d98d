"""Measure what centers gain and cost: the figures under "Centers" in docs/numerics.md.

    python tools/measure_centers.py [MODEL ...] [--tokens N] [--cost]
    python tools/measure_centers.py MODEL --write-raised OUT [--turning]

Gain: each MODEL (default: the demo model) runs in float32, so that only the cache rounds. A model
without biases is measured as it is. A model with key biases, as `tools/train_demo_model.py --family
qwen2` trains it, is measured as it is and with these biases raised to their size in Qwen2.5-7B.
`--write-raised` writes the latter as a model. `--cost` measures attention alone, by number of
centered pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure_scales import calibrated
from scale_variants import key_spreads, read_tensors, write_tensors
from torch import Tensor

from freight.base.tables import markdown
from freight.cache.groups import Pages
from freight.checkpoint.reader import resolve_model
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.select import select_kernels
from freight.lab.evaluate.report import compare_caches
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import load_samples, open_unquantized
from freight.settings.engine import EngineArgs, KVCacheConfig

# Qwen2.5-7B, by KV head: its key biases have norms of 605 in the first layer, 921 in the last and
# 22 in the median one, each over four heads (https://github.com/ggml-org/llama.cpp/issues/21385).
NORMS = {"first": 605 / 2, "between": 22 / 2, "last": 921 / 2}
# rad over the context: a pair that hardly rotates, and one that makes a full turn
STILL = 0.1
TURN = 2 * math.pi
GRANULARITIES = (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)
HEADS = 8
GROUP = 4
DIM = 128
BLOCK_SIZE = 64
PAIRS = (0, 2, 8, 20, 40)
LOADS = ((16, 2048, 1), (1, 8192, 1), (1, 2048, 512))  # sequences, tokens of each, new tokens
REPEATS = 12


def pairs_of(config: dict[str, Any], turning: bool) -> Tensor:
    """Return the pairs that rotate by at most `STILL` over the context; if `turning`, the others
    that make no full turn.
    """
    half = config["head_dim"] // 2
    angles = config["max_position_embeddings"] * config["rope_theta"] ** (
        -torch.arange(half) / half
    )
    chosen: Tensor = (angles <= TURN) & (angles > STILL) if turning else angles <= STILL
    return chosen.nonzero().flatten()


def write_raised(source: Path, out: Path, turning: bool = False) -> None:
    """Write the model with key biases of the size in `NORMS`: those on some pairs are multiplied,
    the others stay.

    Where pairs hardly rotate, a bias adds the same to all scores of a query, so the function hardly
    changes.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = read_tensors(source)
    heads = config["num_key_value_heads"]
    dim = config["head_dim"]
    last = config["num_hidden_layers"] - 1
    pairs = pairs_of(config, turning)
    channels = torch.cat([pairs, pairs + dim // 2])
    for index in range(last + 1):
        name = f"model.layers.{index}.self_attn.k_proj.bias"
        bias = tensors[name].view(heads, dim)
        place = {last: "last", 0: "first"}.get(index, "between")
        norm = bias[:, channels].norm(dim=1, keepdim=True)
        bias[:, channels] *= (NORMS[place] / norm).clamp(min=1)
        tensors[name] = bias.flatten()
    write_tensors(source, out, tensors)


def by_layer(model: str) -> list[list[str]]:
    """Return table rows by layer: the key biases, if any, the factor by which centers divide the
    mean squared error, and centered pairs per head.
    """
    source = resolve_model(model)
    data = resolve_model("demo") / "calibration.txt"
    opened = open_unquantized(model)
    decided = plan(
        QuantizeArgs(weights="none", kv_cache="fp8", center=True, num_samples=8, max_seq_len=512)
    )
    samples = load_samples(opened, decided, data)
    result = opened.calibrate(decided, samples, ()).centers
    spreads = key_spreads(model, samples[0])
    tensors = read_tensors(source)
    rows = [["layer", "key bias: largest", "norm of a head", "std of keys", "gain", "pairs"]]
    for index, (item, spread) in enumerate(zip(result, spreads, strict=True)):
        k = tensors.get(f"model.layers.{index}.self_attn.k_proj.bias", torch.zeros(1))
        norm = (
            k.view(opened.model.attention[index].num_kv_heads if len(k) > 1 else 1, -1)
            .norm(dim=1)
            .max()
        )
        sizes = float(k.abs().max()), float(norm), spread, item.k_gain
        pairs = 0 if item.k is None else int((item.k != 0).sum(1).max()) // 2
        rows.append([str(index), *(f"{size:.2f}" for size in sizes), str(pairs)])
    return rows


def caches(model: str, data: Path) -> dict[str, KVCacheConfig]:
    """Return caches in E4M3 with every kind of scale, then with channel scales and centers."""
    results = {
        "unit": KVCacheConfig(Format.E4M3FN, Granularity.TENSOR, ScaleSource.UNIT, None),
        "token": KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None),
    }
    for granularity in GRANULARITIES:
        scales = calibrated(model, data, granularity)
        results[str(granularity)] = KVCacheConfig(
            Format.E4M3FN, granularity, ScaleSource.CALIBRATED, scales
        )
    rest = calibrated(model, data, Granularity.CHANNEL, center=True)
    results["centered"] = KVCacheConfig(
        Format.E4M3FN, Granularity.CHANNEL, ScaleSource.CALIBRATED, rest
    )
    return results


def row(name: str, model: Path, text: str, data: Path, tokens: int) -> dict[str, str]:
    tried = caches(str(model), data)
    plain, *scores = compare_caches(
        EngineArgs(str(model), dtype="float32"), list(tried.values()), text, max_tokens=tokens
    )
    cells = {"perplexity (mean KL)": name, "not rounded": f"{plain.perplexity:.2f}"}
    return cells | {
        kind: f"{score.perplexity:.2f} ({score.mean_kl:.5f})"
        for kind, score in zip(tried, scores, strict=True)
    }


def gains(model: str, tokens: int) -> list[list[str]]:
    source = resolve_model(model)
    demo = resolve_model("demo")
    text = (demo / "heldout.txt").read_text(encoding="utf-8")
    data = demo / "calibration.txt"
    with tempfile.TemporaryDirectory() as folder:
        models = {"as it is": source}
        if has_biases(source):
            models["raised"] = Path(folder) / "raised"
            write_raised(source, models["raised"])
        rows = [row(name, item, text, data, tokens) for name, item in models.items()]
    return [list(rows[0]), *(list(item.values()) for item in rows)]


def has_biases(model: Path) -> bool:
    return any(name.endswith("k_proj.bias") for name in read_tensors(model))


def milliseconds(sequences: int, length: int, new: int) -> list[float]:
    """Return the fastest of `REPEATS` runs for each of `PAIRS`, in alternation."""
    per = length // BLOCK_SIZE
    shape = (sequences * per, BLOCK_SIZE, HEADS, DIM)
    k = torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    v = torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pages = KVPages(
        k, v, torch.rand(HEADS, DIM), torch.rand(HEADS, DIM), torch.zeros(2, dtype=torch.int64)
    )
    angles = torch.outer(torch.arange(length).float(), 1e6 ** (-torch.arange(0, DIM, 2) / DIM))
    tables = KeyCenter.angle_tiles(angles.cos()), KeyCenter.angle_tiles(angles.sin())
    b = [torch.zeros(HEADS, DIM).index_fill_(1, torch.arange(count), 1.0) for count in PAIRS]
    tried = [
        replace(pages, k_center=KeyCenter.of(item, *tables) if item.any() else None) for item in b
    ]
    slices = [
        SequenceSlice([0] * new, length - new, (range(i * per, (i + 1) * per),), Logits.NONE)
        for i in range(sequences)
    ]
    batch = prepare(slices, [Pages((0,), 0, None, BLOCK_SIZE)])
    q = torch.randn(sequences * new, HEADS * GROUP, DIM).bfloat16()
    attention = select_kernels("auto").attention
    best = [float("inf")] * len(PAIRS)
    for _ in range(REPEATS):
        for i, item in enumerate(tried):
            begin = time.perf_counter()
            attention(q, item, batch.sequences(0), AttentionCall(DIM**-0.5))
            best[i] = min(best[i], time.perf_counter() - begin)
    return [1e3 * seconds for seconds in best]


def costs(loads: Sequence[tuple[int, int, int]] = LOADS) -> list[list[str]]:
    rows = [["milliseconds", *(f"{count} pairs" for count in PAIRS)]]
    for sequences, length, new in loads:
        times = milliseconds(sequences, length, new)
        rows.append([f"{sequences} × {length}, {new} new", *(f"{time:.2f}" for time in times)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=["demo"], metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--cost", action="store_true", help="only what centers cost attention")
    parser.add_argument(
        "--write-raised", type=Path, metavar="OUT", help="only write MODEL with larger key biases"
    )
    parser.add_argument(
        "--turning",
        action="store_true",
        help="raise them on pairs that rotate, not on those that do not",
    )
    args = parser.parse_args()
    if args.write_raised:
        write_raised(Path(args.models[0]), args.write_raised, args.turning)
        return
    if args.cost:
        print(markdown(costs(), num_left=1))
        return
    for model in args.models:
        print(markdown(by_layer(model), num_left=1), end="\n\n")
        print(markdown(gains(model, args.tokens), num_left=1), end="\n\n")


if __name__ == "__main__":
    main()
