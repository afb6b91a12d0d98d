"""Measure every kind of KV scale, and centers, on variants of a model: the table of numerics.md.

    python tools/measure_scales.py [MODEL] [--data FILE] [--calibration-data FILE] [--tokens N]

The variants (scale_variants.py) either compute the model's function with keys or values of another
size, so that only the storage can make a difference, or have a large key bias. Static scales are
calibrated as by `freight quantize`, on another text than the evaluation text. E5M2 gets the same
scales, converted to its range.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scale_variants import hot_pair, key_spreads, rescaled, write_biased, write_variant
from torch import Tensor

from freight.base.tables import markdown
from freight.checkpoint.reader import resolve_model
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.evaluate.report import CacheRun, CacheScore, run_caches
from freight.model.open import open_checkpoint
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import load_samples, open_unquantized
from freight.settings.engine import EngineArgs, KVCacheConfig

FORMATS = (Format.E4M3FN, Format.E5M2)
SCALES = ("unit", "tensor", "head", "channel", "token", "centered")
NUM_SAMPLES = 32
SAMPLE_LENGTH = 512
BLOCK = 64  # neighbouring tokens that the bootstrap resamples together
DRAWS = 10_000

Write = Callable[[Path, Path], None]  # (model's folder, new folder)


@dataclass(frozen=True)
class Row:
    """One variant: the 16-bit cache, then every scale of `SCALES` by format."""

    name: str
    plain: CacheScore
    runs: Mapping[tuple[Format, str], CacheRun]

    def score(self, format: Format, scales: str) -> CacheScore:
        return self.runs[format, scales].score()


def variants(model: str, token_ids: Sequence[int]) -> dict[str, Write]:
    """Return how each variant of `model` is written. `token_ids` show how large its keys are."""
    config = open_checkpoint(model).model
    dim = config.attention[0].k_dim
    half = config.attention[0].k_dim // 2

    def scaled(keys: float = 1.0, values: float = 1.0) -> Write:
        return lambda source, out: write_variant(source, out, rescaled(keys, values))

    def with_hot_pair(source: Path, out: Path) -> None:
        write_variant(source, out, hot_pair(half // 4, dim, 1e3))

    def biased(pair: int) -> Write:
        def write(source: Path, out: Path) -> None:
            write_biased(source, out, config, key_spreads(model, token_ids), pair)

        return write

    return {
        "plain": scaled(),
        "k × 1000": scaled(keys=1e3),
        "v × 1e-4": scaled(values=1e-4),
        "one hot pair": with_hot_pair,
        "bias, slow pair": biased(half - half // 8),
        "bias, fast pair": biased(half // 8),
    }


def calibrated(
    model: str,
    data: Path,
    granularity: Granularity,
    center: bool = False,
    length: int = SAMPLE_LENGTH,
) -> KVScales:
    """Calibrate scales of the model for E4M3 as `freight quantize` does, on the text in `data`."""
    opened = open_unquantized(model)
    args = QuantizeArgs(
        weights="none",
        kv_cache="fp8",
        kv_granularity=granularity,
        center=center,
        num_samples=NUM_SAMPLES,
        max_seq_len=length,
    )
    decided = plan(args)
    result = opened.calibrate(decided, load_samples(opened, decided, data), ())
    scales = result.kv_finer or result.kv
    assert scales is not None
    return scales


def caches(
    model: str, data: Path, length: int = SAMPLE_LENGTH
) -> dict[tuple[Format, str], KVCacheConfig]:
    """Return every cache of the table for this model."""
    static: dict[str, KVScales] = {
        str(granularity): calibrated(model, data, granularity, length=length)
        for granularity in (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)
    }
    static["centered"] = calibrated(model, data, Granularity.CHANNEL, center=True, length=length)
    results = {}
    for format in FORMATS:
        results[format, "unit"] = KVCacheConfig(format, Granularity.TENSOR, ScaleSource.UNIT, None)
        results[format, "token"] = KVCacheConfig(
            format, Granularity.TOKEN, ScaleSource.DYNAMIC, None
        )
        for name, scales in static.items():
            granularity = Granularity.CHANNEL if name == "centered" else Granularity(name)
            results[format, name] = KVCacheConfig(
                format, granularity, ScaleSource.CALIBRATED, _for_range(scales, format)
            )
    return results


def _for_range(scales: KVScales, format: Format) -> KVScales:
    """Convert scales for E4M3FN to `format`, so that the same amax becomes its largest number."""
    factor = Format.E4M3FN.max / format.max

    def changed(layer: LayerScales | None) -> LayerScales | None:
        return layer and replace(
            layer, k=tuple(x * factor for x in layer.k), v=tuple(x * factor for x in layer.v)
        )

    return KVScales(tuple(map(changed, scales.layers)), format)


def judge(
    name: str,
    write: Write,
    model: str,
    text: str,
    data: Path,
    tokens: int | None,
    window: int | None = None,
) -> Row:
    """Compute one row of the table: the variant that `write` makes of `model`, in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        variant = Path(folder) / "model"
        write(resolve_model(model), variant)
        tried = caches(str(variant), data)
        args = EngineArgs(model=str(variant), dtype="bfloat16")
        plain, *runs = run_caches(args, list(tried.values()), text, window, tokens)
        return Row(name, plain.score(), dict(zip(tried, runs, strict=True)))


def paired_difference(item: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Return the mean of `other` - `one` over tokens [num_tokens], and its 95 % interval by paired
    bootstrap (Efron 1979).

    Draws blocks of `BLOCK` neighbouring tokens (Künsch 1989), because a cache's errors on
    neighbouring tokens are correlated.
    """
    difference = (other - item).double()
    blocks = difference[: len(difference) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(
        len(blocks), (DRAWS, len(blocks)), generator=generator, dtype=torch.int64, device="cpu"
    )
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")
    low, high = torch.quantile(blocks[drawn].mean(1), ends).tolist()
    return float(difference.mean()), low, high


def as_table(rows: Sequence[Row], format: Format) -> str:
    """Format one row per variant: perplexity and, in brackets, mean KL in nats to the 16-bit cache
    of the same variant.
    """
    cells = [["", "16 bits", *SCALES]]
    for row in rows:
        scores = [row.score(format, scales) for scales in SCALES]
        cells.append(
            [
                row.name,
                f"{row.plain.perplexity:.2f}",
                *(f"{s.perplexity:.2f} ({s.mean_kl:.4f})" for s in scores),
            ]
        )
    return markdown(cells, num_left=1)


def against_unit(row: Row) -> str:
    """Say how calibrated scales change a token's loss against scales of 1.0, in E4M3."""
    unit = row.runs[Format.E4M3FN, "unit"].token_logprobs
    cells = [["E4M3, minus unit", "nats per token", "95 % interval"]]
    for scales in SCALES[1:]:
        mean, low, high = paired_difference(row.runs[Format.E4M3FN, scales].token_logprobs, unit)
        cells.append([scales, f"{mean:+.5f}", f"{low:+.5f} … {high:+.5f}"])
    return markdown(cells, num_left=1)


def main() -> None:
    demo = resolve_model("demo")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument(
        "--data", type=Path, default=demo / "heldout.txt", help="the text to judge by"
    )
    parser.add_argument("--calibration-data", type=Path, default=demo / "calibration.txt")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the text to judge by")
    args = parser.parse_args()
    text = args.data.read_text(encoding="utf-8")
    tokenizer = open_unquantized(args.model).load_tokenizer()
    token_ids = tokenizer.encode(args.calibration_data.read_text(encoding="utf-8"))[:1024]
    rows = [
        judge(name, write, args.model, text, args.calibration_data, args.tokens)
        for name, write in variants(args.model, token_ids).items()
    ]
    for format in FORMATS:
        print(
            f"{format}: perplexity (mean KL to the 16-bit cache of the same variant, nats), {args.tokens} tokens\n"
        )
        print(as_table(rows, format), end="\n\n")
    print(against_unit(rows[0]))


if __name__ == "__main__":
    main()
