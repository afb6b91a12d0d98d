"""Write a Llama or Qwen3-MoE checkpoint as a GGUF file with Q8_0, Q4_0, Q4_K_M or BF16 weights, for
llama.cpp.

With Q8_0 a matrix is blocks of 32 int8 values with one float16 scale, as llama.cpp's `quantize`
makes them, and with Q4_0 blocks of 32 values of 4 bits; head and embedding too. Q4_K_M is made by
llama.cpp itself from a BF16 file: mostly 4 bits, some matrices 6, about 5 bits per weight in all.
Norms are float32. The vocabulary of a byte-level BPE tokenizer is included, because llama.cpp's
server needs one; without a tokenizer.json the file takes and gives token ids only. Runs in
llama.cpp's environment, which has gguf and NumPy but no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
PLAIN = {  # all matrices of one type, which the gguf package rounds to
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
IN_FLOAT32 = ("_norm", "ffn_gate_inp")
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"


def bfloat16_tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values of every tensor; those of the experts of a layer as one [experts,
    outputs, inputs].
    """
    for path in sorted(checkpoint.glob("*.safetensors")):
        stored = dict(file_tensors(path))
        experts: dict[str, list[np.ndarray]] = {}
        for name, bits in stored.items():
            module, number, part = re.fullmatch(r"(?:(.*\.experts\.)(\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
            if number is None:
                yield name, values(bits)
            else:
                experts.setdefault(module + part, []).append(bits)
        for name, parts in experts.items():
            yield name, np.stack([values(bits) for bits in parts])


def file_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the bits of the tensors of one file, mapped."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, tensor in header.items():
        if tensor["dtype"] != "BF16":
            sys.exit(f"{path}: {name} is {tensor['dtype']}, only BF16 is read")
        begin, end = tensor["data_offsets"]
        yield name, data[begin:end].view("<u2").reshape(tensor["shape"])


def values(bits: np.ndarray) -> np.ndarray:
    """Convert BF16 to float32, of which it is the upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pair_neighbours(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of each head from halves to pairs: in RoPE llama.cpp rotates neighbours, Hugging
    Face i and i + d/2.
    """
    rows, columns = matrix.shape
    return (
        matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def add_vocabulary(writer: gguf.GGUFWriter, path: Path, config: dict[str, Any]) -> None:
    """Add the tokens and merges of a tokenizer.json; "none" if there is no such file."""
    if not path.exists():
        writer.add_tokenizer_model("none")
        return
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(
        [added.get(index) or tokens.get(index, f"<unused {index}>") for index in ids]
    )
    kinds = gguf.TokenType
    types = []
    for index in ids:
        if index in added:
            types.append(kinds.CONTROL)
        else:
            types.append(kinds.NORMAL if index in tokens else kinds.UNUSED)
    writer.add_token_types(types)
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write(
    checkpoint: Path, file: Path, kind: gguf.GGMLQuantizationType, file_type: gguf.LlamaFileType
) -> None:
    """Write the checkpoint as `file`, with matrices of type `kind`."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    mixture = config["model_type"] == "qwen3_moe"
    writer = gguf.GGUFWriter(file, "qwen3moe" if mixture else "llama", use_temp_file=True)
    if mixture:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, checkpoint / "tokenizer.json", config)
    writer.add_file_type(file_type)
    for name, tensor in bfloat16_tensors(checkpoint):
        if (
            "q_proj" in name or "k_proj" in name
        ) and not mixture:  # it turns Qwen's halves as they are
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = pair_neighbours(tensor, config[heads])
        stored = gguf_name(name)
        as_type = (
            gguf.GGMLQuantizationType.F32 if any(part in stored for part in IN_FLOAT32) else kind
        )
        writer.add_tensor(stored, gguf.quantize(tensor, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_k(source: Path, file: Path) -> None:
    """Quantize `source`, in 16 bits, to Q4_K_M."""
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_MOSTLY_Q4_K_M
    code = lib.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params))
    if code != 0:
        sys.exit(f"llama.cpp cannot quantize {source}: code {code}")


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "checkpoint", type=Path, help="a folder with config.json and model.safetensors in BF16"
    )
    made.add_argument("file", type=Path, help="where to write, NAME.gguf")
    made.add_argument(
        "--weights",
        choices=(*PLAIN, "q4_k_m", "bf16"),
        default="q8_0",
        help="the type of the matrices",
    )
    args = made.parse_args()
    if args.weights in PLAIN:
        write(args.checkpoint, args.file, *PLAIN[args.weights])
        return
    sixteen = args.file if args.weights == "bf16" else args.file.with_suffix(".bf16.gguf")
    write(args.checkpoint, sixteen, gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16)
    if args.weights == "q4_k_m":
        quantize_k(sixteen, args.file)
        sixteen.unlink()


if __name__ == "__main__":
    main()
