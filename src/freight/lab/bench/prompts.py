"""What a load asks for: prompts and lengths, drawn from a seed, so that every server compared gets
the same requests.

`Text` takes pieces of a text at random places; `Ids` draws token ids evenly; `Listed` repeats a user's
list. With a shared prefix, all prompts begin with the same tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.base.fields import JsonObject
from freight.base.files import DATA_LIMIT, DuplicateNameError, read_text, reading, unique_names
from freight.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """A number of tokens, or a range that is drawn from evenly, both ends included."""

    low: int
    high: int

    @staticmethod
    def parse(name: str, value: str) -> Lengths:
        """Read `128` or `64:256`. Raises ConfigError that names the option."""
        low, _, high = value.partition(":")
        if low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low):
            return Lengths(int(low), int(high or low))
        raise ConfigError(f"--{name} {value!r}: write a number of tokens, 128, or a range, 64:256")

    def draw(self, numbers: random.Random) -> int:
        return numbers.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Ask:
    """One request: `content` is text, token ids or chat messages; `max_tokens` to generate."""

    content: str | Sequence[int] | Sequence[JsonObject]
    max_tokens: int

    @property
    def is_messages(self) -> bool:
        return not isinstance(self.content, str) and isinstance(self.content[0], Mapping)

    @property
    def is_token_ids(self) -> bool:
        return not isinstance(self.content, str) and not self.is_messages


def _numbers(seed: int) -> random.Random:
    """Seeded by a text: as a number, -1 and 1 would draw the same."""
    return random.Random(f"prompts {seed}")


@dataclass(frozen=True)
class Text:
    """Pieces of `text` of about so many tokens; `per_token` is the characters of one, as the server
    counted before.
    """

    text: str
    per_token: float
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0

    def asks(self, seed: int) -> Iterator[Ask]:
        numbers = _numbers(seed)
        prefix = piece(self.text, 0, round(self.shared_prefix * self.per_token))
        while True:
            length = max(1, round(self.prompt.draw(numbers) * self.per_token))
            begin = numbers.randrange(len(self.text))
            yield Ask(prefix + piece(self.text, begin, length), self.output.draw(numbers))


def piece(text: str, begin: int, length: int) -> str:
    """`length` characters from `begin` on; the text starts again where it ends."""
    rounds = (begin + length) // len(text) + 1
    return (text * rounds)[begin : begin + length]


@dataclass(frozen=True)
class Ids:
    """Token ids, each of [0, vocab_size) as likely as the others; lengths are exact."""

    vocab_size: int
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0

    def asks(self, seed: int) -> Iterator[Ask]:
        numbers = _numbers(seed)
        same = random.Random("prefix")
        prefix = [same.randrange(self.vocab_size) for _ in range(self.shared_prefix)]
        while True:
            token_ids = [
                numbers.randrange(self.vocab_size) for _ in range(self.prompt.draw(numbers))
            ]
            yield Ask(prefix + token_ids, self.output.draw(numbers))


@dataclass(frozen=True)
class Listed:
    """The requests of a list, in its order, again from the start where it ends; every run gets the
    same.
    """

    listed: Sequence[Ask]

    def asks(self, seed: int) -> Iterator[Ask]:
        return itertools.cycle(self.listed)


# `asks` gives requests without end; the same seed gives the same
Prompts = Text | Ids | Listed


def read_prompts(path: Path, output: Lengths, seed: int) -> list[Ask]:
    """Read one JSON object a line: `prompt` (text or token ids) or `messages`, and `max_tokens` if
    it is not `output`'s.

    Raises ConfigError that names the line.
    """
    with reading(f"--prompts {path}"):
        text = read_text(path, "utf-8-sig", DATA_LIMIT)
    numbers = random.Random(seed)
    asks = []
    # splitlines() also splits inside of JSON: U+2028
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line, object_pairs_hook=unique_names)
            content = entry["messages"] if "messages" in entry else entry["prompt"]
            ask = Ask(content, entry.get("max_tokens") or output.draw(numbers))
            if (
                not content
                or not isinstance(content, str | list)
                or not isinstance(ask.max_tokens, int)
            ):
                raise ValueError
        except DuplicateNameError as error:
            raise ConfigError(f"--prompts {path}, line {number}: {error}; write it once") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f'--prompts {path}, line {number}: write {{"prompt": "text"}}, {{"prompt": [token ids]}} or '
                '{"messages": [...]}, with "max_tokens" if you like'
            ) from None
        asks.append(ask)
    if not asks:
        raise ConfigError(f"--prompts {path} has no prompt")
    return asks
