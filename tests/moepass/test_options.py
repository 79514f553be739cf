"""The options of the backend, the dump folder, and the lookup of the backend by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moepass
from moepass.options import Options, parse_options
from moepass.passes.ir.plan import Plan
from moepass.passes.pipeline import PASSES
from tests.helpers.graphs.backend_helper import Stack, tokens


def test_defaults() -> None:
    assert parse_options(None) == parse_options({}) == Options("inductor", (), False, None)


def test_options_are_read() -> None:
    values = {"lower": "eager", "disable": ["verify"], "debug": True, "dump": "folder"}
    assert parse_options(values) == Options("eager", ("verify",), True, "folder")


@pytest.mark.parametrize("folder", ["folder", b"folder", Path("folder")])
def test_every_kind_of_path_names_the_same_folder(folder: object) -> None:
    assert parse_options({"dump": folder}).dump == "folder"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lowr": "eager"},
            r"option 'lowr' is unknown; did you mean lower\? the options are lower, disable, debug, dump",
        ),
        ({"zzz": 1}, r"option 'zzz' is unknown; the options are lower, disable, debug, dump"),
        ({1: 1}, r"option 1 is unknown"),
        ({"lower": "fast"}, r"option lower is 'fast'; it must be one of eager, inductor"),
        ({"lower": None}, r"option lower is None; it must be one of eager, inductor"),
        ({"lower": ["eager"]}, r"option lower is \['eager'\]"),
        ({"disable": "verify"}, r"option disable is 'verify'; it must be a list of pass names"),
        ({"disable": [1]}, r"option disable is \[1\]; it must be a list of pass names"),
        ({"disable": 5}, r"option disable is 5; it must be a list of pass names"),
        ({"disable": ["partition"]}, r"option disable has 'partition', but lower='inductor' compiles segments"),
        ({"debug": 1}, r"option debug is 1; it must be True or False"),
        ({"debug": "yes"}, r"option debug is 'yes'; it must be True or False"),
        ({"cudagraphs": 1}, r"option cudagraphs is 1; it must be True or False"),
        (
            {"lower": "eager", "cudagraphs": True, "disable": ["partition"]},
            r"option disable has 'partition', but cudagraphs=True records segments",
        ),
        ({"dump": 3}, r"option dump is 3; it must be the path of a folder"),
    ],
)
def test_wrong_options_are_named_with_the_valid_values(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(moepass.OptionError, match=message):
        parse_options(values)


def _run(model: torch.nn.Module, **options: Any) -> tuple[torch.Tensor, list[moepass.Compilation]]:
    with torch.no_grad(), moepass.record_compilations() as compilations:
        output = torch.compile(model, backend="asyncep", options={"lower": "eager", **options})(tokens())
    return output, compilations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowr": 1}, "option 'lowr' is unknown"),
        (
            {"disable": ["nope"]},
            "disable: no pass is called nope; the passes are sort_masks, write_grouped_gemms, group_exchanged_slots, "
            "eliminate_expert_parallelism, compute_chosen_pairs, look_up_one_hots, compute_read_slots, "
            "lower_expert_stacks, lower_complete_experts, detect",
        ),
        (
            {"disable": ["schedule"]},
            "pass verify needs scheduled, which schedule provides: do not disable it",
        ),
        ({"disable": ["detect"]}, "pass rewrite needs blocks, which detect provides"),
        (
            {"cudagraphs": True},
            "option cudagraphs is True, but the graph computes on cpu: CUDA graphs record only GPU work; "
            "move the model to cuda, or leave the option out",
        ),
    ],
)
def test_errors_reach_the_user_of_torch_compile(options: dict[str, Any], message: str) -> None:
    with pytest.raises(moepass.OptionError, match=message):
        _run(Stack(depth=1), **options)


def test_a_mode_is_refused() -> None:
    with (
        torch.no_grad(),
        pytest.raises(moepass.InputError, match="mode is 'max-autotune', but backend asyncep has no modes"),
    ):
        torch.compile(Stack(depth=1), backend="asyncep", mode="max-autotune")(tokens())


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("disable", "strategy"),
    [
        (["verify"], "asyncep"),
        (["partition"], "asyncep"),
        (["verify", "partition"], "asyncep"),
        (["rewrite", "plan", "schedule", "verify"], "resident"),
        ([function.__name__ for function in PASSES], "resident"),
    ],
)
def test_passes_can_be_disabled_by_name(disable: list[str], strategy: str) -> None:
    model = Stack("dense_bmm", depth=3)
    with torch.no_grad():
        expected = model(tokens())
    moepass.offload_experts(model)
    output, (compilation,) = _run(model, disable=disable, debug=True)
    assert torch.equal(output, expected)
    assert compilation.plan.strategy == strategy


def test_a_dump_has_every_graph_and_the_plan(tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=2)
    moepass.offload_experts(model)
    folder = tmp_path / "deep" / "dump"
    _, (compilation,) = _run(model, dump=str(folder))
    assert [path.name for path in folder.iterdir()] == ["graph-0"]
    graph = folder / "graph-0"
    names = ["captured", *(function.__name__ for function in PASSES)]
    assert sorted(path.name for path in graph.iterdir()) == [
        *(f"{number:02d}-{name}.py" for number, name in enumerate(names)),
        "plan.json",
    ]
    assert Plan.from_json((graph / "plan.json").read_text()) == compilation.plan
    text = {name: (graph / f"{number:02d}-{name}.py").read_text() for number, name in enumerate(names)}
    assert "moepass.bank_tensor" in text["captured"]
    assert text["captured"] == text["detect"]
    assert "gather" in text["rewrite"]
    assert "moepass.bank_tensor" not in text["rewrite"]
    assert "prefetch" in text["schedule"]
    assert "# segment_0" in text["partition"]


def test_a_dumped_graph_is_python(tmp_path: Path) -> None:
    _run(Stack("dense_bmm", depth=1), dump=str(tmp_path))
    for path in sorted(tmp_path.glob("graph-0/*.py")):
        compile(path.read_text(), path.name, "exec")


@pytest.mark.slow
def test_every_graph_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=1)
    for number in range(3):
        torch._dynamo.reset()
        _run(model, dump=str(tmp_path))
        assert len(list(tmp_path.glob("graph-*/plan.json"))) == number + 1


def test_a_dump_continues_after_a_folder_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "graph-1").mkdir()
    _run(Stack("dense_bmm", depth=1), dump=str(tmp_path))
    assert len(list(tmp_path.glob("graph-*"))) == 2


def test_a_dump_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(moepass.OptionError, match=r"option dump is '.*file', which cannot be written"):
        _run(Stack(depth=1), dump=str(tmp_path / "file"))


def _python(program: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_backend_is_found_without_importing_moepass() -> None:
    program = """
import sys, torch
assert "asyncep" in torch._dynamo.list_backends()
before = "moepass" in sys.modules
f = torch.compile(lambda x: x.relu() + 1, backend="asyncep", options={"lower": "eager"})
with torch.no_grad():
    print(before, f(torch.tensor([-1.0, 2.0])).tolist(), "moepass.backend" in sys.modules)
"""
    assert _python(program) == "False [1.0, 3.0] True"


def test_importing_moepass_does_not_import_torch() -> None:
    assert _python("import sys, moepass; print('torch' in sys.modules, len(moepass.__all__) > 5)") == "False True"


def test_public_names_exist() -> None:
    for name in moepass.__all__:
        assert getattr(moepass, name) is not None
    with pytest.raises(AttributeError, match="module 'moepass' has no attribute 'nope'"):
        moepass.nope  # noqa: B018
