"""A rank has rows of a weight and heads of a group, and its kernels take the tiles of the whole: so
its sums have the order of one rank's. Tiles are chosen here for GPUs that need not be there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freight.fp8.formats import Format
from freight.kernels.reference_set import ReferenceKernels
from freight.kernels.triton import experts, linear, paged
from freight.kernels.triton.formats import INTERPRETER, Target
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.random_weights import random_model
from freight.model.shares import share_of
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.weight import Activations, Weight

TARGETS = {
    "interpreter": INTERPRETER,
    "sm_80": Target("cuda", 80, 108),
    "sm_90": Target("cuda", 90, 132),
    "sm_100": Target("cuda", 100, 148),
    "gfx942": Target("hip", "gfx942", 304),
}
ROWS = (1, 16, 17, 64, 65, 300)
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (16896, 2048)]


class Launches:
    """A kernel that is never run: it keeps the constants of its launches."""

    fn = SimpleNamespace(__name__="never run")

    def __init__(self) -> None:
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **constants: self.constants.append(constants)

    def warmup(self, *_: object, **__: object) -> None:
        return None

    def taken(self) -> list[dict[str, Any]]:
        """The constants since the last call."""
        taken = self.constants
        self.constants = []
        return taken


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(kind: str, outputs: int, inputs: int, whole: int | None) -> Weight:
    """A weight without memory: 'bf16', or E4M3 with scales of 'rows' or 'blocks'."""
    if kind == "bf16":
        return Weight(empty(outputs, inputs), whole=whole)
    shape = (outputs,)
    if kind == "blocks":
        shape = (-(-outputs // 128), -(-inputs // 128))
    scale = empty(*shape, dtype=torch.float32)
    data = empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    return Weight(data, scale, Activations.DYNAMIC, whole=whole)


def product(target: Target, kind: str, rows: int, weight: Weight) -> None:
    inputs = weight.data.shape[1]
    if kind == "bf16":
        linear.matmul(target, empty(rows, inputs), None, weight, None, torch.bfloat16)
        return
    groups = -(-inputs // 128) if kind == "blocks" else 1
    x = empty(rows, inputs, dtype=torch.float8_e4m3fn)
    scale = empty(rows, groups, dtype=torch.float32)
    linear.matmul(target, x, scale, weight, None, torch.bfloat16)


@pytest.mark.parametrize("kind", ["bf16", "rows", "blocks"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_rank_s_rows_of_a_weight(target: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Launches()
    monkeypatch.setattr(linear, "matmul_kernel", kernel)
    differs = False
    for rows in ROWS:
        for outputs, inputs in SHAPES:
            product(TARGETS[target], kind, rows, matrix(kind, outputs, inputs, None))
            (whole,) = kernel.taken()
            for ranks in (2, 4, 8):
                part = matrix(kind, outputs // ranks, inputs, outputs)
                product(TARGETS[target], kind, rows, part)
                assert kernel.taken() == [whole], (rows, outputs, inputs, ranks)
                product(TARGETS[target], kind, rows, matrix(kind, len(part.data), inputs, None))
                differs |= kernel.taken() != [whole]
    assert differs == (target in ("sm_90", "sm_100"))  # there tiles follow from the outputs


@pytest.mark.parametrize("target", TARGETS)
def test_a_rank_s_channels_of_experts(target: str) -> None:
    differs = False
    for count, outputs in ((8, 4096), (128, 1536), (4, 512)):
        stacks = []
        for part, whole in ((outputs, None), (outputs // 4, outputs), (outputs // 4, None)):
            first = matrix("rows", part, 512, whole)
            data = empty(count, part, 512, dtype=torch.float8_e4m3fn)
            stacks.append(experts.ExpertStack(data, empty(count, part), None, first))
        dot = linear.dot_type(TARGETS[target], stacks[0].data, stacks[0].first)
        alone, of_rank, forgotten = (
            experts.experts_tile(TARGETS[target], stack, dot) for stack in stacks
        )
        assert of_rank == alone
        differs |= forgotten != alone
    assert differs == (target in ("sm_90", "sm_100"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_rank_s_heads_of_latents(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 heads by 8 ranks: products by head, decoding and prefill."""
    heads, prefill, decode = Launches(), Launches(), Launches()
    monkeypatch.setattr(experts, "heads_kernel", heads)
    monkeypatch.setattr(paged, "prefill_kernel", prefill)
    monkeypatch.setattr(paged, "decode_kernel", decode)
    monkeypatch.setattr(paged, "merge_kernel", Launches())
    stored = empty(64, 16, 1, 576, dtype=torch.float8_e4m3fn)
    counters = empty(2, dtype=torch.int64)
    pages = KVPages(stored, stored[..., 64:], None, None, counters, v_in_k=True)
    integers = torch.int32
    sequences = Sequences(
        empty(3, dtype=integers), empty(2, dtype=integers), empty(2, 8, dtype=integers), True
    )
    found = []
    for count, group, whole in ((128, None, None), (16, 128, 512 * 8), (16, None, None)):
        weights = [Weight(empty(512, 128), whole=whole)] * count
        first = weights[0]
        stack = experts.ExpertStack(empty(count, 512, 128), None, None, first)
        experts.by_head(TARGETS[target], empty(2, count, 128), stack)
        call = AttentionCall(0.1, group=group)
        paged.attention(TARGETS[target], empty(5, count, 576), pages, sequences, call)
        launched = []
        for kernel in (heads, prefill, decode):
            (constants,) = kernel.taken()
            launched.append({k: v for k, v in constants.items() if k not in ("GROUP", "TAKEN")})
        launched[1].pop("QUERIES")  # a tile has more rows where a program has fewer heads
        found.append(launched)
    assert found[1] == found[0]
    assert (found[2] != found[0]) == (target != "gfx942")


class Packed(ReferenceKernels):
    """Keeps how many outputs each matrix has, in this rank's part and in all."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "outputs", [])

    def pack(self, weight: Weight) -> Weight:
        self.outputs.append((len(weight.data), weight.whole_outputs))  # type: ignore[attr-defined]
        return super().pack(weight)

    def pack_experts(self, weights: Any, bias: Any = None) -> Any:
        for weight in weights:
            self.pack(weight)
        return super().pack_experts(weights, bias)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_matrix_of_a_rank_knows_the_whole(ranks: int) -> None:
    """Also where ranks share a KV head, and where the vocabulary is padded."""
    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 101, "head_dim": 16}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = parse_model_config(PRESETS["llama-1b"] | small | sizes)
    found = []
    for share in (None, share_of(config, 1, ranks)):
        kernels = Packed()
        random_model(config, kernels, Format.BFLOAT16, Format.E4M3FN, 64, "cpu", share=share)
        found.append(kernels.outputs)  # type: ignore[attr-defined]
    alone, of_rank = found
    assert [whole for _, whole in of_rank] == [whole for _, whole in alone]
    assert all(own == whole for own, whole in alone)
    assert all(own < whole for own, whole in of_rank)
