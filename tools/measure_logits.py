"""Measure what a rounding of the logits to bfloat16 would change, on held-out text.

Prints in how many places the two highest logits tie, without the rounding and with it; and the KL
to a run in float32, in nats, of a run in bfloat16 without the rounding and with it, and of the
float32 run's own logits rounded. The text is cut into windows of 512 tokens.

    python tools/measure_logits.py [MODEL [TEXT [TOKENS]]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from freight.checkpoint.reader import resolve_model
from freight.engine.build import start_engine
from freight.engine.runner import ModelRunner
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

from torch import Tensor  # isort: skip  (after freight, which sets the waiting of threads)

WINDOW = 512


def runner_of(model: str, dtype: str) -> ModelRunner:
    args = EngineArgs(model, dtype=dtype, kv_cache_dtype=dtype, max_model_len=WINDOW)
    return start_engine(open_model(args))[0].runner


def rounded(logits: Tensor) -> Tensor:
    return logits.bfloat16().float()


def ties(logits: Tensor) -> int:
    """Return the number of rows whose two highest logits are equal."""
    first, second = logits.topk(2).values.unbind(1)
    return int((first == second).sum())


def kl(reference: Tensor, other: Tensor) -> float:
    """Return the sum over rows of the KL of `other` to `reference`, in nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (reference, other))
    return float((p.exp() * (p - q)).sum())


def main(model: str = "demo", text: str = "", tokens: str = "16384") -> None:
    path = Path(text) if text else resolve_model(model) / "heldout.txt"
    tokenizer = open_model(EngineArgs(model)).load_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(path.read_text(encoding="utf-8"))[: int(tokens)]
    exact = runner_of(model, "float32")
    narrow = runner_of(model, "bfloat16")
    tied = 0
    tied_rounded = 0
    sums = dict.fromkeys(("bfloat16", "bfloat16, logits rounded", "only logits rounded"), 0.0)
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        reference = exact.logits(window, 0, exact.pool.whole)
        logits = narrow.logits(window, 0, narrow.pool.whole)
        tied += ties(logits)
        tied_rounded += ties(rounded(logits))
        sums["bfloat16"] += kl(reference, logits)
        sums["bfloat16, logits rounded"] += kl(reference, rounded(logits))
        sums["only logits rounded"] += kl(reference, rounded(reference))
    print(f"{len(ids)} tokens")
    print(f"ties: {tied / len(ids):.3%}, with the rounding {tied_rounded / len(ids):.2%}")
    for name, total in sums.items():
        print(f"KL to float32, {name}: {total / len(ids):.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
