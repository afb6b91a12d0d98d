"""What keys and values cost below eight bits, by position: formats that no cache has, simulated in pages
of 16 bits, beside FP8 and INT8 as they are.

    python benchmarks/below_eight_bits.py MODEL --text FILE [--window 4096] [--tokens 8192]
        [--calibration 2048] [--formats NAME …] [--json]

The last `--calibration` tokens of the text give the channel scales and are not scored. KL is in nats per
token against pages of 16 bits, of all tokens and of those at position 2,048 and beyond. A layer's keys and
values are rounded as they are stored; everything else is the engine's. Formats:

    int4-32    4 bits, groups of 32 channels with a minimum and a step in float16
    lloyd4     4 bits: a Hadamard rotation of random signs, the length in float16, and the centroids of
               Lloyd and Max for a normal distribution (TurboQuant, Zandieh et al. 2025, arXiv:2504.19874),
               with the length of the codes set right
    …+scales   of channels that were divided by the largest values of calibration, as scales are that the
               query and the output take (pairs of a rotation have one)
    near16:A/B keys of the last 16 blocks of 16 tokens in A, all before in B, by the position of the query
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from freight.base.tables import markdown
from freight.kernels.interface import KernelSet
from freight.lab.evaluate.documents import cut_documents
from freight.lab.evaluate.measure import mean_perplexity, measure
from freight.lab.evaluate.report import CacheRun, cache_run, load_for, resolve_caches
from freight.model.open import open_model
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages, read_slots, write_slots
from freight.operands.packed import PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.quantizer.observers import pair_norms
from freight.settings.engine import EngineArgs

FAR = 2048  # the position from which the second KL counts
BLOCK = 16  # tokens of a block of near keys
# float32 [rows, heads, channels] -> the same, rounded
Round = Callable[[Tensor], Tensor]


def of_token(bits: int, rotates: bool = False) -> Round:
    """INT of so many bits with a bfloat16 scale per token and head."""
    top = 2 ** (bits - 1) - 1

    def rounded(x: Tensor) -> Tensor:
        signed = hadamard(x.shape[-1]) if rotates else None
        if signed is not None:
            x = x @ signed
        scale = (x.abs().amax(-1, keepdim=True) / top).bfloat16().float().clamp_min(1e-30)
        x = (x / scale).round().clamp(-top, top) * scale
        return x if signed is None else x @ signed.T

    return rounded


def int4_groups(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / 15
    step = step.half().float().clamp_min(1e-7)
    low = low.half().float()
    codes = ((groups - low) / step).round().clamp(0, 15)
    rounded: Tensor = (codes * step + low).flatten(-2)
    return rounded


def lloyd4(x: Tensor) -> Tensor:
    size = x.shape[-1]
    signed = hadamard(size)
    turned = x @ signed
    length = turned.norm(dim=-1, keepdim=True).clamp_min(1e-20)
    codes = CENTROIDS[torch.bucketize(turned / length * math.sqrt(size), EDGES)]
    codes = codes * (math.sqrt(size) / codes.norm(dim=-1, keepdim=True).clamp_min(1e-20))
    rounded: Tensor = (codes * length.half().float() / math.sqrt(size)) @ signed.T
    return rounded


def hadamard(size: int) -> Tensor:
    """An orthogonal matrix [size, size]: random signs, and Sylvester's matrix."""
    if size not in _HADAMARD:
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
        assert len(matrix) == size, "heads have a power of two of channels"
        generator = torch.Generator().manual_seed(1)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
        _HADAMARD[size] = signs[:, None] * matrix / math.sqrt(size)
    return _HADAMARD[size]


_HADAMARD: dict[int, Tensor] = {}


def centroids(bits: int) -> Tensor:
    """The centroids of a standard normal distribution with the least squared error (Lloyd 1982)."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).sort().values
    count = 2**bits
    found = values[torch.linspace(0, len(values) - 1, count + 2).long()[1:-1]]
    for _ in range(200):
        cells = torch.bucketize(values, (found[1:] + found[:-1]) / 2)
        sums = torch.zeros(count).scatter_add_(0, cells, values)
        found = sums / torch.bincount(cells, minlength=count)
    return found


CENTROIDS = centroids(4)
EDGES = (CENTROIDS[1:] + CENTROIDS[:-1]) / 2


@dataclass(frozen=True)
class Simulated:
    """A format: its rounding, and whether channels are scaled. near: that of the last `blocks` blocks."""

    rounded: Round
    scales: bool = False
    near: Round | None = None
    blocks: int = 0


FORMATS = {
    "int8-hadamard": Simulated(of_token(8, rotates=True)),
    "int6": Simulated(of_token(6)),
    "int4-32": Simulated(int4_groups),
    "int4-32+scales": Simulated(int4_groups, scales=True),
    "lloyd4": Simulated(lloyd4),
    "lloyd4+scales": Simulated(lloyd4, scales=True),
    "near16:int8/lloyd4": Simulated(lloyd4, False, of_token(8), 16),
    "near16:int8/lloyd4+scales": Simulated(lloyd4, True, of_token(8), 16),
    "near16:int8/int4-32": Simulated(int4_groups, False, of_token(8), 16),
    "near16:int8/int4-32+scales": Simulated(int4_groups, True, of_token(8), 16),
    "near64:int8/lloyd4+scales": Simulated(lloyd4, True, of_token(8), 64),
}


@dataclass
class Channels:
    """The largest values of each layer's channels, in the order in which layers first store."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)


@dataclass
class Layer:
    """What simulating kernels know of a layer's pages: its index, and the pages of its far tokens."""

    index: int
    far: KVPages | None


class Rounding:
    """Kernels that round what they store: all others are those of `kernels`."""

    def __init__(self, kernels: KernelSet, form: Simulated | None, channels: Channels) -> None:
        """form: None: nothing is rounded, and `channels` are measured."""
        self._kernels = kernels
        self._form = form
        self._channels = channels
        self._layers: dict[int, Layer] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _layer(self, pages: KVPages) -> Layer:
        key = pages.k.data_ptr()
        if key not in self._layers:
            far = None
            if self._form is not None and self._form.near is not None:
                far = replace(pages, k=pages.k.clone(), v=pages.v.clone())
            self._layers[key] = Layer(len(self._layers), far)
        return self._layers[key]

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        q = self._kernels.rotate_store(qkv, rotary, positions, slots, pages)
        if slots is None:
            return q
        layer = self._layer(pages)
        k = read_slots(pages.k, slots).float()
        v = read_slots(pages.v, slots).float()
        if self._form is None:
            self._observe(layer, pair_norms(k, 2 * rotary.cos.shape[-1]), v)
            return q
        far_k, far_v = self._far(layer, k, v)
        if layer.far is not None:
            assert self._form.near is not None
            self._write(layer.far, slots, far_k, far_v)
            self._write(pages, slots, self._form.near(k), self._form.near(v))
        else:
            self._write(pages, slots, far_k, far_v)
        return q

    def _far(self, layer: Layer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._form is not None
        if not self._form.scales:
            return self._form.rounded(k), self._form.rounded(v)
        k_scale = self._channels.k[layer.index].clamp_min(1e-6)
        v_scale = self._channels.v[layer.index].clamp_min(1e-6)
        return self._form.rounded(k / k_scale) * k_scale, self._form.rounded(v / v_scale) * v_scale

    def _write(self, pages: KVPages, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write_slots(pages.k, slots, k.to(pages.k.dtype))
        write_slots(pages.v, slots, v.to(pages.v.dtype))

    def _observe(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        largest = k.abs().amax(0), v.abs().amax(0)
        if layer.index == len(self._channels.k):
            self._channels.k.append(largest[0])
            self._channels.v.append(largest[1])
            return
        for kept, new in zip((self._channels.k, self._channels.v), largest, strict=True):
            kept[layer.index] = torch.maximum(kept[layer.index], new)

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        far = self._layer(pages).far
        if far is None:
            return self._kernels.attention(q, pages, sequences, call, consumer)
        assert self._form is not None
        assert call.causal
        assert call.soft_cap is None
        assert call.sinks is None
        (length,) = sequences.context_lens.tolist()  # one sequence
        rows = len(q)
        key = torch.arange(length)
        position = torch.arange(length - rows, length)[:, None]
        block = pages.k.shape[1]
        slots = sequences.block_tables[0].long()[key // block] * block + key % block
        seen = key <= position
        if call.window is not None:
            seen &= position - key < call.window
        near = position // BLOCK - key // BLOCK < self._form.blocks
        out = q.new_empty(*q.shape[:2], pages.v.shape[3])
        of_both = [(read_slots(part.k, slots), read_slots(part.v, slots)) for part in (pages, far)]
        group = q.shape[1] // of_both[0][0].shape[1]
        for head in range(q.shape[1]):
            (near_k, near_v), (far_k, far_v) = [
                (k[:, head // group].float(), v[:, head // group].float()) for k, v in of_both
            ]
            query = q[:, head].float()
            scores = torch.where(near, query @ near_k.T, query @ far_k.T) * call.softmax_scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            total = (weights * near) @ near_v + (weights * ~near) @ far_v
            out[:, head] = total.to(q.dtype)
        return out if consumer is None else out.flatten(1)


def described(run: CacheRun, length: int, beside: Mapping[str, float]) -> dict[str, float]:
    """beside: the figures of E4M3, of which ratios are; empty for its own."""
    kl = run.token_kl.double()
    by_position = kl[: len(kl) // length * length].view(-1, length)
    far = float(by_position[:, FAR:].mean()) if length > FAR else float("nan")
    figures = {
        "perplexity": mean_perplexity(run.token_logprobs),
        "kl": float(kl.mean()),
        "kl_far": far,
        "same_top": float(run.token_same.double().mean()),
    }
    figures["to_e4m3"] = figures["kl"] / beside.get("kl", figures["kl"])
    figures["far_to_e4m3"] = far / beside.get("kl_far", far)
    return figures


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--calibration", type=int, default=2048)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    opened = open_model(EngineArgs(args.model, max_model_len=args.window))
    tokenizer = opened.load_tokenizer()
    assert tokenizer is not None
    tokens = tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(tokens) < args.tokens + args.calibration:
        raise SystemExit(f"--text has {len(tokens):,} tokens, and more are asked for")
    configs = resolve_caches(opened, [("fp8", "dynamic"), ("int8", "dynamic")])
    plain = configs[0]
    kernels = opened.kernels(plain)
    channels = Channels()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done:,} of {total:,} tokens", end="", file=sys.stderr)

    with opened.threads(plain):
        decoder = load_for(opened, configs, args.window)

        def simulating(form: Simulated | None) -> CacheRun:
            # mypy does not see what `__getattr__` provides
            own = cast(KernelSet, Rounding(kernels, form, channels))
            return cache_run(opened, decoder, plain, args.window, kernels=own)

        behind = tokens[args.tokens : args.tokens + args.calibration]
        parts = cut_documents(opened, [behind], min(args.window, args.calibration), None)
        measure([simulating(None)], [part.window for part in parts], show)
        runs = {
            str(config.kv.format): cache_run(opened, decoder, config, args.window)
            for config in configs
        }
        runs |= {name: simulating(FORMATS[name]) for name in args.formats}
        parts = cut_documents(opened, [tokens[: args.tokens]], args.window, None)
        windows = [part.window for part in parts]
        measure(list(runs.values()), windows, show)
    length = windows[0].num_scored
    names = list(runs)
    beside = described(runs[names[1]], length, {})
    figures = {name: described(run, length, beside) for name, run in runs.items()}
    if args.json:
        print(
            json.dumps({"model": args.model, "window": args.window, "formats": figures}, indent=1)
        )
        return 0
    rows = []
    for name, of in figures.items():
        rows.append(
            [
                name,
                f"{of['perplexity']:.3f}",
                f"{of['kl']:.5f}",
                f"{of['kl_far']:.5f}",
                f"{of['to_e4m3']:.2f}",
                f"{of['far_to_e4m3']:.2f}",
                f"{of['same_top']:.2%}",
            ]
        )
    heads = ["format", "perplexity", "KL", f"KL from {FAR}", "to E4M3", "from there", "same top"]
    print(markdown([heads, *rows], 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
