"""Check that vLLM runs a centered, channel-scaled checkpoint like one with a scale per layer.

    python benchmarks/peers/compare_centered.py --vllm-python PATH [MODEL] [--data FILE]

Runs in Freight's environment; PATH is the interpreter of one with vLLM's CPU build (0.32 was
tried). MODEL, and a copy of it with a large key bias (freight.lab.evaluate.variants), are quantized
twice, with `--kv-granularity channel --center` and with `--kv-granularity tensor`. vLLM loads both,
with an FP8 cache, and must give the same log-probabilities: it sees neither centers nor finer
scales, and the scales that it sees are valid without them. Prints a line for each model: the
largest difference between the two in vLLM, and of either to vLLM's own 16-bit cache. Status 1 if
the two differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import PROMPTS, comparison, differences
from compare_with_vllm import ask

import freight
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.model.config.parse import parse_model_config
from freight.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from scale_variants import key_spreads, write_biased

SCALES = ({"kv_granularity": "tensor"}, {"kv_granularity": "channel", "center": True})


def write_models(model: str, folder: Path, token_ids: list[int]) -> dict[str, Path]:
    """Write the model, and its biased copy; the bias is on a pair of channels that hardly rotates."""
    source = resolve_model(model)
    config = parse_model_config(Checkpoint(source).config)
    half = config.head_dim // 2
    write_biased(source, folder / "biased", config, key_spreads(model, token_ids), half - half // 8)
    return {model: source, f"{model} with a key bias": folder / "biased"}


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument("--vllm-python", required=True, metavar="PATH")
    args = parser.parse_args()
    source = resolve_model(args.model)
    tokenizer = Tokenizer.load(source)
    data = args.data or source / "calibration.txt"
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    token_ids = tokenizer.encode(data.read_text(encoding="utf-8"))[:1024]
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in write_models(args.model, Path(temporary), token_ids).items():
            tops = [ask(args.vllm_python, folder, prompts)]
            for index, scales in enumerate(SCALES):
                out = Path(temporary) / f"{folder.name}-{index}"
                result = freight.quantize(
                    folder, out, weights="none", kv_cache="fp8", calibration_data=data, num_samples=32, max_seq_len=512,
                    **scales,
                )  # fmt: skip
                tops.append(ask(args.vllm_python, out, prompts))
            plain, coarse, centered = tops
            layers = sum(item.k is not None for item in result.centers)
            apart = differences(coarse, centered)[-1]
            failed |= apart > 0
            print(
                f"{name}: {layers} of {len(result.centers)} layers centered; apart in vLLM {apart:.5f}; from 16 bits "
                f"{differences(plain, coarse)[-1]:.5f} per layer, {differences(plain, centered)[-1]:.5f} centered",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
