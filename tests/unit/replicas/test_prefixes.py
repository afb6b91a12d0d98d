"""Which replica a request goes to, and the keys by which prompts that begin alike are found."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.adapters.ray.passing import Request
from freight.adapters.ray.prefixes import Prefixes
from freight.adapters.ray.prompts import CHUNK, prefix_keys

NAMES = ["a", "b", "c"]
KEYS = st.lists(st.integers(0, 3), max_size=6).map(
    lambda path: [bytes(path[: end + 1]) for end in range(len(path))]
)
RUNNING = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 12), min_size=1)


def longest(had: list[tuple[list[bytes], str]], keys: list[bytes], name: str) -> int:
    """Chunks at the beginning of a prompt that a replica has had, by looking at all it was sent."""
    sent = {key for other, replica in had if replica == name for key in other}
    return max((count for count, key in enumerate(keys, 1) if key in sent), default=0)


@given(
    st.lists(st.tuples(KEYS, st.sampled_from(NAMES)), max_size=8), KEYS, RUNNING, st.integers(0, 6)
)
def test_the_longest_prefix_wins_unless_its_replica_is_too_busy(
    had: list[tuple[list[bytes], str]], keys: list[bytes], running: dict[str, int], slack: int
) -> None:
    prefixes = Prefixes(slack)
    for other, replica in had:
        prefixes.routed(other, replica)
    chosen = prefixes.choose(keys, running)
    able = [name for name in running if running[name] - min(running.values()) <= slack]
    assert chosen in able
    lengths = {name: longest(had, keys, name) for name in able}
    assert lengths[chosen] == max(lengths.values())
    alike = [name for name in able if lengths[name] == lengths[chosen]]
    assert running[chosen] == min(running[name] for name in alike)


@given(st.lists(st.tuples(KEYS, st.sampled_from(NAMES)), max_size=30), st.integers(1, 8))
def test_the_memory_is_bounded_and_keeps_the_last(
    had: list[tuple[list[bytes], str]], capacity: int
) -> None:
    prefixes = Prefixes(0, capacity)
    for keys, replica in had:
        prefixes.routed(keys, replica)
        assert len(prefixes) <= capacity
        if 0 < len(keys) <= capacity:
            others = dict.fromkeys(NAMES, 0)
            assert replica in {prefixes.choose(keys, others) for _ in range(50)}


def test_a_replica_that_is_gone_is_forgotten() -> None:
    prefixes = Prefixes(4)
    prefixes.keep({"a", "b"})
    prefixes.routed([b"1", b"2"], "a")
    prefixes.routed([b"1"], "b")
    prefixes.keep({"b"})
    assert len(prefixes) == 1
    assert prefixes.choose([b"1", b"2"], {"b": 3, "c": 0}) == "b"


def test_new_prompts_are_spread_over_idle_replicas() -> None:
    prefixes = Prefixes(4, seed=0)
    assert {prefixes.choose([], {"a": 1, "b": 0, "c": 0}) for _ in range(50)} == {"b", "c"}


TEXT = st.text(st.characters(codec="utf-8"), max_size=600)


@given(TEXT, TEXT, TEXT)
def test_texts_share_the_keys_of_whole_chunks_that_are_equal(
    begin: str, one: str, two: str
) -> None:
    first, second = (begin + one).encode(), (begin + two).encode()
    found = [prefix_keys({"prompt": begin + end}) for end in (one, two)]
    assert [len(keys) for keys in found] == [len(first) // CHUNK, len(second) // CHUNK]
    for number, (a, b) in enumerate(zip(*found, strict=False), 1):
        assert (a == b) == (first[: number * CHUNK] == second[: number * CHUNK])


@given(st.lists(st.integers(0, 2**31), min_size=16, max_size=100), st.integers(0, 99))
def test_token_ids_are_a_prompt_too(ids: list[int], changed: int) -> None:
    keys = prefix_keys({"prompt": ids})
    assert len(keys) == 8 * len(ids) // CHUNK
    at = changed % len(ids)
    other = prefix_keys({"prompt": [*ids[:at], ids[at] + 1, *ids[at + 1 :]]})
    whole = 8 * at // CHUNK
    assert other[:whole] == keys[:whole]
    assert not set(other[whole:]) & set(keys)


def messages(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


BODIES: list[dict[str, Any]] = [
    {"prompt": "x" * 500},
    {"prompt": ["x" * 500, "other"]},
    {"prompt": list(range(100))},
    {"prompt": [list(range(100))]},
    {"messages": messages("x" * 500)},
    {"input": "x" * 500},
    {"input": messages("x" * 500), "instructions": "be brief"},
    {"system": "x" * 500, "messages": messages("hello")},
    {"inputs": "x" * 500},
]


@pytest.mark.parametrize("body", BODIES)
def test_salts_and_keys_divide_what_is_shared(body: dict[str, Any]) -> None:
    plain = prefix_keys(body)
    assert plain
    salted = prefix_keys(body | {"cache_salt": "s"})
    assert salted == prefix_keys(body | {"cache_salt": "s", "max_tokens": 3})
    found = [plain, salted, prefix_keys(body | {"cache_salt": ""}), prefix_keys(body, b"Bearer k")]
    every = [key for keys in found for key in keys]
    assert len(set(every)) == len(every)


def test_one_prompt_in_a_list_is_that_prompt() -> None:
    assert prefix_keys(BODIES[0]) == prefix_keys(BODIES[1])
    assert prefix_keys(BODIES[2]) == prefix_keys(BODIES[3])


def test_a_conversation_that_goes_on_begins_with_the_one_before() -> None:
    said = messages("a" * 300, "b" * 300)
    before = prefix_keys({"messages": said, "tools": [{"name": "f"}]})
    after = prefix_keys({"tools": [{"name": "f"}], "messages": [*said, *messages("c" * 300)]})
    assert after[: len(before)] == before
    assert prefix_keys({"messages": said})[0] != before[0]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": 3},
        {"prompt": []},
        {"prompt": ["x", 3]},
        {"prompt": [2**70] * 100},
        {"prompt": [1.5] * 100},
        {"prompt": [None] * 100},
        {"prompt": "short"},
        {"messages": 3},
        {"messages": [[[]]]},
    ],
)
def test_what_is_no_prompt_has_no_keys(body: dict[str, Any]) -> None:
    assert prefix_keys(body) == []


def test_half_a_surrogate_pair_does_no_harm() -> None:
    assert prefix_keys(json.loads(json.dumps({"prompt": "\ud800" * 100})))


def test_the_end_of_a_very_long_prompt_does_not_count() -> None:
    long = "y" * (1 << 17)
    assert prefix_keys({"prompt": long}) == prefix_keys({"prompt": long + "z" * 1000})


def test_keys_stay_behind_when_a_request_is_sent() -> None:
    request = Request({"path": "/"}, b"{}", [b"key"])
    sent = pickle.loads(pickle.dumps(request))
    assert (sent.scope, sent.body, sent.keys) == (request.scope, request.body, [])
