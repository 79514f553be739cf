"""Hardware profiles: presets, files, refusals, and predicted seconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.formulas.stored_weights import BankSizes
from moepass.passes.machine import times
from moepass.passes.machine.hardware import (
    COLLECTIVES,
    DENSE_GEMM_EFFICIENCY,
    Collectives,
    Figure,
    Hardware,
    TransferLink,
    with_collectives,
    with_emulated_link,
    with_ranks,
)
from moepass.passes.machine.seconds_table import Source, table_of
from moepass.runtime.profiles.hardware_profiles import load_hardware, preset_names, profile_json, read_profile
from tests.helpers.graphs.error_fields import refused

H100 = load_hardware("8xh100-80g")
BANK_BYTES = 128 * 3 * 4096 * 1536 * 2  # one layer of Qwen3-235B-A22B in bf16


def _measured() -> Hardware:
    """Return H100s with tables for everything, each of them a power law."""
    gemm = table_of(
        {"rows": (1, 4096), "inner": (64, 4096), "columns": (64, 4096)},
        [2 * m * k * n / 500e12 for m in (1, 4096) for k in (64, 4096) for n in (64, 4096)],
        "calibrated",
    )
    attention = table_of(
        {"sequence": (128, 8192), "head_dim": (64, 128)},
        [2 * s * s * d / 300e12 for s in (128, 8192) for d in (64, 128)],
        "calibrated",
    )
    collective = table_of({"bytes": (1e3, 1e9)}, (20e-6, 20e-6 * 1e6), "user")
    return dataclasses.replace(
        H100,
        compute={"gemm": {"bf16": gemm}, "grouped_gemm": {"bf16": gemm}, "attention": {"bf16": attention}},
        collectives=Collectives(8, {"all_to_all": collective}),
    )


# ---- Presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_where_each_of_its_figures_comes_from(name: str) -> None:
    hardware = load_hardware(f"8x{name}")
    assert (hardware.name, hardware.ranks) == (f"8x{name}", 8)
    sources = {field: text.split(":")[0] for field, text in hardware.sources().items()}
    stated = {field for field, source in sources.items() if source == "datasheet"}
    assert {"flops.bf16", "memory_bytes", "memory_bytes_per_s", "host.bytes_per_s"} <= stated
    # At most three efficiencies, and assumed values are labelled as such.
    empirical = {field for field, source in sources.items() if source == "empirical"}
    assert {field for field in empirical if field.startswith("efficiency.")} == {
        "efficiency.dense_gemm",
        "efficiency.irregular",
        "efficiency.bandwidth",
    }
    assert set(sources.values()) <= {"datasheet", "empirical", "derived"}


def test_presets_equal_the_datasheets() -> None:
    assert (H100.flops["bf16"].value, H100.flops["fp8"].value) == (989e12, 1979e12)
    assert H100.peer is not None
    assert H100.peer.bytes_per_s == Figure(450e9, "datasheet", "one direction")
    assert "fp8" not in load_hardware("a100-80g").flops
    assert load_hardware("l40s-48g").peer is None


@pytest.mark.parametrize(
    ("text", "name"), [("8xh100", "8xh100-80g"), ("H200-141G", "1xh200-141g"), ("2xl40s", "2xl40s-48g")]
)
def test_the_beginning_of_a_name_is_enough(text: str, name: str) -> None:
    assert load_hardware(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xh110-80g", "hardware '8xh110-80g' is unknown; did you mean h100-80g"),
        ("8xg100-80g", "did you mean a100-80g|did you mean h100-80g"),
        ("8xh", "did you mean h100-80g or h200-141g"),
        ("tpu", "hardware 'tpu' is unknown; .*one of a100-80g, b200-192g, h100-80g, h200-141g, l40s-48g"),
        ("0xh100-80g", "hardware '0xh100-80g' has no devices"),
        ("h100-80g x 8", "is unknown"),
        ("", "hardware '' is unknown"),
        ("nowhere.json", "profile 'nowhere.json' cannot be read: No such file"),
    ],
)
def test_unknown_hardware(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_hardware(text)


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", [H100, load_hardware("2xl40s"), _measured(), with_emulated_link(H100, 1e9)])
def test_a_profile_comes_back_from_its_file(hardware: Hardware, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(profile_json(hardware))
    assert read_profile(file) == hardware == load_hardware(str(file))


def _file(folder: Path, raw: Any, name: str = "mine.json") -> Path:
    file = folder / name
    file.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return file


def test_a_profile_may_contain_only_differences(tmp_path: Path) -> None:
    table = {"axes": [{"name": "bytes", "points": [1, 1e6]}], "seconds": [1e-5, 1e-4], "source": "user"}
    raw = {
        "extends": "8xh100-80g",
        "name": "our node",
        "host": {"bytes_per_s": 25e9},
        "flops": {"bf16": {"value": 700e12, "source": "calibrated", "note": "ours"}},
        "collectives": {"ranks": 8, "seconds": {"all_to_all": table}},
    }
    _file(tmp_path, raw, "node.json")
    hardware = load_hardware(_file(tmp_path, {"extends": "node.json", "ranks": 4}))
    assert (hardware.name, hardware.ranks) == ("our node", 4)
    assert hardware.host == TransferLink(Figure(25e9, "user"), H100.host.latency_seconds)  # type: ignore[union-attr]
    assert hardware.flops["bf16"] == Figure(700e12, "calibrated", "ours")
    assert (hardware.flops["fp8"], hardware.peer) == (H100.flops["fp8"], H100.peer)
    assert times.collective_seconds(hardware, "all_to_all", 1e6, ranks=8) == pytest.approx(1e-4)


def test_plain_numbers_become_figures_where_the_base_profile_has_none(tmp_path: Path) -> None:
    raw = {
        "extends": "4xl40s",
        "disk": {"bytes_per_s": 5e9, "latency_seconds": 1e-4},
        "host": {"emulated_bytes_per_s": 1e9},
        "flops": {"fp8": 1e15},
    }
    hardware = read_profile(_file(tmp_path, raw))
    assert hardware.disk == TransferLink(Figure(5e9, "user"), Figure(1e-4, "user"))
    assert hardware.host is not None
    assert hardware.host.emulated_bytes_per_s == Figure(1e9, "user")
    assert hardware.flops["fp8"] == Figure(1e15, "user")


def test_tables_of_collectives_are_for_one_number_of_ranks(tmp_path: Path) -> None:
    table = {"axes": [{"name": "bytes", "points": [1e3, 1e6]}], "seconds": [1e-5, 1e-3], "source": "user"}
    both = {"ranks": 2, "seconds": {"all_to_all": table, "all_gather": table}}
    _file(tmp_path, {"extends": "2xh100", "collectives": both}, "two.json")
    eight = {"extends": "two.json", "ranks": 8, "collectives": {"ranks": 8, "seconds": {"all_to_all": table}}}
    collectives = read_profile(_file(tmp_path, eight)).collectives
    assert collectives is not None
    assert (collectives.ranks, list(collectives.seconds)) == (8, ["all_to_all"])
    same = read_profile(_file(tmp_path, {**eight, "collectives": {"seconds": {"all_to_all": table}}})).collectives
    assert same is not None
    assert (same.ranks, set(same.seconds)) == (2, {"all_to_all", "all_gather"})


def test_a_rate_replaces_a_table(tmp_path: Path) -> None:
    table = {"axes": [{"name": "bytes", "points": [1, 1e9]}], "seconds": [1e-3, 1e-1], "source": "user"}
    _file(tmp_path, {"extends": "h100", "host": {"seconds": table}, "memory": table}, "tables.json")
    profile = read_profile(tmp_path / "tables.json")
    assert times.gather_seconds(profile, 1e9, "host") == times.memory_seconds(profile, 1e9) == pytest.approx(0.1)
    raw = {"extends": "tables.json", "host": {"bytes_per_s": 1e9}, "memory_bytes_per_s": 1e9}
    hardware = read_profile(_file(tmp_path, raw))
    assert times.gather_seconds(hardware, 1e9, "host") == pytest.approx(1 / 0.82, rel=1e-3)
    assert times.memory_seconds(hardware, 1e9) == pytest.approx(1 / 0.82)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", 'is not a JSON object; it must be one, with "schema"'),
        ({}, "schema"),
        ({"extends": 5}, '"extends" is 5; it must be the name'),
        ({"extends": "8xh101"}, "hardware '8xh101' is unknown; did you mean h100-80g"),
        ({"extends": "mine.json"}, "extends a chain of more than 8 profiles"),
        ({"extends": "h100", "ranks": 0}, "ranks is 0; it must lie between 1 and 512"),
        ({"extends": "h100", "ranks": "8"}, r"Expected `int`, got `str` - at `\$.ranks`"),
        ({"extends": "h100", "memory_bytes": "80 GB"}, r"got `str` - at `\$.memory_bytes`"),
        ({"extends": "h100", "memory_bytes": -1}, r"a figure is -1.0; it must be a finite number.*\$.memory_bytes"),
        ({"extends": "h100", "memory_bytes": 0}, "memory_bytes is 0; it must lie between 1000 and 1e"),
        (
            {"extends": "h100", "efficiency": {"irregular": 1.5}},
            "efficiency.irregular is 1.5; it must lie between 1e-06 and 1: it is a fraction of",
        ),
        ({"extends": "h100", "flops": {"bf61": 1e15}}, "flops has 'bf61'; it can have bf16, fp16, fp32, fp8"),
        ({"extends": "h100", "peer": {"emulated_bytes_per_s": 0}}, "peer.emulated_bytes_per_s is 0; it must lie"),
        ({"extends": "h100", "hots": None}, r"\$.hots is not a field; did you mean host\?"),
        (
            {"extends": "h100", "host": {"bytes_per_sec": 1}},
            r"\$.host.bytes_per_sec is not a field; did you mean bytes_per_s",
        ),
        (
            {"extends": "h100", "flops": {"bf16": {"value": 1, "source": "guess"}}},
            r"'guess' - at `\$.flops\[...\].source`",
        ),
        (
            {"extends": "h100", "compute": {"gem": {}}},
            "compute has 'gem'; it can have attention, gemm, grouped_gemm, masked",
        ),
        ({"extends": "h100", "collectives": {"ranks": 1, "seconds": {}}}, "ranks is 1; it must lie between 2 and 512"),
        ({"extends": "h100", "collectives": {"ranks": 2, "seconds": {"alltoall": None}}}, r"Expected `object`"),
        (
            {"extends": "h100", "schema": "moepass.hardware/2"},
            "schema of a profile is 'moepass.hardware/2'; this version",
        ),
    ],
)
def test_bad_files_name_the_field(raw: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_profile(_file(tmp_path, raw))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(("profile ", "hardware "))


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("memory", {"axes": [{"name": "rows", "points": [1]}], "seconds": [1], "source": "user"}),
        ("memory", {"axes": [{"name": "bytes", "points": [2, 1]}], "seconds": [1, 1], "source": "user"}),
        ("memory", {"axes": [{"name": "bytes", "points": [1, 2]}], "seconds": [1], "source": "user"}),
    ],
)
def test_bad_tables_are_refused(field: str, table: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"profile .*table"):
        read_profile(_file(tmp_path, {"extends": "h100", field: table}))


# ---- Transfers -------------------------------------------------------------------------------------------------------


def _plain(hardware: Hardware) -> Hardware:
    """Return hardware without latencies and with efficiencies of 1, to test formulas without constants."""
    unit = Figure(1.0, "user")
    links = {
        name: dataclasses.replace(getattr(hardware, name), latency_seconds=Figure(0.0, "user"))
        for name in ("peer", "host")
        if getattr(hardware, name)
    }
    return dataclasses.replace(
        hardware, efficiency=dataclasses.replace(hardware.efficiency, bandwidth=unit, dense_gemm=unit), **links
    )


def test_transfers_follow_the_design_s_formulas() -> None:
    plain = _plain(H100)
    local_seconds = 2 * BANK_BYTES / 8 / 3.35e12
    peer_seconds = BANK_BYTES * 7 / 8 / 450e9
    assert times.pull_seconds(plain, BANK_BYTES, copies_own_shard=True) == pytest.approx(peer_seconds + local_seconds)
    assert times.gather_seconds(plain, BANK_BYTES, "peer") == pytest.approx(peer_seconds)
    assert times.gather_seconds(plain, BANK_BYTES, "host") == pytest.approx(BANK_BYTES / 64e9)
    slower_of_both = max(times.pull_seconds(plain, BANK_BYTES), BANK_BYTES / 8 / 64e9)
    assert times.gather_seconds(plain, BANK_BYTES, "hybrid") == pytest.approx(slower_of_both)
    assert times.gather_seconds(plain, BANK_BYTES, "device") == 0
    assert times.gather_seconds(with_ranks(plain, 1), BANK_BYTES, "peer") == 0


def test_every_slice_costs_its_latency() -> None:
    link = TransferLink(Figure(1e9, "user"), Figure(1e-3, "user"))
    assert times.transfer_seconds(link, 10 << 20) == pytest.approx(3e-3 + (10 << 20) / 1e9)
    # Large banks have larger slices, because the host limits their number.
    assert times.transfer_seconds(link, 10 << 30) == pytest.approx(64e-3 + (10 << 30) / 1e9)
    assert times.transfer_seconds(link, 0) == 0


def test_decoding_is_measured_or_runs_at_the_rate_of_memory_during_the_next_transfer() -> None:
    h100 = load_hardware("h100-80g")
    bank = BankSizes(10**9, 10**9, 4 * 10**9)
    assert times.decode_seconds(h100, bank) == pytest.approx(5e9 / (h100.memory_bytes_per_s.value * 0.82))
    table = table_of({"bytes": (10**6, 10**9)}, [1e-3, 1.0], "measured")
    measured = dataclasses.replace(h100, decode=table)
    assert times.decode_seconds(measured, bank) == pytest.approx(4.0)
    assert times.fill_seconds(measured, bank, "host") == pytest.approx(4.0)
    assert times.fill_seconds(h100, bank, "host") == times.gather_seconds(h100, 10**9, "host")
    assert times.decode_seconds(measured, BankSizes(10**9, 10**9, 10**9)) == 0


def test_a_table_replaces_rate_and_latency() -> None:
    link = TransferLink(Figure(1e9, "user"), Figure(1.0, "user"), table_of({"bytes": (1, 1e6)}, (1e-6, 1.0), "user"))
    assert times.transfer_seconds(link, 1e6) == pytest.approx(1.0)
    assert times.transfer_seconds(link, 1e3) == pytest.approx(1e-3)


def test_an_emulated_link_takes_no_less_than_its_bytes_nor_than_the_true_copies() -> None:
    slow = with_emulated_link(_plain(H100), 1e9)
    assert times.gather_seconds(slow, BANK_BYTES, "host") == pytest.approx(BANK_BYTES / 1e9)
    assert times.pull_seconds(slow, BANK_BYTES) == pytest.approx(BANK_BYTES * 7 / 8 / 1e9)
    fast = with_emulated_link(_plain(H100), 1e15)
    assert times.pull_seconds(fast, BANK_BYTES) == pytest.approx(times.pull_seconds(_plain(H100), BANK_BYTES))
    # All ranks gather together, over the same emulated link.
    assert times.gather_seconds(slow, BANK_BYTES, "peer", "collective") == times.pull_seconds(slow, BANK_BYTES)
    gathering = times.gather_seconds(_plain(H100), BANK_BYTES, "peer", "collective")
    assert times.gather_seconds(fast, BANK_BYTES, "peer", "collective") == gathering
    assert slow.sources()["peer.emulated_bytes_per_s"] == "emulated: link emulated"
    with refused(InputError, name="peer.emulated_bytes_per_s", value=0):
        with_emulated_link(H100, 0)


def test_links_and_types_that_a_machine_lacks_are_refused() -> None:
    with refused(InputError, name="peer", expected=["host"]):
        times.gather_seconds(load_hardware("8xl40s"), BANK_BYTES, "peer")
    with refused(InputError, name="disk"):
        times.gather_seconds(H100, BANK_BYTES, "disk")
    with refused(InputError, name="home", value="cloud"):
        times.gather_seconds(H100, BANK_BYTES, "cloud")
    with refused(InputError, name="transport", value="push"):
        times.gather_seconds(H100, BANK_BYTES, "peer", "push")
    with refused(InputError, name="dtype", value="fp8", expected=("bf16", "fp32", "fp16")):
        times.gemm_seconds(load_hardware("a100-80g"), "fp8", 1, 1, 1)
    with refused(InputError, name="dtype", value="int3"):
        times.gemm_seconds(H100, "int3", 1, 1, 1)


# ---- Computation -----------------------------------------------------------------------------------------------------


def test_large_products_run_at_the_reached_part_of_the_peak() -> None:
    seconds = times.gemm_seconds(H100, "bfloat16", 8192, 8192, 8192)
    # The rate of one H200, whose GEMMs run at the same rate, including its half-empty last wave of tiles.
    assert 2 * 8192**3 / seconds == pytest.approx(790e12, rel=0.01)
    assert times.reached_flops_per_s(H100, "torch.bfloat16").source == "derived"
    assert times.reached_flops_per_s(H100, "bf16", "attention").value == pytest.approx(0.60 * 989e12)


def test_small_products_run_at_the_speed_of_memory() -> None:
    seconds = times.gemm_seconds(H100, "bf16", 1, 8192, 8192)
    assert seconds == pytest.approx(2 * (8192 * 8192 + 2 * 8192) / (3.35e12 * 0.82))
    few = times.grouped_gemm_seconds(H100, "bf16", 128, 128, 4096, 3072)
    assert few == pytest.approx(128 * 2 * (4096 * 3072 + 4096 + 3072) / (3.35e12 * 0.82))


def test_fewer_rows_than_experts_read_fewer_weights() -> None:
    half = times.grouped_gemm_seconds(H100, "bf16", 64, 128, 4096, 3072)
    assert half == pytest.approx(times.grouped_gemm_seconds(H100, "bf16", 128, 128, 4096, 3072) / 2)


def test_tables_replace_efficiencies() -> None:
    hardware = _measured()
    assert 2 * 4096**3 / times.gemm_seconds(hardware, "bf16", 4096, 4096, 4096) == pytest.approx(500e12)
    reached = times.reached_flops_per_s(hardware, "bf16")
    assert reached.value == pytest.approx(500e12)
    assert (reached.source, reached.note) == ("calibrated", "gemm of the largest measured shape")
    seconds = times.grouped_gemm_seconds(hardware, "bf16", 128 * 2048, 128, 4096, 3072)
    assert 2 * 128 * 2048 * 4096 * 3072 / seconds == pytest.approx(500e12)
    for sequence in (1000, 8192, 20_000):  # within the table, and beyond it
        for is_masked in (False, True):
            seconds = times.attention_seconds(hardware, "bf16", 3e14, 0, sequence, 128, is_masked=is_masked)
            assert seconds == pytest.approx(1.0)
    # A dtype without a table keeps its efficiency.
    assert times.reached_flops_per_s(hardware, "fp8").value == pytest.approx(DENSE_GEMM_EFFICIENCY * 1979e12)


_ROWS = st.integers(1, 10**6)
_WIDTH = st.integers(1, 20_000)


@given(_ROWS, _WIDTH, _WIDTH, st.integers(1, 10**6), st.sampled_from(["preset", "measured"]))
def test_more_rows_never_take_less(rows: int, inner: int, columns: int, more: int, kind: str) -> None:
    hardware = H100 if kind == "preset" else _measured()
    fewer = times.gemm_seconds(hardware, "bf16", rows, inner, columns)
    assert 0 < fewer <= times.gemm_seconds(hardware, "bf16", rows + more, inner, columns) * (1 + 1e-9)
    grouped = [times.grouped_gemm_seconds(hardware, "bf16", n, 64, inner, columns) for n in (rows, rows + more)]
    assert 0 < grouped[0] <= grouped[1] * (1 + 1e-9)


def test_nothing_takes_no_time() -> None:
    assert times.gemm_seconds(H100, "bf16", 0, 8, 8) == times.grouped_gemm_seconds(H100, "bf16", 0, 8, 8, 8) == 0
    assert times.attention_seconds(H100, "bf16", 0, 0, 1, 1) == times.memory_seconds(H100, 0) == 0
    assert times.collective_seconds(H100, "all_to_all", 0) == times.collective_seconds(H100, "p2p", 5, ranks=1) == 0


# ---- Collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor", "steps"),
    [
        ("all_to_all", 7 / 8, 1),
        ("all_gather", 7 / 8, 1),
        ("reduce_scatter", 7 / 8, 3),
        ("all_reduce", 7 / 4, 6),
        ("p2p", 1, 1),
    ],
)
def test_collectives_without_a_table(kind: str, factor: float, steps: int) -> None:
    assert times.collective_seconds(H100, kind, 1e9) == pytest.approx(steps * 10e-6 + factor * 1e9 / (450e9 * 0.82))


def test_devices_without_a_link_of_their_own_meet_in_host_memory() -> None:
    seconds = times.collective_seconds(load_hardware("8xl40s"), "all_to_all", 1e9)
    assert seconds == pytest.approx(10e-6 + 7 / 8 * 1e9 / (32e9 * 0.82))


def test_a_user_s_table_counts_and_scales_with_the_ranks() -> None:
    table = table_of({"bytes": (1e3, 1e9)}, (1e-5, 1e-2), "user")
    hardware = with_collectives(H100, Collectives(2, {"all_reduce": table}))
    assert times.collective_seconds(hardware, "all_reduce", 1e9, ranks=2) == pytest.approx(1e-2)
    # 7/4 of the bytes cross each link instead of 1.
    assert times.collective_seconds(hardware, "all_reduce", 1e9) == pytest.approx(1e-2 * 7 / 4)
    assert times.collective_seconds(hardware, "p2p", 1e9) == times.collective_seconds(H100, "p2p", 1e9)
    again = with_collectives(hardware, Collectives(2, {"p2p": table}))
    assert again.collectives is not None
    assert set(again.collectives.seconds) == {"all_reduce", "p2p"}
    with refused(InputError, name="ranks", value=4, expected=2):
        with_collectives(hardware, Collectives(4, {"p2p": table}))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_more_bytes_take_longer(kind: str) -> None:
    seconds = [times.collective_seconds(H100, kind, nbytes) for nbytes in (1, 1e3, 1e6, 1e9)]
    assert seconds == sorted(seconds)


def test_unknown_collectives() -> None:
    with refused(InputError, name="collective", value="alltoall", expected=tuple(COLLECTIVES)):
        times.collective_seconds(H100, "alltoall", 1)
    with refused(InputError, name="ranks", value=0):
        times.collective_seconds(H100, "p2p", 1, ranks=0)


def test_sources_are_those_of_the_plan() -> None:
    sources = set(msgspec.json.decode(msgspec.json.encode(Source.__args__)))  # type: ignore[attr-defined]
    assert sources == {"measured", "calibrated", "datasheet", "empirical", "emulated", "user", "derived"}
