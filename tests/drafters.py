"""Drafters that know the answer: right, wrong, or both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from freight.engine.drafts import Drafter

KINDS = ("right", "wrong", "mixed")


class Told(Drafter):
    """Proposes what `answers`, all that its request may come to, have next; or other tokens.

    kind    right: as many as it may; wrong: none is; mixed: some, and any number of them
    """

    def __init__(
        self, answers: Sequence[Sequence[int]], kind: str, rng: Random, vocab: int
    ) -> None:
        super().__init__(())
        self._answers, self._kind, self._rng, self._vocab = answers, kind, rng, vocab

    def propose(self, output: Sequence[int], most: int) -> tuple[int, ...]:
        given = list(output)
        answer = next((one for one in self._answers if list(one[: len(given)]) == given), ())
        right = list(answer[len(given) : len(given) + most])
        other = [(token + 1) % self._vocab for token in right]
        if self._kind == "right":
            return tuple(right)
        if self._kind == "wrong":
            return tuple(other)
        cut = self._rng.randint(0, most)
        kept = [a if self._rng.random() < 0.8 else b for a, b in zip(right, other, strict=True)]
        behind = [self._rng.randrange(self._vocab) for _ in range(most - len(kept))]
        return tuple([*kept, *behind][:cut])
