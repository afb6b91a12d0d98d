"""What centers gain by side, and what they cost attention: the figures under "Centers" in docs/numerics.md.

    python tools/measure_centers.py [--tokens N]

Gain: the demo model in float32, so that only the cache rounds, as it is and with a bias of 15 on one channel of every
value head, which a bias of the output projection undoes. Cost: attention alone, by centered pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from freight.checkpoint.reader import resolve_model
from freight.config.engine import EngineArgs, KVCacheConfig
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.evaluate.report import compare_caches, markdown
from freight.evaluate.scales import calibrated
from freight.evaluate.variants import read_tensors, write_tensors
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.select import select_kernels
from freight.operands.kv_pages import KeyCenter, KVPages

VALUE_BIAS = 15.0
SIDES = ("", "k", "v", "kv")
HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 64
PAIRS = (0, 2, 8, 20, 40)
LOADS = ((16, 2048, 1), (1, 8192, 1), (1, 2048, 512))  # sequences, tokens of each, of which new
REPEATS = 12


def with_value_bias(source: Path, out: Path) -> None:
    """The demo model's function, with a constant in its values."""
    tensors = read_tensors(source)
    for index in range(6):
        prefix = f"model.layers.{index}.self_attn."
        bias = torch.zeros(2, 64)
        bias[:, 5] = VALUE_BIAS
        output = tensors[prefix + "o_proj.weight"]
        tensors[prefix + "q_proj.bias"], tensors[prefix + "k_proj.bias"] = torch.zeros(256), torch.zeros(128)
        tensors[prefix + "v_proj.bias"] = bias.flatten()
        tensors[prefix + "o_proj.bias"] = -output @ bias.repeat_interleave(2, 0).flatten()
    write_tensors(source, out, tensors, {"attention_bias": True})


def of_sides(whole: KVScales, rest: KVScales, sides: str) -> KVCacheConfig:
    """Channel scales with the centers of `sides` only."""

    def layer(a: LayerScales | None, b: LayerScales | None) -> LayerScales:
        assert a is not None
        assert b is not None
        k = b if "k" in sides else a
        v = b if "v" in sides else a
        return replace(a, k=k.k, v=v.v, k_center=k.k_center, v_center=v.v_center)

    layers = tuple(map(layer, whole.layers, rest.layers))
    return KVCacheConfig(Format.E4M3FN, Granularity.CHANNEL, ScaleSource.CALIBRATED, KVScales(layers))


def gains(tokens: int) -> list[list[str]]:
    source = resolve_model("demo")
    text, data = (source / "heldout.txt").read_text(encoding="utf-8"), source / "calibration.txt"
    rows = [["mean KL", *(f"centered: {sides or 'none'}" for sides in SIDES)]]
    with tempfile.TemporaryDirectory() as folder:
        biased = Path(folder) / "biased"
        with_value_bias(source, biased)
        for name, model in (("plain", source), ("values biased", biased)):
            whole, rest = (calibrated(str(model), data, Granularity.CHANNEL, center) for center in (False, True))
            caches = [of_sides(whole, rest, sides) for sides in SIDES]
            _, *scores = compare_caches(EngineArgs(str(model), dtype="float32"), caches, text, max_tokens=tokens)
            rows.append([name, *(f"{score.mean_kl:.5f}" for score in scores)])
    return rows


def milliseconds(sequences: int, length: int, new: int) -> list[float]:
    """Fastest of `REPEATS` for each of `PAIRS`, taken in turns."""
    per = length // BLOCK_SIZE
    shape = (sequences * per, BLOCK_SIZE, HEADS, DIM)
    k, v = (torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in "kv")
    pages = KVPages(k, v, torch.rand(HEADS, DIM), torch.rand(HEADS, DIM), torch.zeros(2, dtype=torch.int64))
    angles = torch.outer(torch.arange(length).float(), 1e6 ** (-torch.arange(0, DIM, 2) / DIM))
    tables = KeyCenter.angle_tiles(angles.cos()), KeyCenter.angle_tiles(angles.sin())
    b = [torch.zeros(HEADS, DIM).index_fill_(1, torch.arange(count), 1.0) for count in PAIRS]
    tried = [replace(pages, k_center=KeyCenter.of(one, *tables) if one.any() else None) for one in b]
    slices = [
        SequenceSlice([0] * new, length - new, (range(i * per, (i + 1) * per),), Logits.NONE) for i in range(sequences)
    ]
    batch, q = prepare(slices, BLOCK_SIZE), torch.randn(sequences * new, HEADS * GROUP, DIM).bfloat16()
    attention, best = select_kernels("auto").attention, [float("inf")] * len(PAIRS)
    for _ in range(REPEATS):
        for i, one in enumerate(tried):
            begin = time.perf_counter()
            attention(q, one, batch.sequences(0), DIM**-0.5, None, None)
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
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    print(markdown(costs(), num_left=1), end="\n\n")
    print(markdown(gains(args.tokens), num_left=1))


if __name__ == "__main__":
    main()
