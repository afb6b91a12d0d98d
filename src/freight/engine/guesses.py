"""What is known of the drafts that a head makes for one request, and whether another one gains. Imports
no torch.

A head (`model/draft_head.py`) gives each draft with its own probability. A draft is as likely to be right
as those of this request with such a probability have been. The next one is drafted as long as that is
worth a pass of the head and a row of the step, in the time that a step without drafts takes. So how many
there are follows from what came true, and no clock is read.

Where text is sampled, a draft is the token that the head draws, or its likeliest one: whichever would
have come true more often in this request. A head that is close to the model is right by drawing with the
model's random number, and a weak one by its likeliest token.

Where first drafts come true too rarely, the head rests. It is tried twice more, and then not again: what
it has not seen by then costs a pass over all of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

ROW = 0.03  # of a step: what one more row adds to it (`drafts.py` has the measurements)
FIRST_ROW = 0.2  # and the first one, at least
# The same where products are of float32 (AVX2): they take so long that a step of four rows takes twice as long as
# one of one or two (Qwen2.5-Coder-1.5B in Q4_K_M, two cores of an AMD EPYC).
FLOAT32_ROW = 0.3
LEAST = 0.1  # a draft that is less likely to be kept is not worth its row
KINDS = 8  # of drafts, by probability
ASSUMED = 0.8  # of first drafts, before any was seen
WEIGHT = 4.0  # of what is assumed
MEMORY = 64.0  # drafts of a kind after which earlier ones count half, since texts change
PAUSES = (32, 256)  # tokens that a head rests before it is tried again


class Features(Protocol):
    """A tensor [rows, size]."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice[int, int, None], /) -> Features: ...


@dataclass(slots=True)
class Rate:
    """How often something came true."""

    right: float
    total: float = WEIGHT

    @property
    def value(self) -> float:
        return self.right / self.total

    def note(self, is_right: bool) -> None:
        if self.total >= MEMORY:
            self.right = self.right / 2
            self.total = self.total / 2
        self.right += is_right
        self.total += 1


def pays(rate: float, cost: float, row: float) -> bool:
    """Return whether a first draft that is right so often is worth its pass and its row."""
    return rate >= cost + max(FIRST_ROW, row)


def _assumed_first() -> Rate:
    """Return what is assumed of first drafts."""
    return Rate(ASSUMED * WEIGHT)


def _assumed() -> list[Rate]:
    """Return what is assumed of drafts by probability: that it is right."""
    return [Rate((kind + 0.5) / KINDS * WEIGHT) for kind in range(KINDS)]


@dataclass(slots=True)
class Guesses:
    """The drafts of one request by a head.

    cost         of a pass of the head for one row, in steps of one row
    row          what one more row adds to a step, in steps of one row
    num_filled   leading rows whose keys and values the head has
    preemptions  of the request, when it had them
    kept         of a head that takes features: those of rows that it has not seen, each part with its first
                 row. A part may have rows of drafts that were wrong, which the next one has anew
    """

    cost: float
    row: float = ROW
    num_filled: int = 0
    preemptions: int = -1
    kept: list[tuple[int, Features]] = field(default_factory=list)
    _first: Rate = field(default_factory=_assumed_first)
    _rates: list[Rate] = field(default_factory=_assumed)
    # of first drafts: those that were drawn, and the likeliest ones
    _drawn: Rate = field(default_factory=_assumed_first)
    _likeliest: Rate = field(default_factory=_assumed_first)
    _firsts: tuple[int, int] | None = None
    _drafts: tuple[int, ...] = ()  # the last ones, behind `_known` output tokens
    _kinds: tuple[int, ...] = ()
    _known: int = 0
    _rests_from: int | None = None
    _num_rests: int = 0

    def note(self, output: Sequence[int], num_prompt: int, preemptions: int, start: int) -> None:
        """Take note of what came of the last drafts, before a chunk from `start`. After a preemption it
        begins behind a prefix hit, whose tokens count as seen.
        """
        num_right = self._note_drafts(output)
        if preemptions != self.preemptions or start == 0:
            self.preemptions = preemptions
            self.num_filled = start
            self.kept = []
        elif self._drafts:
            # what it has of wrong drafts is of other tokens than the request's
            self.num_filled = min(self.num_filled, num_prompt + self._known + num_right)
        self._drafts = ()

    @property
    def num_kept(self) -> int:
        """How many rows have features that the head has not seen."""
        return sum(len(features) for _, features in self.kept)

    def keep(self, start: int, features: Features) -> None:
        """Keep the features of the rows from `start` on."""
        if not self.is_given_up:
            self.kept.append((start, features))

    def take_kept(self, end: int) -> list[Features]:
        """Return the features of the rows from `num_filled` to `end`, in parts. With a gap before them,
        `num_filled` is behind it: what the head has of those rows is of other tokens, or of none.
        """
        kept = [part for part in self.kept if part[0] < end]
        self.kept = []
        if not kept:
            return []
        self.num_filled = max(self.num_filled, kept[0][0])
        ends = [start for start, _ in kept[1:]]
        parts = []
        for (start, features), next_start in zip(kept, [*ends, end], strict=True):
            first = max(self.num_filled - start, 0)
            if first < next_start - start:
                parts.append(features[first : next_start - start])
        return parts

    def wants(self, num_output: int) -> bool:
        """Return whether a draft behind so many output tokens may gain anything."""
        if self._rests_from is not None:
            if self.is_given_up or num_output - self._rests_from < PAUSES[self._num_rests - 1]:
                return False
            self._rests_from = None
            self._first = _assumed_first()
        if not pays(self._first.value, self.cost, self.row):
            self._rests_from = num_output
            self._num_rests += 1
            if self.is_given_up:
                self.kept = []
            return False
        return True

    @property
    def is_given_up(self) -> bool:
        """Whether no draft will ever be asked for again."""
        return self._rests_from is not None and self._num_rests > len(PAUSES)

    @property
    def takes_likeliest(self) -> bool:
        """Whether the likeliest token is drafted and not the one that is drawn, where text is sampled."""
        return self._likeliest.value > self._drawn.value

    def kind_of(self, probability: float) -> int:
        return min(int(probability * KINDS), KINDS - 1)

    def likely(self, kinds: Sequence[int]) -> float:
        """Return how likely drafts of these kinds are all right."""
        product = 1.0
        for kind in kinds:
            product *= self._rates[kind].value
        return product

    def goes_on(self, kinds: Sequence[int]) -> bool:
        """Return whether a draft behind those of `kinds` is worth its pass."""
        gain = 1.0
        likely = 1.0
        for kind in kinds:
            likely *= self._rates[kind].value
            gain += likely
        spent = 1 + max(FIRST_ROW, self.row) + len(kinds) * (self.cost + self.row)
        next_one = likely * self._first.value
        return next_one >= (self.cost + self.row) * max(1.0, gain / spent)

    def propose(
        self,
        drafts: Sequence[int],
        kinds: Sequence[int],
        num_output: int,
        firsts: tuple[int, int] | None = None,
    ) -> None:
        """Take note of the drafts that follow `num_output` output tokens; of a pass that gave none too.
        firsts: where text is sampled, what the head drew first, and its likeliest token.
        """
        self._firsts = firsts
        if not drafts:
            self._first.note(is_right=False)
        self._drafts = tuple(drafts)
        self._kinds = tuple(kinds)
        self._known = num_output

    def _note_drafts(self, output: Sequence[int]) -> int:
        """Take note of which of the last drafts came true; return how many of the first ones did."""
        came = output[self._known : self._known + len(self._drafts)]
        if came and self._firsts is not None:
            drawn, likeliest = self._firsts
            self._drawn.note(drawn == came[0])
            self._likeliest.note(likeliest == came[0])
        num_right = 0
        for kind, draft, token in zip(self._kinds, self._drafts, came, strict=False):
            is_right = draft == token
            self._rates[kind].note(is_right)
            if num_right == 0:
                self._first.note(is_right)
            if not is_right:
                break
            num_right += 1
        return num_right
