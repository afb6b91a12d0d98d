"""What is asked of simulated replicas: when, how long, and with which common prefix.

Arrivals are Poisson, from a seed. Lengths are those of a trace, of its percentiles, or even over a
range. Imports no torch.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from freight.errors import ConfigError

COLUMNS = ("ContextTokens", "GeneratedTokens")  # of Azure's LLM inference traces
AT = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 97, 98, 99, 99.5, 99.9, 100)  # percent


class Sizes(Protocol):
    """`source` says in a sentence where the lengths come from."""

    @property
    def source(self) -> str: ...

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its answer."""
        ...


@dataclass(frozen=True)
class Even:
    """Both drawn evenly from ranges, ends included."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def source(self) -> str:
        return "prompts of {}:{} and answers of {}:{} tokens, evenly".format(
            *self.prompt, *self.output
        )

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        return numbers.randint(*self.prompt), numbers.randint(*self.output)


@dataclass(frozen=True)
class Percentiles:
    """The lengths at the percentiles `AT`, linear between them; prompt and answer drawn apart."""

    source: str
    prompt: Sequence[int]
    output: Sequence[int]

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        return between(self.prompt, numbers.random()), between(self.output, numbers.random())


def between(values: Sequence[int], place: float) -> int:
    """The length below which `place`, 0 to 1, of all lie."""
    percent = 100 * place
    index = next(i for i in range(1, len(AT)) if percent <= AT[i])
    share = (percent - AT[index - 1]) / (AT[index] - AT[index - 1])
    return round(values[index - 1] + share * (values[index] - values[index - 1]))


@dataclass(frozen=True)
class Listed:
    """Pairs of a trace, drawn evenly: its lengths, not its order or its times."""

    source: str
    pairs: Sequence[tuple[int, int]]

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        return numbers.choice(self.pairs)


_AZURE = (
    "percentiles of the {} {} requests in the Azure LLM inference trace 2023 (Patel et al., "
    "Splitwise, ISCA 2024; github.com/Azure/AzurePublicDataset at b469a11), prompt and answer drawn "
    "apart (their rank correlation is {})"
)
PUBLISHED = {
    "azure-conversation": Percentiles(
        _AZURE.format("19,366", "conversation", "0.07"),
        (
            2,
            181,
            207,
            387,
            403,
            703,
            1020,
            1071,
            1130,
            1315,
            2734,
            4083,
            4090,
            4098,
            4142,
            4831,
            6212,
            14050,
        ),
        (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 509, 540, 601, 643, 954, 1000),
    ),
    "azure-code": Percentiles(
        _AZURE.format("8,819", "code", "-0.02"),
        (
            3,
            75,
            147,
            386,
            770,
            1075,
            1469,
            1909,
            2433,
            3192,
            5186,
            7302,
            7435,
            7436,
            7436,
            7436,
            7437,
            7437,
        ),
        (6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 128, 172, 252, 361, 824, 1899),
    ),
}


def read_trace(path: Path) -> Listed:
    """A CSV with the columns of Azure's traces. Raises ConfigError that names the line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror}") from None
    pairs = []
    for number, row in enumerate(rows, 2):
        try:
            prompt, output = (int(row[name]) for name in COLUMNS)
            if min(prompt, output) < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"--trace {path}, line {number}: the columns {' and '.join(COLUMNS)} must have "
                "whole numbers from 1"
            ) from None
        pairs.append((prompt, output))
    if not pairs:
        raise ConfigError(f"--trace {path} has no request")
    return Listed(f"{len(pairs):,} requests of {path.name}, drawn evenly", pairs)


@dataclass(frozen=True)
class Ask:
    """One request. `shared` tokens at its start are those of the common prefix `prefix`; seconds."""

    number: int
    arrival: float
    num_prompt: int
    num_output: int
    prefix: int = 0
    shared: int = 0

    def tokens(self) -> tuple[int, ...]:
        """Token ids that are equal where prompts are: in the shared part of one prefix."""
        return (-1 - self.prefix,) * self.shared + (self.number,) * (self.num_prompt - self.shared)


@dataclass(frozen=True)
class Traffic:
    """share     of every prompt's tokens that are of a common prefix
    prefixes  how many different ones there are, equally likely
    """

    sizes: Sizes
    share: float = 0.0
    prefixes: int = 100
    seed: int = 0

    def asks(self, rate: float, seconds: float) -> list[Ask]:
        """All requests of `seconds` at `rate` a second, in order. The lengths are the same at every
        rate.
        """
        arrivals = random.Random(f"arrivals {self.seed}")
        lengths = random.Random(f"lengths {self.seed}")
        asks: list[Ask] = []
        now = arrivals.expovariate(rate)
        while now < seconds:
            prompt, output = self.sizes.draw(lengths)
            prefix = lengths.randrange(self.prefixes)
            asks.append(Ask(len(asks), now, prompt, output, prefix, int(self.share * prompt)))
            now += arrivals.expovariate(rate)
        return asks

    def means(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an answer, of 10,000 drawn."""
        numbers = random.Random("means")
        drawn = [self.sizes.draw(numbers) for _ in range(10_000)]
        return sum(item for item, _ in drawn) / len(drawn), sum(item for _, item in drawn) / len(
            drawn
        )

    def describe(self) -> str:
        shared = (
            f"; {self.share:.0%} of each prompt is the start of one of {self.prefixes:,} common prefixes"
            if self.share
            else "; no common prefixes"
        )
        return f"Poisson arrivals; {self.sizes.source}{shared}"
