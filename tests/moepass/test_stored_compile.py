"""A later process runs what an earlier one compiled: the same bits, without Dynamo, and never a stale graph."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.utils.import_utils import is_torch_less_or_equal

import moepass
from moepass import stored_compile
from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.runtime.captures.fingerprint import digest_of
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.padded_rows import RowsBackbone
from moepass.stored_compile import StoredModule
from tests.helpers.graphs.stored_models import EAGER, graphs_compiled_by
from tests.helpers.models.moe_stack import MoEStack, StackConfig, build_stack
from tests.helpers.models.tiny import tiny_model
from tests.helpers.processes import halved_format

SMALL = StackConfig(layers=2, hidden=16, width=16, experts=4)
pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")


class Sum(nn.Module):
    """A module with two arguments, of which it may leave the second unread."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_second = True
        self.weight = nn.Parameter(torch.arange(4.0), requires_grad=False)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        scaled = first * self.weight
        return scaled + second if self.reads_second else scaled


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows * 2


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.last.copy_(rows)
        return rows * 2


class Assigned(nn.Module):
    """A module that assigns a buffer: Dynamo does so after the graph has run, and the graph does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.last = rows * 5
        return rows * 2


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = [torch.zeros(4)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.last[0] = rows * 5
        return rows * 2


class Skipped(nn.Module):
    @torch.compiler.disable
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class AsksForVersion(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + is_torch_less_or_equal("2.8.0", accept_dev=True)


class Constant(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.tensor([1.0, 1.0, 1.0, 1.0])


class Doubled(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class Broken(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        half = rows * 0.5
        torch._dynamo.graph_break()
        return half * 4


# A store with the capture of `_stack()`, and what that gave, by number of tokens.
Filled = tuple[CaptureStore, dict[int, torch.Tensor]]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, known_tests: None) -> Filled:
    store = CaptureStore(tmp_path_factory.mktemp("captured"))
    store.folder.chmod(0o700)
    fresh = StoredModule(_stack(), EAGER, "stack", store)
    with torch.no_grad():
        return store, {count: fresh(_tokens(count)) for count in (6, 2, 33)}


@pytest.fixture
def filled(captured: Filled, store: CaptureStore) -> Filled:
    shutil.copytree(captured[0].folder, store.folder)
    return store, captured[1]


def _stack(config: StackConfig = SMALL, slots: int = 2) -> MoEStack:
    model = build_stack(config)
    moepass.offload_experts(model, slots=slots)
    return model


def _tokens(count: int, hidden: int = SMALL.hidden, *, dynamic: bool = True) -> torch.Tensor:
    rows = torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))
    if dynamic:
        torch._dynamo.mark_dynamic(rows, 0)
    return rows


def _compiles(store: CaptureStore, model: nn.Module, options: dict[str, Any] | None = None, tokens: int = 6) -> bool:
    """Return whether a new process would compile `model`."""
    stored = StoredModule(model, options or EAGER, "stack", store)
    return graphs_compiled_by(lambda: stored(_tokens(tokens))) > 0


# ---- hits ------------------------------------------------------------------------------------------------------------


def test_a_stored_capture_gives_the_same_bits_for_all_sizes_without_dynamo(filled: Filled) -> None:
    store, expected = filled
    assert len(store.entries()) == 1
    loaded = StoredModule(_stack(), EAGER, "stack", store)
    outputs: dict[int, torch.Tensor] = {}
    with moepass.record_compilations() as compilations:
        assert graphs_compiled_by(lambda: outputs.update({n: loaded(_tokens(n)) for n in (33, 6, 2)})) == 0
    assert all(torch.equal(outputs[count], expected[count]) for count in expected)
    # The plan is that of the first process, and the experts really stream.
    (compilation,) = compilations
    assert [stay.bank for stay in compilation.plan.slot_stays] == [0, 1]
    ring = compilation.executor.ring
    assert ring is not None
    assert ring.statistics.copied_bytes > 0


def _encoded_stack() -> MoEStack:
    model = build_stack(SMALL)
    halved_format.halve(model)
    with halved_format.resting_halved():
        moepass.offload_experts(model)
    return model


def test_a_stored_capture_serves_experts_that_rest_encoded(store: CaptureStore) -> None:
    with torch.no_grad():
        expected = StoredModule(_encoded_stack(), EAGER, "stack", store)(_tokens(6))
        stored = StoredModule(_encoded_stack(), EAGER, "stack", store)
        results: list[torch.Tensor] = []
        assert graphs_compiled_by(lambda: results.append(stored(_tokens(6)))) == 0
    assert torch.equal(results[0], expected)


@pytest.mark.slow
def test_weights_are_those_of_the_model_at_hand(filled: Filled) -> None:
    store, _ = filled
    other_model = _stack(dataclasses.replace(SMALL, seed=7))
    expected = StoredModule(other_model, EAGER, "stack", CaptureStore(store.folder / "none"))(_tokens(6))
    loaded = StoredModule(other_model, EAGER, "stack", store)
    outputs: list[torch.Tensor] = []
    assert graphs_compiled_by(lambda: outputs.append(loaded(_tokens(6)))) == 0
    assert torch.equal(outputs[0], expected)
    # A parameter that is replaced later is read anew, as Dynamo's code would.
    other_model.dense[0].weight = nn.Parameter(torch.zeros_like(other_model.dense[0].weight), requires_grad=False)
    assert not torch.equal(loaded(_tokens(6)), expected)
    other_model.dense[0].weight = nn.Parameter(other_model.dense[0].weight.t().contiguous().t(), requires_grad=False)
    assert graphs_compiled_by(lambda: loaded(_tokens(6))) == 1  # of other strides


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows))  # type: ignore[no-any-return]


def test_weights_that_are_no_longer_tied_are_compiled_anew(store: CaptureStore) -> None:
    model, rows = Tied(), torch.ones(4)
    StoredModule(model, EAGER, "tied", store)(rows)
    loaded = StoredModule(model, EAGER, "tied", store)
    assert graphs_compiled_by(lambda: loaded(rows)) == 0
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(2 * layer.weight, requires_grad=False)
        assert torch.equal(loaded(rows), model(rows))


def test_a_call_in_another_mode_of_torch_is_compiled_and_the_log_says_so_once(
    store: CaptureStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    model = Constant()  # nothing was stored that could serve the second call
    stored, rows = StoredModule(model, EAGER, "model", store), torch.ones(4)
    stored(rows)
    caplog.clear()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(stored(rows), model(rows))
    assert caplog.text.count("some calls are in torch.inference_mode and some are not") == 1
    assert "changed" not in caplog.text


def test_a_stride_that_no_dimension_shows_is_named(store: CaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="moepass")
    stored = StoredModule(Doubled(), EAGER, "doubled", store)
    for width in (9, 11, 13):
        stored(torch.ones(4, width)[:, :3])
    assert re.search(r"no argument has the size s\d+ as a dimension", caplog.text)


@pytest.mark.slow
def test_sizes_that_a_capture_is_not_right_for_are_compiled_and_stored_too(store: CaptureStore) -> None:
    model = _stack()
    StoredModule(model, EAGER, "stack", store)(_tokens(6, dynamic=False))
    assert _compiles(store, model, tokens=9)  # captured for 6 tokens alone
    assert len(store.entries()) == 2
    assert not _compiles(store, model, tokens=6)
    assert not _compiles(store, model, tokens=9)


def test_calls_that_the_capture_is_not_for_go_to_the_compiler(filled: Filled) -> None:
    store, expected = filled
    loaded = StoredModule(_stack(), EAGER, "stack", store)
    compiled: list[torch.Tensor] = []

    def compile_it(rows: torch.Tensor) -> torch.Tensor:
        compiled.append(rows)
        return rows

    loaded._compiled = compile_it
    assert torch.equal(loaded(_tokens(6)), expected[6])
    other_arguments = [
        torch.randn(SMALL.hidden, 6).t(),  # other strides
        _tokens(1),  # torch compiles one row for itself
        _tokens(6).double(),
        _tokens(6, 8),
        _tokens(6)[None],
        _tokens(6)[0],
        _tokens(6).to("meta"),
        _tokens(6).to_sparse(),
        _tokens(6).requires_grad_(),
        torch._neg_view(_tokens(6)),  # its memory has other numbers
    ]
    for rows in other_arguments:
        loaded(rows)
    with torch.autocast("cpu", torch.bfloat16):
        loaded(_tokens(6))
    with torch.enable_grad():
        loaded(_tokens(6))
    assert len(compiled) == len(other_arguments) + 2
    assert torch.equal(loaded(_tokens(2)), expected[2])
    assert len(compiled) == len(other_arguments) + 2


@pytest.mark.slow
def test_code_of_inductor_gives_the_same_bits(store: CaptureStore) -> None:
    options = {"lower": "inductor"}
    counts = (6, 2, 33, 1200)  # experts without a row, with one, and with more than a chunk
    fresh = StoredModule(_stack(), options, "stack", store)
    expected = {count: fresh(_tokens(count)) for count in counts}
    loaded = StoredModule(_stack(), options, "stack", store)
    outputs: dict[int, torch.Tensor] = {}
    assert graphs_compiled_by(lambda: outputs.update({count: loaded(_tokens(count)) for count in counts})) == 0
    assert not any("fxgraph" in name for name in counters["inductor"])
    assert all(torch.equal(outputs[count], expected[count]) for count in counts)
    record = (store.folder / next(store.folder.iterdir()).name).read_bytes()
    assert b'"type":"experts"' in record
    assert b'"type":"inductor"' in record


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "jamba"])
def test_families_are_stored_and_give_the_same_bits(store: CaptureStore, family: str) -> None:
    def make() -> RowsBackbone:
        model = tiny_model(family)
        moepass.offload_experts(model)
        return RowsBackbone(ModelHead(model).backbone)

    def inputs(rows: int, tokens: int) -> list[torch.Tensor]:
        ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        arguments = [ids, mask, torch.arange(rows) * tokens + tokens - 3]
        for position, tensor in enumerate(arguments):
            # The recurrent layers of jamba hold for one number of tokens.
            for dim in [0] if position == 2 or family == "jamba" else [0, 1]:
                torch._dynamo.mark_dynamic(tensor, dim)
        return arguments

    sizes = [(2, 7), (3, 7)] if family == "jamba" else [(2, 7), (3, 12), (2, 33)]
    fresh = StoredModule(make(), EAGER, family, store)
    expected = [fresh(*inputs(*size)) for size in sizes]
    loaded = StoredModule(make(), EAGER, family, store)
    outputs: list[torch.Tensor] = []
    assert graphs_compiled_by(lambda: outputs.extend(loaded(*inputs(*size)) for size in sizes)) == 0
    assert all(torch.equal(left, right) for left, right in zip(outputs, expected, strict=True))


# ---- misses: each part of the key ------------------------------------------------------------------------------------


def _with_attribute(model: nn.Module) -> None:
    model.get_submodule("moe.1.router").top_k = 1  # type: ignore[assignment]


def _with_hook(model: nn.Module, factor: int = 2) -> None:
    model.get_submodule("dense.0").register_forward_hook(lambda module, inputs, output: output * factor)


def _with_shared_weights(model: nn.Module) -> None:
    first, second = (model.get_submodule(f"dense.{index}") for index in (0, 1))
    second.weight = first.weight  # type: ignore[assignment]


def _with_gradients(model: nn.Module) -> None:
    model.get_submodule("dense.0").weight.requires_grad_(True)  # type: ignore[union-attr, operator]


def _key(model: nn.Module, options: dict[str, Any] | None = None) -> str:
    """Return the key under which a new process would look up `model`."""
    return digest_of(StoredModule(model, options or EAGER, "any")._describe()[0])


def test_equal_models_have_one_key() -> None:
    assert _key(_stack()) == _key(_stack())
    assert _key(_stack()) == _key(_stack(dataclasses.replace(SMALL, seed=7)))  # numbers are no part of it


@pytest.mark.parametrize(
    "change", [_with_attribute, _with_hook, _with_shared_weights, _with_gradients, lambda model: model.train()]
)
def test_another_state_of_the_model_has_another_key(change: Callable[[nn.Module], None]) -> None:
    model = _stack()
    before = _key(model)
    change(model)
    assert _key(model) != before


@pytest.mark.parametrize(
    "other",
    [
        lambda: _stack(dataclasses.replace(SMALL, top_k=1)),
        lambda: _stack(dataclasses.replace(SMALL, experts=8)),
        lambda: _stack(dataclasses.replace(SMALL, layers=3)),
        lambda: _stack(dataclasses.replace(SMALL, dtype=torch.float64)),
        lambda: _stack(slots=1),
        lambda: build_stack(SMALL),
    ],
)
def test_another_model_or_placement_has_another_key(other: Callable[[], nn.Module]) -> None:
    assert _key(other()) != _key(_stack())


def test_other_options_have_another_key() -> None:
    model = _stack()
    assert _key(model, {**EAGER, "disable": ["sink_token_gather"]}) != _key(model) != _key(model, {"lower": "inductor"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("versions", lambda: {"torch": "3.0"}),
        ("machine", lambda devices: {"threads": 99}),
        ("settings", lambda: {}),
        ("_own_digest", lambda: "other sources of moepass"),
        ("SCHEMA", "moepass.capture/0"),
    ],
)
def test_other_versions_processors_and_sources_have_another_key(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    model = _stack()
    before = _key(model)
    monkeypatch.setattr(fingerprint if hasattr(fingerprint, name) else stored_compile, name, value)
    assert _key(model) != before


def test_other_settings_of_torch_have_another_key() -> None:
    model = _stack()
    before = _key(model)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert _key(model) != before
    with torch._inductor.config.patch({"cpp.fallback_scatter_reduce_sum": False}):
        assert _key(model) != before
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert _key(model) != before
    finally:
        torch.set_num_threads(threads)
    assert _key(model) == before


@pytest.mark.slow
def test_another_key_is_compiled_anew(filled: Filled) -> None:
    store, _ = filled
    model = _stack()
    _with_shared_weights(model)
    assert _compiles(store, model)


# ---- calls that are not stored ---------------------------------------------------------------------------------------


def test_an_argument_that_is_given_twice_or_not_read_is_not_stored(
    store: CaptureStore, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.ones(4)
    caplog.set_level("INFO", logger="moepass")
    StoredModule(Sum(), EAGER, "sum", store)(rows, rows)
    unread = Sum()
    unread.reads_second = False
    StoredModule(unread, EAGER, "sum", store)(rows, torch.ones(4))
    assert store.entries() == []
    assert sum("is passed twice" in record.getMessage() for record in caplog.records) == 2
    StoredModule(Sum(), EAGER, "sum", store)(rows, torch.ones(4))
    assert len(store.entries()) == 1


class Same(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * 3 if first is second else first + second


def test_an_argument_that_is_given_twice_has_no_stored_capture(store: CaptureStore) -> None:
    model, rows = Same(), torch.ones(4)
    StoredModule(model, EAGER, "same", store)(rows, torch.ones(4))
    loaded = StoredModule(model, EAGER, "same", store)
    assert graphs_compiled_by(lambda: loaded(rows, torch.ones(4))) == 0
    assert torch.equal(loaded(rows, rows), model(rows, rows))


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counter, "these changed since the first call: model"),
        (Memory, "writes to its inputs"),
        (Constant, "constant"),
        (Broken, "2 runs of 2 new graphs"),
        (Assigned, "these changed since the first call: tensors of the model"),
        (Listed, "these changed since the first call: tensors of the model"),
        (Skipped, "Dynamo compiles nothing in a call"),
    ],
)
def test_what_one_graph_does_not_give_is_not_stored(
    store: CaptureStore, caplog: pytest.LogCaptureFixture, model: Callable[[], nn.Module], reason: str
) -> None:
    caplog.set_level("INFO", logger="moepass")
    stored = StoredModule(model(), EAGER, "effects", store)
    for _ in range(2):
        assert torch.equal(stored(torch.ones(4)), torch.full((4,), 2.0))
    assert store.entries() == []
    assert reason in caplog.text


def test_nothing_is_stored_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEPASS_CACHE_DIR", "")
    assert StoredModule(Sum(), EAGER, "sum")._store is None
    monkeypatch.setenv("MOEPASS_CACHE_DIR", str(tmp_path / "named"))
    StoredModule(Sum(), EAGER, "sum")(torch.ones(4), torch.ones(4))
    assert len(CaptureStore(tmp_path / "named").entries()) == 1
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        assert StoredModule(Sum(), EAGER, "sum")._store is None


# ---- damage ----------------------------------------------------------------------------------------------------------


def _first(items: list[Any], key: Any, value: str) -> Any:
    return next(item for item in items if item[key] == value)


def _rewritten(store: CaptureStore, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a stored capture and its digest, as a bug of moepass could."""
    (entry,) = store.entries()
    assert entry.header is not None
    content = json.loads(entry.path.read_bytes().partition(b"\n")[2])
    edit(content)
    entry.path.unlink()
    store.save(entry.header.key, "edited", json.dumps(content).encode(), "stack", {})


# Of the right types, but no call has these values.
ABSURD: list[Callable[[dict[str, Any]], Any]] = [
    lambda content: content.update(result=77),
    lambda content: content.update(result=-1),
    lambda content: content.update(arguments=10**12),
    lambda content: _first(content["inputs"], "type", "argument").update(position=50),
    lambda content: content["sizes"].update(s0=[5, 0]),
    lambda content: content["sizes"].update(s0=[0, -1]),
    lambda content: content["conditions"].append(["9**9**9", "<", "1"]),
    lambda content: content["conditions"].append(["1", "<", f"1/({next(iter(content['sizes']))} - 6)"]),
    lambda content: content["conditions"].append(["1", "is", "1"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("plan"),
        lambda content: content["top"].pop(0),
        lambda content: content["segments"].clear(),
        lambda content: content["inputs"][0].update(type="what"),
        lambda content: _first(content["inputs"], "type", "state").update(paths=["dense.0.missing"]),
        lambda content: _first(content["inputs"], "type", "state").update(paths=[]),
        lambda content: content["plan"]["banks"][0].update(name="other"),
        lambda content: content["plan"]["banks"][0]["format"].update(home_bytes=1),
        lambda content: _first(content["top"], 0, "call_function").__setitem__(2, "torch.ops.aten.missing.default"),
        lambda content: _first(content["top"], 0, "call_function").__setitem__(2, "os.system"),
        *ABSURD,
    ],
)
def test_a_damaged_capture_is_reported_once_and_compiled_anew(
    filled: Filled, caplog: pytest.LogCaptureFixture, edit: Callable[[dict[str, Any]], Any]
) -> None:
    store, expected = filled
    _rewritten(store, edit)
    loaded = StoredModule(_stack(), EAGER, "stack", store)
    outputs: list[torch.Tensor] = []
    compiled = graphs_compiled_by(lambda: outputs.extend([loaded(_tokens(6)), loaded(_tokens(6))]))
    assert compiled == 1
    assert all(torch.equal(result, expected[6]) for result in outputs)
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    assert "ignored" in caplog.text


def test_models_that_ask_for_the_version_of_torch_compile_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    """transformers' grouped experts do so in bf16, and Dynamo warns of functions with an lru_cache."""
    is_torch_less_or_equal("2.8.0", accept_dev=True)
    assert torch.equal(StoredModule(AsksForVersion(), EAGER, "asks")(torch.ones(3)), torch.ones(3))
    assert [str(warning.message) for warning in recwarn if "lru_cache" in str(warning.message)] == []
