"""Attributes of errors, also after they were sent to another process."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from moepass.models.errors import CheckpointError, InputError, MoepassError, OptionError

FIELDS = ("name", "value", "expected", "path", "rank", "ranks")


class RuleError(MoepassError):
    """An error whose constructor takes other arguments than its text."""

    def __init__(self, rule: str, problem: int) -> None:
        super().__init__(f"rule {rule} is broken {problem} times", value=problem)
        self.rule = rule


def _pickled(error: MoepassError) -> MoepassError:
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, MoepassError)
    return again


@pytest.mark.parametrize("kind", [MoepassError, OptionError, CheckpointError, InputError])
@pytest.mark.parametrize("transfer", [_pickled, copy.copy, copy.deepcopy])
def test_fields_come_along(kind: type[MoepassError], transfer: Callable[[MoepassError], MoepassError]) -> None:
    fields = {
        "name": "slots", "value": 0, "expected": (1, 2), "path": Path("a/config.json"), "rank": 3, "ranks": (0, 3),
    }  # fmt: skip
    again = transfer(kind("slots is 0; it must be 1 or 2", **fields))  # type: ignore[arg-type]
    assert type(again) is kind
    assert str(again) == "slots is 0; it must be 1 or 2"
    assert {name: getattr(again, name) for name in FIELDS} == fields


def test_a_field_that_does_not_apply_is_none() -> None:
    error = OptionError("no")
    assert all(getattr(error, name) is None for name in FIELDS)
    assert MoepassError("no", ranks=[1, 2]).ranks == (1, 2)


def test_what_is_no_plain_data_becomes_text_on_the_way() -> None:
    value = {"on": [len, 1], "path": Path("x")}
    again = _pickled(OptionError("no", name="hardware", value=value))
    assert again.value == {"on": [repr(len), 1], "path": Path("x")}


@pytest.mark.parametrize("transfer", [_pickled, copy.copy])
def test_a_subclass_with_arguments_of_its_own(transfer: Callable[[MoepassError], MoepassError]) -> None:
    again = transfer(RuleError("read after write", 2))
    assert isinstance(again, RuleError)
    assert (str(again), again.rule, again.value) == ("rule read after write is broken 2 times", "read after write", 2)


def _raise() -> None:
    raise RuleError("read after write", 2)


def test_an_error_of_another_process_keeps_its_fields() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(_raise).exception()
    assert isinstance(error, RuleError)
    assert (error.rule, error.value) == ("read after write", 2)
