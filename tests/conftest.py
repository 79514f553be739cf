"""Every test starts with an empty Dynamo, no stored captures or profiles, one thread per worker and no network.

Triton's kernels are interpreted where there is no GPU.

`@pytest.mark.covering(strength)`: of all combinations of a test's parameters, a few run that contain every value
(strength 1), or every pair of values of two parameters (strength 2).
`@pytest.mark.sampled(every=N)`: the fast tests take one in N combinations that run, the others are slow.
"""

from __future__ import annotations

import collections
import gc
import itertools
import math
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test workers and the processes that they start share the cores; threads that wait for each other would take them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests must not load captures that another test or earlier code has stored.
os.environ["MOEPASS_CACHE_DIR"] = ""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from moepass.runtime.captures.capture_store import CaptureStore

# Examples are the same in every run, and independent of the load of the machine.
settings.register_profile("moepass", deadline=None, derandomize=True)
settings.load_profile("moepass")

torch.set_num_threads(1)

# [Empirical] With Python's default of 700, collections take a seventh of the time of imports and compilations.
gc.set_threshold(20_000)

# A shell that runs tests in the background ignores SIGINT, and so would the processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, on CPU tensors. Triton reads the variable when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@pytest.fixture(autouse=True, scope="session")
def _no_stored_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Plans in tests must not depend on the calibration of this machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    # Code that Dynamo compiled in one test must not affect the next one.
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()  # it grows without a limit, and each collection of garbage would walk through it


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    """Return an empty store of captures."""
    from moepass.runtime.captures.capture_store import CaptureStore

    return CaptureStore(tmp_path / "captures")


@pytest.fixture(scope="module")
def known_tests() -> Iterator[None]:
    """Let processes store captures although they run modules of tests, and files may have changed.

    Otherwise captures are stored only by processes that run installed code, and not while packages are installed or
    after a source was edited, which happens while tests run.
    """
    from moepass import stored_compile
    from moepass.runtime.captures import fingerprint

    packages = fingerprint.distributions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_compile, "foreign_code", lambda: "")
        patch.setattr(fingerprint, "distributions", lambda: packages)
        patch.setattr(fingerprint, "process_began", lambda: math.inf)
        yield


def pytest_collection_finish() -> None:
    # Modules live until the end, so the garbage collector, which Dynamo calls often, need not visit them.
    gc.collect()
    gc.freeze()


# This hook is first, so that `-m "not slow"` deselects the tests that it marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = _combinations_left_out(items)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("slow") is not None:
            continue
        test = _test_of(item)
        block, position = divmod(seen[test], sampled.kwargs["every"])
        # The position varies from block to block, because parameters repeat in cycles, and all values should occur.
        if position != int(block * GOLDEN_RATIO % 1 * sampled.kwargs["every"]):
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


def _test_of(item: pytest.Item) -> tuple[str, str]:
    return str(item.path), getattr(item, "originalname", item.name)


def _combinations_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items of tests marked `covering` that add no value or pair of values to those of the other items.

    The item that adds the most is taken until none adds anything; of those that add equally many, the first fast one.
    """
    by_test = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            by_test[_test_of(item)].append(item)
    left_out: set[pytest.Item] = set()
    for candidates in by_test.values():
        values = {item: _sets_of_values(item) for item in candidates}
        covered: set[frozenset[tuple[object, ...]]] = set()
        remaining = sorted(candidates, key=lambda item: item.get_closest_marker("slow") is not None)
        while remaining:
            best = max(remaining, key=lambda item: len(values[item] - covered))
            if values[best] <= covered:
                break
            covered |= values[best]
            remaining.remove(best)
        left_out.update(remaining)
    return left_out


def _sets_of_values(item: pytest.Item) -> set[frozenset[tuple[object, ...]]]:
    """Return every value of the item's parameters, or every pair of values, whichever the mark `covering` asks for.

    The rows of a `parametrize` with several names count as one value. Values are compared by identity, because some
    have no hash, and pytest numbers combinations of values, not values.
    """
    strength = item.get_closest_marker("covering").args[0]
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values.append((*names, *(id(item.callspec.params[name.strip()]) for name in names)))
    return {frozenset(together) for together in itertools.combinations(values, min(strength, len(values)))}
