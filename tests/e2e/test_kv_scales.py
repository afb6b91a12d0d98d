"""A KV scale in a checkpoint changes the bytes in the cache exactly as it says, for keys and values
apart.

The first layer's keys and values do not depend on the cache, so those of a 16-bit run are what an
FP8 run encodes: `encode(k16, scale)` is compared byte by byte. Deeper layers are compared through
the logits, with a run whose float32 cache holds the dequantized values. A scale that is read and
not used, or used for the other side, fails both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import assert_names
from tests.scaled_models import with_scales
from torch import Tensor

from freight import LLM, SamplingParams
from freight.cache.pool import PagedKV, allocate_pool
from freight.engine.runner import ModelRunner
from freight.fp8.cast import decode, encode
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
LAYERS, HEADS, CHANNELS = 2, 2, 64
TOKENS = torch.randint(3, 256, (50,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = (range(4),)

Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Scale tensors of one layer by name, what they mean for k and v [heads, channels or 1], and
    their granularity.
    """

    tensors: Callable[[int], Stored]
    k: Callable[[int], Tensor]
    v: Callable[[int], Tensor]
    granularity: str = "tensor"


def spread(shape: tuple[int, ...], layer: int, side: str) -> Tensor:
    """Scales of this shape: powers of no two, other ones for every layer, side, head and channel;
    some saturate.
    """
    seed = 2 * layer + (side == "v")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float32) * 0.01 + 0.0005


def apart(
    shape: tuple[int, ...], granularity: str, k_name: str = "k_scale", v_name: str = "v_scale"
) -> Case:
    def meant(side: str) -> Callable[[int], Tensor]:
        wide = {"tensor": (1, 1), "head": (HEADS, 1), "channel": (HEADS, CHANNELS)}[granularity]
        return lambda layer: spread(shape, layer, side).reshape(wide)

    names = {"k": k_name, "v": v_name}
    return Case(
        lambda layer: {name: spread(shape, layer, side) for side, name in names.items()},
        meant("k"),
        meant("v"),
        granularity,
    )


def bf16(layer: int, side: str) -> Tensor:
    return spread((1,), layer, side).bfloat16()


def both(layer: int) -> Tensor:
    return spread((), layer, "k")


CASES = {
    "kv_scale": Case(lambda layer: {"kv_scale": both(layer)}, both, both),
    "k_scale []": apart((), "tensor"),
    "k_scale [1]": apart((1,), "tensor"),
    "k_scale [1] bfloat16": Case(
        lambda layer: {"k_scale": bf16(layer, "k"), "v_scale": bf16(layer, "v")},
        lambda layer: bf16(layer, "k").float(),
        lambda layer: bf16(layer, "v").float(),
    ),
    "k_scale [H,1,1]": apart((HEADS, 1, 1), "head"),
    "k_scale [H,D]": apart((HEADS, CHANNELS), "channel"),
    "modelopt": apart((1,), "tensor", "k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors before 0.7": apart(
        (1,), "tensor", "k_proj.output_scale", "v_proj.output_scale"
    ),
    "only k": Case(lambda layer: {"k_scale": both(layer)}, both, both),
    "k per head, v per tensor": Case(
        lambda layer: {
            "k_scale": spread((HEADS, 1, 1), layer, "k"),
            "v_scale": spread((), layer, "v"),
        },
        lambda layer: spread((HEADS, 1, 1), layer, "k").view(HEADS, 1),
        lambda layer: spread((), layer, "v"),
        "head",
    ),
}


def write_model(folder: Path, tensors: Callable[[int], Stored], **config: Any) -> Path:
    return with_scales(BASE, folder, tensors, LAYERS, **config)


def open_llm(model: Path = BASE, **options: Any) -> LLM:
    return LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", kv_cache_memory="1MiB", **options
    )


def run(llm: LLM) -> Tensor:
    return llm.engine.runner.logits(TOKENS, 0, BLOCKS)


def stored(llm: LLM, layer: int = 0) -> tuple[Tensor, Tensor]:
    """What the cache holds of k and v, [tokens, heads, channels]."""
    pages = llm.engine.runner.pool.layers[layer].pages
    return pages.k.flatten(0, 1)[: len(TOKENS)], pages.v.flatten(0, 1)[: len(TOKENS)]


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, Tensor]:
    """The first layer's k and v as computed."""
    llm = open_llm(kv_cache_dtype="float32")
    run(llm)
    return stored(llm)


@dataclass(frozen=True)
class Dequantized(PagedKV):
    """A float32 cache in which every k and v goes to FP8 and back."""

    scales: tuple[Tensor, Tensor] = (torch.ones(1), torch.ones(1))

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        q, slots = super().store(qkv, rotary, batch), batch.slots[self.group]
        for page, scale in zip(
            (self.pages.k.flatten(0, 1), self.pages.v.flatten(0, 1)), self.scales, strict=True
        ):
            page[slots] = decode(encode(page[slots], scale, Format.E4M3FN), scale)
        return q


def logits_of_dequantized(case: Case) -> Tensor:
    """The oracle: nothing is stored in FP8, but every k and v goes to FP8 and back on its way into
    a float32 cache.
    """
    llm = open_llm(kv_cache_dtype="float32")
    runner = llm.engine.runner
    layers = allocate_pool(runner.pool.spec, llm.config.kv, (4,), REFERENCE).layers
    layers = tuple(
        Dequantized(layer.pages, REFERENCE, scales=(case.k(index), case.v(index)))
        for index, layer in enumerate(layers)
    )
    pool = replace(runner.pool, layers=layers, num_blocks=(4,))
    return ModelRunner(runner.model, pool, "cpu").logits(TOKENS, 0, BLOCKS)


def assert_used(llm: LLM, case: Case, plain: tuple[Tensor, Tensor]) -> None:
    logits = run(llm)
    for x, got, scale in zip(plain, stored(llm), (case.k(0), case.v(0)), strict=True):
        assert got.dtype == torch.float8_e4m3fn
        assert torch.equal(codes(got), codes(encode(x, scale, Format.E4M3FN)))
        assert not torch.equal(codes(got), codes(encode(x, 1.0, Format.E4M3FN)))
    expected = logits_of_dequantized(case)
    assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_s_scales(name: str, plain: tuple[Tensor, Tensor], tmp_path: Path):
    case = CASES[name]
    llm = open_llm(write_model(tmp_path / "model", case.tensors), kv_cache_dtype="fp8")
    info = llm.kv_cache_info()
    assert (info["dtype"], info["granularity"], info["scale_source"]) == (
        "fp8_e4m3fn",
        case.granularity,
        "checkpoint",
    )
    assert_used(llm, case, plain)


def test_k_and_v_are_not_taken_for_each_other(plain: tuple[Tensor, Tensor], tmp_path: Path):
    """The scales of `k_scale []` given to the other side: each side's bytes change."""
    case = CASES["k_scale []"]
    crossed = Case(
        lambda layer: {"k_scale": spread((), layer, "v"), "v_scale": spread((), layer, "k")},
        case.v,
        case.k,
    )
    llms = [
        open_llm(write_model(tmp_path / str(i), one.tensors), kv_cache_dtype="fp8")
        for i, one in enumerate([case, crossed])
    ]
    assert_used(llms[1], crossed, plain)
    run(llms[0])
    for one, other in zip(*map(stored, llms), strict=True):
        assert not torch.equal(codes(one), codes(other))


@pytest.mark.parametrize("option", ["quantization_param_path", "kv_scales"])
def test_the_json_file(option: str, plain: tuple[Tensor, Tensor], tmp_path: Path):
    """It counts more than the checkpoint, which `kv_scales` finds with other scales."""
    factors = {str(layer): both(layer).item() for layer in range(LAYERS)}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    file = tmp_path / "kv_cache_scales.json"
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    three = torch.tensor(3.0, dtype=torch.float32)
    model = write_model(tmp_path / "model", lambda layer: {"kv_scale": three})
    llm = open_llm(
        model if option == "kv_scales" else BASE, kv_cache_dtype="fp8", **{option: str(file)}
    )
    info = llm.kv_cache_info()
    assert (info["granularity"], info["scale_source"]) == ("tensor", "file")
    assert_used(llm, CASES["kv_scale"], plain)


@pytest.mark.parametrize("name", ["kv_scale", "k_scale [H,1,1]", "k_scale [H,D]"])
def test_an_fnuz_cache_has_doubled_scales_and_the_same_values(name: str, tmp_path: Path):
    tensors = CASES[
        name
    ].tensors  # made larger, so that nothing saturates: FN does at 448, FNUZ at what FN calls 480
    folder = write_model(
        tmp_path / "model",
        lambda layer: {name: scale + 0.03 for name, scale in tensors(layer).items()},
    )
    fn, fnuz = (open_llm(folder, kv_cache_dtype=dtype) for dtype in ("fp8_e4m3fn", "fp8_e4m3fnuz"))
    logits = [run(llm) for llm in (fn, fnuz)]
    assert torch.equal(*logits)
    for layer in range(LAYERS):
        pages, other = (llm.engine.runner.pool.layers[layer].pages for llm in (fn, fnuz))
        for scale, doubled in ((pages.k_scale, other.k_scale), (pages.v_scale, other.v_scale)):
            assert scale is not None
            assert torch.equal(scale * 2, doubled)
        for a, b, scale in zip(
            stored(fn, layer), stored(fnuz, layer), (pages.k_scale, pages.v_scale), strict=True
        ):
            assert b.dtype == torch.float8_e4m3fnuz
            assert decode(a).abs().max() < 448
            assert torch.equal(decode(a, scale), decode(b, scale * 2))
            assert (codes(a) != codes(b)).sum() == (codes(a) == 0x80).sum()  # FN's -0 is FNUZ's NaN


def test_scales_made_for_fnuz_are_halved(plain: tuple[Tensor, Tensor], tmp_path: Path):
    """`kv_cache_torch_dtype` says what the scales were made for, and that there is an FP8 cache at
    all.
    """
    case = CASES["kv_scale"]
    folder = write_model(
        tmp_path / "model",
        lambda layer: {"kv_scale": both(layer) * 2},
        kv_cache_torch_dtype="float8_e4m3fnuz",
    )
    llm = open_llm(folder)
    assert llm.kv_cache_info()["dtype"] == "fp8_e4m3fn"
    assert_used(llm, case, plain)


FOUR = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)


def generate(model: Path, **options: Any) -> None:
    open_llm(model, kv_cache_dtype="fp8", **options).generate([TOKENS], FOUR)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_scales_that_clip_are_warned_about_and_scales_that_fit_are_not(
    kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    scales = [torch.tensor(scale, dtype=torch.float32) for scale in (1e-3, 0.1)]
    small, large = (
        write_model(tmp_path / f"{scale:g}", lambda layer, scale=scale: {"kv_scale": scale})
        for scale in scales
    )
    generate(large, kernels=kernels)
    generate(small, kernels=kernels, kv_scales="dynamic")
    assert "clipped" not in caplog.text
    generate(small, kernels=kernels)
    (said,) = re.findall(
        r"([\d.]+) % of the keys and values lay beyond the range of their scales", caplog.text
    )
    llm = open_llm(small, kv_cache_dtype="fp8", kernels=kernels)
    run(llm)
    pages = [half for layer in range(LAYERS) for half in stored(llm, layer)]
    ends = sum(int((decode(half).abs() == 448).sum()) for half in pages)
    at_the_end = ends / sum(half.numel() for half in pages)
    assert 0.5 * at_the_end < float(said) / 100 <= at_the_end + 0.01
    caplog.clear()
    for _ in llm.stream(TOKENS, FOUR):
        assert "clipped" not in caplog.text
    assert_names(caplog.text, f"{said} %", "keys and values")
