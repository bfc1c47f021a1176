"""compiled is the identity, to rounding: laws 2, 6 and 7 in one graph, and on several ranks."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from tests.laws.law03_real_processes import batches, run
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.compilers import MARKS

pytestmark = MARKS


class Twins:
    """The same training by hand and compiled, on the same batches."""

    def __init__(self, optimizer):
        parts = af.compose(af.accumulate(2), af.clip(0.5), scaled(1024.0, growth_interval=3))
        recipes = {
            "eager": parts,
            "compiled": af.compose(parts, af.compiled(scope="step", dynamic=True)),
        }
        self.runs = {}
        for name, recipe in recipes.items():
            model = ours.regression_model()
            plan = recipe(af.Plan(ours.mse, model, optimizer(model.parameters())))
            self.runs[name] = plan, *af.build(plan, af.DistState())

    def train(self, batch, rate):
        """Train both on a batch; return the reports and the state of both."""
        told = {}
        for name, (plan, state, step) in self.runs.items():
            plan.optimizer.param_groups[0]["lr"] = rate
            state, report = step(state, copy.deepcopy(batch))
            self.runs[name] = plan, state, step
            scaler = state.scaler
            numbers = [scaler.scale, scaler.good_steps, scaler.skipped, report.weight, state.step]
            told[name] = {
                "numbers": torch.tensor([float(number) for number in numbers]),
                "applied": report.applied,
                "loss": report.loss.double(),
                "norm": report.grad_norm.double(),
                **plan.model.state_dict(),
                **{
                    f"{index} {key}": value
                    for index, held in plan.optimizer.state_dict()["state"].items()
                    for key, value in held.items()
                },
            }
        return told["compiled"], told["eager"]


@pytest.fixture(
    scope="module",
    params=[ours.adamw, ours.sgd],
    ids=["adamw", "sgd"],
)
def twins(request):
    """Compile once for all examples: one graph takes two micro-batches of any size, also one sample
    apart."""
    return Twins(request.param)


@given(data=st.data(), half=st.integers(2, 6), rate=st.floats(1e-4, 1e-2), seed=st.integers(0, 9))
@ours.share(1.2)
def test_a_compiled_step_is_the_step(twins, data, half, rate, seed):
    """The step accumulates, clips and scales, and some batches overflow."""
    generator, size = torch.Generator().manual_seed(seed), 2 * half + 1
    inputs = torch.randn(size, 3, generator=generator).double()
    targets = torch.randn(size, 1, generator=generator).double()
    bad = data.draw(st.sampled_from([None, None, None, float("inf"), float("nan")]))
    if bad is not None:
        inputs[data.draw(st.integers(0, size - 1))] = bad
    actual, expected = twins.train((inputs, targets), rate)
    assert actual["applied"] == expected["applied"] == (bad is None)
    loss, norm = (actual.pop(name) for name in ("loss", "norm"))
    for name, value in (("loss", loss), ("norm", norm)):  # reports are in float32
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=0, equal_nan=True)
    ours.assert_close(actual, {name: expected[name] for name in actual})


@pytest.mark.parametrize(
    ("wrap", "scope", "beside"),
    [
        ("af.wrap_ddp()", "loss", ""),
        ("af.wrap_ddp()", "blocks", "af.checkpoint_activations(), "),
        ("af.wrap_fsdp()", "blocks", ""),
        ("af.wrap_fsdp()", "loss", "af.checkpoint_activations(), "),
    ],
)
def test_a_compiled_loss_of_several_processes_is_one_process(wrap, scope, beside):
    """The ranks are processes: the compiler marks all threads as compiling, which optimizers
    check."""
    losses, expected = ours.trained_by_hand(ours.regression_model(), batches("mse"), max_norm=0.5)
    compiling = f"{beside}af.compiled(scope={scope!r}), af.accumulate(3), af.clip(0.5)"
    for actual in run(2, wrap=wrap, transforms=compiling):
        assert actual.losses == pytest.approx(losses, rel=1e-6)
        ours.assert_close(actual.parameters, expected)
        assert actual.num_graphs > 0
