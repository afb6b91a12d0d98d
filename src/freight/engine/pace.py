"""Pace: the most tokens that the next step may have, so that running requests do not wait long for
their next token.

While no request decodes, a step may have all the tokens that any step may have. While one does, the
duration of a step is the time between two tokens of every running request. A step then takes only
as many prompt tokens as are expected to fit into `seconds`, by the times of the engine's earlier
steps. Prompts always advance:

- They get at least as much time as the step takes without them: at least half of the step. So a
  step is expected to take `seconds`, or twice the time of a step without prompts, whichever is
  longer.
- A step has at least MIN_PROMPT_TOKENS prompt tokens, however slow steps are.

The chunks that a prompt is cut into change no bit of a result, so they may depend on measured
times. A `Pace` reads no clock: its answers follow from the seconds and counts that it is given.
"""

from __future__ import annotations

ROWS = 32  # rows of a tile of a matrix product; a tile of fewer rows costs as much
MIN_PROMPT_TOKENS = 32  # as many as a tile has rows
SMOOTHING = 0.3  # weight of a new measurement; all earlier ones together have the rest
# A new measurement counts as at most this many times the old value, so that one slow step does not
# stop the prompts.
MOST_GROWTH = 4.0


def _smoothed(old: float, new: float, weight: float) -> float:
    """Return the mean of `old` and `new`, where `new` has `weight`; `new` if `old` is 0, which
    means unknown.
    """
    if old <= 0:
        return new
    bounded = min(new, MOST_GROWTH * old)
    return old + weight * (bounded - old)


class Pace:
    """The most tokens of the next step, from the times of earlier steps.

    A step with n prompt tokens is expected to take base + n * per_token seconds. `base` is smoothed
    over steps without prompt tokens, `per_token` over the others. If `base` is out of date, because
    there are now more sequences, or longer ones, `per_token` makes up for the error: it is measured
    at the number of prompt tokens that steps have now.
    """

    def __init__(self, seconds: float, most: int) -> None:
        """`seconds`: the target duration of a step in which a request decodes; `most`: the most
        tokens of any step.
        """
        assert seconds > 0
        assert most > 0
        self._seconds = seconds
        self._most = most
        self.base = 0.0  # seconds; 0: not measured yet
        self.per_token = 0.0  # seconds; 0: not measured yet

    def tokens(self, num_decoding: int) -> int:
        """Return the most tokens of a step in which `num_decoding` sequences have one token each
        and prompts have the rest.

        The result is `most` if no sequence decodes. Otherwise it is a multiple of ROWS that leaves
        prompts at least MIN_PROMPT_TOKENS, or `most` if that is less.
        """
        if num_decoding == 0:
            return self._most
        left = max(self._seconds - self.base, self.base)
        fitting = left / self.per_token if self.per_token > 0 else 0.0
        least = -(-(num_decoding + MIN_PROMPT_TOKENS) // ROWS) * ROWS
        num_tokens = int(min(num_decoding + fitting, self._most)) // ROWS * ROWS
        return min(max(least, num_tokens), self._most)

    def note(self, seconds: float, num_prompt: int) -> None:
        """Record that a step with `num_prompt` prompt tokens took `seconds`."""
        seconds = max(seconds, 0.0)
        if num_prompt == 0:
            self.base = _smoothed(self.base, seconds, SMOOTHING)
            return
        # Less than a tile costs as much as a full one, so it tells less about the cost of a token.
        weight = SMOOTHING * min(1.0, num_prompt / ROWS)
        if seconds > self.base:
            self.per_token = _smoothed(self.per_token, (seconds - self.base) / num_prompt, weight)
        else:
            # `base` is out of date: there are now fewer sequences, or shorter ones. Without its
            # prompt tokens this step would have been shorter still; half of it is assumed.
            self.base = _smoothed(self.base, seconds / 2, weight)
