"""wrap_fsdp(ignore=): frozen modules that stay whole on every rank."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import batches, part, stack


class Distilled(nn.Module):
    """A student beside a frozen teacher, and a frozen layer in the midst of the student."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = stack(0), stack(1).requires_grad_(False)
        self.student.first.requires_grad_(False)
        self.scale = nn.ParameterDict({"by": nn.Parameter(torch.tensor(2.0).double())})
        self.scale.requires_grad_(False)  # 0-dim, which FSDP cannot cut

    def forward(self, inputs):
        return self.student(inputs) - self.scale["by"] * self.teacher(inputs)


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def trained(state, recipe, *, model=None, num=3):
    model = Distilled() if model is None else model
    optimizer = ours.adamw([each for each in model.parameters() if each.requires_grad])
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state, check_loss=False)
    norms = []
    for batch in batches(num):
        state, report = step(state, part(batch, state))
        norms.append(report.grad_norm)
    return model, state, step, norms


IGNORE = ["teacher", "student.first", "scale"]
RECIPES = {
    "replicated": (4, af.wrap_fsdp(ignore=IGNORE, replicate=2)),
    "kept whole": (
        2,
        af.compose(af.wrap_fsdp(ignore=IGNORE, reshard_after_forward=False), af.accumulate(2)),
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:step. model should write the same in its forward")


@pytest.mark.parametrize(("world_size", "recipe"), RECIPES.values(), ids=RECIPES)
def test_it_trains_as_one_process_does(world_size, recipe):
    expected, _, _, norms = trained(af.DistState(), af.clip(1.0))
    before = expected.teacher.state_dict()

    def run(state):
        model, state, _, norms = trained(state, af.compose(recipe, af.clip(1.0)))
        whole = {name for name, each in model.named_parameters() if not isinstance(each, DTensor)}
        return whole, norms, ours.whole(model.state_dict())

    for whole, found, parameters in simulate(run, world_size=world_size):
        assert whole == {
            name
            for name, _ in expected.named_parameters()
            if name.startswith(("teacher.", "student.first.", "scale."))
        }
        torch.testing.assert_close(found, norms, rtol=1e-12, atol=0)
        for name, value in expected.named_parameters():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-12)
        ours.assert_identical(
            {
                name: parameters[f"teacher.{name}"]
                for name in dict(expected.teacher.named_parameters())
            },
            {name: before[name] for name in dict(expected.teacher.named_parameters())},
        )


def test_whole_parameters_keep_their_dtype_and_are_not_gathered():
    def run(state):
        model = Distilled().float()
        model.teacher.to(torch.bfloat16)
        teacher = {name: each.data_ptr() for name, each in model.teacher.named_parameters()}
        optimizer = ours.adamw([each for each in model.parameters() if each.requires_grad])

        wrap = af.wrap_fsdp(ignore=["teacher", "scale"], param_dtype=torch.bfloat16)
        plan = wrap(af.Plan(loss_fn, model, optimizer))
        state, step = af.build(plan, state, check_loss=False)
        inputs, targets = part(batches()[0], state)
        step(state, (inputs.float(), targets))
        after = {name: each.data_ptr() for name, each in model.teacher.named_parameters()}
        return teacher == after, {each.dtype for each in model.teacher.parameters()}

    assert simulate(run, world_size=2) == [(True, {torch.bfloat16})] * 2


@pytest.mark.parametrize(
    ("ignore", "text"),
    [
        (
            "student.last",
            r"wrap_fsdp\(ignore\) must match modules whose parameters are frozen, since no rank adds up "
            r"their gradients, got 'student.last.weight'; call requires_grad_\(False\)",
        ),
        ("critic", r"wrap_fsdp\(ignore\) must match modules with parameters, got 'critic', which"),
    ],
)
def test_what_cannot_be_ignored_is_refused_in_build(ignore, text):
    def run(state):
        with pytest.raises(ValueError, match=f"build: {text}"):
            trained(state, af.wrap_fsdp(ignore=ignore), num=0)

    simulate(run, world_size=2)


def test_what_names_no_module_is_refused():
    with pytest.raises(TypeError, match="wrap_fsdp: ignore must be a class of modules, a name"):
        af.wrap_fsdp(ignore=3)
