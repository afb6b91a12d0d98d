"""`freight verify`: whether an answer of a server is what this model gives, without generating it
again.
"""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from freight.base import terminal
from freight.base.files import unique_names
from freight.cli.options import Json, Values, argument, takes_engine_options
from freight.cli.serve import require_packages, takes_server_options
from freight.engine.verification import Outcome, Verification, unknown
from freight.errors import ConfigError
from freight.settings.engine import EngineArgs

# The options of `freight serve` that decide what an answer is, and how long a template may take.
_OPTIONS = (
    "chat_template",
    "template_timeout",
    "tool_call_parser",
    "reasoning_parser",
    "reasoning_budget",
)
_STATUS = {Outcome.EQUAL: 0, Outcome.DIFFERS: 1, Outcome.UNKNOWN: 2}


@takes_engine_options
@takes_server_options(_OPTIONS)
def verify(
    args: EngineArgs,
    server: Values,
    answer: Annotated[
        Path,
        argument("ANSWER", "A JSON file with a request and its answer; - reads stdin."),
    ],
    as_json: Json = False,
) -> None:
    """Check an answer of a server in one prefill.

    Every token is drawn again, from its own logits and seed. Exit status: 0 if all is equal, 1 if
    something differs, 2 if it cannot be said.
    """
    require_packages("verify")
    from freight.serve.offline.verify import read_stated, verifier_of
    from freight.serve.settings import ServerSettings

    settings = ServerSettings(**server)
    contents = list(_read(answer))
    unreadable = []
    for content in contents:
        fault = read_stated(content)
        if isinstance(fault, Verification):
            unreadable.append(fault)
    results: Iterable[Verification] = unreadable  # no model is needed to say so
    if len(unreadable) < len(contents):
        results = verifier_of(args, settings).results(contents)
    counts: Counter[Outcome] = Counter()
    for number, result in enumerate(results, 1):
        counts[result.outcome] += 1
        if as_json:
            print(json.dumps(result.as_object()))
        elif len(contents) > 1:
            terminal.say(f"{number}: {_in_words(result)}")
        else:
            terminal.say(_in_words(result))
    if len(contents) > 1:
        shares = [
            f"{counts[outcome]:,} {_WORDS[outcome]}" for outcome in Outcome if counts[outcome]
        ]
        terminal.say(f"{len(contents):,} answers: {', '.join(shares)}", err=True)
    raise typer.Exit(_status(counts))


def _status(counts: Counter[Outcome]) -> int:
    """Return the exit status: that of an answer that differs, if one does."""
    if counts[Outcome.DIFFERS]:
        return _STATUS[Outcome.DIFFERS]
    return max(_STATUS[outcome] for outcome in counts if counts[outcome])


_WORDS = {
    Outcome.EQUAL: "equal",
    Outcome.DIFFERS: "differ",
    Outcome.UNKNOWN: "of which it cannot be said",
}


def _in_words(result: Verification) -> str:
    if result.outcome is Outcome.EQUAL:
        return f"equal: all {result.num_tokens:,} tokens were drawn again as stated"
    if result.outcome is Outcome.DIFFERS:
        return f"differs: {result.reason}"
    return f"it cannot be said: {result.reason}"


def _read(source: Path) -> Iterator[object]:
    """Yield the values of a file that is one JSON value, or has one on each line; a Verification for
    a line that cannot be read, because it is not JSON or not UTF-8. Raises ConfigError if none can.
    """
    try:
        if str(source) == "-":
            data = sys.stdin.buffer.read()
        else:
            data = source.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    data = data.removeprefix(BOM_UTF8)  # Windows writes one
    if not data.strip():
        raise ConfigError(f"{source} is empty")
    if b"\0" in data:  # of weights, whose bytes may be numbers on some lines
        raise ConfigError(
            f"{source} is not JSON in UTF-8: it has zero bytes; the file of the answer comes first, then MODEL"
        )
    try:
        yield _parse(data)
        return
    except (ValueError, RecursionError) as error:
        fault = error
    # not `splitlines`: strings of JSON may have U+2028 and others that it takes for line ends
    values = []
    numbers = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            numbers.append(number)
            values.append(_value_of(number, line))
    if all(isinstance(value, Verification) for value in values):
        raise ConfigError(
            f"{source}, line {numbers[0]}, is not JSON; the file is neither one JSON value ({fault}) nor one on "
            "each line"
        )
    yield from values


def _value_of(number: int, line: bytes) -> object:
    try:
        return _parse(line)
    except (ValueError, RecursionError) as error:
        return unknown(f"line {number} is not JSON: {error}")


def _parse(data: bytes) -> Any:
    """Read a JSON value. Raises ValueError also where an object has a name twice: such an answer
    would state both values.
    """
    return json.loads(data.decode(), object_pairs_hook=unique_names)
