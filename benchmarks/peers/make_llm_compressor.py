"""Quantize a tiny model by llm-compressor with calibration: GPTQ, SmoothQuant, AWQ, SpinQuant.

    python benchmarks/peers/make_llm_compressor.py OUT [--only NAME …] [--dtype float32] [--fixture FILE]

Needs llmcompressor 0.14, transformers and a torch for the CPU. OUT gets

    model/          the model in bfloat16 from a fixed seed, with a tokenizer of one word per id
    calibration.jsonl   its calibration data: one {"input_ids": […]} a line
    NAME/           a folder for each recipe: config.json, model.safetensors, and

                    recipe.json            the modifiers with their fields
                    expected.safetensors   input_ids [t], and the logits [t, vocab] in float32 of the model as
                                           llm-compressor leaves it, activations rounded where the recipe says so
                    scales.safetensors     what AWQ or SmoothQuant multiplied into the inputs of matrices, by the
                                           module that it was divided out of
                    hessians.safetensors   what GPTQ solved with, by module (sum of 2 x x^T over tokens, divided by
                                           the number of samples)

With `--dtype float32` the weights of model/ are read as float32 and everything is computed so: then nothing is
rounded but by the recipe, and two implementations can be compared by integers.

`--fixture FILE` also writes the first 64 rows of one matrix, `weight` [64, 256], its `hessian` [256, 256], and of
each GPTQ recipe NAME what became of the rows: `NAME.value` [64, 256], dequantized, `NAME.scale`, and where the
format has them `NAME.zero_point` and `NAME.global_scale`. Rows do not depend on each other in GPTQ.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier, base
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

VOCAB = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
SAMPLES = 32
LENGTH = 96  # tokens of a sample
FIXTURE_MODULE = "model.layers.0.self_attn.q_proj"
HELD_OUT = 64  # tokens whose logits are stored
LINEAR: dict[str, Any] = {"targets": ["Linear"], "ignore": ["lm_head"]}
RECIPES: dict[str, list[Any]] = {
    "rounded": [(QuantizationModifier, {"scheme": "W4A16"})],
    "rounded_w8a8": [(QuantizationModifier, {"scheme": "W8A8"})],
    "gptq": [(GPTQModifier, {"scheme": "W4A16", "actorder": None})],
    "gptq_static": [(GPTQModifier, {"scheme": "W4A16", "actorder": "static"})],
    "gptq_asym": [(GPTQModifier, {"scheme": "W4A16_ASYM", "actorder": None})],
    "gptq_asym_static": [(GPTQModifier, {"scheme": "W4A16_ASYM"})],
    "gptq_w8a8": [(GPTQModifier, {"scheme": "W8A8"})],
    "gptq_fp8": [(GPTQModifier, {"scheme": "FP8_DYNAMIC"})],
    "gptq_nvfp4": [(GPTQModifier, {"scheme": "NVFP4A16"})],
    "gptq_mxfp4": [(GPTQModifier, {"scheme": "MXFP4A16"})],
    "gptq_mse": [(GPTQModifier, {"scheme": "W4A16", "weight_observer": "mse"})],
    "smoothquant": [
        (SmoothQuantModifier, {"smoothing_strength": 0.8}),
        (GPTQModifier, {"scheme": "W8A8"}),
    ],
    "smoothquant_rounded": [
        (SmoothQuantModifier, {}),
        (QuantizationModifier, {"scheme": "W8A8"}),
    ],
    "awq": [(AWQModifier, {}), (QuantizationModifier, {"scheme": "W4A16"})],
    "awq_asym": [(AWQModifier, {}), (QuantizationModifier, {"scheme": "W4A16_ASYM"})],
    "awq_both": [
        (AWQModifier, {"duo_scaling": "both"}),
        (QuantizationModifier, {"scheme": "W4A16_ASYM"}),
    ],
    "awq_gptq": [(AWQModifier, {}), (GPTQModifier, {"scheme": "W4A16"})],
    "spinquant": [
        (SpinQuantModifier, {"rotations": ["R1", "R2"], "transform_type": "hadamard"}),
        (QuantizationModifier, {"scheme": "W4A16"}),
    ],
    "spinquant_gptq": [
        (SpinQuantModifier, {"rotations": ["R1", "R2"], "transform_type": "hadamard"}),
        (GPTQModifier, {"scheme": "W4A16"}),
    ],
}  # fmt: skip


def tokens(count: int, seed: int) -> list[int]:
    """Draw token ids; the probability of an id falls with its number, as in text."""
    draw = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1.0, VOCAB - 2)
    return (3 + torch.multinomial(weights, count, True, generator=draw)).tolist()


def make_model(folder: Path) -> None:
    """Write a model whose activations have what the methods are made for: channels far larger than
    others (by the norms), and inputs that correlate (by embeddings of low rank).
    """
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name:
                value = torch.exp(0.7 * noise)
            elif "embed_tokens" in name:
                low_rank = torch.randn(VOCAB, 24) @ torch.randn(24, parameter.shape[1])
                value = 0.1 * low_rank + 0.3 * noise
            else:
                value = 0.06 * noise
            parameter.copy_(value)
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


class Record:
    """What llm-compressor computes and does not store: scales by module, Hessians by module."""

    def __init__(self) -> None:
        self.scales: dict[str, Tensor] = {}
        self.hessians: dict[str, Tensor] = {}
        self._patched: list[tuple[Any, str, Any]] = []

    def _patch(self, owner: Any, name: str, wrapper: Any) -> None:
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapper)

    def __enter__(self) -> Record:
        best = AWQModifier._compute_best_scale
        smooth = SmoothQuantModifier._calculate_smoothing_scales
        prepare = base.prepare_batch
        names: dict[nn.Module, str] = {}

        def best_scale(modifier: AWQModifier, mapping: Any, *rest: Any) -> Tensor:
            scales = best(modifier, mapping, *rest)
            self.scales[mapping.smooth_name] = scales.float().contiguous()
            return scales

        def smoothing(modifier: SmoothQuantModifier, layers: list[nn.Module], of: Tensor) -> Tensor:
            scales = smooth(modifier, layers, of)
            for mapping in modifier.resolved_mappings_:
                if mapping.balance_layers is layers:
                    self.scales[mapping.smooth_name] = scales.float().contiguous()
            return scales

        def prepared(batch: list[nn.Module], *rest: Any) -> Any:
            result = prepare(batch, *rest)
            for module, hessian in zip(batch, result[1], strict=True):
                self.hessians[names[module]] = hessian.clone()
            return result

        start = GPTQModifier.on_initialize

        def initialize(modifier: GPTQModifier, state: Any, **options: Any) -> bool:
            names.update({module: name for name, module in state.model.named_modules()})
            return start(modifier, state, **options)

        # on a machine without an accelerator AWQ stops where it would pin memory for one
        self._patch(IntermediatesCache, "pin_memory", lambda *_: None)
        self._patch(AWQModifier, "_compute_best_scale", best_scale)
        self._patch(SmoothQuantModifier, "_calculate_smoothing_scales", smoothing)
        self._patch(base, "prepare_batch", prepared)
        self._patch(GPTQModifier, "on_initialize", initialize)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._patched:
            setattr(owner, name, original)


def rows_of_one(name: str, model: tf.PreTrainedModel, record: Record) -> dict[str, Tensor]:
    """Return what GPTQ made of the first rows of one matrix, and its Hessian."""
    if FIXTURE_MODULE not in record.hessians or not name.startswith("gptq"):
        return {}
    module = model.get_submodule(FIXTURE_MODULE)
    rows = {"hessian": record.hessians[FIXTURE_MODULE], f"{name}.value": module.weight[:64]}
    for field in ("scale", "zero_point", "global_scale"):
        stored = getattr(module, f"weight_{field}", None)
        if stored is not None:
            rows[f"{name}.{field}"] = stored[:64]
    return {key: value.detach().clone() for key, value in rows.items()}


def quantize(name: str, out: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    base_model = out / "model"
    model = tf.AutoModelForCausalLM.from_pretrained(
        base_model, dtype=dtype, attn_implementation="eager"
    )
    rows = [json.loads(line) for line in (out / "calibration.jsonl").read_text().splitlines()]
    data = Dataset.from_list([row | {"attention_mask": [1] * LENGTH} for row in rows])
    recipe = []
    for modifier, options in RECIPES[name]:
        is_transform = modifier in (AWQModifier, SmoothQuantModifier, SpinQuantModifier)
        recipe.append(modifier(**(options if is_transform else LINEAR | options)))
    with Record() as record:
        oneshot(
            model=model, recipe=recipe, dataset=data, num_calibration_samples=SAMPLES, max_seq_length=LENGTH,
            shuffle_calibration_samples=False,
        )  # fmt: skip
    ids = torch.tensor(tokens(HELD_OUT, 99))
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float().contiguous()
    rows = rows_of_one(name, model, record)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_compressed=True)
    said = [{modifier.__name__: options} for modifier, options in RECIPES[name]]
    (folder / "recipe.json").write_text(json.dumps(said, indent=2) + "\n")
    save_file({"input_ids": ids, "logits": logits}, folder / "expected.safetensors")
    if record.scales:
        save_file(record.scales, folder / "scales.safetensors")
    if record.hessians:
        save_file(record.hessians, folder / "hessians.safetensors")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=RECIPES)
    parser.add_argument("--fixture", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_model(args.out / "model")
    lines = [json.dumps({"input_ids": tokens(LENGTH, seed)}) for seed in range(SAMPLES)]
    (args.out / "calibration.jsonl").write_text("\n".join(lines) + "\n")
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    (args.out / "README.md").write_text(
        f"Made by benchmarks/peers/make_llm_compressor.py with --dtype {args.dtype}: {versions}.\n"
    )
    rows: dict[str, Tensor] = {}
    for name in args.only or RECIPES:
        rows |= quantize(name, args.out, getattr(torch, args.dtype))
        print(name, sum(file.stat().st_size for file in (args.out / name).iterdir()))
    if args.fixture:
        weight = load_file(args.out / "model" / "model.safetensors")[f"{FIXTURE_MODULE}.weight"]
        save_file(rows | {"weight": weight[:64].float()}, args.fixture)


if __name__ == "__main__":
    main()
