"""Recompute what 8-bit caches cost with transformers and ml_dtypes, beside the figures of Freight.

    python benchmarks/peers/cache_oracle.py FOLDER TEXT [--window 341] [--tokens 4096] [--caches token,unit,e5m2,int8]
        [--beside FILE.json]

FOLDER is a checkpoint that transformers reads. Nothing of Freight is imported: the model, its
tokenizer and its attention are transformers' in float32, the formats are ml_dtypes', and keys and
values are rounded as they enter transformers' own cache. FILE.json is what this prints for the same
text, window and tokens:

    freight evaluate caches FOLDER --dtype float32 --caches token,unit,e5m2,int8 --no-speed --json \\
        --data TEXT --window 341 --max-tokens 4096

Then both stand side by side, with the share by which they differ. KL is in nats per token, of the
distribution without rounding to that with it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

Array = NDArray[Any]
Rounding = Callable[[Array], Array]  # keys or values [..., head_dim] as a cache gives them back


def by_token(values: Array, dtype: Any, largest: float) -> Array:
    """Round with a scale for each vector: its largest magnitude / `largest`, kept in bfloat16."""
    amax = np.abs(values).max(-1, keepdims=True)
    scale = np.maximum(amax / np.float32(largest), np.finfo(np.float32).tiny)
    stored = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    return cast(values / stored, dtype, largest) * stored


def cast(values: Array, dtype: Any, largest: float) -> Array:
    """Round to nearest, ties to even, within ± `largest`."""
    within = np.clip(values, -largest, largest)
    if dtype is np.int8:
        return np.rint(within).astype(np.float32)
    return within.astype(dtype).astype(np.float32)


ROUNDINGS: Mapping[str, Rounding] = {
    "token": lambda values: by_token(values, ml_dtypes.float8_e4m3fn, 448.0),
    "unit": lambda values: cast(values, ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": lambda values: cast(values, ml_dtypes.float8_e5m2, 57344.0),
    "int8": lambda values: by_token(values, np.int8, 127.0),
}


class RoundedCache(DynamicCache):
    """transformers' cache, whose keys and values are rounded as they enter it."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = torch.from_numpy(self._rounding(key_states.numpy()))
        values = torch.from_numpy(self._rounding(value_states.numpy()))
        updated: tuple[Tensor, Tensor] = super().update(keys, values, *args, **kwargs)
        return updated


@dataclass
class Figures:
    """Of one cache, by token, in the text's order: log-probabilities, KL in nats, same top."""

    logprobs: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)

    def as_object(self) -> dict[str, float]:
        return {
            "perplexity": math.exp(-float(torch.cat(self.logprobs).mean())),
            "kl": float(torch.cat(self.divergence).mean()),
            "same_top": float(torch.cat(self.same).double().mean()),
        }


def windows(ids: Sequence[int], length: int, begin: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets: each window begins with the begin-of-text token, or, without one,
    with the last token of the window before.
    """
    step = length if begin is not None else length - 1
    for start in range(0, len(ids), step):
        part = list(ids[start : start + length])
        inputs = part[:-1] if begin is None else [begin, *part[:-1]]
        targets = part[1:] if begin is None else part
        if targets:
            yield torch.tensor([inputs]), torch.tensor(targets)


def logits(model: Any, inputs: Tensor, rounding: Rounding | None) -> Tensor:
    """Return float64 log-probabilities [tokens, vocab_size]."""
    cache = DynamicCache() if rounding is None else RoundedCache(rounding)
    output = model(inputs, past_key_values=cache, use_cache=True)
    return output.logits[0].double().log_softmax(-1)


@torch.inference_mode()
def measure(
    folder: str, text: str, length: int, tokens: int, caches: Sequence[str]
) -> dict[str, dict[str, float]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin = tokenizer.bos_token_id
    if tokenizer("a").input_ids[0] != begin:
        begin = None
    ids = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    figures = {name: Figures() for name in ("float32", *caches)}
    parts = list(windows(ids, length, begin))
    start = time.monotonic()
    for number, (inputs, targets) in enumerate(parts, 1):
        exact = logits(model, inputs, None)
        for name, row in figures.items():
            other = exact if name == "float32" else logits(model, inputs, ROUNDINGS[name])
            row.logprobs.append(other.gather(-1, targets[:, None])[:, 0])
            row.divergence.append((exact.exp() * (exact - other)).sum(-1))
            row.same.append(exact.argmax(-1) == other.argmax(-1))
        left = (time.monotonic() - start) / number * (len(parts) - number)
        print(f"{number} of {len(parts)} windows, about {left:.0f} s left", file=sys.stderr)
    return {name: row.as_object() for name, row in figures.items()}


def lines(
    own: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
    """Yield a Markdown table of both; `other` has Freight's figures by name, or nothing."""
    yield "| cache | KL here | KL of Freight | apart | perplexity here | of Freight | same top here | of Freight |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, row in own.items():
        freight = other.get(name)
        if freight is None:
            cells = ["", "", ""]
            apart = ""
        else:
            cells = [
                f"{freight['kl']:.5f}",
                f"{freight['perplexity']:.4f}",
                f"{freight['same_top']:.2%}",
            ]
            apart = f"{freight['kl'] / row['kl'] - 1:+.2%}" if row["kl"] else ""
        yield (
            f"| {name} | {row['kl']:.5f} | {cells[0]} | {apart} | {row['perplexity']:.4f} | {cells[1]} "
            f"| {row['same_top']:.2%} | {cells[2]} |"
        )


def of_freight(path: Path) -> dict[str, dict[str, float]]:
    """Figures by the name of the run, from `freight evaluate caches --json`."""
    figures = {}
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        figures[run["name"]] = {
            "kl": run["kl_mean"],
            "perplexity": run["perplexity"],
            "same_top": run["same_top"],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=341, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, the first ones")
    parser.add_argument("--caches", default=",".join(ROUNDINGS))
    parser.add_argument("--json", type=Path, help="file for the figures of both")
    parser.add_argument("--beside", type=Path, help="what freight evaluate caches --json printed")
    args = parser.parse_args()
    caches = args.caches.split(",")
    for name in caches:
        if name not in ROUNDINGS:
            parser.error(f"--caches {name!r} is unknown: choose among {', '.join(ROUNDINGS)}")
    other = of_freight(args.beside) if args.beside else {}
    text = args.text.read_text(encoding="utf-8")
    own = measure(args.folder, text, args.window, args.tokens, caches)
    for line in lines(own, other):
        print(line)
    if args.json is not None:
        facts = {"num_tokens": args.tokens, "window": args.window, "oracle": own, "freight": other}
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
