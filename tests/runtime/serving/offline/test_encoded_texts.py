"""`read_ahead` keeps the order of items and errors, stays within its bound, and leaves no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass import InputError
from moepass.runtime.serving.offline.encoded_texts import read_ahead


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moepass-read-ahead")]


@given(st.integers(0, 12), st.integers(1, 5), st.none() | st.integers(0, 12), st.none() | st.integers(0, 12))
def test_items_come_in_order_until_an_error_or_the_end_of_the_block(
    count: int, most: int, fails_at: int | None, leaves_at: int | None
) -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in range(count):
            if number == fails_at:
                raise InputError(f"item {number}")
            read.append(number)
            yield number

    received: list[int] = []
    raised = []
    with read_ahead(source(), most) as items:
        try:
            for item in items:
                received.append(item)
                # Taking an item submits the next read.
                assert len(read) <= len(received) + most
                if item == leaves_at:
                    break
        except InputError as error:
            raised.append(str(error))
    assert not _threads()
    end = min(count, count if fails_at is None else fails_at)
    is_left = leaves_at is not None and leaves_at < end
    assert received == list(range(leaves_at + 1 if leaves_at is not None and is_left else end))
    fails = not is_left and fails_at is not None and fails_at < count
    assert raised == ([f"item {fails_at}"] if fails else [])


def test_the_thread_ends_when_the_block_fails() -> None:
    def interrupted() -> None:
        with read_ahead(iter(range(100)), 2) as items:
            next(items)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not _threads()
