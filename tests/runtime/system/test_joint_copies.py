"""Many tensors go to a device in one copy, and arrive as they were."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.system.joint_copies import ALIGNMENT, as_graph_inputs, download, upload
from tests.helpers.graphs.fake_gpu import device_copies, pretended_gpu

CUDA = torch.device("cuda")


class Record(NamedTuple):
    rows: torch.Tensor | slice
    number: int
    nothing: torch.Tensor | None = None


def _tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    tensor = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    return torch.from_numpy(tensor.numpy().copy())


TENSORS = st.builds(
    _tensor,
    st.sampled_from([torch.int64, torch.int32, torch.bool]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(tensors=st.lists(TENSORS, max_size=6))
def test_tensors_arrive_as_they_were(tensors: list[torch.Tensor]) -> None:
    nest = {
        "records": tuple(Record(tensor, number) for number, tensor in enumerate(tensors)),
        "rows": Record(slice(3), 1),
    }
    with mock.patch.object(torch.Tensor, "to", lambda tensor, *_, **__: tensor):  # the device is the CPU
        uploaded = upload(nest, CUDA)
    records = uploaded["records"]
    assert uploaded["rows"] == nest["rows"]
    assert [record.number for record in records] == list(range(len(tensors)))
    for record, tensor in zip(records, tensors, strict=True):
        assert record.rows.dtype == tensor.dtype
        assert torch.equal(record.rows, tensor)
        assert record.rows.storage_offset() * tensor.itemsize % ALIGNMENT == 0


def test_a_cpu_needs_no_copy() -> None:
    nest = [torch.arange(3)]
    assert upload(nest, torch.device("cpu")) is nest
    assert download(nest) is nest
    assert as_graph_inputs(nest)[0] is nest[0]


@settings(max_examples=30, deadline=None)
@given(tensors=st.lists(TENSORS, max_size=6))
def test_tensors_come_back_as_they_were(tensors: list[torch.Tensor]) -> None:
    with mock.patch.object(torch.Tensor, "device", mock.Mock(type="cuda")):
        nest = download((tensors, 3))
    assert nest[1] == 3
    for tensor, downloaded in zip(tensors, nest[0], strict=True):
        assert tensor.dtype == downloaded.dtype
        assert torch.equal(tensor, downloaded)


def test_tensors_are_uploaded_in_one_copy_while_the_host_goes_on() -> None:
    with pretended_gpu(), device_copies() as copies:
        inputs = as_graph_inputs(upload([torch.arange(3), torch.arange(5, dtype=torch.int32)], CUDA))
    assert (copies.uploads, copies.downloads) == ([True], [])
    assert [len(tensor) for tensor in inputs] == [3, 5]
    assert {(tensor.device.type, tensor.storage_offset()) for tensor in inputs} == {("cuda", 0)}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_memory_is_pinned_where_there_is_a_gpu(has_gpu: bool) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def recorded(*sizes: Any, pin_memory: bool, **named: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*sizes, **named)

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=has_gpu),
        mock.patch.object(torch, "empty", recorded),
        mock.patch.object(torch.Tensor, "to", lambda tensor, *_, **__: tensor),
    ):
        upload([torch.arange(3)], CUDA)
    assert pinned == [has_gpu]
