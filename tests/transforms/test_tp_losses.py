"""wrap_tp and losses beyond one forward: parameters and activations of split layers in them."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.transforms.test_wrap_tp import (
    SQUARE,
    STYLES,
    TWO,
    assert_one_process,
    perceptron,
    split_by_hand,
)

BATCH = (torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4, 1).double())


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def squares(model):
    return 0.1 * sum(whole(each).square().sum() for each in model.parameters())


def test_a_penalty_on_whole_parameters_is_that_of_one_process():
    def loss_fn(model, batch):
        return ours.mse(model, batch) + squares(model)

    assert_one_process(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES)), SQUARE, loss_fn=loss_fn)


def refused(loss_fn, styles=STYLES, model_of=lambda state: perceptron()):
    """Take a step of this loss on two ranks, and return the error of each."""

    def run(state):
        plan = ours.plan(model=model_of(state), loss_fn=loss_fn)
        state, step = af.build(af.wrap_tp(styles)(plan), state)
        with pytest.raises(af.errors.AccelError) as caught:
            step(state, BATCH)
        return str(caught.value)

    return simulate(run, mesh=TWO)


MIXED = {
    "squares": lambda model: sum(each.square().sum() for each in model.parameters()),
    "a product": lambda model: (model[2].weight @ torch.ones(6, 1).double()).sum(),
}


@pytest.mark.parametrize("penalty", MIXED.values(), ids=MIXED)
def test_a_loss_that_mixes_dtensors_and_plain_tensors_is_refused(penalty):
    for text in refused(lambda model, batch: ours.mse(model, batch) + penalty(model)):
        assert "mixes them with plain tensors; call full_tensor() on each" in text


def loss_of_a_part(model, batch):
    return ours.mse(model, batch) + model[0](batch[0]).square().mean()


def metric_of_a_part(model, batch):
    return ours.mse(model, batch), {"active": (model[0](batch[0]) > 0).double().mean()}


@pytest.mark.parametrize(
    ("loss_fn", "name"), [(loss_of_a_part, "the loss"), (metric_of_a_part, "the metric 'active'")]
)
def test_what_is_computed_from_a_part_of_a_layer_is_refused(loss_fn, name):
    for text in refused(loss_fn):
        assert f"on ranks that differ in other axes than dp, {name} differs on rank 1;" in text


def test_a_metric_may_be_computed_from_parameters():
    def loss_fn(model, batch):
        return ours.mse(model, batch), {
            "norm": model[0].weight.norm(),
            "pair": (model[2].weight.square().sum(), 2),
            "whole": whole(model[0].weight).mean(),
        }

    def run(state):
        plan = ours.plan(model=perceptron(), loss_fn=loss_fn)
        state, step = af.build(af.wrap_tp(STYLES)(plan), state)
        _, report = step(state, BATCH)
        return {name: float(each) for name, each in report.metrics.items()}

    (expected,) = simulate(run, world_size=1)
    assert simulate(run, mesh=TWO) == [pytest.approx(expected)] * 2


def test_replicas_of_a_split_model_need_a_loss_that_reaches_every_parameter():
    def run(state):
        model = perceptron().append(nn.Linear(1, 1).double())
        plan = ours.plan(model=model, loss_fn=lambda model, batch: ours.mse(model[:3], batch))
        state, step = af.build(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES))(plan), state)
        with pytest.raises(af.errors.LossError, match=r"got no gradient for 3\.weight, 3\.bias;"):
            step(state, af.shard_batch(BATCH, state))

    simulate(run, mesh=SQUARE)


def of_gradients(model, batch):
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return ours.mse(model, batch) + slope.square().mean()


class WrongSize(nn.Sequential):
    """Code that fails with parts of the features, and with all of them."""

    def forward(self, x):
        return self[2](self[0](x).view(2, 12))


NOTE = (
    "wrap_tp: a colwise layer returns a part of its features on each rank, and a rowwise one takes a part; "
    "take sizes from the tensors, as in q.view(b, t, -1, head_dim), or leave out styles"
)


@pytest.mark.parametrize(
    ("transform", "has_note"), [(af.wrap_tp(STYLES), True), (af.wrap_fsdp(), False)]
)
def test_a_wrong_size_in_the_users_code_has_a_note_where_layers_are_split(transform, has_note):
    def run(state):
        plan = ours.plan(model=WrongSize(*perceptron()))
        state, step = af.build(transform(plan), state)
        with pytest.raises(RuntimeError) as caught:
            step(state, BATCH)
        return NOTE in getattr(caught.value, "__notes__", ())

    assert simulate(run, mesh=TWO) == [has_note] * 2


@pytest.mark.parametrize(
    ("styles", "model_of"),
    [(STYLES, lambda state: perceptron()), ("auto", split_by_hand)],
    ids=["by wrap_tp", "by hand"],
)
def test_gradients_of_gradients_are_refused(styles, model_of):
    for text in refused(of_gradients, styles, model_of):
        assert "wrap_tp must have a loss_fn without gradients of gradients" in text
