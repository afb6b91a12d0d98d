"""The conformance suite itself: a server that keeps the rules passes, each broken rule fails the
test of that rule.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.conformance import test_faults, test_openai_shapes
from tests.conformance.wire import Api
from tests.unit.conformance.conforming_server import serving

ROOT = Path(__file__).parents[3]
KEPT = (
    "chat_whole or chat_stream or usage_chunk or usage_in_every or streamed_is_not_streamed or completions_whole "
    "or index_of_a_choice or stop_strings or limits_of or names_that_mean or (openai_client and not logprobs) "
    "or unknown_model or test_models"
)


def run_suite(url: str) -> tuple[int, set[str], str]:
    """(passed, names of the tests that failed, all that was said)."""
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-k", KEPT, "-rf"]
    options += ["--confcutdir", "tests/conformance"]  # it speaks HTTP alone, and needs no torch
    command = [sys.executable, "-m", "pytest", "tests/conformance", "--url", url, *options]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", ended.stdout, re.MULTILINE))
    passed = re.search(r'\{"passed": (\d+), "failed": \d+\}', ended.stdout)
    return int(passed[1]) if passed else 0, failed, ended.stdout + ended.stderr


def test_a_server_that_keeps_the_rules_passes() -> None:
    with serving() as url:
        passed, failed, said = run_suite(url)
    assert failed == set(), said[-3000:]
    assert passed > 20, said[-3000:]
    assert re.search(r"openai_shapes +\d+ passed +0 failed", said)


STREAMS = partial(
    test_openai_shapes.test_chat_stream_has_the_role_of_every_index_first_and_one_end_for_each,
    n=2,
)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        ("roles", STREAMS),
        ("two-ends", STREAMS),
        ("object", STREAMS),
        ("no-done", STREAMS),
        (
            "no-usage",
            partial(
                test_openai_shapes.test_the_usage_chunk_is_the_last_and_has_no_choice, path="chat"
            ),
        ),
        ("envelope", partial(test_faults.test_unknown_model_is_404, path=test_faults.CHAT)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_fails_its_test(broken: str, check: Callable[[Api], None]) -> None:
    with serving() as url:
        check(Api(url, "letters"))
    with serving(broken) as url, pytest.raises((AssertionError, KeyError)):
        check(Api(url, "letters"))
