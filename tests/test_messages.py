"""The sentences of Freight's errors: each keeps the rules that a reader relies on, and a change of
one is seen in tests/fixtures/messages.txt.

Other tests name an error by its kind and by what it names (tests/refusals.py), so that a sentence is
reworded in the source and in the list alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools/list_messages.py"
LIST = ROOT / "tests/fixtures/messages.txt"

# Words of other programs, repeated as they are: AutoFP8's errors, and those of Python's JSON reader
FOREIGN = {
    "Invalid activation_scheme. Choose either 'static' or 'dynamic'.",
    "Only FP8 quantization is supported.",
    "Expecting ',' delimiter",
    "Expecting ':' delimiter",
    "Expecting property name enclosed in double quotes",
}
# What has ended or is not there: the event is all that there is to name
EVENTS = {
    "another rank has ended",
    "another rank has left the step",
    "another task awaits the next output of this stream",
    "the model has no chat template",
    "the process that compiles grammars ended on this one",
    "the process that renders chat templates did not start",
    "the process that renders chat templates ended on these messages",
    "the process that tokenizes long texts ended on this one",
    "the ranks of this engine were ended",
    "the replica that computed this answer has ended",
    "the request was aborted before its answer was complete",
    "the server failed",
    "the server is shutting down",
    "this rank has left the step",
}
# A value, an option, a field, text in quotes, a path, a header, a format, or a part of a request
NAMED = re.compile(
    r"{…}|--\w|\w_\w|\w\.\w|['\"=/]|\b[A-Z][A-Z0-9]|\b[A-Z][a-z]+-[A-Z]"
    r"|\b(body|embedding|grammar|language model|messages|model_type|prompt)\b"
)
# What to do: after a semicolon or a colon, or what would have been accepted
WAY_OUT = re.compile(r"[;:] ")
# Names that begin with a capital as a word of English does
CAPITALS = re.compile(r"(Content|Transfer)-[A-Z]|(Ray|Triton) ")
LONGEST = 400

RULES = {
    "names a value, an option or a field, or says what to do": lambda text: (
        bool(NAMED.search(text) or WAY_OUT.search(text)) or text in EVENTS
    ),
    "begins with a small letter or a name": lambda text: (
        re.match(r"[A-Z][a-z]+\b", text) is None or CAPITALS.match(text) is not None
    ),
    "ends without a full stop": lambda text: not text.endswith((".", "!", " ")),
    "has single spaces": lambda text: "  " not in text,
    "says what is expected, not that a value is bad": lambda text: (
        re.search(r"\b(invalid|bad|illegal|malformed)\b", text, re.IGNORECASE) is None
    ),
    "is plain": lambda text: (
        re.search(r"\b(sorry|please|unfortunately|oops|failed to|error:)", text, re.IGNORECASE)
        is None
    ),
    f"has at most {LONGEST} characters": lambda text: len(text) <= LONGEST,
}


def broken(text: str) -> list[str]:
    """The rules that a message breaks."""
    return [rule for rule, holds in RULES.items() if not holds(text)]


def listed(source: Path) -> list[str]:
    """What tools/list_messages.py prints for a folder of Python files."""
    command = [sys.executable, str(TOOL), "--source", str(source)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout.splitlines()


def test_messages_are_those_of_the_list() -> None:
    """`python tools/list_messages.py --write` writes the list anew."""
    assert listed(ROOT / "src/freight") == LIST.read_text(encoding="utf-8").splitlines()


def test_messages_keep_the_rules() -> None:
    texts = [line.split(": ", 1)[1] for line in LIST.read_text(encoding="utf-8").splitlines()]
    faults = {text: broken(text) for text in texts if text not in FOREIGN and broken(text)}
    assert not faults
    assert len(texts) > 900


def test_exceptions_to_the_rules_are_in_the_source() -> None:
    texts = {line.split(": ", 1)[1] for line in LIST.read_text(encoding="utf-8").splitlines()}
    assert texts >= FOREIGN | EVENTS


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("that does not work", "names a value, an option or a field, or says what to do"),
        ("The cache {…} is unknown", "begins with a small letter or a name"),
        ("the cache {…} is unknown.", "ends without a full stop"),
        ("the cache {…}  is unknown", "has single spaces"),
        ("the cache {…} is invalid", "says what is expected, not that a value is bad"),
        ("sorry, no cache {…}", "is plain"),
        ("{…}" + " long" * 90, f"has at most {LONGEST} characters"),
    ],
)
def test_each_rule_is_seen_to_be_broken(text: str, rule: str) -> None:
    assert broken(text) == [rule]


def test_all_forms_of_messages_are_listed(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text("class FreightError(Exception): ...\n", encoding="utf-8")
    source = """
class ScaleError(FreightError): ...
def check(name, value, checkpoint):
    raise ScaleError(f"{name} is {value:.3g}; "  # in two parts
                     "give one of 1 or 2")
    raise ScaleError("the scale of " + name)
    raise checkpoint.fault(f"{name} is\\nmissing", name)
    raise ScaleError(name)
    raise ValueError("no error of Freight")
    return ScaleError(f"{name} is unknown")
"""
    (tmp_path / "raises.py").write_text(source, encoding="utf-8")
    assert listed(tmp_path) == [
        "ScaleError: the scale of {…}",
        "ScaleError: {…} is unknown",
        "ScaleError: {…} is {…}; give one of 1 or 2",
        r"fault: {…} is\nmissing",
    ]
