"""Tuning of tiles with a timer that returns given times, and kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moepass.models.errors import InputError
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes, candidate_sizes, tile_sizes
from moepass.runtime.kernels.grouped_gemm.tuner import rows_bucket, seconds_on_gpu, tune_kernels
from tests.helpers.models.expert_segments import ExpertInputs, ExpertSizes, expert_inputs, expert_segment

SIZES = ExpertSizes(tokens=8, pairs=9, experts=2, hidden=16, width=8)
INPUTS = expert_inputs(SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tuned sizes."""
    monkeypatch.setenv("MOEPASS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class RecordedGemm(GeneratedGemm):
    """Records the sizes of its launches."""

    def __init__(self, inputs: ExpertInputs = INPUTS) -> None:
        super().__init__(read_kernels(read_program(expert_segment("swiglu", "plain", inputs))).kernels[0])
        self.sizes: list[TileSizes] = []

    def launch(self, operands, weights, ends, outputs, sizes, *scaled):  # type: ignore[no-untyped-def]
        self.sizes.append(sizes)
        return super().launch(operands, weights, ends, outputs, sizes, *scaled)

    def run(self) -> torch.Tensor:
        (result,) = self([INPUTS.x, INPUTS.token], [INPUTS.up.mT], INPUTS.ends, SIZES.pairs)
        return result

    def candidates(self) -> list[TileSizes]:
        return list(candidate_sizes(self.kernel, 8, torch.float32))

    def default(self) -> TileSizes:
        return tile_sizes(self.kernel, 8, torch.float32, -(-SIZES.pairs // SIZES.experts))


def _timer(fastest: int) -> Callable[[Callable[[], None]], float]:
    """Return a timer for which candidate number `fastest`, in the order of trials, takes least."""
    seconds = iter(1.0 if number != fastest else 0.5 for number in range(1000))

    def time_launch(launch: Callable[[], None]) -> float:
        launch()
        return next(seconds)

    return time_launch


def test_the_fastest_sizes_are_used_and_stored(folder: Path) -> None:
    gemm = RecordedGemm()
    candidates = gemm.candidates()
    assert len(set(candidates)) == len(candidates) > 4
    fastest = 3
    assert candidates[fastest] != gemm.default()
    with tune_kernels(_timer(fastest)):
        gemm.run()
    assert gemm.sizes == [*candidates, candidates[fastest]]
    # The next calls, and a kernel made later, use the stored sizes without timing.
    gemm.run()
    later = RecordedGemm()
    with tune_kernels(_timer(fastest + 1)):
        later.run()
    assert gemm.sizes[-1] == candidates[fastest]
    assert later.sizes == [candidates[fastest]]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_candidates_give_the_same(dtype: torch.dtype) -> None:
    sizes = ExpertSizes(tokens=20, pairs=37, experts=5, hidden=48, width=24, dtype=dtype)
    inputs = expert_inputs(sizes, torch.tensor([8.0, 0.0, 1.0, 1.0, 0.2]))
    gemm = RecordedGemm(inputs)
    results = [
        gemm([inputs.x, inputs.token], [inputs.up.mT], inputs.ends, sizes.pairs, tile)[0].float()
        for tile in candidate_sizes(gemm.kernel, 9, dtype)
    ]
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_kernels_are_timed_and_stored_only_on_request(folder: Path) -> None:
    gemm = RecordedGemm()
    gemm.run()
    assert gemm.sizes == [gemm.default()]
    assert not folder.exists()
    # A kernel that ran untuned is tuned now.
    with tune_kernels(_timer(2)):
        gemm.run()
    assert gemm.sizes[-1] == gemm.candidates()[2]


@pytest.mark.slow
def test_other_numbers_of_rows_are_tuned_separately(folder: Path) -> None:
    gemm = RecordedGemm()
    for rows in (SIZES.pairs, 8, 7, 4):
        with tune_kernels(_timer(0)):
            gemm([INPUTS.x, INPUTS.token[:rows]], [INPUTS.up.mT], INPUTS.ends.clamp(max=rows), rows)
    assert [rows_bucket(rows, SIZES.experts) for rows in (SIZES.pairs, 8, 7, 4)] == [8, 4, 4, 2]
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (5, 1), (6, 2), (11, 4), (5 * 128, 128), (5 * 128 + 1, 256)])
def test_buckets_of_rows(rows: int, bucket: int) -> None:
    assert rows_bucket(rows, 5) == bucket


CHANGES: dict[str, Callable[[str], str]] = {
    "damaged": lambda text: text[:-20],
    "does not use": lambda text: text.replace('"rows": ', '"rows": 1'),
    "schema": lambda text: text.replace("moepass.tiles/1", "moepass.tiles/9"),
    "another kernel": lambda text: text.replace('"experts": 2', '"experts": 6'),
}


def test_a_file_that_cannot_be_used_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tune_kernels(_timer(3)):
        RecordedGemm().run()
    (file,) = folder.iterdir()
    text = file.read_text()
    for problem, change in CHANGES.items():
        assert change(text) != text
        file.write_text(change(text))
        gemm = RecordedGemm()
        caplog.clear()
        gemm.run()
        assert gemm.sizes == [gemm.default()]
        (message,) = [record.getMessage() for record in caplog.records if record.name == "moepass"]
        assert str(file) in message
        assert problem in message


def test_candidates_that_do_not_fit_the_gpu_are_skipped(folder: Path) -> None:
    from triton.runtime.errors import OutOfResources

    gemm, tried = RecordedGemm(), iter(range(100))

    def timer(launch: Callable[[], None]) -> float:
        number = next(tried)
        if number == 0:
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch()
        return float(number)

    with tune_kernels(timer):
        gemm.run()
    assert gemm.sizes[-1] == gemm.candidates()[1]
    assert "shared memory" in next(folder.iterdir()).read_text()


@pytest.mark.slow
def test_without_a_cache_folder_this_process_uses_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPASS_CACHE_DIR", "")
    gemm = RecordedGemm()
    with tune_kernels(_timer(3)):
        gemm.run()
    gemm.run()
    assert gemm.sizes[-1] == gemm.candidates()[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed_to_tune() -> None:
    with pytest.raises(InputError, match="needs a GPU"):
        seconds_on_gpu(lambda: None)


IN_ANOTHER_PROCESS = """
from tests.runtime.kernels.grouped_gemm.test_tuner import RecordedGemm
gemm = RecordedGemm()
gemm.run()
print(gemm.candidates().index(gemm.sizes[-1]))
"""


@pytest.mark.slow
def test_another_process_uses_stored_measurements() -> None:
    with tune_kernels(_timer(3)):
        RecordedGemm().run()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3"]
