"""Make LoRA adapters of tiny models with PEFT, and the logits of each model with its adapter.

    python benchmarks/peers/make_peft.py tests/fixtures/adapters

Needs peft 0.21 or later, accelerate, and transformers 5. The models are those of
`tests/parity/variants.py` in float32, which `save_random` makes from a seed, so only the adapters
are stored: adapter_config.json and adapter_model.safetensors as `save_pretrained` writes them, with
random values in place of trained ones, and `expected.safetensors`: `token_ids`, `logits` of PEFT
over transformers in float32, and as metadata the name of the variant and the SHA-256 of the model's
tensors. PEFT writes experts as parameters of a module (`target_parameters`), also where the targets
are names of separate experts' modules (`mixtral-experts`). Before 0.19 A had the outputs of a
parameter and B its inputs; with peft 0.18.1 the script makes one such adapter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity.random_models import digest_of_weights, save_random, tokens
from tests.parity.variants import VARIANTS

TOKENS = 24
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
EXCHANGED = ("qwen2-moe-experts-0.18",)  # what peft 0.18.1 makes; it makes nothing else here
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # folder -> variant, arguments of LoraConfig
    "llama": (
        "llama",
        {
            "r": 8,
            "lora_alpha": 12,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\..*_proj": 1, "layers.2.self_attn.k_proj": 64},
            "alpha_pattern": {"down_proj": 3, "layers.2.self_attn.k_proj": 20},
        },
    ),
    "llama-rank-1": (
        "llama",
        {
            "r": 1,
            "lora_alpha": 1,
            "target_modules": [*ATTENTION, *DENSE],
            "layers_to_transform": [1],
        },
    ),
    "phi3": ("phi3", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}),
    "qwen2-moe": (
        "qwen2-moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": r".*\.(self_attn\.._proj|shared_expert\.\w+_proj)",
        },
    ),
    "qwen2-moe-experts": (
        "qwen2-moe",
        {
            "r": 1,
            "lora_alpha": 2,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "layers_to_transform": [0],
        },
    ),
    "qwen2-moe-experts-0.18": (
        "qwen2-moe",
        {
            "r": 1,
            "lora_alpha": 2,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "layers_to_transform": [0],
        },
    ),
    "mixtral-experts": (
        "mixtral",
        {"r": 1, "lora_alpha": 3, "target_modules": ["v_proj", "w1", "w2", "w3"]},
    ),
    "gpt-oss-experts": (
        "gpt-oss",
        {
            "r": 2,
            "lora_alpha": 5,
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 1},
            "use_rslora": True,
        },
    ),
    "nemotron-h-experts": (
        "nemotron-h-latent",
        {
            "r": 1,
            "lora_alpha": 4,
            "target_modules": [],
            "target_parameters": ["mixer.experts.up_proj"],
        },
    ),
    "qwen3-next": (
        "qwen3-next",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        },
    ),
    "granite-h": (
        "granite-h",
        {
            "r": 2,
            "lora_alpha": 5,
            "target_modules": [
                *ATTENTION,
                "in_proj",
                "out_proj",
                "input_linear",
                "output_linear",
            ],
        },
    ),
}


def randomize(model: PeftModel) -> None:
    """Give A and B values of the size of trained ones: PEFT begins with B = 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                spread = 0.1 if "lora_A" in name else 0.05
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


def make(folder: Path, variant: str, arguments: dict[str, Any]) -> None:
    token_ids = torch.tensor([tokens(TOKENS)])
    with tempfile.TemporaryDirectory() as base:
        model = save_random(VARIANTS[variant], Path(base), torch.float32)
        digest = digest_of_weights(Path(base))
    with torch.no_grad():
        base_logits = model(token_ids).logits[0]
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments)).eval()
        randomize(adapted)
        logits = adapted(token_ids).logits[0]
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = variant
    for key, value in config.items():  # a set has another order each time
        if isinstance(value, list):
            config[key] = sorted(value)
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    assert (logits - base_logits).abs().max() > 0.05
    save_file(
        {"token_ids": token_ids[0].clone(), "logits": logits.clone()},
        folder / "expected.safetensors",
        {"variant": variant, "base_sha256": digest},
    )


if __name__ == "__main__":
    for name, (variant, arguments) in ADAPTERS.items():
        if (name in EXCHANGED) != peft.__version__.startswith("0.18."):
            continue
        make(Path(sys.argv[1]) / name, variant, arguments)
