"""Pace: how many tokens the next step may have, so that running requests do not wait long for their
next token.

While no request is decoding, a step may have all the tokens that a step may have at most. While one
is, the time of the step counts: it is the time between two tokens of everybody. Then it takes only
as many prompt tokens as are expected to fit into `seconds`, from what the engine's own steps took.
Prompts always go on:

- They get at least as long as a step without them takes, so prefill keeps at least half of its
  speed where decoding alone fills the time. A running request gets a token in `seconds`, or in
  twice what its step takes anyway.
- A step has at least MIN_PROMPT_TOKENS of them, however slow the steps are.

Chunks change no bit of a result, so a clock may decide about them. This object reads none: it gets
seconds and counts, and two that got the same give the same.
"""

from __future__ import annotations

ROWS = 32  # matrix products take rows in tiles of so many
MIN_PROMPT_TOKENS = 32
SMOOTHING = 0.3  # what a new measurement counts against all that were before
# a step that took longer than expected by more is taken as one that took this many times as long
MOST_GROWTH = 4.0


def _smoothed(old: float, new: float, weight: float) -> float:
    """`old` on its way to `new`; without an old value, `new`."""
    return old + weight * (min(new, MOST_GROWTH * old) - old) if old > 0 else new


class Pace:
    """Tokens of the next step, from the times of earlier ones. `most` is the largest number of
    tokens of a step.

    The expected time of a step is `base` seconds, smoothed over steps without prompt tokens, and
    `per_token` seconds, smoothed over the others, for each prompt token. Where `base` is wrong,
    because there are more sequences or longer ones by now, `per_token` makes up for it, as it is
    measured at the number of tokens that is used.
    """

    def __init__(self, seconds: float, most: int) -> None:
        assert seconds > 0
        assert most > 0
        self._seconds, self._most = seconds, most
        self.base = 0.0
        self.per_token = 0.0  # 0: not known

    def tokens(self, num_decoding: int) -> int:
        """The most tokens of a step in which `num_decoding` sequences have one token each and
        prompts have the rest.

        At most `most`, which is also the answer for 0 sequences; else at least MIN_PROMPT_TOKENS
        for prompts, where `most` leaves them. Whole tiles of rows, the sequences' own included.
        """
        if num_decoding == 0:
            return self._most
        left = max(self._seconds - self.base, self.base)
        fitting = left / self.per_token if self.per_token > 0 else 0.0
        least = -(-(num_decoding + MIN_PROMPT_TOKENS) // ROWS) * ROWS
        wanted = int(min(num_decoding + fitting, self._most)) // ROWS * ROWS
        return min(max(least, wanted), self._most)

    def note(self, seconds: float, num_prompt: int) -> None:
        """Take in that a step took `seconds` with `num_prompt` tokens of prompts."""
        seconds = max(seconds, 0.0)
        if num_prompt == 0:
            self.base = _smoothed(self.base, seconds, SMOOTHING)
            return
        weight = SMOOTHING * min(
            1.0, num_prompt / ROWS
        )  # a few tokens say little: they cost as much as a whole tile
        if seconds > self.base:
            self.per_token = _smoothed(self.per_token, (seconds - self.base) / num_prompt, weight)
        else:  # fewer sequences, or shorter ones: `base` is out of date
            self.base = _smoothed(self.base, seconds / 2, weight)
