"""Offloading: which parameters move, the eager model afterwards, and the operations that it still supports."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import moepass
from moepass.models.errors import InputError
from moepass.runtime.banks.banked_modules import BankedParameter
from moepass.runtime.banks.banks import BankStore, find_store
from moepass.runtime.offload.offload import expert_parameters, find_expert_modules
from tests.helpers.graphs.backend_helper import BLOCKS, EXPERTS, HIDDEN, BatchedBlock, Stack, tokens
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.tiny import EXPERT_KINDS, tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("form", BLOCKS)
def test_a_report_says_what_was_moved(form: str) -> None:
    model = Stack(form, depth=3, bias=True)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    report = moepass.offload_experts(model, slots=2)
    assert report.home == "host"
    assert report.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert (
        report.home_bytes == report.store.home_bytes == sum(bank.spec.format.home_bytes for bank in report.store.banks)
    )
    assert report.ring_bytes == 2 * report.store.banks[0].spec.format.slot_bytes
    assert find_store(report.store.number) is report.store
    for name, value in weights.items():
        module = model.get_submodule(name.rpartition(".")[0])
        assert torch.equal(getattr(module, name.rpartition(".")[2]), value), name


@pytest.mark.slow
def test_memory_on_the_device_counts_what_eager_mode_holds_until_a_graph_is_compiled() -> None:
    model = Stack(depth=3)
    store = moepass.offload_experts(model).store
    assert store.device_bytes == 0
    model(tokens())
    assert store.device_bytes == sum(tensor.nbytes for tensor in store.banks[2].spec.tensors)
    torch.compile(model, backend="asyncep", options={"lower": "eager"})(tokens())
    assert store.device_bytes == store.ring().device_bytes == store.ring_bytes


@pytest.mark.parametrize("runs_compiled_first", [False, True])
def test_calls_of_the_uncompiled_model_are_said_once(
    runs_compiled_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack(depth=2)
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    if runs_compiled_first:
        compiled(tokens())
    assert "uncompiled" not in caplog.text
    for _ in range(2):
        model(tokens())  # as `compiled.generate(...)` does
    assert caplog.text.count("this call runs the uncompiled model") == 1


def test_a_ring_has_no_more_slots_than_there_are_banks() -> None:
    model = Stack(depth=2)
    report = moepass.offload_experts(model, slots=10**12)
    largest = max(bank.spec.format.slot_bytes for bank in report.store.banks)
    assert report.ring_bytes == report.store.ring().device_bytes == 2 * largest


@pytest.mark.slow
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("spare", [0, 1])
def test_the_first_layers_stay_where_memory_allows(form: str, spare: int) -> None:
    model, reference = Stack(form, depth=4), Stack(form, depth=4)
    model.load_state_dict(reference.state_dict())
    layer_bytes = sum(value.nbytes for value in model.blocks[0].parameters())
    report = moepass.offload_experts(model, resident_bytes=2 * layer_bytes + spare)
    assert report.resident_layers == ("blocks.0", "blocks.1")
    assert report.layers == ("blocks.2", "blocks.3")
    assert torch.equal(model.blocks[1].up, reference.blocks[1].up)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
        assert torch.equal(compiled(tokens()), reference(tokens()))
    plan = compilations[0].plan
    assert len(plan.blocks) == 4
    assert [stay.bank for stay in plan.slot_stays] == [0, 1]


@pytest.mark.slow
def test_any_layers_may_stay() -> None:
    model, reference = Stack(depth=4), Stack(depth=4)
    model.load_state_dict(reference.state_dict())
    report = moepass.offload_experts(model, resident_layers=[3, 1])
    assert report.resident_layers == ("blocks.1", "blocks.3")
    assert report.layers == ("blocks.0", "blocks.2")
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    assert torch.equal(compiled(tokens()), reference(tokens()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"resident_layers": [1, 7]}, moepass.InputError, "resident_layers has 7, but no module with experts has"),
        ({"resident_layers": [0, 1]}, moepass.InputError, "resident_layers names all 2 layers with experts"),
        ({"resident_layers": [-1]}, moepass.OptionError, "must be a list of layer numbers from 0 on"),
        ({"resident_layers": ["blocks.0"]}, moepass.OptionError, "must be a list of layer numbers from 0 on"),
        ({"resident_layers": 1}, moepass.OptionError, "must be a list of layer numbers from 0 on"),
        ({"resident_layers": [1], "resident_bytes": 1}, moepass.OptionError, "give one of them"),
    ],
)
def test_layers_that_are_to_stay_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        moepass.offload_experts(Stack(depth=2), **arguments)


def test_a_budget_for_resident_layers_is_checked() -> None:
    with refused(moepass.OptionError, name="resident_bytes", value=-1):
        moepass.offload_experts(Stack(depth=2), resident_bytes=-1)
    with pytest.raises(moepass.InputError, match="resident_bytes is 1000000000, and the experts of all 2 layers fit"):
        moepass.offload_experts(Stack(depth=2), resident_bytes=10**9)


def test_the_experts_leave_the_model() -> None:
    model = Stack("dense_bmm", depth=2)
    dense = sum(value.numel() for name, value in model.named_parameters() if "blocks" not in name)
    moepass.offload_experts(model)
    assert sum(value.numel() for value in model.parameters()) == dense
    assert not any(name.endswith("shard") for name in model.state_dict())
    assert {name for name, value in model.named_parameters() if value.numel() == 0} == {
        f"blocks.{layer}.parametrizations.{name}.original" for layer in range(2) for name in ("up", "down")
    }
    assert not any(value.requires_grad for name, value in model.named_parameters() if "blocks" in name)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_eager_forward_is_bit_identical(form: str, mode: Callable[[], Any]) -> None:
    model = Stack(form, depth=3, bias=True)
    expected = model(tokens())
    with mode():
        moepass.offload_experts(model)
        for _ in range(2):
            assert torch.equal(model(tokens()), expected)


class _Counter:
    """A counter of copies of banks from their home; cached banks do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[int] = []
        real = BankStore.gather_now

        def counting(store: BankStore, bank: int) -> tuple[torch.Tensor, ...]:
            held = store._eager
            tensors = real(store, bank)
            if held is None or held[1] is not tensors:
                self.copies.append(bank)
            return tensors

        monkeypatch.setattr(BankStore, "gather_now", counting)


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", EXPERT_KINDS)
def test_families_run_offloaded_in_eager_mode_with_one_copy_per_layer(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, experts_implementation=implementation)
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    report = moepass.offload_experts(model)
    counter = _Counter(monkeypatch)
    assert torch.equal(model(**inputs).logits, expected)
    assert counter.copies == list(range(len(report.layers)))


@pytest.mark.slow
def test_eager_mode_holds_one_bank_at_most() -> None:
    model = Stack("dense_bmm", depth=3)
    report = moepass.offload_experts(model)
    first = report.store.gather_now(0)
    alive = [weakref.ref(tensor) for tensor in first]
    del first
    report.store.gather_now(1)
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_the_data_dependent_expert_loop_compiles_in_pieces_and_stays_right(family: str) -> None:
    model = tiny_model(family, experts_implementation="eager")
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    report = moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(2):
            assert torch.equal(compiled(**inputs).logits, expected)
    assert len(compilations) > 1
    refused = {refusal.where for item in compilations for refusal in item.plan.refusals}
    assert refused
    assert refused <= set(report.layers)
    assert not any(item.plan.blocks for item in compilations)


def test_copying_or_pickling_is_refused_with_the_way_out() -> None:
    model = Stack("dense_bmm", depth=1)
    twin = copy.deepcopy(model)
    moepass.offload_experts(model)
    with pytest.raises(moepass.InputError, match=r"cannot be copied or pickled.*before offload_experts"):
        copy.deepcopy(model)
    with pytest.raises(moepass.InputError, match=r"cannot be copied or pickled"):
        pickle.dumps(model.blocks[0].parametrizations["up"][0])
    for module in (model, model.blocks, model.blocks[0], model.blocks[0].parametrizations):
        for save in (pickle.dumps, lambda part: torch.save(part, io.BytesIO()), copy.deepcopy):
            with pytest.raises(moepass.InputError, match="cannot be copied or pickled"):
                save(module)
    # A shallow copy reads the same banks.
    assert torch.equal(copy.copy(model.blocks[0]).up, model.blocks[0].up)
    moepass.offload_experts(twin)
    assert torch.equal(twin(tokens()), model(tokens()))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to("meta"),
    ],
)
def test_a_model_cannot_change_type_or_place_under_its_banks(move: Callable[[nn.Module], object]) -> None:
    model = Stack("dense_bmm", depth=1)
    moepass.offload_experts(model)
    with pytest.raises(
        moepass.InputError, match=r"offloaded experts are torch\.float32 for cpu .* before offload_experts"
    ):
        move(model)


def test_moves_that_change_nothing_are_fine() -> None:
    model = Stack("dense_bmm", depth=2)
    expected = model(tokens())
    moepass.offload_experts(model)
    shard = next(module for module in model.modules() if isinstance(module, BankedParameter)).shard
    moved = model.to("cpu").float().to(torch.float32).cpu().eval().requires_grad_(False)
    assert torch.equal(moved(tokens()), expected)
    assert next(module for module in moved.modules() if isinstance(module, BankedParameter)).shard is shard


def test_experts_in_another_type_than_the_dense_part_keep_it() -> None:
    model = Stack("batched_mm", depth=1)
    model.blocks.to(torch.float64)
    moepass.offload_experts(model)
    assert model.blocks[0].up.dtype == torch.float64
    assert model.linears[0].weight.dtype == torch.float32


def test_weights_that_rest_in_a_bank_cannot_be_assigned() -> None:
    model = Stack("dense_bmm", depth=1)
    moepass.offload_experts(model)
    with pytest.raises(moepass.InputError, match=r"`up` was offloaded and rests in a bank"):
        model.blocks[0].up = torch.zeros(1)


def test_offloading_twice_is_an_error() -> None:
    model = Stack("dense_bmm", depth=1)
    moepass.offload_experts(model)
    with pytest.raises(moepass.InputError, match="Stack has no expert weights to offload: they were offloaded before"):
        moepass.offload_experts(model)


def test_a_model_without_experts_is_an_error() -> None:
    with pytest.raises(moepass.InputError, match=r"Linear has no expert weights to offload: no module has two"):
        moepass.offload_experts(nn.Linear(2, 2))


_HOMES = "one of device, disk, host, hybrid, peer, or its options, such as moepass.Peer(timeout_s=300)"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("home", home, _HOMES) for home in ("disc", moepass.Host, ["host"])),
        *(("slots", slots, "at least 1") for slots in (0, -3, 1.5, "2", True)),
        *(("device", device, "cpu, cuda or cuda:INDEX") for device in (["cpu"], 1.5, "gpu")),
        ("device", "xpu", "cpu or cuda, to which experts stream"),
        ("device", "cuda:99", "cpu"),
    ],
)
def test_wrong_arguments_name_the_value_and_leave_the_model_alone(name: str, value: Any, expected: str) -> None:
    model = Stack("dense_bmm", depth=2)
    before = sorted(model.state_dict())
    kind = moepass.InputError if name == "device" else moepass.OptionError
    with refused(kind, name=name, value=value, expected=expected):
        moepass.offload_experts(model, **{name: value})
    assert sorted(model.state_dict()) == before
    assert not any(isinstance(module, BankedParameter) for module in model.modules())


def test_training_mode_with_gradients_is_refused_in_eager_mode() -> None:
    model = Stack("dense_bmm", depth=1)
    moepass.offload_experts(model)
    model.train()
    with (
        torch.enable_grad(),
        pytest.raises(moepass.InputError, match=r"call model\.eval\(\), and run it under torch\.no_grad"),
    ):
        model(tokens())
    model.eval()
    with torch.enable_grad():
        assert not model(tokens()).requires_grad


def test_a_shared_layer_becomes_one_bank() -> None:
    model = Stack("dense_bmm", depth=3)
    model.blocks[2] = model.blocks[0]
    expected = model(tokens())
    report = moepass.offload_experts(model)
    assert report.layers == ("blocks.0", "blocks.1")
    assert torch.equal(model(tokens()), expected)


def _tied(depth: int = 3, *names: str) -> Stack:
    """Return a model whose last layer shares the parameters `names` with the first one."""
    model = Stack("dense_bmm", depth=depth)
    for name in names:
        setattr(model.blocks[-1], name, getattr(model.blocks[0], name))
    return model


def test_layers_that_share_all_parameters_share_a_bank() -> None:
    model = _tied(3, "up", "down")
    expected = model(tokens())
    report = moepass.offload_experts(model)
    assert report.layers == ("blocks.0", "blocks.1")
    assert torch.equal(model(tokens()), expected)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    for _ in range(2):
        assert torch.equal(compiled(tokens()), expected)
    state = model.state_dict()
    assert state["blocks.0.up"].data_ptr() == state["blocks.2.up"].data_ptr()


def test_layers_that_share_some_parameters_have_banks_of_their_own() -> None:
    model = _tied(3, "up")
    expected = model(tokens())
    report = moepass.offload_experts(model)
    assert report.layers == ("blocks.0", "blocks.1", "blocks.2")
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    for run in (model, compiled, compiled):
        assert torch.equal(run(tokens()), expected)


def test_one_parameter_under_two_names_leaves_the_module_under_both() -> None:
    model = Stack("dense_bmm", depth=1, split=True)
    model.blocks[0].gate = model.blocks[0].up
    expected = model(tokens())
    moepass.offload_experts(model)
    assert not any("blocks" in name and value.numel() for name, value in model.named_parameters())
    assert torch.equal(model(tokens()), expected)


def test_a_model_that_shares_the_parameters_keeps_them() -> None:
    model, twin = Stack("dense_bmm", depth=2).requires_grad_(True), Stack("dense_bmm", depth=2)
    for mine, block in zip(model.blocks, twin.blocks, strict=True):
        block.up, block.down = mine.up, mine.down
    expected = twin(tokens())
    moepass.offload_experts(model)
    assert torch.equal(twin(tokens()), expected)
    assert twin.blocks[0].up.requires_grad
    moepass.offload_experts(twin)
    assert torch.equal(twin(tokens()), expected)


def test_tensors_cached_in_inference_mode_serve_gradients_of_dense_weights() -> None:
    model = Stack("dense_bmm", depth=1).eval()
    model.linears.requires_grad_(True)
    moepass.offload_experts(model)
    with torch.inference_mode():
        model(tokens())
    with torch.enable_grad():
        model(tokens()).sum().backward()
    assert model.linears[0].weight.grad is not None


def test_eager_mode_sees_a_bank_that_was_changed_in_place() -> None:
    model = Stack("dense_bmm", depth=1)
    report = moepass.offload_experts(model)
    model(tokens())
    bank = report.store.banks[0]
    bank.views(bank.shard)[0].fill_(0.5)
    assert torch.equal(model.blocks[0].up, torch.full_like(model.blocks[0].up, 0.5))


def test_a_model_made_in_inference_mode_is_offloaded_like_any_other() -> None:
    with torch.inference_mode():
        model = Stack("dense_bmm", depth=2)
        expected = model(tokens())
        report = moepass.offload_experts(model)
    assert not any(bank.shard.is_inference() for bank in report.store.banks)
    assert torch.equal(model(tokens()), expected)


def _module(**shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        setattr(module, name, nn.Parameter(torch.zeros(shape)))
    return module


def test_further_parameters_of_experts_move_too() -> None:
    lora = _module(up=(4, 64, 32), down=(4, 32, 48), a=(4, 7, 32), b=(4, 64, 7), scale=(4, 1, 1), bias=(4, 64))
    assert set(expert_parameters(lora)) == {"up", "down", "a", "b", "scale", "bias"}
    assert set(expert_parameters(_module(up=(4, 64, 32), down=(4, 32, 64), norm=(32,)))) == {"up", "down"}


@pytest.mark.parametrize(
    "shapes",
    [
        {"scale": (4, 1, 1), "shift": (4, 1, 1)},
        {"scale": (4, 1, 1), "weight": (4, 8, 1)},
        {"a": (4, 3, 5), "b": (4, 7, 11), "scale": (4, 1, 1)},
        {"query": (32, 16, 64), "key": (8, 16, 64), "value": (8, 16, 64)},  # heads, not experts
        {"mix": (1, 1, 64), "up": (1, 64, 32), "down": (1, 32, 64)},
    ],
)
def test_parameters_that_only_look_like_experts_stay(shapes: dict[str, tuple[int, ...]]) -> None:
    assert expert_parameters(_module(**shapes)) == {}


def test_experts_are_recognised_by_shape() -> None:
    assert set(expert_parameters(BatchedBlock(bias=True))) == {"up", "down", "up_bias", "down_bias"}
    assert expert_parameters(nn.Linear(4, 4)) == {}
    convolution = nn.Conv1d(4, 4, 3)
    assert expert_parameters(convolution) == {}
    single = nn.Module()
    single.up = nn.Parameter(torch.zeros(1, HIDDEN, 8))
    single.down = nn.Parameter(torch.zeros(1, 8, HIDDEN))
    assert expert_parameters(single) == {}
    odd = nn.Module()
    odd.a = nn.Parameter(torch.zeros(EXPERTS, 3, 5))
    odd.b = nn.Parameter(torch.zeros(EXPERTS, 7, 11))
    assert expert_parameters(odd) == {}
    assert list(find_expert_modules(Stack(depth=2))) == ["blocks.0", "blocks.1"]


def test_a_store_is_found_by_number_as_long_as_its_model_lives() -> None:
    model = Stack("dense_bmm", depth=1)
    number = moepass.offload_experts(model).store.number
    assert find_store(number).slots == 2
    model(tokens())
    del model
    gc.collect()
    with pytest.raises(KeyError):
        find_store(number)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "device_map", "meta"])
def test_experts_without_values_are_refused(way: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    if way == "cpu_offload":
        accelerate.cpu_offload(model, torch.device("cpu"))
    elif way == "disk_offload":
        accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
    elif way == "device_map":
        names = ["lm_head", *(f"model.{name}" for name in model.model._modules if name != "layers")]
        places = {f"model.layers.{index}": "disk" if index else "cpu" for index in range(len(model.model.layers))}
        device_map = {**dict.fromkeys(names, "cpu"), **places}
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    else:
        model.to("meta")
    message = r"model\.layers\.\d\.mlp\.experts\.\w+ and \d+ other parameters are on the meta device.*load_pretrained"
    with pytest.raises(InputError, match=message):
        moepass.offload_experts(model)
    with pytest.raises(InputError, match=message):
        moepass.offload_experts(model, device="cpu")
