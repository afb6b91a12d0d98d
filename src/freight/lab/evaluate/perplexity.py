"""Perplexity: exp of the mean negative log-likelihood per token, over windows of a text.

Each window begins with the model's begin-of-text token where it has one, so that every token of the
text is scored once. Without one, a window begins with the last token of the window before; the
text's first token is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """`token_ids` go in; the logits after token i are scored by `targets[i]`. Both have the same
    length.

    The rows before `first_scored` are context: the model goes through them, and the head does not.
    `first_scored` is less than the length, so every window has a scored row.
    """

    token_ids: list[int]
    targets: list[int]
    first_scored: int = 0

    @property
    def num_scored(self) -> int:
        return len(self.targets) - self.first_scored


def cut_windows(token_ids: Sequence[int], length: int, bos_token_id: int | None) -> list[Window]:
    """Cut a text into windows of at most `length` tokens; a remainder shorter than two tokens is
    left out.
    """
    windows = []
    step = length if bos_token_id is not None else length - 1
    for start in range(0, len(token_ids), step):
        part = list(token_ids[start : start + length])
        if bos_token_id is not None:
            windows.append(Window([bos_token_id, *part[:-1]], part))
        elif len(part) > 1:
            windows.append(Window(part[:-1], part[1:]))
    return windows


def of_targets(values: Tensor, targets: Tensor) -> Tensor:
    """Logits or log-probabilities [rows, vocab_size], targets [rows] -> that of each target [rows]."""
    return values.gather(-1, targets[:, None])[:, 0]
