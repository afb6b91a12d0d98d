"""A store's folder: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.cache.store import folder as folders
from freight.cache.store import segment as segments
from freight.cache.store.entries import ENTRY_BYTES, Entry, decode_entries
from freight.cache.store.folder import (
    BlockFolder,
    FullError,
    remove_leftovers,
    segments_of,
    write_private,
)
from freight.cache.store.survey import clear, survey, verify
from freight.errors import ConfigError

TOKENS = b"\7" * 32


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload_of(number: int, size: int = 40) -> bytes:
    return random.Random(number).randbytes(size)


def block(number: int, size: int = 40, group: int = 0) -> tuple[bytes, int, bytes, bytes]:
    return key_of(number), group, TOKENS, payload_of(number, size)


def read(folder: BlockFolder, number: int, size: int = 40, group: int = 0) -> bytes | None:
    """The payload of a block; None for a miss."""
    record = bytearray(len(TOKENS) + size)
    try:
        found = folder.read_into(key_of(number), group, TOKENS, memoryview(record))
    except (KeyError, OSError):
        return None
    return bytes(record[len(TOKENS) :]) if found else None


def opened(root: Path, limit: int = 1 << 20) -> BlockFolder:
    return BlockFolder(root, "space", limit, {"model": "demo"})


def test_blocks_outlive_their_writer(tmp_path: Path) -> None:
    first = opened(tmp_path / "store")
    first.append([block(1), block(2, group=1)])
    first.append([block(3)])
    assert read(first, 3) == payload_of(3)
    first.close()
    second = opened(tmp_path / "store")
    assert len(second) == 3
    assert read(second, 1) == payload_of(1)
    assert read(second, 2, group=1) == payload_of(2)
    assert read(second, 2, group=0) is None
    assert read(second, 4) is None
    assert read(BlockFolder(tmp_path / "store", "other", 1 << 20, {}), 1) is None


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    root = tmp_path / "store"
    mask = os.umask(0)
    try:
        opened(root).append([block(1)])
    finally:
        os.umask(mask)
    modes = {
        path.relative_to(root).suffix or "folder": stat.S_IMODE(path.stat().st_mode)
        for path in [root, *root.rglob("*")]
    }
    assert modes == {"folder": 0o700, ".index": 0o600, ".blocks": 0o600, ".json": 0o600}


def test_a_folder_that_others_may_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with refuses(ConfigError, "others may write"):
        opened(tmp_path)


def test_other_token_ids_or_sizes_are_a_miss(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([block(1), block(2)])
    record = memoryview(bytearray(len(TOKENS) + 40))
    assert not folder.read_into(key_of(1), 0, b"\6" * 32, record)
    assert not folder.read_into(key_of(2), 0, TOKENS, record[:-1])
    assert len(folder) == 0


def test_every_byte_flipped_in_turn(tmp_path: Path) -> None:
    """A miss, or what was written; never anything else. A damaged byte costs one block at most."""
    numbers = range(3)
    folder = opened(tmp_path)
    folder.append([block(number) for number in numbers])
    folder.close()
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".index", ".blocks")]
    flipped = 0
    for path in files:
        sound = path.read_bytes()
        for place in range(len(sound)):
            bit = 1 << place % 8
            damaged = bytearray(sound)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            fresh = opened(tmp_path)
            found = [read(fresh, number) for number in numbers]
            fresh.close()
            assert found.count(None) == 1
            assert all(one in (None, payload_of(number)) for number, one in enumerate(found))
            flipped += 1
        path.write_bytes(sound)
    assert flipped == 3 * (ENTRY_BYTES + len(TOKENS) + 40)


@pytest.mark.parametrize("suffix", [".index", ".blocks"])
def test_every_length_cut(tmp_path: Path, suffix: str) -> None:
    folder = opened(tmp_path)
    folder.append([block(number) for number in range(3)])
    folder.close()
    path = next(tmp_path.rglob(f"*{suffix}"))
    sound, size = path.read_bytes(), path.stat().st_size // 3
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        fresh = opened(tmp_path)
        whole = length // size
        assert [read(fresh, number) for number in range(3)] == [
            payload_of(number) if number < whole else None for number in range(3)
        ]
        fresh.close()


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**60),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**40),
)
def test_entries_come_back(
    key: bytes, group: int, digest: bytes, offset: int, tokens: int, payload: int
) -> None:
    entry = Entry(key, group, digest, offset, tokens, payload)
    assert list(decode_entries(entry.encode())) == [entry]


WRITER = """
import sys
sys.path[:0] = {path!r}
from tests.unit.cache.store.test_folder import block, opened
from pathlib import Path
folder = opened(Path({root!r}), 1 << 26)
number = {first}
while True:
    folder.append([block(number + i, 3000) for i in range(5)])
    number += 5
    print(number, flush=True)
"""


@pytest.mark.parametrize("times", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_while_it_writes(tmp_path: Path, times: int) -> None:
    """What was reported as stored is found; what is found is right."""
    root, moments = tmp_path / "store", random.Random(times)
    paths = [path for path in sys.path if path]
    first, promised = 0, []
    for _ in range(times):
        program = WRITER.format(root=str(root), first=first, path=paths)
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            line = writer.stdout.readline()  # it stores by now
            assert line
            time.sleep(moments.random() * 0.02)
            writer.kill()
            said = line + writer.stdout.read()
        end = int(said[: said.rindex(b"\n")].split()[-1])
        promised += range(first, end)
        first = end + 1000
    folder = opened(root, 1 << 26)
    for number in promised:
        assert read(folder, number, 3000) == payload_of(number, 3000)
    extra = [number for number in range(first) if number not in set(promised)]
    found = [(number, read(folder, number, 3000)) for number in extra]
    assert all(one in (None, payload_of(number, 3000)) for number, one in found)
    folder.append([block(-1)])
    assert read(folder, -1) == payload_of(-1)


@pytest.mark.parametrize("after", [0, 10, 71, 72, 100, 150, 300, 400, 500])
def test_a_disk_that_becomes_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """After any number of bytes: what was stored before stays, and later blocks are stored again."""
    folder = opened(tmp_path)
    folder.append([block(1)])
    left, write = after, os.write

    def limited(file: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, memoryview(data)[:left])
        left -= count
        return count

    monkeypatch.setattr(segments.os, "write", limited)
    with pytest.raises(OSError, match="No space left"):
        folder.append([block(number) for number in range(2, 6)])
    monkeypatch.undo()
    folder.append([block(6)])
    for seen in (folder, opened(tmp_path)):
        assert read(seen, 1) == payload_of(1)
        assert read(seen, 6) == payload_of(6)
        rest = [(number, read(seen, number)) for number in range(2, 6)]
        assert all(one in (None, payload_of(number)) for number, one in rest)


def test_two_writers_read_each_other(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    one.append([block(1)])
    two.append([block(1), block(2)])  # both may store the same
    assert read(one, 2) is None
    one.refresh()
    assert [read(one, number) for number in (1, 2)] == [payload_of(1), payload_of(2)]
    one.append([block(3)])
    two.refresh()
    assert read(two, 3) == payload_of(3)
    assert len(list(segments_of(tmp_path))) == 2


def test_the_oldest_goes_and_nothing_that_is_written(tmp_path: Path) -> None:
    limit, size = 1 << 20, 70_000  # a segment ends with each block
    others = opened(tmp_path, limit)
    others.append([block(100)])  # its writer lives
    folder = opened(tmp_path, limit)
    for number in range(14):
        folder.append([block(number, size)])
    folder.touch([(key_of(0), 0), (key_of(1), 0)])
    for number in range(14, 20):
        folder.append([block(number, size)])
    found = {number for number in range(20) if read(folder, number, size) is not None}
    assert {0, 1, *range(14, 20)} <= found
    assert len(found) == 14
    assert sum(size for _, _, size in segments_of(tmp_path)) <= limit
    assert read(others, 100) == payload_of(100)
    other_space = BlockFolder(tmp_path, "other", limit, {})
    for number in range(20):  # the limit is that of all name spaces
        other_space.append([block(number, size)])
    assert sum(size for _, _, size in segments_of(tmp_path)) <= limit
    folder.refresh()
    assert len(folder) == 1  # that of the writer that lives


def test_a_lower_limit_holds_from_the_opening_on(tmp_path: Path) -> None:
    """That of all name spaces, and before anything is written."""
    old = BlockFolder(tmp_path, "other", 1 << 20, {})
    folder = opened(tmp_path, 1 << 20)
    for number in range(8):
        old.append([block(number, 60_000)])
        folder.append([block(number, 60_000)])
    old.close()
    folder.close()
    lower = opened(tmp_path, 300_000)
    assert sum(size for _, _, size in segments_of(tmp_path)) <= 300_000
    assert lower.num_bytes <= 300_000
    found = [number for number in range(8) if read(lower, number, 60_000) is not None]
    assert found
    assert found[-1] == 7


def test_a_disk_that_is_smaller_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest goes there as well. Where others take the disk, the store takes no more of it."""
    disk = 0

    def free(root: Path) -> SimpleNamespace:
        used = sum(size for _, _, size in segments_of(tmp_path))
        return SimpleNamespace(f_blocks=9999, f_bavail=max(disk - used, 0) // 100, f_frsize=100)

    monkeypatch.setattr(folders.os, "statvfs", free)
    folder = opened(tmp_path, 1 << 20)
    with pytest.raises(FullError, match="or into its disk"):
        folder.append([block(0, 60_000)])
    disk = 400_000
    for number in range(20):
        folder.append([block(number, 60_000)])
        assert sum(size for _, _, size in segments_of(tmp_path)) <= disk
    assert read(folder, 19, 60_000) == payload_of(19, 60_000)
    assert read(folder, 0, 60_000) is None
    assert len(folder) >= 5
    before, disk = sum(size for _, _, size in segments_of(tmp_path)), 150_000
    folder.append([block(20, 60_000)])
    assert read(folder, 20, 60_000) == payload_of(20, 60_000)
    assert sum(size for _, _, size in segments_of(tmp_path)) <= before


def test_a_disk_that_does_not_say_how_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tmpfs without a size: what is stored stays, up to the limit."""
    unsaid = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(folders.os, "statvfs", lambda _: unsaid)
    folder = opened(tmp_path, 1 << 20)
    for number in range(3):
        folder.append([block(number, 60_000)])
    assert [read(folder, number, 60_000) for number in range(3)] == [
        payload_of(number, 60_000) for number in range(3)
    ]
    with pytest.raises(FullError):
        folder.append([block(3, 1 << 20)])


def test_the_start_of_a_prefix_goes_last(tmp_path: Path) -> None:
    folder = opened(tmp_path, 1 << 20)
    for number in range(14):
        folder.append([block(number, 70_000)])
    folder.touch([(key_of(number), 0) for number in range(14)])
    for number in range(14, 21):
        folder.append([block(number, 70_000)])
    found = [number for number in range(14) if read(folder, number, 70_000) is not None]
    assert found == list(range(7))


def test_a_block_that_never_fits(tmp_path: Path) -> None:
    folder = opened(tmp_path, 1 << 20)
    folder.append([block(1)])
    with pytest.raises(FullError, match="do not fit"):
        folder.append([block(2, 2 << 20)])
    folder.append([block(3)])
    assert read(folder, 3) == payload_of(3)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = opened(tmp_path / "store")
    folder.append([block(1), block(2)])
    for path in sorted((tmp_path / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert read(folder, 1) is None
    folder.refresh()
    assert len(folder) == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_two_engines_and_a_limit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever two engines do in one folder, a block is right or missing, and the limit holds."""
    root, limit = tmp_path_factory.mktemp("store"), 1 << 20
    folders = [opened(root, limit), opened(root, limit)]
    sizes: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        which = data.draw(st.integers(0, 1))
        match data.draw(
            st.sampled_from(("append", "append", "refresh", "touch", "reopen", "read"))
        ):
            case "append":
                number = data.draw(st.integers(0, 30))
                size = sizes.setdefault(number, data.draw(st.sampled_from((10, 5000, 90_000))))
                folders[which].append([block(number, size)])
            case "refresh":
                folders[which].refresh()
            case "touch":
                folders[which].touch([(key_of(data.draw(st.integers(0, 30))), 0)])
            case "reopen":
                folders[which].close()
                folders[which] = opened(root, limit)
            case _:
                for number, size in sizes.items():
                    assert read(folders[which], number, size) in (None, payload_of(number, size))
        assert sum(size for _, _, size in segments_of(root)) <= limit + 30 * ENTRY_BYTES
    for folder in folders:
        folder.close()


def test_a_segment_that_is_given_up_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the writing thread does that deletes it for room: what is open stays readable."""
    folder = opened(tmp_path)
    folder.append([block(1)])
    preadv = os.preadv

    def given_up(file: int, buffers: list[memoryview], offset: int) -> int:
        for segment in folder._segments.values():
            segment.close()
        return preadv(file, [buffers[0][:8]], offset)

    monkeypatch.setattr(os, "preadv", given_up)
    assert read(folder, 1) == payload_of(1)


def test_entries_count_as_well(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([block(number) for number in range(100)])
    counted = folder.num_bytes
    folder.refresh()
    assert folder.num_bytes == counted


def test_a_segment_that_is_deleted_while_it_is_written(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([block(1)])
    for path in (*tmp_path.rglob("*.index"), *tmp_path.rglob("*.blocks")):
        path.unlink()
    folder.refresh()
    folder.append([block(2)])
    assert [read(folder, number) for number in (1, 2)] == [None, payload_of(2)]


def test_emptied_while_an_engine_writes_nothing(tmp_path: Path) -> None:
    """The folder of its name space goes, and comes again."""
    folder = BlockFolder(tmp_path, "0" * 32, 1 << 20, {"name": "demo"})
    clear(tmp_path)
    assert not list(tmp_path.iterdir())
    folder.append([block(1)])
    assert read(folder, 1) == payload_of(1)
    assert survey(tmp_path)[0].decides == {"name": "demo"}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    files = [tmp_path / "project" / name for name in ("data.blocks", "name.json")]
    files += [
        tmp_path / "weights.json",
        tmp_path / "project/old.index",
        tmp_path / "project/old.blocks",
    ]
    (tmp_path / "project").mkdir()
    for path in files:
        path.write_text('{"some": 1}')
    folder = opened(tmp_path, 1 << 20)
    for number in range(20):
        folder.append([block(number, 90_000)])
    folder.close()
    for look in (survey, verify, clear):
        with refuses(ConfigError, "other files", "store"):
            look(tmp_path)
    described = tmp_path / ("0" * 32) / "name.json"
    described.parent.mkdir()
    described.write_text("{}")
    assert verify(tmp_path).damaged == 0
    assert clear(tmp_path) > 0
    assert all(path.exists() for path in files)
    assert not described.exists()


def test_an_engine_counts_what_others_stored_meanwhile(tmp_path: Path) -> None:
    """The limit is that of the folder, also between two looks at what others do."""
    limit, size = 1 << 20, 70_000
    folders = [opened(tmp_path, limit) for _ in range(3)]
    for number in range(60):
        folders[number % 3].append([block(number, size)])
        assert sum(size for _, _, size in segments_of(tmp_path)) <= limit


def test_an_entry_is_written_once_its_record_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = opened(tmp_path), []

    def noted(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def note(file: int, *rest: Any) -> Any:
            calls.append((call, Path(os.readlink(f"/proc/self/fd/{file}")).suffix))
            return real(file, *rest)

        return note

    monkeypatch.setattr(segments.os, "write", noted("write", os.write))
    monkeypatch.setattr(segments, "_sync", noted("sync", segments._sync))
    folder.append([block(1), block(2)])
    assert calls == [
        *[("write", ".blocks")] * 2,
        ("sync", ".blocks"),
        ("write", ".index"),
        ("sync", ".index"),
    ]


def test_what_killed_writers_leave_goes(tmp_path: Path) -> None:
    """An index without records or entries, records without an index, files not written whole."""
    folder = opened(tmp_path)
    folder.append([block(1)])
    space, name = tmp_path / "space", "0123456789abcdef01234567"
    left = [space / f"{name}.index", space / f"{name[::-1]}.index", space / f"{name[::-1]}.blocks"]
    left += [tmp_path / "weights.json.0a0b0c0d", space / "name.json.0a0b0c0d"]
    kept = [tmp_path / "notes.json.txt", space / "notes.index"]
    for path in (*left, *kept):
        path.write_bytes(b"")
    left[2].write_bytes(b"records")
    remove_leftovers(tmp_path)
    assert all(path.exists() for path in left)  # their writers may be at it now
    for path in (*left, *kept, *space.glob("*.index")):
        os.utime(path, (1, 1))
    idle = segments.SegmentWriter(space)  # it stored nothing yet
    os.utime(idle.segment.index, (1, 1))
    opened(tmp_path)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in (*kept, idle.segment.index, idle.segment.blocks))
    idle.close()
    assert read(opened(tmp_path), 1) == payload_of(1)


def test_a_store_that_cannot_be_written_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlockFolder(tmp_path, "0" * 32, 1 << 20, {})
    folder.append([block(1)])
    folder.close()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(ConfigError, match="cannot be emptied"):
            clear(tmp_path)
    assert verify(tmp_path).sound == 1
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match="cannot be read"):
        survey(tmp_path)


def test_emptying_takes_what_killed_writers_left(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, "0" * 32, 1 << 20, {})
    folder.close()
    (tmp_path / ("0" * 32) / "0123456789abcdef01234567.index").write_bytes(b"")
    write_private(tmp_path / "weights.json.0a0b0c0d", b"")
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
def test_a_fork_of_a_killed_writer_holds_no_segment(tmp_path: Path) -> None:
    """Else nobody could delete the segment while the fork lives."""
    program = WRITER.format(root=str(tmp_path), first=0, path=[path for path in sys.path if path])
    program = program.replace("while True:", "while os.fork():").replace(
        "print(number, flush=True)", "print(number, flush=True); time.sleep(60)"
    )
    program = "import os, time\n" + program + "\ntime.sleep(60)  # of the fork\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        (index,) = [index for _, index, _ in segments_of(tmp_path)]
        assert segments.is_written(index)
        writer.kill()
        writer.wait()
        assert not segments.is_written(index)
        os.killpg(writer.pid, signal.SIGKILL)  # its fork
        (_, _, size), *_ = segments_of(tmp_path)
        assert size > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
def test_a_fork_deletes_nothing_of_its_parent(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder._writer = segments.SegmentWriter(folder.folder)  # it stored nothing yet
    if (child := os.fork()) == 0:
        try:
            folder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    folder.append([block(1)])
    assert read(opened(tmp_path), 1) == payload_of(1)
    assert segments.is_written(folder._writer.segment.index)
