"""Make two tiny Llamas in INT8 with compressed-tensors alone, and the logits of its model.

    python benchmarks/peers/make_int8_models.py tests/fixtures/compressed_int8

Needs compressed-tensors 0.19 or later and transformers 5. `token` has scales per output row and
activations per token, `static` one scale per matrix and one for its inputs. Each folder gets
config.json and model.safetensors as `save_pretrained` writes them, and `expected.safetensors`:
token ids, and the logits in float32 of the quantized model, whose inputs compressed-tensors rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TOKENS = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(1))
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FORMS = {
    "token": (
        QuantizationArgs(**INT8, strategy="channel"),
        QuantizationArgs(**INT8, strategy="token", dynamic=True),
    ),
    "static": (
        QuantizationArgs(**INT8, strategy="tensor"),
        QuantizationArgs(**INT8, strategy="tensor", dynamic=False),
    ),
}


def extremes(x: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    if args.strategy == "channel":
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    return x.amin().reshape(1), x.amax().reshape(1)


def inputs_of(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """By the name of a Linear: what it multiplies for TOKENS in the unquantized model."""
    results: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: results.update({name: given[0]})
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    model(TOKENS)
    for hook in hooks:
        hook.remove()
    return results


@torch.no_grad()
def make(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    seen = inputs_of(model)
    weights, inputs = FORMS[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )  # fmt: skip
    apply_quantization_config(model, config)
    for module_name, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        module.weight_scale.copy_(calculate_qparams(*extremes(module.weight, weights), weights)[0])
        if not inputs.dynamic:
            scale, _ = calculate_qparams(*extremes(seen[module_name], inputs), inputs)
            module.input_scale.copy_(scale)
        module.quantization_status = QuantizationStatus.FROZEN
    logits = model(TOKENS).logits.float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({"tokens": TOKENS, "logits": logits}, folder / "expected.safetensors")


if __name__ == "__main__":
    for form in FORMS:
        make(form, Path(sys.argv[1]) / form)
