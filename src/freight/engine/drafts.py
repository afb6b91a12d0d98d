"""Drafts: guesses of a request's next tokens from its own text, without a second model. Imports no
torch.

Text repeats itself: an answer quotes its prompt, a program its names. So what followed the last
tokens where they stood before is likely to follow again (prompt lookup: Saxena 2023; suffixes:
SuffixDecoding, Oliaro et al. 2024). The last k tokens, for each k in LENGTHS, are a context. For
each context that occurred, a table has

    the token that followed when it occurred last
    how many times in a row it was that token, up to MOST_TIMES

The kind of a guess is the length of its context and this count. A guess is as likely to be right
as guesses of its kind have been, over prompt and output of this request. The next token that is
drafted is the likeliest guess, the one after it that of the context which ends with the draft, and
so on. So a text that does not repeat itself has hardly any drafts, and there is nothing to set. To
take in a token costs O(1): an entry in each table, about 350 bytes together.

A request with a grammar has other drafts, `Forced`: the text that its grammar leaves no choice of, such
as the names in a JSON schema. Its own text has none there, as most guesses would not be permitted.

A draft decides no token: one that is wrong costs time only (`compute.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from freight.engine.grammar import Matcher

LENGTHS = (1, 2, 4, 8)  # of contexts, in tokens
MOST_TIMES = 7
# What is assumed of guesses by length of context before any was seen, with the weight of so many:
# rounded down from what source code has.
ASSUMED = (0.15, 0.25, 0.45, 0.6)
WEIGHT = 4.0
MEMORY = 64.0  # guesses of a kind after which earlier ones count half, since texts change
# A draft that is less likely to be kept costs more than it gives: one more row adds about 3 % to a
# step, and then there is the time to draw. The first one adds up to a fifth, because the products
# of several rows are others: so much has to be likely to be gained. (llama-1b in FP8 on EPYC and
# AMX: 5 rows take 1.23 times as long as 1, 16 rows 1.37 times.)
LEAST = 0.15
GAIN = 0.25
# Tokens of a prompt that are taken in before a step: 0.5 to 3 ms for each drafted request
AT_ONCE = 512
LONGEST = 32768  # last tokens of a prompt that are taken in: 11 MB
# First characters of a predicted text that are tokenized, which running requests wait for: LONGEST
# tokens of source code have about as many.
LONGEST_TEXT = 4 * LONGEST

_BITS = 32  # of a token in a context
_MASKS = tuple((1 << _BITS * length) - 1 for length in LENGTHS)
_CONTEXT = _MASKS[-1]


class Drafts(Protocol):
    """What guesses the next tokens of one request. `source`: its name in what is counted."""

    source: ClassVar[str]

    def propose(self, output: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow the prompt and `output`; () if none is likely."""


class Forced:
    """The drafts of a request with a grammar: tokens of the text that has to come next.

    The model may write that text with other tokens. So the first token of each such text is a guess,
    which is drafted as long as these guesses come true often enough.
    """

    source: ClassVar[str] = "grammar"

    def __init__(self, grammar: Matcher) -> None:
        self._grammar = grammar
        # a forced text, and how many output tokens came before it
        self._tokens: tuple[int, ...] = ()
        self._start = 0
        self._right = self._all = WEIGHT  # guesses that were right, and all

    def propose(self, output: Sequence[int], most: int) -> tuple[int, ...]:
        past = tuple(output[self._start :])
        self._note(past)
        left: tuple[int, ...] = ()
        if past == self._tokens[: len(past)]:
            left = self._tokens[len(past) :]
        self._tokens = left or self._grammar.forced(output)
        self._start = len(output)
        if self._right < GAIN * self._all:
            return ()
        return self._tokens[:most]

    def _note(self, past: tuple[int, ...]) -> None:
        """Take note of the tokens that came since the last call: of the first one, which was guessed."""
        if not past or not self._tokens:
            return
        if self._all >= MEMORY:
            self._right = self._right / 2
            self._all = self._all / 2
        self._right += past[0] == self._tokens[0]
        self._all += 1


class Drafter:
    """The drafts of one request. Tokens are only ever appended to the request's output.

    An exception inside makes drafts worse at most, which changes no result.
    """

    source: ClassVar[str] = "text"

    def __init__(self, prompt: Sequence[int], predicted: Sequence[int] = ()) -> None:
        """`predicted`: the output that the caller expects, taken in as if it had followed before."""
        self._prompt = prompt[-LONGEST:]
        self._predicted = predicted[:LONGEST]
        self._num_taken = 0  # of the prompt, then of `predicted`, then of the output
        self._context = 0  # the last tokens, the last one in the low bits
        self._length = 0  # tokens that stand before the next one
        # context -> token, and in the low bits how many times more it was the same
        self._tables: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)
        # by length of the context and count: guesses that were right, and all
        self._right = [[rate * WEIGHT] * (MOST_TIMES + 1) for rate in ASSUMED]
        self._all = [[WEIGHT] * (MOST_TIMES + 1) for _ in ASSUMED]

    def propose(self, output: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow the prompt and `output`; () if none is likely.

        A long prompt is taken in over several calls, which draft nothing until it is complete.
        """
        if not self._catch_up(output):
            return ()
        drafts: list[int] = []
        context = self._context
        likely = 1.0
        gain = 0.0
        while len(drafts) < most:
            rate, token = self._guess(context)
            likely *= rate
            if likely < LEAST:
                break
            gain += likely
            drafts.append(token)
            context = ((context << _BITS) | token) & _CONTEXT
        if gain < GAIN:
            return ()
        return tuple(drafts)

    def _guess(self, context: int) -> tuple[float, int]:
        """Return (rate, token) of the likeliest guess: how often guesses of its kind were right, and
        the token; (0, 0) without a guess.
        """
        best = 0.0
        token = 0
        for table, mask, right, totals in zip(
            self._tables, _MASKS, self._right, self._all, strict=True
        ):
            entry = table.get(context & mask)
            if entry is None:  # then no longer context occurred either
                break
            times = entry & MOST_TIMES
            rate = right[times] / totals[times]
            if rate > best:
                best = rate
                token = entry >> 3
        return best, token

    def _catch_up(self, output: Sequence[int]) -> bool:
        """Take in tokens that came since the last call; False if some are left."""
        prompt = len(self._prompt)
        predicted = len(self._predicted)
        end = prompt + predicted + len(output)
        for index in range(self._num_taken, min(end, self._num_taken + AT_ONCE)):
            if index < prompt:
                self._take(self._prompt[index])
            elif index < prompt + predicted:
                self._take(self._predicted[index - prompt])
            else:
                self._take(output[index - prompt - predicted])
            self._num_taken = index + 1
            if index + 1 == prompt + predicted and predicted:
                self._go_back()
        return self._num_taken == end

    def _go_back(self) -> None:
        """Stand behind the prompt again, now that `predicted` is taken in."""
        self._context = 0
        self._length = len(self._prompt)
        for token in self._prompt[-LENGTHS[-1] :]:
            self._context = (self._context << _BITS) | token

    def _take(self, token: int) -> None:
        context = self._context
        new = token << 3
        for kind, length in enumerate(LENGTHS):
            if length > self._length:
                break
            table = self._tables[kind]
            key = context & _MASKS[kind]
            entry = table.get(key)
            if entry is None:
                table[key] = new
                continue
            times = entry & MOST_TIMES
            is_right = entry >> 3 == token
            right = self._right[kind]
            totals = self._all[kind]
            if totals[times] >= MEMORY:
                totals[times] /= 2
                right[times] /= 2
            totals[times] += 1
            right[times] += is_right
            if not is_right:
                table[key] = new
            elif times < MOST_TIMES:
                table[key] = entry + 1
        self._context = ((context << _BITS) | token) & _CONTEXT
        self._length += 1
