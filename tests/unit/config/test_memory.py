"""Amounts of memory, as --kv-cache-memory takes them."""

from __future__ import annotations

import re

import pytest
from tests.unit.config.test_resolve import decide

from freight.errors import ConfigError
from freight.settings.resolve import parse_memory


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (None, None),
        (123, 123),
        ("123", 123),
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("4GB", 4 * 10**9),
        ("1e9", 10**9),
        (1e9, 10**9),
        ("1.5 kib", 1536),
        ("64 B", 64),
        ("1TiB", 2**40),
    ],
)
def test_memory(said, size):
    assert parse_memory(said) == size
    assert decide(kv_cache_memory=said).kv_cache_memory == size


@pytest.mark.parametrize(
    "said",
    ["4G", "GiB", "1.2.3", "-4GiB", "nan", "inf", "", ".", True, "0", "0.1", "1e99", "9" * 400],
)
def test_no_memory(said):
    with pytest.raises(ConfigError, match=re.escape(f"--kv-cache-memory {said!r}")):
        parse_memory(said)
