"""Expressions of files: the same names as `re` matches, and a time after which they end."""

from __future__ import annotations

import re
from contextlib import suppress
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.base import patterns
from freight.base.patterns import FilePattern
from freight.errors import CheckpointError, ConfigError

# as checkpoints of compressed-tensors, ModelOpt, GPTQModel and PEFT have them
PUBLISHED = (
    r".*lm_head",
    r"^(?!.*(?:visual|vision)).*proj",
    r".*\.(?:q|k|v)_proj$",
    r"model\.layers\.(?:[0-9]|1[0-9])\.mlp\.(gate|up)_proj",
    r"(.*\.)?(self_attn\.q_proj)$",
    r".*mlp\.gate$",
    r"(?i:.*ROUTER)",
)
PARTS = st.sampled_from(
    ["model", "layers", "0", "13", "mlp", "gate", "gate_proj", "self_attn", "q_proj", "visual"]
)


@given(st.sampled_from(PUBLISHED), st.lists(PARTS, min_size=1, max_size=6))
def test_published_expressions_match_as_re_does(expression: str, parts: list[str]) -> None:
    name = ".".join(parts)
    pattern = FilePattern(expression, "config.json")
    assert pattern.match(name) == (re.match(expression, name) is not None)
    assert pattern.search(name) == (re.search(expression, name) is not None)


@pytest.mark.parametrize(
    "expression", [r"(a*)*b", r"(.*\.)?((?:a|a)+x)$", r"(?:a+)+$|b", r"(.*a){25}x"]
)
def test_an_expression_that_goes_back_and_forth_ends(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`regex` finds that some of these cannot match; the time of the others runs out."""
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    pattern = FilePattern(expression, "adapter_config.json")
    started = monotonic()
    with suppress(CheckpointError):
        assert not any(pattern.match("a" * 60 + "!") for _ in range(100))
    assert monotonic() - started < 20


def test_the_time_is_that_of_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    pattern = FilePattern(r"(?:.*a|.*a){20}$", "adapter_config.json: rank_pattern")
    for name in ("a" * 60 + "!", "b"):  # no name is compared once the time is up
        with refuses(CheckpointError, "adapter_config.json: rank_pattern", "nested repeats"):
            pattern.search(name)


def test_what_is_no_expression_is_an_error_of_the_kind_that_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"recipe.*not a regular expression"):
        FilePattern("gate(", "recipe: ignore", ConfigError)
    with pytest.raises(CheckpointError, match=r"4,097 characters; the limit is 4,096"):
        FilePattern("a" * 4097, "config.json")
    with pytest.raises(CheckpointError, match="not a regular expression"):
        FilePattern("(" * 4000, "config.json")
