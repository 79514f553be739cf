"""Quantised checkpoints rest as they are stored, and give the same results from every home as dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moepass
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import main_result, tiny_inputs, tiny_model
from tests.helpers.processes.ranks import run_ranks

HOMES = ("host", "device", "disk", "peer", "collective", "hybrid")


def _compiled_results(folders: tuple[Path, Path], home: str) -> list[torch.Tensor]:
    """Return the results of both checkpoints, the quantised one compiled with its experts at `home`, quantised."""
    quantised, plain = folders
    options = moepass.Peer(transport="collective") if home == "collective" else home
    model, reference = moepass.load_pretrained(quantised, home=options), moepass.load_pretrained(plain)
    (sizes,) = moepass.offload_report(model).formats.values()
    (expected,) = moepass.offload_report(reference).formats.values()
    assert sizes.is_encoded
    assert sizes.link_bytes < 0.9 * expected.link_bytes
    assert sizes.slot_bytes == expected.slot_bytes
    inputs = tiny_inputs(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    with torch.no_grad():
        return [main_result(item(**inputs)).float() for item in (compiled, reference)]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout_runs_from_every_home(form: str, home: str, tmp_path: Path) -> None:
    folders = save_quantized(tiny_model(FORMS[form].family, dtype=torch.bfloat16), FORMS[form], tmp_path)
    ranks = 1 if home in ("host", "device", "disk") else 2
    for result, expected in run_ranks(ranks, _compiled_results, folders, home):
        assert torch.equal(result, expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("home", ["host", "device", "disk"])
@pytest.mark.parametrize("form", ["fp8 blocks", "int4 packed, indices of -1", "gptq, ordered by activations", None])
@pytest.mark.parametrize("resident_layers", [(), (1,)])
def test_progress_ends_at_the_total(
    form: str | None, home: str, resident_layers: tuple[int, ...], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=3)
    folder = save_quantized(model, FORMS[form or "fp8 blocks"], tmp_path)[0 if form else 1]
    calls: list[tuple[int, int]] = []
    moepass.load_pretrained(
        folder, home=home, resident_layers=resident_layers, progress=lambda *call: calls.append(call)
    )
    assert len({total for _, total in calls}) == 1
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
