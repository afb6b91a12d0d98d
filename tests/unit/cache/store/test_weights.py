"""The digest of weights: of every byte, and read once."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from freight.cache.store import weights
from freight.cache.store.weights import ChangedError, WeightFile, digest_of_weights


def files(folder: Path, *contents: bytes) -> list[WeightFile]:
    folder.mkdir(exist_ok=True)
    for index, content in enumerate(contents):
        (folder / f"{index}.safetensors").write_bytes(content)
    return [WeightFile.of(path) for path in sorted(folder.glob("*.safetensors"))]


def test_one_byte_of_equal_files(tmp_path: Path) -> None:
    """Of equal names and sizes, wherever the byte is."""
    content = bytes(100_000)
    digests = {digest_of_weights(tmp_path, files(tmp_path / "first", content, content))}
    for place in (0, 50_001, 99_999):
        changed = bytearray(content)
        changed[place] = 1
        other = files(tmp_path / f"other{place}", content, bytes(changed))
        digests.add(digest_of_weights(tmp_path, other))
    assert len(digests) == 4


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = files(tmp_path / "model", b"one", b"two")
    digest = digest_of_weights(tmp_path, found)
    monkeypatch.setattr(weights, "_digest", None)
    assert digest_of_weights(tmp_path, found) == digest
    copies = files(tmp_path / "copy", b"one", b"two")
    monkeypatch.undo()
    assert digest_of_weights(tmp_path, copies) == digest  # the path is not in it


def test_a_file_that_is_written_again_with_its_old_time(tmp_path: Path) -> None:
    found = files(tmp_path / "model", b"one")
    before = digest_of_weights(tmp_path, found)
    path, times = tmp_path / "model/0.safetensors", (found[0].state[1], found[0].state[1])
    path.write_bytes(b"two")
    os.utime(path, ns=times)
    with pytest.raises(ChangedError):
        digest_of_weights(tmp_path, found)
    assert digest_of_weights(tmp_path, files(tmp_path / "model")) != before


def test_it_stops_when_it_is_not_wanted(tmp_path: Path) -> None:
    found = files(tmp_path / "model", b"one")
    assert digest_of_weights(tmp_path, found, lambda: False) is None
    assert not (tmp_path / weights.FILE).exists()


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"a": {}, "b": [], "c": [3]}']
)
def test_a_damaged_list_is_made_anew(tmp_path: Path, content: bytes) -> None:
    found = files(tmp_path / "model", b"one")
    (tmp_path / weights.FILE).write_bytes(content)
    expected = hashlib.sha256(
        f"0.safetensors {hashlib.sha256(b'one').hexdigest()}\n".encode()
    ).hexdigest()
    assert digest_of_weights(tmp_path, found) == expected


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_link_that_leads_elsewhere_meanwhile(tmp_path: Path, of_folder: bool) -> None:
    """As `current` does in a folder of releases: what was loaded is not what it led to before."""
    files(tmp_path / "one", b"one")
    files(tmp_path / "two", b"two")
    place = tmp_path / "current"
    if not of_folder:
        place.mkdir()
    link = place if of_folder else place / "0.safetensors"
    target = "" if of_folder else "0.safetensors"
    link.symlink_to(tmp_path / "one" / target)
    found = [WeightFile.of(path) for path in place.glob("*.safetensors")]
    assert digest_of_weights(tmp_path, found) is not None
    link.unlink()
    link.symlink_to(tmp_path / "two" / target)
    with pytest.raises(ChangedError):
        digest_of_weights(tmp_path, found)


def test_times_in_whole_seconds_tell_nothing_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images of equal times, of which one is mounted and then the other."""
    found = files(tmp_path / "model", b"one")
    size, modified, _, inode = found[0].state
    image = replace(found[0], state=(size, modified, 1_700_000_000 * 10**9, inode))
    monkeypatch.setattr(WeightFile, "of", lambda path: image)
    first = digest_of_weights(tmp_path, [image])
    (tmp_path / "model/0.safetensors").write_bytes(b"two")
    assert digest_of_weights(tmp_path, [image]) != first
