"""Gradients with an open factor: their value, their norm, and the result of clipping."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.utils import get_total_norm

import accel_fn as af
from accel_fn.testing import strategies
from tests.support import strategies as ours

SHAPES = [(), (1,), (0,), (3,), (2, 3), (2, 1, 2)]
HALVES = [torch.float16, torch.bfloat16]

factors = st.floats(-1e3, -1e-3) | st.floats(1e-3, 1e3)
bounds = st.floats(1e-3, 1e3)


@st.composite
def tensors(draw, dtypes=(torch.float64,)):
    """Draw gradients of any shapes, some missing, with values of any size that their dtypes can
    hold."""
    shapes = draw(st.lists(st.sampled_from([*SHAPES, None]), min_size=1, max_size=5))
    largest = 8 if dtypes == (torch.float64,) else 3
    size = 10.0 ** draw(st.integers(-largest, largest))
    generator = torch.Generator().manual_seed(draw(strategies.seeds()))
    dtypes = [draw(st.sampled_from(dtypes)) for _ in shapes]
    return tuple(
        None if shape is None else (torch.randn(shape, generator=generator) * size).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def clip_norm(grads, *, max_norm):
    (clip,) = af.clip(max_norm)(ours.plan()).gradients
    return clip(af.DistState(), grads)


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def flat(grads):
    """Return every element of the value, [num_elements], float64."""
    values = [value.double().flatten() for value in grads.values() if value is not None]
    return torch.cat([torch.zeros(0).double(), *values])


def sparse(value_of=2.0):
    """Make a sparse gradient of a table [4, 2] that is not coalesced: rows 1, 3 and 1 again."""
    rows = torch.full((3, 2), value_of, dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 3, 1]]), rows, (4, 2), check_invariants=True, is_coalesced=False
    )


@given(tensors=tensors(), factor=factors)
def test_value_is_the_factor_times_the_tensors(tensors, factor):
    values = af.Grads(tensors, number(factor)).values()
    expected = tuple(None if each is None else each * factor for each in tensors)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_value_without_a_factor_is_the_tensors_themselves():
    gradient = torch.ones(2)
    assert af.Grads((gradient, None)).values()[0] is gradient


def test_value_in_float16_is_rounded_once_where_the_factor_is_below_float16():
    (value,) = af.Grads((torch.full((2,), 2.0**15).half(),), torch.tensor(2.0**-30)).values()
    assert torch.equal(value, torch.full((2,), 2.0**-15).half())


@given(tensors=tensors(), factor=factors)
@example(tensors=(), factor=2.0)
@example(tensors=(None, None), factor=2.0)
def test_norm_is_the_total_norm_of_the_value(tensors, factor):
    grads = af.Grads(tensors, number(factor))
    values = [value for value in grads.values() if value is not None]
    # the bound covers a sum of squares of a few elements and a product, in another order
    torch.testing.assert_close(
        grads.norm().double(), get_total_norm(values).double(), rtol=1e-14, atol=0
    )


@given(tensors=tensors(dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64)))
@example(tensors=(torch.ones(2), torch.ones(2).double()))
@example(tensors=(torch.ones(2).double(), torch.ones(2)))
@example(tensors=(torch.ones(2).bfloat16(), torch.ones(2).half()))
def test_norm_of_mixed_precision_is_that_of_all_elements(tensors):
    norm = af.Grads(tensors).norm()
    expected = flat(af.Grads(tensors)).norm()
    # the bound covers a sum of a few squares in float32
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([], torch.float32),
        ([torch.float16], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float32], torch.float32),
        ([torch.complex64], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.float64, torch.bfloat16], torch.float64),
        ([torch.complex128], torch.float64),
    ],
)
def test_norm_is_float32_or_float64_where_a_gradient_is(dtypes, expected):
    assert af.Grads([torch.ones(2, dtype=dtype) for dtype in dtypes]).norm().dtype == expected


def test_norm_of_a_large_gradient_in_float32_is_that_in_float64():
    """Torch's own norm is off by more than 1e-4, so it would clip shards differently from the
    whole."""
    gradient = torch.randn(2**25, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    assert abs(get_total_norm([gradient]) / expected - 1) > 1e-4
    torch.testing.assert_close(af.Grads((gradient,)).norm().double(), expected, rtol=1e-5, atol=0.0)


def test_norm_of_a_sparse_gradient_counts_a_row_once():
    assert af.Grads((sparse(),)).norm() == sparse().to_dense().norm()


def test_value_of_a_sparse_gradient_stays_sparse():
    (value,) = af.Grads((sparse(),), number(0.5)).values()
    assert value.is_sparse
    assert torch.equal(value.to_dense(), sparse(1.0).to_dense())


@pytest.mark.parametrize("gradients", [(), (None,), (None, torch.zeros(0))])
def test_norm_of_no_gradient_is_zero(gradients):
    assert af.Grads(gradients).norm() == 0.0


@given(tensors=tensors(), factor=factors)
def test_norm_is_read_once_and_scaled_from_then_on(tensors, factor):
    grads = af.Grads(tuple(None if each is None else each.clone() for each in tensors))
    norm = grads.norm().clone()
    for each in grads.present():
        each.fill_(torch.nan)  # a second read would return nan
    torch.testing.assert_close(grads.norm(), norm, rtol=0, atol=0)
    scaled = grads.scaled(number(factor)).norm()
    torch.testing.assert_close(scaled.double(), norm.double() * abs(factor), rtol=1e-6, atol=0)


def test_norm_read_is_the_first_that_was_read():
    grads = af.Grads((torch.ones(4),)).scaled(torch.tensor(3.0))
    assert grads.norm() == 6.0
    later = grads.scaled(torch.tensor(0.5))
    assert later.norm() == 3.0
    assert later.norm_read == 6.0


@given(tensors=tensors((torch.float32, torch.float64, *HALVES)), factor=factors)
def test_scaling_by_a_number_is_scaling_by_a_tensor_as_wide_as_the_gradients(tensors, factor):
    double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    dtype = torch.float64 if double else torch.float32
    by_tensor = af.Grads(tensors).scaled(number(factor, dtype))
    for plain in (factor, np.float64(factor)):
        by_number = af.Grads(tensors).scaled(plain)
        assert (by_number.factor.dtype, by_number.factor.shape) == (dtype, ())
        assert torch.equal(flat(by_number), flat(by_tensor))


@pytest.mark.parametrize("factor", [True, "2", None, 1j, [2.0]])
def test_what_gradients_are_scaled_by_is_a_number_or_a_tensor(factor):
    with pytest.raises(
        TypeError, match=r"Grads\.scaled: factor must be a finite number or a 0-dim"
    ):
        af.Grads((torch.ones(4),)).scaled(factor)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_number_that_gradients_are_scaled_by_is_finite(factor):
    with pytest.raises(ValueError, match=r"Grads\.scaled: factor must be a finite number"):
        af.Grads((torch.ones(4),)).scaled(factor)


@pytest.mark.parametrize(
    "factor", [torch.ones(1), torch.ones(4), torch.tensor(True), torch.tensor(1j)]
)
def test_a_tensor_that_gradients_are_scaled_by_is_one_real_number(factor):
    with pytest.raises(ValueError, match=r"Grads\.scaled: factor must be a real 0-dim tensor, got"):
        af.Grads((torch.ones(4),)).scaled(factor)


@given(tensors=tensors(), factor=factors)
def test_map_gives_the_function_every_value_and_leaves_out_what_is_missing(tensors, factor):
    mapped = af.Grads(tensors, number(factor)).map(lambda value: value + 1)
    expected = tuple(None if each is None else each * factor + 1 for each in tensors)
    assert mapped.factor is None
    torch.testing.assert_close(mapped.values(), expected, rtol=0, atol=0)


@given(tensors=tensors(), max_norm=bounds)
def test_clipping_scales_as_clip_grad_norm_does(tensors, max_norm):
    parameters = [torch.zeros_like(each) for each in tensors if each is not None]
    for parameter, each in zip(parameters, af.Grads(tensors).present(), strict=True):
        parameter.grad = each.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clipped = clip_norm(af.Grads(tensors), max_norm=max_norm)
    expected = [parameter.grad for parameter in parameters]
    actual = [value for value in clipped.values() if value is not None]
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)


def test_named_gives_the_parameters_that_have_a_gradient():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 1) for n in ("used", "frozen", "unused")})
    model.double()["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters()][::-1], lr=0.1)

    def loss_fn(model, batch):
        return (model["used"](batch) + model["frozen"](batch)).square().mean()

    state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    _, grads, _ = step.grads(state, torch.ones(4, 3).double())
    expected = [("used.bias", model["used"].bias), ("used.weight", model["used"].weight)]
    for each in (grads, grads.scaled(2.0), grads.scaled(2.0).map(torch.neg)):
        found = [*each.named()]
        assert [name for name, _, _ in found] == [name for name, _ in expected]
        assert all(p is q for (_, p, _), (_, q) in zip(found, expected, strict=True))
        values = [value for value in each.values() if value is not None]
        assert all(map(torch.equal, (value for _, _, value in found), values))


def test_named_refuses_gradients_that_no_step_has_made():
    with pytest.raises(ValueError, match=r"Grads.named: gradients must be of a step"):
        next(af.Grads((torch.ones(2),)).named())
