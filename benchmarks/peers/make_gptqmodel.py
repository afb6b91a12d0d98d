"""Make tiny models that GPTQModel itself quantizes and saves, and the logits of the values it reads back.

    GPTQMODEL_CPU_WORKERS=2 python benchmarks/peers/make_gptqmodel.py tests/fixtures/four_bits

Needs gptqmodel 7.7 and transformers; it runs on a CPU. Without the variable the tool stops on two cores. Each folder
gets config.json and model.safetensors, and `expected.safetensors`: token ids, and the logits in float32 of
transformers' model with the values of GPTQModel's own `dequantize_weight`, or for AWQ its `dequantize_gemm`, over
float32 scales.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MADE = {
    "gptqmodel": QuantizeConfig(bits=4, group_size=32),
    "gptqmodel_order": QuantizeConfig(
        bits=4,
        group_size=32,
        desc_act=True,
        act_group_aware=False,
        sym=False,
        format=FORMAT.GPTQ_V2,
    ),
    "gptqmodel_awq": QuantizeConfig(
        bits=4, group_size=32, method=METHOD.AWQ, format=FORMAT.GEMM, sym=False
    ),
}
draw = torch.Generator().manual_seed(7)
IDS = torch.randint(3, VOCAB, (24,), generator=draw)


def random_model(folder: Path, method: METHOD) -> None:
    """Write a model with random parameters in float16, and a tokenizer of as many words."""
    torch.manual_seed(0)
    # the tool's AWQ searches 64 outputs at a time
    shape = SHAPE | ({"num_key_value_heads": 2} if method is METHOD.AWQ else {})
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**shape)).half()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tf.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w0"
    ).save_pretrained(folder)


def values_of(folder: Path, backend: BACKEND) -> dict[str, Tensor]:
    """Return every matrix as GPTQModel reads it back, [outputs, inputs] float32."""
    read = GPTQModel.load(str(folder), device="cpu", backend=backend)
    stored = load_file(folder / "model.safetensors")
    results = {}
    for name, module in read.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        # those of the file: the tool rounds them to the dtype of the model
        module.scales = stored[f"{name}.scales"].float()
        if hasattr(module, "dequantize_weight"):
            value = module.dequantize_weight()
        else:
            value = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, 32)
        results[f"{name}.weight"] = value.float().t().contiguous()
    return results


def make(config: QuantizeConfig, out: Path) -> None:
    with tempfile.TemporaryDirectory() as item, tempfile.TemporaryDirectory() as two:
        base = Path(item)
        made = Path(two)
        random_model(base, config.method)
        tool = GPTQModel.load(str(base), config, device="cpu")
        # lengths and tokens at random: columns get statistics of their own
        texts = [torch.randint(3, VOCAB, (48,), generator=draw) for _ in range(16)]
        tool.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts])
        tool.save(str(made))
        said = json.loads((made / "config.json").read_text())
        said["quantization_config"]["meta"].pop("offload_to_disk_path")  # of this run
        (out / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        shutil.copy(made / "model.safetensors", out / "model.safetensors")
        backend = BACKEND.AWQ_TORCH if config.method is METHOD.AWQ else BACKEND.TORCH
        model = tf.LlamaForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        parameters = dict(model.named_parameters())
        values = values_of(made, backend)
        assert len(values) == 7
        stored = load_file(made / "model.safetensors")
        plain = {name: stored[name].float() for name in parameters.keys() & stored.keys()}
        assert not plain.keys() & values.keys()
        with torch.no_grad():
            for name, matrix in (plain | values).items():
                parameters[name].copy_(matrix)
            logits = model(IDS[None]).logits[0]
        save_file({"input_ids": IDS, "logits": logits.contiguous()}, out / "expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[*MADE])
    args = parser.parse_args()
    for name, config in MADE.items():
        if name not in args.only:
            continue
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        make(config, folder)
        said = json.loads((folder / "config.json").read_text())["quantization_config"]
        print(name, said, sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    main()
