"""Labels that `prefetch` has moved are counted in the host's copy, as long as that is the same."""

import pytest
import torch

import accel_fn as af

COUNT = af.count_labels("labels")
META = af.DistState(device="meta")


@pytest.fixture
def moved():
    """Labels [3, 4] on another device, which does not hold their values, and what was moved there."""
    source = torch.tensor([[1, 2, -100, 3], [-100, 4, 5, 6], [7, -100, -100, -100]])
    (copy,) = af.prefetch([source], META)
    return copy, source


def is_counted(labels):
    """A meta tensor has no values, so counting it raises."""
    try:
        COUNT({"labels": labels})
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize(
    "cut",
    [
        lambda labels: labels,
        lambda labels: labels[1:],
        lambda labels: labels[:, 1:],
        lambda labels: labels[1:][:, 2:],
        lambda labels: labels.tensor_split(2)[1],
        lambda labels: labels[2],
        lambda labels: labels.T,
    ],
)
def test_views_are_counted_as_those_of_the_source(moved, cut):
    copy, source = moved
    assert COUNT({"labels": cut(copy)}) == COUNT({"labels": cut(source)})


@pytest.mark.parametrize(
    "change", [lambda copy, source: copy.add_(1), lambda copy, source: source.add_(1)]
)
def test_a_copy_that_was_written_since_is_read_itself(moved, change):
    copy, source = moved
    change(copy, source)
    assert not is_counted(copy)


@pytest.mark.parametrize(
    "other",
    [lambda copy: copy.clone(), lambda copy: copy[[0, 2]], lambda copy: copy.view(torch.int32)],
)
def test_tensors_of_other_values_have_no_source(moved, other):
    assert not is_counted(other(moved[0]))


def test_numbers_that_are_no_labels_are_not_kept():
    (copy,) = af.prefetch([torch.ones(2)], META)
    assert not is_counted(copy)
