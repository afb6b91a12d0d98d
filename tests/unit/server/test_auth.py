"""Keys: how they are given, what they open, and that their values show nowhere."""

from __future__ import annotations

import hmac
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.serve.transport.auth import Keys, check_binding, is_loopback

SECRET = "sk-a-Secret-Value"


def test_a_key_opens_as_bearer_and_as_x_api_key() -> None:
    keys = Keys.read(["alice:" + SECRET, "other", "bob:b:c"])
    assert keys.names == ("alice", "key-1", "bob")
    assert keys.check(f"Bearer {SECRET}", None) == "alice"
    assert keys.check(f"bearer  {SECRET} ", None) == "alice"
    assert keys.check(None, SECRET) == "alice"
    assert keys.check("Bearer wrong", SECRET) == "alice"
    assert keys.check("Bearer other", "wrong") == "key-1"
    assert keys.check("Bearer b:c", None) == "bob"


@pytest.mark.parametrize(
    "line", ["my name:sk-1", "a/b:sk-1", ":sk-1", "x" * 65 + ":sk-1", "é:sk-1"]
)
def test_a_name_that_is_none_is_refused_and_is_not_part_of_a_key(line: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good:sk-0\n\n{line}\n")
    with refuses(ConfigError, "line 3", "before the ':'", "NAME:VALUE") as refused:
        Keys.read(files=[file])
    assert line not in str(refused.value)
    assert "sk-1" not in str(refused.value)


def test_keys_may_change_while_they_are_used() -> None:
    keys = Keys.read(["a:1", "b:2"])
    salt = keys.salt_for("a", None)
    keys.take(Keys.read(["a:1", "c:3"]))
    assert keys.names == ("a", "c")
    assert [keys.check(f"Bearer {value}", None) for value in "123"] == ["a", None, "c"]
    assert keys.salt_for("a", None) == salt  # what it has in the cache is found again


def test_a_secret_makes_the_same_salts() -> None:
    secret = b"s" * 32
    first, again = (Keys.read(["a:1", "2"], secret=secret) for _ in range(2))
    for name in ("a", "key-1"):
        for salt in (None, "", "x"):
            assert first.salt_for(name, salt) == again.salt_for(name, salt)
    other = Keys.read(["a:1", "2"], secret=b"t" * 32)
    drawn = Keys.read(["a:1", "2"])
    salts = {keys.salt_for(name, None) for keys in (first, other, drawn) for name in keys.names}
    assert len(salts) == 6
    assert first.check("Bearer 1", None) == other.check("Bearer 1", None) == "a"


def test_the_number_of_a_key_is_no_name() -> None:
    """A name keeps its part of the cache with another value. A key without one keeps its own in
    another place, and leaves it to nobody.
    """
    secret = b"s" * 32
    before = Keys.read(["a:1", "2", "3"], secret=secret)
    after = Keys.read(["a:new", "4", "2"], secret=secret)
    assert after.salt_for("a", None) == before.salt_for("a", None)
    assert after.salt_for("key-2", None) == before.salt_for("key-1", None)
    assert after.salt_for("key-1", None) not in {
        before.salt_for(name, None) for name in before.names
    }
    named = Keys.read(["key-1:2"], secret=secret)
    assert named.salt_for("key-1", None) != before.salt_for("key-1", None)
    before.take(after)
    assert [before.salt_for(name, None) for name in before.names] == [
        after.salt_for(name, None) for name in after.names
    ]


@pytest.mark.parametrize(
    "authorization",
    [
        *(
            None,
            "",
            "Bearer",
            "Bearer ",
            SECRET,
            f"Basic {SECRET}",
            f"Bearer {SECRET}x",
            f"Bearer {SECRET[:-1]}",
        ),
        *(
            f"Bearer {SECRET.upper()}",
            f"Bearer alice:{SECRET}",
            "Bearer alice",
            "Bearer é",
            "Bearer " + "x" * 100_000,
        ),
    ],
)
def test_nothing_else_opens(authorization: str | None) -> None:
    keys = Keys.read(["alice:" + SECRET])
    assert keys.check(authorization, None) is None
    assert (
        keys.check(
            None, authorization and authorization.removeprefix("Bearer ").replace(SECRET, "")
        )
        is None
    )


@given(st.text(), st.text())
def test_random_headers_open_nothing(authorization: str, x_api_key: str) -> None:
    assert Keys.read([SECRET]).check(authorization, x_api_key) is None


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        calls.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys.read([f"secret-{i}" for i in range(5)])
    counts = set()
    for given_key in ("secret-0", "secret-4", "wrong", ""):
        calls.clear()
        keys.check(f"Bearer {given_key}", None)
        counts.add(len(calls))
    assert counts == {10}  # each key with each header, whichever matches
    assert {len(a) for a, _ in calls} == {32}


def test_values_are_not_kept() -> None:
    keys = Keys.read(["alice:" + SECRET])
    assert SECRET not in repr(vars(keys))
    assert SECRET.encode() not in pickle.dumps(vars(keys))


def test_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\nalice:{SECRET}\r\n  plain  \n#bob:no\n")
    keys = Keys.read(["first"], [file])
    assert keys.names == ("key-1", "alice", "key-2")
    assert keys.check("Bearer plain", None) == "key-2"
    assert keys.check("Bearer no", None) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no key in it"),
        (b"# nothing\n\n", "no key in it"),
        (f"a:{SECRET}\n\na:other\n".encode(), "line 3: the name 'a' is given twice"),
        (f"a:{SECRET}\nb:{SECRET}\n".encode(), "line 2: this key's value was given before"),
        (b"a:\n", "line 1: the key is empty"),
        (f"a:{SECRET} x\n".encode(), "line 1: the key is longer"),
        (f"key-1:x\n{SECRET}\n".encode(), "line 2: the name 'key-1' is given twice"),
        (f"a:{SECRET}é\n".encode(), "line 1: the key is longer"),
        (f"{SECRET}\xff".encode("latin-1"), "not UTF-8 at byte 17"),
    ],
)
def test_a_file_that_is_not_right_is_refused_without_a_word_of_the_keys(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Keys.read([], [file])
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            Keys.read([], [path])


@pytest.mark.parametrize("given_key", ["", "a b", "alice:", "x" * 513, "a\nb"])
def test_a_value_that_no_header_can_carry_is_refused(given_key: str) -> None:
    with refuses(ConfigError, "--api-key"):
        Keys.read([given_key])


def test_each_key_has_its_own_part_of_the_prefix_cache() -> None:
    keys = Keys.read(["a:1", "b:2"])
    pairs = [(name, salt) for name in ("a", "b") for salt in (None, "", "x", "a")]
    salts = [keys.salt_for(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert salts == [keys.salt_for(*pair) for pair in pairs]
    assert all(salt and len(salt) == 64 for salt in salts)
    assert keys.salt_for("a", None) != Keys.read(["a:1", "b:2"]).salt_for(
        "a", None
    )  # nobody can work it out
    assert keys.salt_for("a", "\ud800")


def test_without_keys_and_with_a_shared_cache_the_requests_salt_counts() -> None:
    assert Keys.read().salt_for(None, "x") == "x"
    assert Keys.read(["a:1"], shared_prefix_cache=True).salt_for("a", "x") == "x"
    assert Keys.read(["a:1"], shared_prefix_cache=True).salt_for("a", None) is None


LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"]
PUBLIC = [
    "0.0.0.0",
    "::",
    "",
    "192.168.1.5",
    "10.0.0.1",
    "8.8.8.8",
    "fe80::1",
    "::ffff:10.0.0.1",
    "0",
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_key(host: str) -> None:
    check_binding(host, Keys.read(), insecure=False)


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--host.*--api-key.*--insecure"):
        check_binding(host, Keys.read(), insecure=False)
    check_binding(host, Keys.read(), insecure=True)
    check_binding(host, Keys.read(["a"]), insecure=False)


def test_a_name_is_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"here": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "10.1.2.3"], "there": ["10.1.2.3"]}

    def getaddrinfo(
        host: str, *_: object, **__: object
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in names:
            raise OSError(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert [is_loopback(name) for name in ("here", "both", "there")] == [True, False, False]
    with refuses(ConfigError, "--host nowhere", "Name or service not known"):
        is_loopback("nowhere")
