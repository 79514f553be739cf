"""`expert_format`: experts that are packed while they are loaded give the same results from every home."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import moepass
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import OptionError
from moepass.models.limits import ExpertFormat
from moepass.passes.ir.bank_format import BankFormat
from moepass.runtime.homes.options.home_options import HomeOptions
from moepass.runtime.offload.pack_checkpoint import pack_checkpoint
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import main_result, tiny_inputs, tiny_model
from tests.helpers.processes.ranks import run_ranks

EXPERT_FORMATS: tuple[ExpertFormat, ...] = ("stored", "lossless")

pytestmark = pytest.mark.usefixtures("no_grad")


def _model(family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    # As wide as it takes for packing to save bytes.
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    return tiny_model(family, dtype=dtype, num_hidden_layers=2, **sizes)


def _saved(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16) -> Path:
    _model(family, dtype).save_pretrained(folder)
    return folder


def _home(name: str) -> str | HomeOptions:
    return moepass.Peer(transport="collective") if name == "collective" else name


def _result(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    with torch.no_grad():
        return main_result(compiled(**inputs)).float()


def _from_files_and_from_memory(folder: Path, home: str, expert_format: ExpertFormat, same: Path) -> list[Any]:
    """Return the result of the checkpoint `same`, then result, formats and bytes of both ways to pack for `home`."""
    reference, moved = load_model(same), load_model(folder)
    inputs = tiny_inputs(moved)
    with torch.no_grad():
        found: list[Any] = [main_result(reference(**inputs)).float()]
    loaded = moepass.load_pretrained(folder, home=_home(home), expert_format=expert_format)
    moepass.offload_experts(moved, home=_home(home), expert_format=expert_format)
    for model in (loaded, moved):
        report = moepass.offload_report(model)
        found.append((_result(model, inputs), report.formats, report.home_bytes))
    return found


HOMES = [
    "host",
    "device",
    "peer",
    pytest.param("collective", marks=pytest.mark.slow),
    pytest.param("hybrid", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("home", HOMES)
def test_lossless_experts_compute_the_same_from_every_home(home: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    ranks = 1 if home in ("host", "device") else 2
    results = run_ranks(ranks, _from_files_and_from_memory, folder, home, "lossless", folder, timeout=180)
    home_bytes = 0
    for expected, (of_files, formats, nbytes), (of_memory, *_, same_nbytes) in results:
        assert torch.equal(of_files, expected)
        assert torch.equal(of_memory, expected)
        ((name, sizes),) = formats.items()
        assert name == "lossless bf16"
        assert sizes.home_bytes == sizes.link_bytes
        assert sizes.link_bytes < 0.85 * sizes.slot_bytes
        assert nbytes == same_nbytes
        home_bytes += nbytes
    # Shards begin at multiples of some bytes.
    assert sizes.home_bytes <= home_bytes <= sizes.home_bytes + 1024 * ranks


# Experts with biases, stored as stacks; and experts stored one by one, beside shared ones.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_other_layouts_of_experts(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = _model(family, dtype)
    for name, value in model.named_parameters():
        if ".experts." in name:
            value.copy_(torch.randn_like(value) * 0.02)
    model.save_pretrained(tmp_path)
    expected, (of_files, formats, _), (of_memory, *_) = _from_files_and_from_memory(
        tmp_path, "host", "lossless", tmp_path
    )
    assert torch.equal(of_files, expected)
    assert torch.equal(of_memory, expected)
    assert [(name.split()[0], sizes.is_encoded) for name, sizes in formats.items()] == [("lossless", True)]


@pytest.mark.parametrize("home", ["host", pytest.param("peer", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2**-24), (torch.float16, 2**-11)], ids=str)
def test_elf_keeps_its_bound(dtype: torch.dtype, bound: float, home: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "source", dtype=dtype)
    # Elements are packed one by one, so a packed checkpoint has the same weights.
    pack_checkpoint(folder, tmp_path / "packed", "elf", lambda done, total: None)
    ranks = 2 if home == "peer" else 1
    results = run_ranks(ranks, _from_files_and_from_memory, folder, home, "elf", tmp_path / "packed", timeout=180)
    for expected, (of_files, formats, _), (of_memory, *_) in results:
        assert [*formats] == [f"elf {'fp32' if dtype == torch.float32 else 'fp16'}"]
        assert torch.equal(of_files, expected)
        assert torch.equal(of_memory, expected)
    model, loaded = _model(dtype=dtype), moepass.load_pretrained(folder, expert_format="elf")
    for layer, streamed in zip(model.model.layers, loaded.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name).double()
            error = (getattr(streamed.mlp.experts, name).double() - weight).abs().max()
            assert 0 < error <= bound


@pytest.mark.parametrize("home", ["host", "device"])
def test_layers_that_stay_on_the_device_are_not_packed(home: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    calls: list[tuple[int, int]] = []
    model = moepass.load_pretrained(
        folder,
        home=home,
        resident_layers=(1,),
        expert_format="lossless",
        progress=lambda *call: calls.append(call),
    )
    report = moepass.offload_report(model)
    assert (len(report.layers), len(report.resident_layers)) == (1, 1)
    assert isinstance(model.model.layers[1].mlp.experts.down_proj, torch.nn.Parameter)
    inputs = tiny_inputs(original := _model())
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert len({total for _, total in calls}) == 1
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == (folder / "model.safetensors").stat().st_size - _header_bytes(folder)


def _header_bytes(folder: Path) -> int:
    with open(folder / "model.safetensors", "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_the_planner_counts_packed_bytes(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    # At home `device` experts rest among the other weights.
    stored, packed = (
        moepass.offload_report(moepass.load_pretrained(folder, home="device", expert_format=expert_format))
        for expert_format in EXPERT_FORMATS
    )
    assert stored.store.placed is not None
    assert packed.store.placed is not None
    experts = sum(value.nbytes for name, value in _model().named_parameters() if ".experts." in name)
    assert (stored.home_bytes, stored.store.placed.bank_bytes) == (0, experts)
    assert packed.store.placed.bank_bytes == packed.home_bytes < 0.85 * experts
    assert packed.store.placed.weights == stored.store.placed.weights


def test_layers_that_share_experts_share_a_packed_bank() -> None:
    model = _model()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    report = moepass.offload_experts(model, expert_format="lossless")
    assert len(report.layers) == 1
    assert [*report.formats] == ["lossless bf16"]
    assert torch.equal(_result(model, inputs), expected.float())


def _random_bits(tensor: torch.Tensor) -> None:
    """Write random exponents that packing cannot shorten, of finite numbers."""
    tensor.copy_(torch.randint(0, 0x7F00, tensor.shape, dtype=torch.int16).view(tensor.dtype))


def test_a_matrix_that_would_not_become_smaller_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    layers = model.model.layers
    _random_bits(layers[0].mlp.experts.down_proj)
    for weight in layers[1].mlp.experts.parameters():
        _random_bits(weight)
    originals = [value.clone() for layer in layers for value in layer.mlp.experts.parameters()]
    with caplog.at_level(logging.WARNING, "moepass"):
        report = moepass.offload_experts(model, expert_format="lossless")
    assert [record.getMessage() for record in caplog.records] == [
        "the experts of 1 of 2 layers stay as they are stored, because they would not become smaller in expert_format "
        "'lossless'"
    ]
    formats: dict[str, BankFormat] = report.formats
    assert {name: sizes.is_encoded for name, sizes in formats.items()} == {"lossless bf16": True, "bfloat16": False}
    (packed, plain) = report.store.banks
    assert packed.spec.format.home_bytes > originals[1].nbytes
    assert plain.spec.format.home_bytes == originals[2].nbytes + originals[3].nbytes
    restored = [getattr(layer.mlp.experts, name) for layer in layers for name in ("gate_up_proj", "down_proj")]
    for weight, original in zip(restored, originals, strict=True):
        assert torch.equal(weight.view(torch.int16), original.view(torch.int16))


def _stored_sizes(model: torch.nn.Module) -> list[int]:
    return [tensor.shape[-1] for tensor in moepass.offload_report(model).store.banks[0].spec.stored]


def _sizes_and_results(folder: Path) -> tuple[list[int], list[torch.Tensor]]:
    model = moepass.load_pretrained(folder, home="peer", expert_format="lossless")
    inputs = tiny_inputs(model)
    with torch.no_grad():
        return _stored_sizes(model), [item(**inputs).logits for item in (model, load_model(folder))]


def test_ranks_agree_on_the_length_of_sections(tmp_path: Path) -> None:
    model = _model()
    # The experts of the second rank have more escapes.
    for weight in model.model.layers[0].mlp.experts.parameters():
        weight[len(weight) // 2 :] *= torch.logspace(-3, 3, weight.shape[-1]).to(weight.dtype)
    model.save_pretrained(tmp_path)
    sizes = _stored_sizes(moepass.load_pretrained(tmp_path, expert_format="lossless"))
    for found, (result, expected) in run_ranks(2, _sizes_and_results, tmp_path):
        assert found == sizes
        assert torch.equal(result, expected)


def _disagrees(folder: Path, from_memory: bool) -> str:
    move: Callable[..., Any] = moepass.offload_experts if from_memory else moepass.load_pretrained
    expert_format = EXPERT_FORMATS[dist.get_rank()]
    with pytest.raises(PeerError) as caught, torch.no_grad():
        move(_model() if from_memory else folder, home=moepass.Peer(timeout_s=50), expert_format=expert_format)
    return str(caught.value)


@pytest.mark.parametrize("from_memory", [False, True])
def test_ranks_with_different_formats_get_one_error(from_memory: bool, tmp_path: Path) -> None:
    (text,) = set(run_ranks(2, _disagrees, _saved(tmp_path), from_memory))
    assert text == (
        "ranks disagree on expert_format: stored on rank 0, lossless on rank 1; give every rank the same expert_format"
    )


@pytest.mark.parametrize(
    ("expert_format", "home", "dtype", "text"),
    [
        ("zip", "host", torch.bfloat16, r"expert_format is 'zip'; it must be one of elf, lossless, stored"),
        ("lossless", "disk", torch.bfloat16, r"home='disk' experts are read from the checkpoint's files.*moepass pack"),
        ("elf", "host", torch.bfloat16, r"'elf', but it packs torch.float16, torch.float32, and .* are torch.bfloat16"),
        ("lossless", "host", torch.float64, r"'lossless', but it packs .*, and the experts .* are torch.float64"),
    ],
)
def test_formats_that_do_not_fit_are_refused(
    expert_format: Any, home: str, dtype: torch.dtype, text: str, tmp_path: Path
) -> None:
    model = _model(dtype=dtype)
    parameters = {name: id(value) for name, value in model.named_parameters()}
    with pytest.raises(OptionError, match=text):
        moepass.offload_experts(model, home=home, expert_format=expert_format)
    assert {name: id(value) for name, value in model.named_parameters()} == parameters
    model.save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=text):
        moepass.load_pretrained(tmp_path, home=home, expert_format=expert_format)


def test_experts_that_are_quantised_or_packed_already_are_refused(tmp_path: Path) -> None:
    quantised, plain = save_quantized(_model(), FORMS["fp8 blocks"], tmp_path)
    pack_checkpoint(plain, tmp_path / "packed", "lossless", lambda done, total: None)
    for folder, layout in ((quantised, "fp8"), (tmp_path / "packed", "lossless bf16")):
        with refused(OptionError, name="expert_format", value="lossless", expected=("stored",)):
            moepass.load_pretrained(folder, expert_format="lossless")
        with pytest.raises(OptionError, match=f"are stored as {layout}.*, and stay so; leave the option out"):
            moepass.load_pretrained(folder, expert_format="lossless")


def test_a_model_without_values_cannot_be_packed() -> None:
    with torch.device("meta"):
        model = type(_model())(_model().config)
    with pytest.raises(moepass.InputError, match="are on the meta device, so they have no values"):
        moepass.offload_experts(model, device="meta", expert_format="lossless")
