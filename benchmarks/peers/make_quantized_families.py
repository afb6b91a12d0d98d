"""Make tiny models of many families with llm-compressor's `oneshot`, and the logits of its model.

    python benchmarks/peers/make_quantized_families.py tests/fixtures/llmcompressor_families [NAME ...]

Needs llmcompressor 0.14, compressed-tensors 0.19, transformers 5.17 and torchvision; run it at the
root of the repository. Each folder gets config.json and model.safetensors as `save_pretrained`
writes them, and `expected.safetensors`: token ids, and logits in float32 of the quantized model in
memory. Its matrices are the stored bytes times their scales; compressed-tensors rounds inputs and
cache. Two things differ from compressed-tensors: a dynamic scale is per row if an input has two
dimensions, and a static scale is the largest of a layer's experts. Models that the tool refuses are
printed with its error.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {**SHAPE, "head_dim": 16}
MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 2,
    "spatial_merge_size": 1,
}
SECTIONS: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
}
GEMMA4: dict[str, Any] = {**HEADS, **WINDOWS, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
                          "final_logit_softcapping": 3.0}  # fmt: skip
MODELS: dict[str, tf.PretrainedConfig] = {
    "gpt_oss": tf.GptOssConfig(**{**HEADS, **WINDOWS, "intermediate_size": 32}, num_local_experts=3,
                               num_experts_per_tok=2),
    "glm4_moe": tf.Glm4MoeConfig(
        **HEADS, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.7,
    ),
    "granitemoe": tf.GraniteMoeConfig(
        **{**SHAPE, "intermediate_size": 32}, num_local_experts=3, num_experts_per_tok=2, logits_scaling=2.0,
        attention_multiplier=0.2, residual_multiplier=0.5,
    ),
    "gemma4": tf.Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4_own_inputs": tf.Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    ),
    "gemma4_moe": tf.Gemma4TextConfig(
        **GEMMA4 | {"intermediate_size": 32}, enable_moe_block=True, num_experts=3, top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "qwen2_5_vl": tf.Qwen2_5_VLConfig(
        text_config={**SHAPE, "intermediate_size": 32, "rope_parameters": SECTIONS},
        vision_config={**VISION, "fullatt_block_indexes": [0]}
    ),
    "qwen3_vl_moe": tf.Qwen3VLMoeConfig(
        text_config={
            **HEADS, **MOE, "moe_intermediate_size": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}
        },
        vision_config={**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "gemma3": tf.Gemma3TextConfig(**HEADS, **WINDOWS, query_pre_attn_scalar=24),
    "phi3": tf.Phi3Config(**SHAPE),
    "olmo3": tf.Olmo3Config(**SHAPE, **WINDOWS),
    "exaone4": tf.Exaone4Config(**HEADS, **WINDOWS),
    "minimax_m2": tf.MiniMaxM2Config(**{**HEADS, "intermediate_size": 32}, num_local_experts=3, num_experts_per_tok=2,
                                     rotary_dim=16),
    "ernie4_5_moe": tf.Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=3, moe_k=2, moe_intermediate_size=32, tie_word_embeddings=False
    ),
}  # fmt: skip
PLAIN = ["lm_head", "re:.*visual.*", "re:.*router.*", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$",
         "re:.*per_layer_.*"]  # fmt: skip
# FP8; the others FP8_DYNAMIC
STATIC = ("granitemoe", "gemma4", "gemma3", "phi3", "exaone4", "ernie4_5_moe")
WITHOUT_CACHE = ("gemma4", "gemma4_own_inputs", "gemma4_moe", "qwen3_vl_moe")
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
         "observer": "static_minmax"}  # fmt: skip
random = torch.Generator().manual_seed(7)
SAMPLES = torch.randint(3, VOCAB, (8, 32), generator=random).tolist()
PROMPTS = torch.randint(3, VOCAB, (5, 5), generator=random).tolist()


def random_model(config: tf.PretrainedConfig, folder: str) -> type:
    """Make a model whose parameters are all random, biases and norms too."""
    torch.manual_seed(0)
    auto = tf.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = tf.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape)
            center = 0.0 if config.model_type in ("gemma2", "gemma3_text") else 1.0
            if "norm" in name or name.endswith(
                ("layer_scalar", "per_expert_scale", "router.scale")
            ):
                small = config.model_type.startswith("gemma4") and name.endswith(
                    ("q_norm.weight", "k_norm.weight")
                )
                tensor.copy_((0.4 if small else center) + 0.1 * noise)
            elif (
                tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name
            ):
                width = 0.1 if tensor.ndim == 1 else 0.2
                tensor.copy_(noise * (1.0 if name.endswith("sinks") else width))
    model.save_pretrained(folder)
    return auto


def quantized(name: str, base: str, auto: type, out: Path) -> Any:
    scheme = "FP8" if name in STATIC else "FP8_DYNAMIC"
    cache = name not in WITHOUT_CACHE
    with load_quantizable_moe(auto):
        model = auto.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="eager")
    recipe = QuantizationModifier(
        targets="Linear",
        scheme=scheme,
        ignore=PLAIN,
        kv_cache_scheme=QuantizationArgs(**CACHE) if cache else None,
    )
    rows = {"input_ids": SAMPLES, "attention_mask": [[1] * len(row) for row in SAMPLES]}
    data = {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": len(SAMPLES),
        "max_seq_length": 64,
    }
    tokenizer = tf.AutoTokenizer.from_pretrained("src/freight/demo")
    oneshot(
        model=model,
        recipe=recipe,
        processor=tokenizer,
        **(data if cache or scheme == "FP8" else {}),
    )
    model.save_pretrained(str(out), save_compressed=True)
    return model


def replace_parameter(module: Any, name: str, value: torch.Tensor) -> None:
    """Replace a parameter, and remove it first: else the module's cache would round the new values
    to the old dtype.
    """
    delattr(module, name)
    module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def one_input_scale(experts: LinearExperts2D) -> None:
    """Set the scales of gate, up and down in a layer to the largest, as engines that compute
    experts together do.
    """
    for part in ("gate_proj", "up_proj", "down_proj"):
        modules = [getattr(experts[i], part) for i in range(experts.num_experts)]
        scales = [
            module.input_scale
            for module in modules
            if getattr(module, "input_scale", None) is not None
        ]
        for module in modules if scales else ():
            replace_parameter(module, "input_scale", torch.stack(scales).amax(0))


def by_row(module: Any) -> None:
    """Scale each row where an input has no batch dimension; compressed-tensors would scale each
    number.
    """
    forward = module.forward

    def batched(x: Any) -> Any:
        return forward(x[None])[0] if x.ndim == 2 else forward(x)

    module.forward = batched


def logits(model: Any) -> list[list[list[float]]]:
    """Return float32 logits with the stored bytes times their scales, which compressed-tensors
    would round to bfloat16.
    """
    for module in model.modules():
        if (
            getattr(module, "weight_scale", None) is not None
            and module.weight.dtype == torch.float8_e4m3fn
        ):
            args = module.quantization_scheme.weights
            wide = dequantize(
                module.weight, module.weight_scale.float(), args=args, dtype=torch.float32
            )
            replace_parameter(module, "weight", wide)
            by_row(module)
        if isinstance(module, LinearExperts2D):
            one_input_scale(module)
        if hasattr(module, "scalar_embed_scale"):
            # Gemma's, rounded to bfloat16 when the model was loaded
            del module.embed_scale
            module.register_buffer(
                "embed_scale", torch.tensor(module.scalar_embed_scale), persistent=False
            )
    frequencies = {n: b for n, b in model.named_buffers() if n.endswith("inv_freq")}
    assert all(b.dtype == torch.float32 for b in frequencies.values())
    model._forward_pre_hooks.clear()  # would decompress
    model = model.float().eval()
    results = []
    with torch.no_grad():
        for prompt in PROMPTS:
            results.append(model(input_ids=torch.tensor([prompt])).logits[0].tolist())
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    for name in asked.names or MODELS:
        with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as kept:
            try:
                auto = random_model(MODELS[name], base)
                model = quantized(name, base, auto, Path(kept))
                expected = logits(model)
            except Exception:
                traceback.print_exc()
                print(f"{name}: refused")
                continue
            folder = asked.out / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copy(Path(kept) / file, folder / file)
            tensors = {"tokens": torch.tensor(PROMPTS), "logits": torch.tensor(expected)}
            save_file(tensors, folder / "expected.safetensors")
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{name}: {size} bytes", flush=True)


if __name__ == "__main__":
    main()
