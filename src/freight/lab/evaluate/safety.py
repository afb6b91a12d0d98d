"""Whether a cache or weights may be recommended: bounds on their figures against 16 bits, intervals
included. Pure.

All of them have to hold, each with its 95 % interval:

    perplexity   the ratio lies within 1 / 1.005 … 1.005. What lowers perplexity has changed the
                 model, too.
    mean KL      at most 0.005 nats per token. By Pinsker's inequality, no set of next tokens then
                 gains or loses more than sqrt(KL / 2) = 5 % of probability at a token with that KL.
    same top     at least 95 %
    clipped      at most 0.1 % of the keys and values; a count, without interval

"not safe" names each bound that is failed, "cannot be said" what it would take to say it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

RATIO = 1.005
KL = 0.005  # nats per token
SAME_TOP = 0.95
CLIPPED = 0.001
MIN_UNITS = 12  # fewer windows or documents have no interval: what is called 95 % would hold less
MIN_TOKENS = 2000
# of the vocabulary's size: perplexity from which the model knows no more than a guess
UNKNOWN_TEXT = 0.5

Interval = tuple[float, float]


class Verdict(StrEnum):
    SAFE = "safe"
    NOT_SAFE = "not safe"
    CANNOT_BE_SAID = "cannot be said"


@dataclass(frozen=True)
class Judgement:
    """`reasons` are the bounds that fail, or what is missing; empty for what is safe."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """What was measured on. `units` are windows or documents, which intervals are over.

    `num_units` of one size weigh as much as the `num_uneven` there are, whose sizes differ
    (`statistics.effective_units`); 0: they have one size. `num_repeats` more of
    them say what others say, and count as part of those (`statistics.independent_units`).
    """

    num_units: int
    units: str
    num_tokens: int
    perplexity: float
    vocab_size: int
    num_repeats: int = 0
    num_uneven: int = 0

    @property
    def text_unknown(self) -> bool:
        """Whether the 16-bit model does no better than a guess, so that nothing measured here tells
        of its answers.
        """
        return not self.perplexity < UNKNOWN_TEXT * self.vocab_size

    @property
    def missing(self) -> Iterator[str]:
        """What would make the text usable, in sentences without a full stop."""
        if self.text_unknown:
            yield (
                f"the model does not know this text: perplexity {self.perplexity:,.0f}, and a guess among its "
                f"{self.vocab_size:,} tokens has {self.vocab_size:,}; measure a text like those it was trained for"
            )
        if self.num_units < MIN_UNITS and self.num_repeats:
            yield (
                f"the text repeats itself: {self.num_units + self.num_repeats:,} {self.units} count as "
                f"{self.num_units}, and an interval takes {MIN_UNITS}; measure a text without copies"
            )
        elif self.num_units < MIN_UNITS:
            units = f"{self.num_units} {self.units} are too few"
            if self.num_uneven > self.num_units:
                units = f"{self.num_uneven} {self.units} of different length weigh as {self.num_units}, too few"
            elif self.num_units == 1:
                units = f"1 {self.units.removesuffix('s')} is too little text"
            shorter = ", or a shorter --window" if self.units == "windows" else ""
            missing = MIN_UNITS - self.num_units
            yield f"{units} for an interval: it takes {MIN_UNITS}, so {missing} more{shorter}"
        if self.num_tokens < MIN_TOKENS:
            yield (
                f"{self.num_tokens:,} tokens are too few: it takes {MIN_TOKENS:,}, so "
                f"{MIN_TOKENS - self.num_tokens:,} more"
            )


@dataclass(frozen=True)
class Bound:
    """A figure has to lie within `low` … `high`; without an interval it fails only beyond `far_low`
    … `far_high`.
    """

    name: str
    form: str  # a format specification
    low: float = -math.inf
    high: float = math.inf
    far_low: float = -math.inf
    far_high: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def text(self, value: float) -> str:
        return format(value, self.form)

    @property
    def limit(self) -> str:
        if math.isinf(self.high):
            return f"it has to be at least {self.text(self.low)}"
        if math.isinf(self.low):
            return f"it may be at most {self.text(self.high)}"
        return f"it has to be within {self.text(self.low)} … {self.text(self.high)}"

    def judge(self, value: float, interval: Interval | None, sample: Sample) -> Judgement:
        if not math.isfinite(value):
            return Judgement(Verdict.NOT_SAFE, (f"{self.name} is {value}",))
        if interval is None and self.far_low <= value <= self.far_high:
            return Judgement(Verdict.CANNOT_BE_SAID)
        low, high = interval or (value, value)
        if self.holds(low) and self.holds(high) and self.holds(value):
            return Judgement(Verdict.SAFE)
        spread = f" ({self.text(low)} … {self.text(high)})" if low < high else ""
        around = f"{self.name} is {self.text(value)}{spread}, and {self.limit}"
        if high < self.low or low > self.high:
            return Judgement(Verdict.NOT_SAFE, (around,))
        more = self._more(value, (low, high), sample.num_units, sample.units)
        return Judgement(Verdict.CANNOT_BE_SAID, (f"{around}; {more}",))

    def _more(self, value: float, interval: Interval, num_units: int, units: str) -> str:
        """Say how much text would settle it: an interval narrows with the root of the number of
        units.
        """
        distance = min(abs(value - edge) for edge in (self.low, self.high) if math.isfinite(edge))
        half = max(interval[1] - value, value - interval[0])
        if not math.isfinite(half) or half > 30 * distance:
            return "too near the bound for any amount of text to say"
        return f"about {max(1, math.ceil(num_units * ((half / distance) ** 2 - 1))):,} more {units} would say it"


PERPLEXITY_BOUND = Bound("the ratio of perplexities", ".4f", low=1 / RATIO, high=RATIO)
KL_BOUND = Bound("mean KL", ".3g", high=KL, far_high=2 * KL)
SAME_TOP_BOUND = Bound("same top", ".2%", low=SAME_TOP, far_low=2 * SAME_TOP - 1)
CLIPPED_BOUND = Bound("the share of clipped keys and values", ".3%", high=CLIPPED)

Measured = tuple[float, Interval | None]


def judge(
    ratio: Measured, kl: Measured, same_top: Measured, clipped: float, sample: Sample
) -> Judgement:
    """Return the verdict on figures against 16 bits, each with its interval, None where the sample
    is too small for one.
    """
    bounds: tuple[tuple[Bound, Measured], ...] = (
        (CLIPPED_BOUND, (clipped, (clipped, clipped))),
        (KL_BOUND, kl),
        (SAME_TOP_BOUND, same_top),
        (PERPLEXITY_BOUND, ratio),
    )
    verdicts = set()
    failed: tuple[str, ...] = ()
    missing = tuple(sample.missing)
    for bound, measured in bounds:
        judgement = bound.judge(*measured, sample)
        verdicts.add(judgement.verdict)
        missing += judgement.reasons
        if judgement.verdict is Verdict.NOT_SAFE:
            failed += judgement.reasons
    if failed:
        return Judgement(Verdict.NOT_SAFE, failed)
    if missing or Verdict.CANNOT_BE_SAID in verdicts:
        return Judgement(Verdict.CANNOT_BE_SAID, missing or ("there are no intervals",))
    return Judgement(Verdict.SAFE)


def within_bounds(kl_mean: float, same_top: float) -> bool:
    """Say whether figures without intervals keep the bounds; perplexity without one says nothing on
    a short text.
    """
    return KL_BOUND.holds(kl_mean) and SAME_TOP_BOUND.holds(same_top)
