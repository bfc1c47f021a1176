"""Labels that were moved are counted in the host's copy, as long as that is the same."""

import gc

import pytest
import torch

import accel_fn as af
from accel_fn.base import host_copies


@pytest.fixture
def moved():
    """Labels [3, 4] on another device, which does not hold their values, and what was moved there."""
    source = torch.tensor([[1, 2, -100, 3], [-100, 4, 5, 6], [7, -100, -100, -100]])
    copy = torch.empty_like(source, device="meta")
    host_copies.remember_source(copy, source)
    return copy, source


@pytest.mark.parametrize(
    "cut",
    [
        lambda labels: labels,
        lambda labels: labels[1:],
        lambda labels: labels[:, 1:],
        lambda labels: labels.tensor_split(2)[1],
        lambda labels: labels[2],
        lambda labels: labels.T,
        lambda labels: labels[1:][:, 2:],
    ],
)
def test_views_are_those_of_the_source(moved, cut):
    copy, source = moved
    found = host_copies.on_host(cut(copy))
    assert found.is_cpu
    assert found.flatten().tolist() == cut(source).flatten().tolist()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_labels_of_micro_batches_are_counted_without_their_device(moved, num_parts, shift):
    copy, source = moved
    count = af.num_labels("labels", shift=shift)
    parts = zip(copy.tensor_split(num_parts), source.tensor_split(num_parts), strict=True)
    for part, expected in parts:
        assert count({"labels": part}) == count({"labels": expected})


@pytest.mark.parametrize(
    "change", [lambda copy, source: copy.add_(1), lambda copy, source: source.add_(1)]
)
def test_a_copy_that_was_written_since_is_read_itself(moved, change):
    copy, source = moved
    change(copy, source)
    assert host_copies.on_host(copy) is copy


@pytest.mark.parametrize(
    "other",
    [lambda copy: copy.clone(), lambda copy: copy[[0, 2]], lambda copy: copy.view(torch.int32)],
)
def test_tensors_of_other_values_have_no_source(moved, other):
    found = other(moved[0])
    assert host_copies.on_host(found) is found


def test_a_source_of_another_memory_layout_is_not_read():
    source = torch.arange(6).view(2, 3).T
    copy = torch.empty(3, 2, dtype=torch.int64, device="meta")
    host_copies.remember_source(copy, source)
    assert host_copies.on_host(copy) is copy


def test_only_what_may_be_labels_is_kept_and_no_longer_than_the_copy():
    gc.collect()
    before = len(host_copies._SOURCES)
    copies = [torch.empty(2, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")]
    for copy in copies:
        host_copies.remember_source(copy, torch.ones(2, dtype=copy.dtype))
    assert len(host_copies._SOURCES) == before + 1
    del copies, copy
    gc.collect()
    assert len(host_copies._SOURCES) == before
