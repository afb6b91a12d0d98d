"""Models that test KV scales: copies with rescaled keys or values, or with a large key bias.

Rescaled copies compute the same function: k_proj × c with q_proj / c leaves every score as it was,
for all channels or for one pair of rotary embedding; v_proj × c with o_proj / c leaves every
output. A copy with a key bias, as the Qwen2 family has it, computes another function, and is to be
compared with itself in 16 bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from freight.cache.pool import allocate_pool
from freight.engine.runner import ModelRunner
from freight.kernels.select import select_kernels
from freight.model.config.model import ModelConfig
from freight.model.open import open_model
from freight.quantizer.centers import CenterWatch
from freight.quantizer.watch import WatchedKV
from freight.settings.engine import EngineArgs

BIAS = 100.0  # standard deviations of the layer's keys

# (projection, its weight or bias in float32) -> the new one
Change = Callable[[str, Tensor], Tensor]


def rescaled(keys: float = 1.0, values: float = 1.0) -> Change:
    """Multiply keys by `keys` and divide queries by it; the same for `values` and the output
    projection.
    """
    factors = {"k_proj": keys, "q_proj": 1 / keys, "v_proj": values}

    def change(projection: str, tensor: Tensor) -> Tensor:
        if projection == "o_proj":
            return tensor / values if tensor.ndim == 2 else tensor
        return tensor * factors.get(projection, 1.0)

    return change


def hot_pair(pair: int, head_dim: int, factor: float) -> Change:
    """Multiply channels `pair` and `pair` + head_dim / 2 of every head of the keys by `factor`, and
    divide those of the queries.
    """
    of_key = torch.ones(head_dim, dtype=torch.float32, device="cpu")
    of_key[[pair, pair + head_dim // 2]] = factor
    factors = {"k_proj": of_key, "q_proj": 1 / of_key}

    def change(projection: str, tensor: Tensor) -> Tensor:
        if projection not in factors:
            return tensor
        return (
            tensor.view(-1, head_dim, tensor.numel() // len(tensor)) * factors[projection][:, None]
        ).view_as(tensor)

    return change


def write_variant(source: Path, out: Path, change: Change) -> None:
    """Write the model in `source`, changed, to the new folder `out`, in float32: each weight is
    rounded once.
    """
    write_tensors(
        source,
        out,
        {
            name: change(name.split(".")[-2], tensor)
            for name, tensor in read_tensors(source).items()
        },
    )


def write_biased(
    source: Path, out: Path, config: ModelConfig, spreads: Sequence[float], pair: int
) -> None:
    """Write a copy with a bias of `BIAS` times the layer's spread on channel `pair` of every KV
    head.

    The copy is a Qwen2 model, a family whose q, k and v have biases; those of q and v are 0.
    `source` is a Llama without any.
    """
    tensors = read_tensors(source)
    for index, spread in enumerate(spreads):
        prefix = f"model.layers.{index}.self_attn."
        mixer = config.attention[index]
        bias = torch.zeros(mixer.num_kv_heads, mixer.k_dim, dtype=torch.float32, device="cpu")
        bias[:, pair] = BIAS * spread
        tensors[prefix + "q_proj.bias"] = torch.zeros(
            mixer.num_heads * mixer.k_dim, dtype=torch.float32, device="cpu"
        )
        tensors[prefix + "k_proj.bias"] = bias.flatten()
        tensors[prefix + "v_proj.bias"] = torch.zeros(
            mixer.num_kv_heads * mixer.k_dim, dtype=torch.float32, device="cpu"
        )
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    write_tensors(source, out, tensors, family, ("attention_bias", "mlp_bias"))


def key_spreads(model: str, token_ids: Sequence[int]) -> list[float]:
    """Return the standard deviation of each layer's keys before rotary embedding, over one sequence
    of `token_ids`.
    """
    opened = open_model(EngineArgs(model))
    config = opened.resolve(opened.args)
    decoder = opened.load(config)
    kernels = select_kernels(config.kernels, config.device)
    watches = {
        i: CenterWatch(rotary.rotary_dim)
        for i, rotary in enumerate(decoder.rotaries)
        if rotary is not None
    }
    spec = opened.cache_spec(config)
    pool = allocate_pool(spec, config.kv, spec.blocks_of(len(token_ids)), kernels, config.device)
    pool = pool.with_layers(
        {
            i: WatchedKV(kv.pages, kv.kernels, kv.group, projected=watches[i].see)
            for i, kv in pool.paged.items()
        }
    )
    ModelRunner(decoder, pool, config.device).logits(token_ids, 0, pool.whole)
    return [float(watch.k.variance.mean().sqrt()) for watch in watches.values()]


def read_tensors(source: Path) -> dict[str, Tensor]:
    """Read every tensor of the model in `source` as float32."""
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            tensors.update({name: stored.get_tensor(name).float() for name in stored.keys()})  # noqa: SIM118, no dict
    return tensors


def write_tensors(
    source: Path,
    out: Path,
    tensors: Mapping[str, Tensor],
    changes: Mapping[str, object] | None = None,
    dropped: Sequence[str] = (),
) -> None:
    """Write `tensors` and the other files of `source` to the new folder `out`, with `changes` in
    config.json.
    """
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text()) | dict(changes or {})
    kept = {key: value for key, value in config.items() if key not in dropped}
    (out / "config.json").write_text(json.dumps(kept, indent=1))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
