"""Every test starts with an empty Dynamo, one thread per worker, no network and no stored hardware profile."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples in every run, however busy the machine is.
settings.register_profile("moepass", deadline=None, derandomize=True)
settings.load_profile("moepass")

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_stored_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # What this machine was calibrated to must not decide what is planned in a test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    # Copies of code that Dynamo compiled must not decide what the next test sees.
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
