"""The secret of a store: one for each folder, the same at every start, and nobody else's."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.refusals import refuses

from freight.cache.store.folder import BlockFolder
from freight.cache.store.secret import FILE, has_secret, kept_secret
from freight.cache.store.survey import clear, survey
from freight.errors import ConfigError


def test_one_for_each_folder(tmp_path: Path) -> None:
    first, other = kept_secret(tmp_path / "a"), kept_secret(tmp_path / "b")
    assert len(first) == 32
    assert first != other
    assert kept_secret(tmp_path / "a") == first


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        kept_secret(tmp_path / "store")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "store" / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_one_is_drawn_anew(tmp_path: Path, content: bytes) -> None:
    kept_secret(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    drawn = kept_secret(tmp_path)
    assert len(drawn) == 32
    assert not content or drawn[:31] != content[:31]
    assert kept_secret(tmp_path) == drawn


def test_one_that_others_may_know_is_refused(tmp_path: Path) -> None:
    kept_secret(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(ConfigError, match="others may know it"):
        kept_secret(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        kept_secret(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_others_may_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with refuses(ConfigError, "others may write"):
        kept_secret(tmp_path)


def test_servers_that_start_at_once_have_the_same(tmp_path: Path) -> None:
    code = "import sys, pathlib, freight.cache.store.secret as one\n"
    code += "print(one.kept_secret(pathlib.Path(sys.argv[1])).hex())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    with ThreadPoolExecutor() as threads:
        drawn = set(threads.map(lambda _: kept_secret(tmp_path), range(8)))
    drawn |= {bytes.fromhex(one.communicate()[0].decode()) for one in started}
    assert drawn == {kept_secret(tmp_path)}


def test_it_is_part_of_a_store_and_outlives_its_blocks(tmp_path: Path) -> None:
    """A server that runs while its store is emptied finds at its next start what it stores then."""
    secret = kept_secret(tmp_path)
    assert survey(tmp_path) == []
    folder = BlockFolder(tmp_path, "0" * 32, 1 << 20, {})
    folder.append([(b"k" * 32, 0, b"t" * 8, b"p" * 8)])
    folder.close()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert kept_secret(tmp_path) == secret
    clear(tmp_path)
    assert has_secret(tmp_path)


def test_a_file_of_that_name_makes_no_store(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    with pytest.raises(ConfigError, match="other files than a store"):
        clear(tmp_path)
    shutil.rmtree(tmp_path)
