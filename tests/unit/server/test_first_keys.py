"""The keys of a server that starts: its salts are those of the store, where it stores their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.serve.processes.client import WorkerOptions
from freight.serve.serving import first_keys
from freight.serve.settings import ServerSettings


def salt(shared: bool = False, keys: tuple[str, ...] = ("a:1",), **engine: Any) -> str | None:
    """The salt of a key, at the start of a server."""
    settings = ServerSettings(api_keys=keys, shared_prefix_cache=shared)
    return first_keys(settings, WorkerOptions({"model": "demo", **engine})).salt_for("a", None)


def test_salts_are_those_of_the_store(tmp_path: Path) -> None:
    here: dict[str, Any] = {"kv_store": str(tmp_path / "here"), "kv_store_salted": True}
    first = salt(**here)
    assert first is not None
    assert salt(**here) == first
    assert salt(**here | {"kv_store": str(tmp_path / "there")}) != first


@pytest.mark.parametrize(
    ("shared", "keys", "options"),
    [
        (False, ("a:1",), {}),
        (False, ("a:1",), {"kv_store": "store"}),
        (True, ("a:1",), {"kv_store": "store", "kv_store_salted": True}),
        (False, (), {"kv_store": "store", "kv_store_salted": True}),
    ],
)
def test_no_secret_is_kept_where_it_is_not_needed(
    shared: bool,
    keys: tuple[str, ...],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert salt(shared, keys, **options) != salt(shared, keys, **options) or shared
    assert not list(tmp_path.iterdir())


def test_a_store_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        salt(kv_store=str(tmp_path / "file"), kv_store_salted=True)
    with refuses(ConfigError, "--kv-store ''", "folder"):
        salt(kv_store="", kv_store_salted=True)
