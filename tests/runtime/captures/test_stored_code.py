"""A stored graph is not used if a source file of the model was edited without a change of version."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from moepass import stored_compile
from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.stored_compile import StoredModule
from tests.helpers.graphs.stored_models import EAGER, compiles, graphs_compiled_by

pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")


class Doubled(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


def _model_of(name: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a `Model` of the code `source`, imported again as module `name`."""
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    made: nn.Module = module.Model()
    return made


def test_code_that_was_edited_is_compiled_anew(
    store: CaptureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "edited_model.py"
    text = "from torch import nn\n\n\nclass Model(nn.Module):\n    def forward(self, rows):\n        return rows * 2\n"

    def model() -> nn.Module:
        return _model_of("edited_model", source, monkeypatch)

    source.write_text(text)
    StoredModule(model(), EAGER, "edited", store)(torch.ones(4))
    assert not compiles(store, model())
    source.write_text(text.replace("* 2", "* 3  # and more"))
    loaded = StoredModule(model(), EAGER, "edited", store)
    assert graphs_compiled_by(lambda: loaded(torch.ones(4))) == 1
    assert torch.equal(loaded(torch.ones(4)), torch.full((4,), 3.0))
    source.unlink()
    assert compiles(store, type(loaded._module)())


def test_code_that_was_edited_while_the_process_ran_is_not_stored(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    began = Path(__file__).stat().st_ctime
    monkeypatch.setattr(stored_compile, "_own_digest", lambda: "")
    monkeypatch.setattr(fingerprint, "process_began", lambda: began - 0.1)
    StoredModule(Doubled(), EAGER, "doubled", store)(torch.ones(4))
    assert store.entries() == []
    assert "test_stored_code.py changed after this process began" in caplog.text


def test_a_release_that_a_link_was_switched_to_is_not_stored(
    store: CaptureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files are older than this process, which has read the files of the previous release."""
    caplog.set_level("INFO", logger="moepass")
    for factor in (2, 3):
        release = tmp_path / f"release-{factor}"
        release.mkdir()
        text = f"from torch import nn\nclass Model(nn.Module):\n    def forward(self, rows): return rows * {factor}\n"
        (release / "linked_model.py").write_text(text)
    current = tmp_path / "current"

    def load(factor: int) -> nn.Module:
        current.unlink(missing_ok=True)
        current.symlink_to(f"release-{factor}")
        return _model_of("linked_model", current / "linked_model.py", monkeypatch)

    former = load(2)
    began = time.time() + 0.05  # times of files are counted in steps
    time.sleep(0.1)
    newer = load(3)
    with monkeypatch.context() as patch:
        patch.setattr(stored_compile, "_own_digest", lambda: "")
        patch.setattr(fingerprint, "process_began", lambda: began)
        StoredModule(former, EAGER, "linked", store)(torch.ones(4))
    assert "a link that changed after this process began" in caplog.text
    assert compiles(store, newer)
