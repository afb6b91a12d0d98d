"""Write a Hugging Face checkpoint of a given shape with random weights, for engines that need one.

Weights are BF16, or with `--weights int8` W8A8 as llm-compressor writes it for compressed-tensors:
INT8 with a float32 scale per output row, the head in BF16, and activations that the engine rounds
to INT8 per token. Both forms of a seed hold the same model.

Runs in Freight's environment. The tokenizer is the demo model's, with unused words added up to the
model's vocabulary: some engines require a tokenizer and look up every token that they generate. The
folder loads in Freight, transformers, vLLM and optimum alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import freight
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import shape_config
from freight.model.shapes import tensor_shapes

SPREAD = 0.02  # standard deviation of every matrix; norms are 1

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def by_layer(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Group the tensors by layer, and those outside the layers."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "outer"
        parts.setdefault(layer, {})[name] = shape
    return parts


def to_int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the matrices of the layers to INT8 [output, input] with `weight_scale` [output, 1];
    keep the others.
    """
    results = {}
    for name, values in tensors.items():
        results[name] = values
        if name.startswith("model.layers.") and values.dim() == 2:
            scale = values.float().abs().amax(1, keepdim=True) / 127
            results[name] = (values.float() / scale).round().to(torch.int8)
            results[f"{name}_scale"] = scale
    return results


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the demo model's tokenizer with `vocab_size` words; text never contains the added ones."""
    demo = Path(freight.__file__).parent / "demo"
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    for number in range(len(words), vocab_size):
        words[f"<|unused_{number}|>"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((demo / "tokenizer_config.json").read_bytes())


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("folder", type=Path, help="where to write the checkpoint")
    made.add_argument(
        "--shape",
        default="llama-1b",
        help="a preset of Freight's or a config.json (default llama-1b)",
    )
    made.add_argument(
        "--weights",
        choices=("bf16", "int8"),
        default="bf16",
        help="what matrices of layers are stored in",
    )
    made.add_argument("--seed", type=int, default=0)
    args = made.parse_args()
    config = {"hidden_act": "silu", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1}
    config = {**shape_config(args.shape), **config}
    if config["model_type"] == "llama":
        config["mlp_bias"] = False
    model = parse_model_config(config)
    config["rms_norm_eps"] = model.norm_eps
    generator = torch.Generator().manual_seed(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    parameters = 0
    for part, shapes in by_layer(
        tensor_shapes(model)
    ).items():  # a file each: memory holds one layer
        tensors = {}
        for name, shape in shapes.items():
            values = torch.ones(shape)
            if len(shape) == 2:
                values.normal_(0, SPREAD, generator=generator)
            tensors[name] = values.bfloat16()
            parameters += values.numel()
        if args.weights == "int8":
            tensors = to_int8(tensors)
            config["quantization_config"] = W8A8
        files |= dict.fromkeys(tensors, f"model-{part}.safetensors")
        save_file(tensors, args.folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (args.folder / "model.safetensors.index.json").write_text(
        json.dumps(index) + "\n", encoding="utf-8"
    )
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (args.folder / "generation_config.json").write_text(
        json.dumps(generation) + "\n", encoding="utf-8"
    )
    write_tokenizer(args.folder, config["vocab_size"])
    print(f"{args.folder}: {parameters / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
