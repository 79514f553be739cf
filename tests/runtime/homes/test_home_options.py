"""The table of homes: options are checked by their constructors, and a new home needs two records."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import moepass
from moepass.models.formulas.communication import background_bytes
from moepass.models.homes import HOMES, HomeRecord, LinkUse, home_named
from moepass.models.limits import MOST_WAIT_SECONDS
from moepass.passes.ir.plan import BankSpec
from moepass.passes.machine.times import gather_seconds
from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.homes.device_home import make_transport
from moepass.runtime.homes.options.home_options import HomeOptions
from moepass.runtime.homes.options.packers import RUNNING_HOMES, RunningHome
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import Source, whole
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.error_fields import refused

DOCS = Path(__file__).resolve().parents[3] / "docs"


# ---- The table is complete -------------------------------------------------------------------------------------------


def test_every_home_can_run() -> None:
    assert set(RUNNING_HOMES) == set(HOMES)


def test_on_the_device_nothing_travels() -> None:
    with refused(moepass.OptionError, name="link", value="emulate:1e9"):
        moepass.Device(link="emulate:1e9")
    model = Stack(depth=2)
    with refused(moepass.OptionError, name="memory_budget", value="1GB"):
        moepass.offload_experts(model, "device", memory_budget="1GB")
    report = moepass.offload_experts(model, "device")  # nothing is quantised, so all layers are resident
    assert (report.home, report.layers, len(report.resident_layers)) == ("device", (), 2)
    for name, home in RUNNING_HOMES.items():
        assert home.options.home == home.options().home == name


def test_homes_that_are_spread_and_no_others_have_transports() -> None:
    for home in HOMES.values():
        assert bool(home.transports) == home.is_spread, home.name
        for device in map(torch.device, ("cpu", "cuda:0")):
            assert [make_transport(name, Link(), device).name for name in home.transports] == list(home.transports)
        assert home.is_spread == hasattr(RUNNING_HOMES[home.name].options(), "group") if home.travel else True


@pytest.mark.parametrize("home", [home.name for home in HOMES.values() if home.travel])
def test_every_byte_of_a_bank_that_is_not_there_comes_over_a_link(home: str) -> None:
    resident_bytes = 1000 // 4 if home_named(home).rests_in == "device" else 0
    assert background_bytes(home, 1000, 4) == 1000 - resident_bytes
    assert gather_seconds(dataclasses.replace(load_hardware("4xh100"), disk=load_hardware("h100").host), 1e9, home) > 0


@pytest.mark.parametrize("home", list(RUNNING_HOMES))
def test_the_documentation_names_every_home_and_option(home: str) -> None:
    page = (DOCS / "homes.md").read_text(encoding="utf-8")
    options = RUNNING_HOMES[home].options

    def row(begin: str) -> str:
        (match,) = [line for line in page.splitlines() if line.startswith(f"| `{begin}` | ")]
        return match

    assert ("CUDA" in row(home)) == ("cuda" in home_named(home).devices)
    names = {field.name for field in dataclasses.fields(options)}
    assert names == {span.split("=")[0] for span in row(f"moepass.{options.__name__}").split("`")[3::2]}
    assert {name for name in names if not re.search(rf"\b{name}[:,]", str(options.__doc__))} == set()


# ---- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name", "value", "expected"),
    [
        (moepass.Host, "link", "fast", "`real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`"),
        (moepass.Host, "link", 5e9, "`real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`"),
        (moepass.Peer, "link", "fast", "`real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`"),
        (moepass.Peer, "transport", "push", "one of collective, pull"),
        (moepass.Peer, "transport", 3, "one of collective, pull"),
        (moepass.Peer, "timeout_s", 0, "a number of seconds above 0"),
        (moepass.Hybrid, "timeout_s", 1e9, MOST_WAIT_SECONDS),
        (moepass.Hybrid, "staging_buffers", 0, "a whole number of at least 1"),
        (moepass.Hybrid, "staging_buffers", True, "a whole number of at least 1"),
        (moepass.Hybrid, "host_link", "5e9", "`real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`"),
        (moepass.Disk, "page_cache", "off", "one of auto, drop, keep"),
        (moepass.Disk, "folder", 3, "the path of a folder, or None"),
    ],
)
def test_wrong_options_are_named_when_they_are_made(
    options: type[HomeOptions], name: str, value: object, expected: object
) -> None:
    with refused(moepass.OptionError, name=name, value=value, expected=expected):
        options(**{name: value})


@pytest.mark.parametrize("arguments", [{"transport": "pull"}, {"folder": "banks"}, {"staging_buffers": 2}])
def test_options_of_another_home_are_no_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
        moepass.Host(**arguments)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
        moepass.offload_experts(Stack(depth=2), **arguments)


def test_options_are_values() -> None:
    assert moepass.Peer(timeout_s=5) == moepass.Peer(timeout_s=5) != moepass.Peer(timeout_s=6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        moepass.Host().link = "emulate:1e9"  # type: ignore[misc]


# ---- A new home ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attic(HomeOptions):
    home = "attic"

    rooms: int = 2


class AtticHome(Home):
    """A home that records which banks were requested, by their index."""

    def __init__(self, rooms: int) -> None:
        self.visits = [0] * rooms

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        self.visits[bank.index % len(self.visits)] += 1
        return tuple(whole(shard) for shard in shards)


class AtticPacker:
    def __init__(self, rooms: int) -> None:
        self.home = AtticHome(rooms)

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        return

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        return pack_bank(index, name, tensors, home="attic")

    def connect(self, banks: Sequence[Bank]) -> None:
        return


@pytest.fixture
def attic() -> Iterator[None]:
    """Register a home that consists of a record and a packer."""
    record = HomeRecord("attic", "gather dust in the attic", "host", (LinkUse("host", "all"), LinkUse("disk", "all")))
    running = RunningHome(Attic, lambda options, device: AtticPacker(options.rooms))
    with mock.patch.dict(HOMES, attic=record), mock.patch.dict(RUNNING_HOMES, attic=running):
        yield


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("home", "rooms"), [("attic", 2), (Attic(rooms=3, link="emulate:1e9"), 3)])
@torch.no_grad()
def test_a_new_home_runs(home: str | HomeOptions, rooms: int, attic: None) -> None:
    torch.manual_seed(0)
    model = Stack("dense_bmm", depth=3)
    expected = model(tokens())
    report = moepass.offload_experts(model, home)
    assert report.home == "attic"
    assert torch.equal(model(tokens()), expected)
    at_home = report.store.home
    assert isinstance(at_home, AtticHome)
    before = sum(at_home.visits)
    assert before >= 3
    assert len(at_home.visits) == rooms
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(2):
            assert torch.equal(compiled(tokens()), expected)
    assert sum(at_home.visits) >= before + 6
    assert compilations[0].plan.reason.startswith("3 banks gather dust in the attic and stream through 2 slots")


@pytest.mark.slow
def test_a_new_home_is_forecast(attic: None) -> None:
    hardware = load_hardware("h100")
    assert hardware.host is not None
    with pytest.raises(moepass.InputError, match="has no disk link"):
        gather_seconds(hardware, 1e9, "attic")
    both = dataclasses.replace(hardware, disk=hardware.host)
    assert gather_seconds(both, 1e9, "attic") == gather_seconds(both, 1e9, "host")
    report = moepass.explain("demo", hardware=both, home="attic", lower="eager")
    assert report.strategy.home == "attic"


def test_a_new_home_appears_in_errors(attic: None) -> None:
    with pytest.raises(moepass.OptionError, match="it must be one of attic, device, disk, host, hybrid, peer"):
        moepass.offload_experts(Stack(depth=2), "cellar")
    with pytest.raises(moepass.InputError, match="it must be one of attic, device, disk, host, hybrid, peer"):
        moepass.explain("demo", home="cellar")
    with pytest.raises(moepass.InputError, match=r"device is meta; home='attic' works on cpu only; use home='host'"):
        moepass.offload_experts(Stack(depth=2), "attic", device="meta")
