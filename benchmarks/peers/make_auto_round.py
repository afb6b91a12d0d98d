"""Make tiny Llamas by AutoRound in the formats whose tensors are laid out as those of compressed-tensors.

    python benchmarks/peers/make_auto_round.py tests/fixtures/four_bits

Needs auto-round 0.16.1, compressed-tensors 0.20.1 and transformers 5. Nothing is tuned (`iters=0`). Each
folder gets config.json and model.safetensors as AutoRound writes them, and `expected.safetensors`: token
ids, and the logits in float32 of transformers' model with the values that compressed-tensors makes of the
tensors, inputs not rounded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IDS = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(7))
SCHEMES = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
PACKINGS = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized"}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0"
    )


def values_of(name: str, own: dict[str, Tensor]) -> Tensor:
    """Return the matrix that compressed-tensors makes of a module's tensors, float32."""
    scheme = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    if name in PACKINGS:
        compressor = BaseCompressor.get_value_from_registry(PACKINGS[name])
        return compressor.decompress(own, scheme)["weight"].float()
    rows, half = own["weight_packed"].shape
    codes = unpack_fp4_from_uint8(own["weight_packed"], rows, 2 * half, torch.float32)
    scale = own["weight_scale"].float()
    whole = own["weight_global_scale"]
    return dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=whole)


@torch.no_grad()
def make(name: str, out: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        model.save_pretrained(base)
        data = Path(folder) / "data.json"
        text = " ".join(f"w{number}" for number in range(3, 64))
        data.write_text(json.dumps([{"text": text}] * 4))
        plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        rounding = AutoRound(
            model, tokenizer(), scheme=SCHEMES[name], iters=0, nsamples=1, seqlen=16,
            disable_opt_rtn=True, device_map="cpu", dataset=str(data),
        )  # fmt: skip
        rounding.quantize_and_save(f"{folder}/made", format="auto_round")
        (config,) = Path(folder, "made").rglob("config.json")
        out.mkdir(parents=True, exist_ok=True)
        stored: dict[str, Tensor] = {}
        for file in config.parent.glob("*.safetensors"):
            stored |= load_file(file)
        shutil.copy(config, out / "config.json")
        save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    for key in [key for key in stored if key.endswith("weight_scale")]:
        module = key.rpartition(".")[0]
        own = {k.rpartition(".")[2]: v for k, v in stored.items() if k.startswith(f"{module}.")}
        plain.get_parameter(f"{module}.weight").copy_(values_of(name, own))
    expected = {"input_ids": IDS, "logits": plain(IDS[None]).logits[0].contiguous()}
    save_file(expected, out / "expected.safetensors")


if __name__ == "__main__":
    for form in SCHEMES:
        make(form, Path(sys.argv[1]) / f"auto_round_{form}")
