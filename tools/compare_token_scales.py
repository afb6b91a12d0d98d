"""Compare formats of `token` scales: the table behind the choice of bfloat16 in docs/numerics.md.

    python tools/compare_token_scales.py [--tokens N]

Runs the demo model's held-out text with E4M3 and E5M2 caches. Their per-token scales are rounded as
named: `float32` not at all, `bfloat16` to nearest, `e5m3` up to three mantissa bits, `power of two`
up to none (E8M0, one byte).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from freight.cache import pool
from freight.checkpoint.reader import resolve_model
from freight.fp8.cast import scale_from_amax
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.lab.evaluate.report import compare_caches
from freight.settings.engine import EngineArgs


def rounded_up(scale: Tensor, mantissa_bits: int) -> Tensor:
    """Return the smallest float32 with so many mantissa bits that is at least `scale`."""
    mask = (1 << (23 - mantissa_bits)) - 1
    return ((scale.view(torch.int32) + mask) & ~mask).view(torch.float32)


ROUNDINGS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # name -> bytes, rounding
    "float32": (4, lambda scale: scale),
    "bfloat16": (2, lambda scale: scale.bfloat16().float()),
    "e5m3": (1, lambda scale: rounded_up(scale, 3)),
    "power of two": (1, lambda scale: rounded_up(scale, 0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=None)
    tokens = parser.parse_args().tokens
    text = Path(resolve_model("demo"), "heldout.txt").read_text(encoding="utf-8")
    args = EngineArgs(model="demo", kernels="reference")
    caches = [("fp8_e4m3", "dynamic"), ("fp8_e5m2", "dynamic")]
    # The pool allocates the scales of all four in this dtype
    float32 = SimpleNamespace(**vars(torch) | {"bfloat16": torch.float32})
    print(
        "| token scale | bytes | E4M3 perplexity | E4M3 mean KL | E5M2 perplexity | E5M2 mean KL |"
    )
    print("|---|---|---|---|---|---|")
    for name, (size, rounding) in ROUNDINGS.items():

        def token_scale(
            amax: Tensor, format: Format, rounding: Callable[[Tensor], Tensor] = rounding
        ) -> Tensor:
            return rounding(scale_from_amax(amax, format))

        with (
            mock.patch.object(reference, "token_scale", token_scale),
            mock.patch.object(pool, "torch", float32),
        ):
            _, *scores = compare_caches(args, caches, text, max_tokens=tokens)
        cells = " | ".join(f"{score.perplexity:.3f} | {score.mean_kl:.5f}" for score in scores)
        print(f"| {name} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
