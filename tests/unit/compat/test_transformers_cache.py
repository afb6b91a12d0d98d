"""FP8Cache against transformers' own DynamicCache, and the scales that it takes.

The oracle is a DynamicCache that is given keys and values which were rounded to FP8 before, one by
one: whatever is done to both, they return the same bits.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.refusals import refuses
from tests.shares import examples
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from freight.checkpoint.extras import write_extras
from freight.checkpoint.reader import resolve_model
from freight.errors import CheckpointError, ConfigError
from freight.fp8.cast import amax, decode, encode, token_scale
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.open import open_checkpoint
from freight.transformers import FP8Cache, FP8Layer, FP8SlidingLayer

BASE = Path(__file__).parents[2] / "fixtures" / "base_bf16"
HEADS, DIM, WINDOW = 2, 64, 6
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "hidden_size": 4 * DIM,
}
MIXED = Qwen2Config(
    **SHAPE,
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention"],
)
LLAMA = LlamaConfig(**SHAPE)
BYTES = torch.uint8


def states(batch: int, tokens: int, seed: int, dim: int = DIM) -> Tensor:
    return torch.randn(
        (batch, HEADS, tokens, dim),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float32,
    )


def per_token(x: Tensor) -> Tensor:
    scale = token_scale(amax(x, -1), Format.E4M3FN).float()[..., None]
    return decode(encode(x, scale, Format.E4M3FN), scale)


def at_1(x: Tensor) -> Tensor:
    return decode(encode(x, 1.0, Format.E4M3FN))


class Pair:
    """Both caches, through the same operations; each compares what they answer."""

    def __init__(self, scales: str, rounded: Callable[[Tensor], Tensor]) -> None:
        self.ours, self.theirs = FP8Cache(MIXED, kv_scales=scales), DynamicCache(config=MIXED)
        self.rounded, self.batch, self.recording, self.since_crop = rounded, 2, False, 0

    def update(self, tokens: int, seed: int) -> None:
        for layer in range(2):
            assert self.ours.get_mask_sizes(tokens, layer) == self.theirs.get_mask_sizes(
                tokens, layer
            )
            k, v = states(self.batch, tokens, seed), states(self.batch, tokens, seed + 1000)
            ours = self.ours.update(k, v, layer)
            theirs = self.theirs.update(self.rounded(k), self.rounded(v), layer)
            assert all(torch.equal(*sides) for sides in zip(ours, theirs, strict=True))
            length, _ = self.ours.layers[layer].get_mask_sizes(0)
            assert self.recording or self.ours.layers[layer].keys.shape[2] == length
        self.since_crop += tokens
        self.compare()

    def crop(self, removed: int) -> None:
        if self.ours.get_seq_length() >= WINDOW and not self.recording:
            self.activate()
            return
        if self.ours.get_seq_length() == 0:
            self.ours.crop(-removed)  # nothing; transformers' layers with a window fail here
            return
        for cache in (self.ours, self.theirs):
            cache.crop(-min(removed, self.since_crop))
        self.since_crop = 0
        self.compare()

    def activate(self) -> None:
        for cache in (self.ours, self.theirs):
            cache.activate_past_recording()
        self.recording, self.since_crop = True, 0

    def reset(self) -> None:
        for cache in (self.ours, self.theirs):
            cache.reset()
        self.since_crop = 0
        self.compare()

    def rows(self, operation: str, argument: Any, batch: int) -> None:
        if self.ours.get_seq_length() > 0:
            for cache in (self.ours, self.theirs):
                getattr(cache, operation)(argument)
            self.batch = batch
            self.compare()

    def compare(self) -> None:
        for layer in range(2):
            assert self.ours.get_seq_length(layer) == self.theirs.get_seq_length(layer)
            assert self.ours.get_max_length(layer) == self.theirs.get_max_length(layer)
            stored, kept = self.ours.layers[layer].keys, self.theirs.layers[layer].keys
            assert (stored is None) == (kept is None)
            if stored is not None and kept.ndim == 4:
                assert stored.shape == kept.shape
                assert stored.itemsize == 1


@settings(max_examples=examples(60))
@given(data=st.data(), how=st.sampled_from([("dynamic", per_token), ("unit", at_1)]))
def test_every_operation_does_what_dynamic_cache_does(data: st.DataObject, how: Any) -> None:
    """Layers with and without a window, growth, crops with and without a record of the past, beams,
    batches, reset.
    """
    pair = Pair(*how)
    for seed in range(data.draw(st.integers(1, 12))):
        match data.draw(
            st.sampled_from(
                ["update"] * 4 + ["crop", "activate", "reset", "reorder", "select", "repeat"]
            )
        ):
            case "update":
                pair.update(data.draw(st.integers(1, 9)), seed)
            case "crop":
                pair.crop(data.draw(st.integers(0, 5)))
            case "activate":
                pair.activate()
            case "reset":
                pair.reset()
            case "reorder":
                rows = data.draw(
                    st.lists(
                        st.integers(0, pair.batch - 1), min_size=pair.batch, max_size=pair.batch
                    )
                )
                pair.rows("reorder_cache", torch.tensor(rows), pair.batch)
            case "select":
                rows = data.draw(st.lists(st.integers(0, pair.batch - 1), min_size=1, max_size=4))
                pair.rows("batch_select_indices", torch.tensor(rows), len(rows))
            case "repeat" if pair.batch < 5:
                pair.rows("batch_repeat_interleave", 2, 2 * pair.batch)


def filled(
    cache: FP8Cache, tokens: int, dim: int = DIM, dtype: torch.dtype = torch.bfloat16
) -> FP8Cache:
    for layer in range(len(cache)):
        cache.update(
            states(2, tokens, layer, dim).to(dtype),
            states(2, tokens, layer + 9, dim).to(dtype),
            layer,
        )
    return cache


def test_a_copy_goes_its_own_way() -> None:
    """A prompt is computed once, and continued several times from copies, as transformers'
    documents show it.
    """
    first = filled(FP8Cache(MIXED), 5)
    second, before = copy.deepcopy(first), first.layers[0].keys.view(BYTES).clone()
    filled(second, 3)
    assert (first.get_seq_length(), second.get_seq_length()) == (5, 8)
    assert torch.equal(first.layers[0].keys.view(BYTES), before)
    assert torch.equal(second.layers[0].keys.view(BYTES)[:, :, :5], before)


def test_tokens_of_a_window_that_are_gone_are_not_brought_back() -> None:
    cache = filled(FP8Cache(MIXED), 20)
    with refuses(ConfigError, "window of 6", "5", "activate_past_recording"):
        cache.layers[1].crop(-1)
    cache.activate_past_recording()
    filled(cache, 2)
    cache.layers[1].crop(-2)
    with pytest.raises(ConfigError, match=r"crop\(-1\) after 20 tokens"):
        cache.layers[1].crop(-1)
    for layer in cache.layers:
        with pytest.raises(ConfigError, match=r"write crop\(-N\)"):
            layer.crop(3)


def test_the_dtype_of_the_model_comes_back_and_layers_that_are_made_early_are_the_same() -> None:
    late, early = FP8Cache(MIXED), FP8Cache(MIXED)
    early.early_initialization(2, HEADS, DIM, torch.float16, torch.device("cpu"))
    assert early.is_initialized
    assert early.get_seq_length() == 0
    k, v = states(2, 9, 1).half(), states(2, 9, 2).half()
    for ours, others in zip(late.update(k, v, 0), early.update(k, v, 0), strict=True):
        assert ours.dtype == torch.float16
        assert torch.equal(ours, others)


@pytest.mark.parametrize(
    ("dim", "share"), [(64, 0.516), (80, 0.513), (96, 0.510), (128, 0.508), (256, 0.504)]
)
def test_memory_is_half_of_what_dynamic_cache_holds_in_bfloat16(dim: int, share: float) -> None:
    """Measured on the storages that both hold. The share is (head_dim + 2) / (2 head_dim), with
    scales per token; up to a 32nd comes on top, the room for tokens to come."""
    config = LlamaConfig(**{**SHAPE, "head_dim": dim})
    ours, theirs = FP8Cache(config), DynamicCache(config=config)
    for cache in (ours, theirs):
        filled(cache, 1000, dim)
        for _ in range(3):
            filled(cache, 1, dim)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in ours.layers
        for side in layer.tokens
        for tensor in (side.stored, side.scale)
    }
    sixteen = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)
    assert ours.nbytes == sum(held.values())
    assert share - 0.0005 <= ours.nbytes / sixteen <= (share + 0.0005) * 33 / 32 + 0.01


def test_a_window_takes_the_memory_of_its_window() -> None:
    config = MistralConfig(**SHAPE, sliding_window=WINDOW)
    cache = filled(FP8Cache(config), 1000)
    for _ in range(50):
        filled(cache, 1)
        assert cache.nbytes <= 2 * 2 * 2 * HEADS * (DIM + 2) * (WINDOW + 2 * 16)
    assert cache.get_seq_length() == 1050
    assert all(isinstance(layer, FP8SlidingLayer) for layer in cache.layers)


# --- scales ---


def with_scales(
    folder: Path, layers: tuple[int, ...] = (0, 1), shape: tuple[int, ...] = ()
) -> Path:
    """A checkpoint of 2 layers, with KV scales in these."""
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        for side, value in (("k", 0.01), ("v", 0.02)):
            scale = (
                torch.full(shape, value + 0.1 * layer)
                + torch.arange(max(1, len(shape) and shape[0])).view(shape) / 64
            )
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(folder: Path) -> PretrainedConfig:
    return LlamaForCausalLM.from_pretrained(folder).config


@pytest.mark.parametrize("scales", ["auto", "checkpoint"])
@pytest.mark.parametrize("shape", [(), (HEADS,)])
def test_the_scales_of_the_checkpoint_that_the_config_came_from(
    tmp_path: Path, scales: str, shape: Any
) -> None:
    folder = with_scales(tmp_path / "m", shape=shape)
    for cache in (
        FP8Cache(config_of(folder), kv_scales=scales),
        FP8Cache(LLAMA, kv_scales=scales, model=folder),
    ):
        assert cache.kv_cache.scale_source == "checkpoint"
        for layer in range(2):
            x = states(2, 7, layer)
            k, v = cache.update(x, x, layer)
            for read, value in ((k, 0.01 + 0.1 * layer), (v, 0.02 + 0.1 * layer)):
                scale = (value + torch.arange(HEADS).view(HEADS, 1, 1) / 64 * bool(shape)).float()
                assert torch.equal(read, decode(encode(x, scale, Format.E4M3FN), scale))


def test_fnuz_doubles_the_scales(tmp_path: Path) -> None:
    cache = filled(FP8Cache(LLAMA, "fp8_e4m3fnuz", model=with_scales(tmp_path / "m")), 3)
    assert cache.layers[0].keys.dtype == torch.float8_e4m3fnuz
    assert torch.equal(cache.layers[0].tokens[0].scale, torch.full((HEADS, DIM), 0.02))
    assert "converted from fp8_e4m3fn" in cache.kv_cache.note


def test_a_file_of_scales(tmp_path: Path) -> None:
    path = tmp_path / "kv_cache_scales.json"
    factors = {"0": {"0": 0.25, "1": 0.5}}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    cache = FP8Cache(LLAMA, kv_scales=path)
    assert cache.kv_cache.scale_source == "file"
    for layer, factor in enumerate((0.25, 0.5)):
        x = states(1, 3, layer)
        k, v = cache.update(x, x, layer)
        assert torch.equal(k, decode(encode(x, factor, Format.E4M3FN), factor))
        assert torch.equal(k, v)


def test_centered_scales_are_left_for_those_that_hold_without_centers(tmp_path: Path) -> None:
    """The engine subtracts centers before the rotary embedding, of which nothing is known here."""
    folder = with_scales(tmp_path / "m")
    centers = (1.0, *[0.0] * (HEADS * DIM - 1))
    layer = LayerScales((0.001,), (0.02,), Granularity.TENSOR, k_center=centers)
    entries, files = write_extras(KVScales((layer, layer)))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert open_checkpoint(str(folder)).kv_scales.layers[0].k_center == centers
    cache = filled(FP8Cache(LLAMA, model=folder), 3)
    assert torch.equal(cache.layers[0].tokens[0].scale, torch.full((HEADS, DIM), 0.01))


def test_without_scales_they_are_measured_and_never_1() -> None:
    for config in (LLAMA, config_of(BASE), config_of(resolve_model("demo"))):
        assert FP8Cache(config).kv_cache.scale_source == "dynamic"
    assert FP8Cache(LLAMA, kv_scales="unit").kv_cache.scale_source == "unit"
    assert FP8Cache(LLAMA, "fp8_e5m2").kv_cache.scale_source == "unit"
    assert FP8Cache(LLAMA, "fp8_e5m2", "dynamic").kv_cache.scale_source == "dynamic"


def test_what_was_decided_is_shown() -> None:
    cache = filled(FP8Cache(LLAMA), 4)
    assert repr(cache) == f"FP8Cache(fp8_e4m3fn, scales dynamic, 2 layers, {cache.nbytes} bytes)"
    assert all(isinstance(layer, FP8Layer) for layer in cache.layers)


def test_skipped_layers_are_those_of_dynamic_cache(tmp_path: Path) -> None:
    """Named by number or by window; their scales may be missing. The others are quantized as
    before.
    """
    folder = with_scales(tmp_path / "m", layers=(1,))
    for config, options, skipped in (
        (MIXED, {"kv_cache_dtype_skip_layers": ["sliding_window"]}, 1),
        (MIXED, {"kv_cache_dtype_skip_layers": [0]}, 0),
        (LLAMA, {"model": folder, "kv_cache_dtype_skip_layers": "0"}, 0),
    ):
        ours, theirs = FP8Cache(config, **options), DynamicCache(config=config)
        filled(ours, 9)
        filled(theirs, 9)
        assert type(ours.layers[skipped]) is type(theirs.layers[skipped])
        assert torch.equal(ours.layers[skipped].keys, theirs.layers[skipped].keys)
        assert isinstance(ours.layers[1 - skipped], FP8Layer)
        assert f"FP8Cache(fp8_e4m3fn, layer {skipped} in bfloat16, scales" in repr(ours)
        plain, quantized = theirs.layers[skipped], ours.layers[1 - skipped]
        assert ours.nbytes == plain.keys.nbytes + plain.values.nbytes + quantized.num_bytes
    assert ours.kv_cache.scale_source == "checkpoint"
    k, _ = ours.update(x := states(2, 7, 1), x, 1)
    scale = torch.tensor(0.11)
    assert torch.equal(k[:, :, -7:], decode(encode(x, scale, Format.E4M3FN), scale))
    with pytest.raises(CheckpointError, match="none for layer 0 of 2"):
        FP8Cache(LLAMA, model=folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_dtype_skip_layers": [2]}, "'2': this model has 2 layers, 0 to 1"),
        ({"kv_cache_dtype_skip_layers": [0, 1]}, "no layer with an 8-bit cache is left"),
        ({"kv_cache_dtype_skip_layers": "sliding_window"}, "no layer of this model has a window"),
        ({"kv_cache_dtype_skip_layers": 1.5}, "kv_cache_dtype_skip_layers is 1.5"),
        ({"kv_cache_dtype": "fp9"}, r"kv_cache_dtype 'fp9' is unknown.*choose fp8, fp8_e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "FP8Cache stores FP8; use transformers' DynamicCache"),
        ({"kv_cache_dtype": "auto"}, "FP8Cache stores FP8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8' is unknown"),
        ({"kv_scales": "dynamc"}, "'dynamc' is unknown .did you mean dynamic"),
        ({"kv_scales": "group"}, "stores a latent in two parts; use kv_scales='dynamic'"),
        ({"kv_scales": "none.json"}, r"none\.json: there is no such file"),
        (
            {"kv_scales": "checkpoint"},
            r"was not loaded from one: name it, FP8Cache\(config, model=FOLDER\)",
        ),
        ({"kv_scales": "checkpoint", "model": BASE}, "the checkpoint has no KV scales: calibrate"),
        ({"kv_scales": "x.json", "kv_cache_dtype": "fp8_e5m2"}, "static scales are made for E4M3"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FP8Cache(LLAMA, **options)


def test_checkpoints_that_cannot_give_the_scales_are_refused(tmp_path: Path) -> None:
    part = with_scales(tmp_path / "part", layers=(0,))
    with pytest.raises(CheckpointError, match="none for layer 1 of 2"):
        FP8Cache(LLAMA, model=part)
    whole = with_scales(tmp_path / "whole")
    with refuses(ConfigError, "KV scales", "fp8_e4m3fn"):
        FP8Cache(LLAMA, "fp8_e5m2", model=whole)
    with refuses(ConfigError, "KV scales of 2 layers", "3"):
        FP8Cache(LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}), model=whole)
    with refuses(ConfigError, "[2, 64]", "KV heads"):
        filled(FP8Cache(LlamaConfig(**{**SHAPE, "head_dim": 32}), model=whole), 3, 32)
    with refuses(CheckpointError, "kv_scales='dynamic'"):
        FP8Cache(LLAMA, model=tmp_path / "nothing")


def test_layers_that_have_no_cache_hold_nothing() -> None:
    """A layer without attention, or one that reads the keys of another layer."""
    config = LlamaConfig(**SHAPE)
    config.layer_types = ["full_attention", "mlp"]
    cache = FP8Cache(config)
    cache.update(states(1, 3, 0), states(1, 3, 1), 0)
    assert cache.nbytes == cache.layers[0].num_bytes
    assert not isinstance(cache.layers[1], FP8Layer)


def test_layers_without_keys_and_values_are_refused() -> None:
    with refuses(ConfigError, "layer 0", "LinearAttentionLayer"):
        FP8Cache(Qwen3NextConfig(num_hidden_layers=4))
    with refuses(ConfigError, "str", "model.config"):
        FP8Cache("demo")  # type: ignore[arg-type]
