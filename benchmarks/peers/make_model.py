"""Write a Hugging Face checkpoint of a given shape with random weights, for engines that need one on disk.

Weights are BF16, or with `--weights int8` W8A8 as llm-compressor writes it for compressed-tensors: INT8 by output row
with a scale of float32, the head in BF16, and the engine rounds activations to INT8 by token.
Both forms of a seed hold the same model.

Runs in Freight's environment. The tokenizer is the demo model's, with unused words added up to the model's vocabulary:
some engines demand a tokenizer and look up every token that they generate. The folder loads in Freight, transformers,
vLLM and optimum alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import freight
from freight.config.presets import shape_config

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


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, [output, input] features for matrices."""
    hidden, between = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (between, hidden),
        "mlp.up_proj": (between, hidden),
        "mlp.down_proj": (hidden, between),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def to_int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of the layers as INT8 [output, input] with `weight_scale` [output, 1]; the others as they are."""
    found = {}
    for name, values in tensors.items():
        found[name] = values
        if name.startswith("model.layers.") and values.dim() == 2:
            scale = values.float().abs().amax(1, keepdim=True) / 127
            found[name] = (values.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale
    return found


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The demo model's tokenizer with `vocab_size` words; the added ones are never read from a text."""
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
    made.add_argument("--shape", default="llama-1b", help="a preset of Freight's or a config.json (default llama-1b)")
    made.add_argument(
        "--weights", choices=("bf16", "int8"), default="bf16", help="what matrices of layers are stored in"
    )
    made.add_argument("--seed", type=int, default=0)
    args = made.parse_args()
    config = {
        **shape_config(args.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    generator = torch.Generator().manual_seed(args.seed)
    tensors = {}
    for name, shape in shapes(config).items():
        values = torch.ones(shape)
        if len(shape) == 2:
            values.normal_(0, SPREAD, generator=generator)
        tensors[name] = values.bfloat16()
    parameters = sum(t.numel() for t in tensors.values())
    if args.weights == "int8":
        tensors, config["quantization_config"] = to_int8(tensors), W8A8
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (args.folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    write_tokenizer(args.folder, config["vocab_size"])
    print(f"{args.folder}: {parameters / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
