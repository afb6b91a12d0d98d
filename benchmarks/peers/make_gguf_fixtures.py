"""Write what llama.cpp's own converter makes of tiny models of many architectures.

    python benchmarks/peers/make_gguf_fixtures.py LLAMA_CPP tests/fixtures/gguf [NAME ...]

LLAMA_CPP is a checkout of llama.cpp, whose `conversion` and `gguf-py` are used. Needs transformers
5.23; run it at the root of the repository with Freight installed. For each model it writes one JSON
file: `config`, the content of config.json; `metadata` of the GGUF file, without the list of tokens;
`shapes` of its tensors, outermost dimension first; `values` of the tensors that describe ropes; and
`marks`, which show where each row went.

In the model that is converted, row r of tensor t, in the order of their names, consists of 1024 t +
r; in the output projection of a delta net, and in stacked experts, column c consists of 1024 t + c;
A_log[i] is i / 8.
`marks` has the first number of each row of a tensor, but all of the first row (of each matrix) where
columns are marked or exchanged with rows. Numbers are stored as runs [first, step, count].
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import save_file

from freight.model.config.parse import parse_model_config
from freight.model.shapes import tensor_shapes

# marked by their last dimension: columns of a matrix, outputs of experts in one tensor
TURNED = ("linear_attn.out_proj.weight", "experts.gate_up_proj", "experts.gate_up_proj_bias")
TURNED += ("experts.down_proj", "experts.down_proj_bias")
ROW_MARKS = ("ssm_out.weight", "attn_k_b.weight")  # tensors whose first rows are kept
ROPES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def shapes_module() -> Any:
    spec = importlib.util.spec_from_file_location("shapes", "tests/parity/shapes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models() -> dict[str, tf.PretrainedConfig]:
    s = shapes_module()
    llama3 = {**s.LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    mscale = {**s.MSCALE, "mscale": 0.707, "mscale_all_dim": 0.707}
    gemma = {**s.GEMMA, "query_pre_attn_scalar": 32}
    six = {**gemma, "num_hidden_layers": 6}
    shared = {"shared_expert_intermediate_size": 48}
    return {
        "llama": tf.LlamaConfig(**s.SHAPE, head_dim=32),
        "llama-biases": tf.LlamaConfig(**s.SHAPE, attention_bias=True, mlp_bias=True),
        "llama3": tf.LlamaConfig(
            **s.SHAPE, head_dim=64, tie_word_embeddings=True, rope_parameters=llama3
        ),
        "mixtral": tf.MixtralConfig(
            **s.SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        "ministral3": tf.Ministral3Config(
            **s.SHAPE,
            head_dim=32,
            sliding_window=None,
            rope_parameters={**s.SCALED, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        "qwen2": tf.Qwen2Config(**s.SHAPE),
        "qwen3": tf.Qwen3Config(**s.SHAPE, head_dim=32, tie_word_embeddings=True),
        "gemma2": tf.Gemma2Config(**gemma),
        "gemma3": tf.Gemma3TextConfig(**six),
        "gemma3-linear": tf.Gemma3TextConfig(
            **six,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "phi3": tf.Phi3Config(
            **s.SHAPE,
            sliding_window=24,
            rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75},
        ),
        "phi3-long": tf.Phi3Config(
            **s.SHAPE, original_max_position_embeddings=128, rope_parameters=s.LONG
        ),
        "qwen2-moe": tf.Qwen2MoeConfig(**s.SHAPE, **s.MOE, **shared),
        "qwen3-moe": tf.Qwen3MoeConfig(**s.SHAPE, **s.MOE, norm_topk_prob=True),
        "smollm3": tf.SmolLM3Config(**{**s.SHAPE, "num_hidden_layers": 4}, attention_bias=True),
        "olmo2": tf.Olmo2Config(**s.SHAPE),
        "olmo3": tf.Olmo3Config(
            **{**s.SHAPE, "num_hidden_layers": 4},
            sliding_window=24,
            rope_parameters={"full_attention": {**s.YARN, "rope_theta": 5e5}},
        ),
        "granite": tf.GraniteConfig(**s.SHAPE, **s.GRANITE),
        "granite-moe": tf.GraniteMoeConfig(
            **s.SHAPE, **s.GRANITE, num_local_experts=8, num_experts_per_tok=3
        ),
        "gpt-oss": tf.GptOssConfig(**s.SHAPE, **s.GPT_OSS, sliding_window=24),
        "glm4": tf.Glm4Config(**s.SHAPE, head_dim=32),
        "glm4-moe": tf.Glm4MoeConfig(
            **s.SHAPE, **s.GLM_MOE, n_group=4, topk_group=2, use_qk_norm=True, attention_bias=True
        ),
        "deepseek-v2": tf.DeepseekV2Config(
            **s.LATENT,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            first_k_dense_replace=1,
            rope_parameters=mscale,
        ),
        "deepseek-v3": tf.DeepseekV3Config(
            **s.LATENT | {"q_lora_rank": None},
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            rope_parameters={**s.MSCALE, "mscale_all_dim": 1.0},
        ),
        "lfm2": tf.Lfm2Config(**s.LFM2),
        "lfm2-moe": tf.Lfm2MoeConfig(**{**s.LFM2_MOE, "routed_scaling_factor": 1.0}),
        "qwen3-next": tf.Qwen3NextConfig(**s.DELTA_NET, **s.MOE, **shared),
        "qwen3-5": tf.Qwen3_5TextConfig(**s.DELTA_NET),
        "qwen3-5-moe": tf.Qwen3_5MoeTextConfig(**s.DELTA_NET, **s.MOE, **shared),
        "gemma4": tf.Gemma4TextConfig(
            **s.GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1
        ),
        "gemma4-own-inputs": tf.Gemma4TextConfig(
            **{**s.GEMMA4, **s.E4B, "vocab_size_per_layer_input": 512, "num_hidden_layers": 6}
        ),
        "gemma4-moe": tf.Gemma4TextConfig(
            **s.GEMMA4,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=32,
            attention_k_eq_v=True,
        ),
    }


def published(config: tf.PretrainedConfig) -> dict[str, Any]:
    """The config.json as publishers write it, where transformers leaves a key out."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    content |= {"dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}
    content["architectures"] = [parse_model_config(content).architecture]
    if content["model_type"] == "deepseek_v3":
        content["scoring_func"] = "sigmoid"
    return {key: value for key, value in content.items() if not key.startswith("_")}


def marked(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for number, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        if name.endswith("A_log"):
            tensors[name] = torch.arange(shape[0]) / 8
            continue
        dimension = -1 if name.endswith(TURNED) else 0
        marks = 1024.0 * number + torch.arange(shape[dimension], dtype=torch.float32)
        view = [1] * len(shape)
        view[dimension] = -1
        tensors[name] = marks.view(view).expand(shape).contiguous()
    return tensors


def stacked(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The experts of Granite and Gemma 4 in the two tensors of a layer that files have."""
    names = {
        "granitemoe": ("block_sparse_moe.experts", "block_sparse_moe.{}put_linear.weight"),
        "gemma4_text": ("experts", "experts.{}_proj"),
    }
    if config["model_type"] not in names or not any("experts.0." in name for name in tensors):
        return tensors
    experts, pattern = names[config["model_type"]]
    into = ("in", "out") if "linear" in pattern else ("gate_up", "down")
    count = config.get("num_local_experts") or config["num_experts"]
    tensors = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."

        def of(part: str, prefix: str = prefix) -> list[torch.Tensor]:
            return [
                tensors.pop(f"{prefix}{experts}.{expert}.{part}_proj.weight")
                for expert in range(count)
            ]

        gate_up = [torch.cat(both) for both in zip(of("gate"), of("up"), strict=True)]
        tensors[prefix + pattern.format(into[0])] = torch.stack(gate_up)
        tensors[prefix + pattern.format(into[1])] = torch.stack(of("down"))
    return tensors


def write_tokens(converter: Any) -> None:
    """Instead of a tokenizer's: the sizes and the ids of the special tokens."""
    writer = converter.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(converter.hparams["vocab_size"])])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def convert(folder: Path, config: dict[str, Any]) -> Any:
    import gguf
    from conversion import get_model_class

    converter = get_model_class(config["architectures"][0])
    converter.set_vocab = write_tokens
    if hasattr(converter, "Ministral3Model"):
        converter.Ministral3Model.set_vocab = write_tokens
    if config["model_type"].startswith("qwen3_"):
        converter.no_mtp = True
    path = folder / "model.gguf"
    with torch.inference_mode():
        converter(folder, gguf.LlamaFileType.ALL_F32, path, eager=True).write()
    return gguf.GGUFReader(path)


def runs(numbers: list[float]) -> list[list[float]]:
    """[first, step, count] of each run."""
    listed: list[list[float]] = []
    for number in numbers:
        last = listed[-1] if listed else None
        if last is not None and last[2] == 1:
            last[1:] = [number - last[0], 2]
        elif last is not None and number == last[0] + last[1] * last[2]:
            last[2] += 1
        else:
            listed.append([number, 0, 1])
    return [[int(part) if part == int(part) else part for part in run] for run in listed]


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def made(name: str, config: tf.PretrainedConfig) -> dict[str, Any]:
    content = published(config)
    tensors = marked(tensor_shapes(parse_model_config(content)))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        vocab = {f"t{token}": token for token in range(content["vocab_size"])}
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        save_file(stacked(tensors, content), folder / "model.safetensors", {"format": "pt"})
        reader = convert(folder, content)
        metadata = {
            key: plain(field.contents())
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and key != "tokenizer.ggml.tokens"
        }
        shapes = {t.name: [int(size) for size in reversed(t.shape)] for t in reader.tensors}
        data = {t.name: np.array(t.data).reshape(shapes[t.name]) for t in reader.tensors}
    marks = {
        tensor: runs(
            (
                data[tensor].reshape(-1)
                if data[tensor].ndim == 1 or tensor.endswith("_exps.bias")
                else data[tensor][..., 0, :].reshape(-1)
                if tensor.endswith(ROW_MARKS)
                else data[tensor][..., 0].reshape(-1)
            ).tolist()
        )
        for tensor in shapes
        if tensor not in ROPES
    }
    values = {tensor: data[tensor].tolist() for tensor in shapes if tensor in ROPES}
    return {
        "config": content,
        "metadata": metadata,
        "shapes": shapes,
        "values": values,
        "marks": marks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, str(args.llama_cpp / "gguf-py"))
    sys.path.append(str(args.llama_cpp))
    logging.disable(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, config in models().items():
        if args.names and name not in args.names:
            continue
        parts = made(name, config)
        text = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(part, separators=(',', ':'))}"
            for key, part in parts.items()
        )
        (args.out / f"{name}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
