"""Why scales matter, as a demonstration: models that compute the same function with keys or values of another size.

    python -m freight.evaluate.rescale [MODEL] [--data FILE] [--calibration-data FILE] [--tokens N]

k_proj × c with q_proj / c leaves every score as it was; v_proj × c with o_proj / c leaves every output. So the 16-bit
model does not change, and neither should one with an FP8 cache; with scales of 1.0 it falls apart, because keys or
values leave E4M3's range, and with calibrated ones it does not notice. The command prints the table of
docs/numerics.md.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from freight.calibrate.quantize import quantize
from freight.checkpoint.reader import resolve_model
from freight.config.engine import EngineArgs
from freight.evaluate.report import CacheScore, compare_caches, markdown

VARIANTS = ((1.0, 1.0), (1000.0, 1.0), (1e-4, 1.0), (1.0, 1000.0), (1.0, 1e-4))  # c for keys, c for values
CACHES = (("fp8_e4m3", "unit"), ("fp8_e4m3", "dynamic"), ("fp8_e5m2", "unit"), ("fp8_e5m2", "dynamic"))
CALIBRATED = ("tensor", "head", "channel")
NUM_SAMPLES, SAMPLE_LENGTH = 32, 512


def rescale_model(source: Path, out: Path, keys: float, values: float) -> None:
    """Write a copy of the model in `source` to the new folder `out`, its keys × `keys` and its values × `values`.

    Weights become float32, so that the change is one rounding of each weight and no more. The model needs biases on
    neither or both of the projections of a pair; they are scaled alike.
    """
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    factors = {"k_proj": keys, "q_proj": 1 / keys, "v_proj": values}
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118, it is no dict
                tensor = stored.get_tensor(name).float()
                module = name.split(".")[-2]
                if module == "o_proj" and name.endswith(".weight"):
                    tensor /= values
                tensors[name] = tensor * factors.get(module, 1.0)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def calibrated_score(
    model: Path, granularity: str, calibration: Path, text: str, num_tokens: int | None, window: int | None = None
) -> CacheScore:
    """The model in `model` with an E4M3 cache whose scales were measured on the text in `calibration`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calibrated"
        quantize(
            str(model),
            out,
            weights="none",
            kv_cache="fp8",
            kv_granularity=granularity,
            calibration_data=calibration,
            num_samples=NUM_SAMPLES,
            max_seq_len=SAMPLE_LENGTH,
        )
        args = EngineArgs(model=str(out), dtype="bfloat16")
        return compare_caches(args, [("auto", "checkpoint")], text, window, num_tokens)[1]


def rescaled_scores(
    model: str, text: str, calibration: Path, num_tokens: int | None = None
) -> dict[tuple[float, float], list[CacheScore]]:
    """Each variant of `model` on the first `num_tokens` of `text`: a 16-bit cache, `CACHES`, then `CALIBRATED`."""
    source = resolve_model(model)
    results = {}
    for keys, values in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            variant = Path(folder) / "model"
            rescale_model(source, variant, keys, values)
            args = EngineArgs(model=str(variant), dtype="bfloat16")
            scores = compare_caches(args, CACHES, text, max_tokens=num_tokens)
            for granularity in CALIBRATED:
                scores.append(calibrated_score(variant, granularity, calibration, text, num_tokens))
            results[keys, values] = scores
    return results


def as_table(results: dict[tuple[float, float], list[CacheScore]]) -> str:
    """A row a variant: perplexity and, in brackets, mean KL in nats to the 16-bit cache of the same variant."""
    columns = [f"{dtype} {scales}" for dtype, scales in CACHES] + [f"calibrated {kind}" for kind in CALIBRATED]
    rows = [["k ×", "v ×", "16 bits", *(column.removeprefix("fp8_") for column in columns)]]
    for (keys, values), (plain, *scores) in results.items():
        cells = [f"{score.perplexity:.2f} ({score.mean_kl:.4f})" for score in scores]
        rows.append([f"{keys:g}", f"{values:g}", f"{plain.perplexity:.2f}", *cells])
    return markdown(rows, num_left=0)


def main() -> None:
    demo = Path(__file__).parent.parent / "demo"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", type=Path, default=demo / "heldout.txt")
    parser.add_argument("--calibration-data", type=Path, default=demo / "calibration.txt")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the text to judge by")
    args = parser.parse_args()
    text = args.data.read_text(encoding="utf-8")
    results = rescaled_scores(args.model, text, args.calibration_data, args.tokens)
    print(as_table(results))
    print(f"perplexity (mean KL to the 16-bit cache of the same variant, nats) on {args.tokens} tokens")


if __name__ == "__main__":
    main()
