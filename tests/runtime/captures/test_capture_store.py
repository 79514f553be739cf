"""The folder of stored captures: files are complete, and files that other users could have written are not read."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.runtime.captures import capture_store
from moepass.runtime.captures.capture_store import CaptureStore, find_store
from tests.helpers.graphs.error_fields import refused

KEY = "a" * 64
VERSIONS = {"torch": "2.13.0"}


def _save(store: CaptureStore, content: bytes = b"content", key: str = KEY, name: str = "one") -> bool:
    return store.save(key, name, content, "demo", VERSIONS)


def _file(store: CaptureStore) -> Path:
    (entry,) = store.entries()
    return entry.path


def test_what_was_saved_is_loaded_and_listed(store: CaptureStore) -> None:
    assert list(store.load(KEY)) == []
    assert _save(store)
    assert _save(store, b"second\nwith lines\0", name="two")
    assert _save(store, b"other", key="b" * 64)
    assert list(store.load(KEY)) == [b"content", b"second\nwith lines\0"]
    assert _save(store, b"newer")
    assert next(store.load(KEY)) == b"newer"
    entries = store.entries()
    assert len(entries) == 3
    assert all(entry.header is not None and entry.header.versions == VERSIONS for entry in entries)
    assert (store.folder.stat().st_mode & 0o777, _mode(entries[0].path)) == (0o700, 0o600)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_clear_removes_stored_captures_and_unfinished_ones_alone(store: CaptureStore) -> None:
    _save(store)
    (store.folder / ".abc.part").write_bytes(b"half")
    (store.folder / "notes.txt").write_text("mine")
    assert len(store.clear()) == 1
    assert [path.name for path in store.folder.iterdir()] == ["notes.txt"]
    assert store.clear() == []


def _of_another_key(path: Path) -> None:
    os.rename(path, path.with_name(path.name.replace("a" * 64, "b" * 64)))


def _linked(path: Path) -> None:
    target = path.with_name("elsewhere")
    os.rename(path, target)
    path.symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _dated(path: Path, created: str) -> None:
    path.write_bytes(re.sub(rb'"created":[^,]*', b'"created":' + created.encode(), path.read_bytes()))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "key", "problem"),
    [
        (lambda path: path.chmod(0o620), KEY, "can be written by other users"),
        (lambda path: path.chmod(0o602), KEY, "can be written by other users"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), KEY, "does not match its digest"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"content", b"context")),
            KEY,
            "does not match its digest",
        ),
        (lambda path: path.write_bytes(b""), KEY, "damaged"),
        (lambda path: path.write_bytes(b"\x80\x04."), KEY, "damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"capture/1", b"capture/9")), KEY, "capture/9"),
        (_of_another_key, "b" * 64, "stored under the key aaaaaaaaaaaa"),
        (_linked, KEY, "it is a link"),
        (lambda path: _dated(path, "1e300"), KEY, "its date is 1e+300"),
        (lambda path: _dated(path, "-1e18"), KEY, "its date is -1e+18"),
        (_pipe, KEY, "not a regular file"),
        (_folder, KEY, "not a regular file"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_reported_and_not_loaded(
    store: CaptureStore, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any], key: str, problem: str
) -> None:
    _save(store)
    damage(_file(store))
    assert list(store.load(key)) == []
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "ignored" in record.getMessage()


def test_files_of_another_user_are_not_loaded(
    store: CaptureStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store)
    monkeypatch.setattr(capture_store.os, "geteuid", lambda: os.getuid() + 1)
    assert list(store.load(KEY)) == []
    assert not _save(store)
    assert all(f"belongs to user {os.getuid()}" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2
    with refused(InputError, path=store.folder):
        store.clear()


def test_a_folder_that_others_can_write_to_is_not_used(store: CaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    _save(store)
    store.folder.chmod(0o777)
    assert list(store.load(KEY)) == []
    assert not _save(store, name="two")
    assert all("mode 777, expected 700" in record.getMessage() for record in caplog.records)
    with pytest.raises(InputError, match="mode 777"):
        store.entries()
    store.folder.chmod(0o700)
    assert list(store.load(KEY)) == [b"content"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not _save(CaptureStore(tmp_path / "file" / "captures"))
    assert "not stored" in caplog.text


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CaptureStore(tmp_path / "file")
    store.folder.write_bytes(b"")
    assert not _save(store)
    assert list(store.load(KEY)) == []
    assert [record.getMessage().count("it is a file, not a folder") for record in caplog.records] == [1, 1]
    with refused(InputError, path=store.folder):
        store.entries()


def test_clear_leaves_a_folder_whatever_its_name(store: CaptureStore) -> None:
    _save(store)
    (store.folder / "mine.capture").mkdir()
    assert len(store.clear()) == 1
    assert [path.name for path in store.folder.iterdir()] == ["mine.capture"]


def test_a_home_folder_is_expanded_without_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOEPASS_CACHE_DIR", "~/captures")
    store = find_store()
    assert store is not None
    assert store.folder == tmp_path / "captures"


def test_what_killed_writers_left_is_removed_and_what_is_being_written_counts(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store)
    nbytes = store.entries()[0].nbytes
    left, written = (store.folder / f".{name}.part" for name in ("left", "written"))
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    written.write_bytes(b"x" * 2 * nbytes)
    os.utime(next(store.folder.glob("*.capture")), (2, 2))
    monkeypatch.setattr(capture_store, "_MOST_BYTES_IN_ALL", 3 * nbytes + nbytes // 2)
    _save(store, name="new", key="b" * 64)
    assert {path.name[:8] for path in store.folder.iterdir()} == {".written", "b" * 8}


def test_a_write_that_fails_leaves_nothing(store: CaptureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(store)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture_store.os, "replace", fail)
    assert not _save(store, b"newer")
    assert [path.suffix for path in store.folder.iterdir()] == [".capture"]
    assert list(store.load(KEY)) == [b"content"]


@given(content=st.binary(max_size=200), place=st.integers(0, 400), value=st.integers(0, 255))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_no_changed_byte_is_loaded(store: CaptureStore, content: bytes, place: int, value: int) -> None:
    store.clear()
    _save(store, content)
    path = _file(store)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data)
    # Header fields such as the name of the model are not part of the content, and may change.
    assert list(store.load(KEY)) in ([], [content])


def _write_many(folder: Path, letter: bytes) -> None:
    store = CaptureStore(folder)
    for _ in range(200):
        assert store.save(KEY, "same", letter * 100_000, "demo", VERSIONS)


def test_writers_at_the_same_time_leave_one_complete_file(store: CaptureStore) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(store.folder, letter)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        for content in store.load(KEY):
            assert len(content) == 100_000
            assert len(set(content)) == 1
            seen.add(content[:1])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(list(store.load(KEY))) == 1
    assert [path.suffix for path in store.folder.iterdir()] == [".capture"]
    assert seen <= {b"a", b"b"}


def test_what_was_not_read_for_the_longest_time_is_removed(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("one", "two", "six")):
        _save(store, name=name, key=str(age) * 64)
        os.utime(store.folder / f"{str(age) * 64}-{name}.capture", (age, age))
    assert list(store.load("0" * 64)) == [b"content"]  # so it is the latest that was read
    # A little more than three: times are written with more or fewer digits.
    nbytes = store.entries()[0].nbytes
    monkeypatch.setattr(capture_store, "_MOST_BYTES_IN_ALL", 3 * nbytes + nbytes // 2)
    _save(store, name="new", key="3" * 64)
    assert {path.name[0] for path in store.folder.iterdir()} == {"0", "2", "3"}
