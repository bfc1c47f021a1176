"""Checks of graphs and parameters: a loss whose backward would miss something is refused, or warned of."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.testing import assert_equivalent, simulate
from accel_fn.testing.internals import warn_user

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
RECIPES = [
    pytest.param(af.accumulate(3), 1, id="three micro-batches"),
    pytest.param(af.wrap_ddp(), 2, id="two ranks"),
    pytest.param(af.reproducible(2), 1, id="virtual ranks"),
]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def trained(recipe, world_size, change=lambda model: None, after=lambda model: None, loss=loss_fn):
    """Return the weights after three steps over X, checked to be equal on all ranks."""

    def run(state):
        model = copy.deepcopy(MODEL)
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, step = af.build(recipe(af.Plan(loss, model, optimizer)), state)
        after(model)
        for _ in range(3):
            state, _ = step(state, X.tensor_split(state.world_size)[state.rank])
        whole = [
            getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()
        ]
        return torch.cat([each.detach().flatten() for each in whole])

    first, *others = simulate(run, world_size=world_size)
    assert all(torch.equal(first, each) for each in others)
    return first


@pytest.mark.parametrize(
    ("recipe", "world_size", "register"),
    [
        (af.accumulate(3), 1, "register_hook"),
        (af.wrap_ddp(), 2, "register_post_accumulate_grad_hook"),
        (af.wrap_fsdp(), 2, "register_hook"),
    ],
)
def test_hooks_of_parameters_are_refused_where_they_would_see_shares(recipe, world_size, register):
    def hooked(model):
        getattr(next(model.parameters()), register)(lambda _: None)

    words = r": model must have no hooks on parameters with several ranks or .* got one on 0.weight"
    with pytest.raises(ValueError, match=f"build{words}"):
        trained(recipe, world_size, hooked)
    with pytest.raises(ValueError, match=f"step{words}"):
        trained(recipe, world_size, after=hooked)


def test_a_hook_that_one_rank_alone_registers_is_an_error_on_all_ranks():
    def run(state):
        model = copy.deepcopy(MODEL)
        plan = af.wrap_ddp()(af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1)))
        state, step = af.build(plan, state)
        if state.is_main:
            model[0].weight.register_hook(lambda _: None)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            step(state, X.tensor_split(state.world_size)[state.rank])
        return str(caught.value)

    own, of_peer = simulate(run, world_size=2)
    assert own.startswith("step: model must have no hooks on parameters")
    assert of_peer.startswith("step: failed on rank 0: PlanError('step: model must have no hooks")


def test_hooks_that_step_for_all_parameters_on_one_rank_are_named():
    def stepping(model):
        def hook(parameter):
            parameter.data.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(hook)

    words = (
        r"step: model must have no post-accumulate-grad hooks that clear .*, got one on 0.weight"
    )
    with pytest.raises(ValueError, match=words):
        trained(af.compose(), 1, stepping)


@pytest.mark.parametrize(("recipe", "world_size"), [(af.compose(), 1), (af.wrap_ddp(), 2)])
def test_parameters_that_are_replaced_after_build_are_named_as_such(recipe, world_size):
    def replacing(model):
        copies = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)

    words = r"step: model must hold the parameters that build found, got another 0.weight; write"
    with pytest.raises(ValueError, match=words):
        trained(recipe, world_size, after=replacing)


@pytest.mark.parametrize("recipe", [af.accumulate(2), af.reproducible(1)])
def test_a_reentrant_checkpoint_of_a_later_micro_batch_is_refused(recipe):
    def long_inputs(model, x):
        inner = (
            model[0](x)
            if x[0, 0] == X[0, 0]
            else checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=True)
        )
        return F.mse_loss(model[1](inner), x.sum(1, keepdim=True))

    if "reproducible" in repr(recipe):
        recipe = af.compose(af.accumulate(2), recipe)
    with pytest.raises(ValueError, match="use_reentrant"):
        trained(recipe, 1, loss=long_inputs)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()

    def forward(self, x, task):
        heads = self.a, self.b
        return torch.cat([heads[t](x[i : i + 1]) for i, t in enumerate(task.tolist())])


def masked_mean(model, batch):
    """Return a mean that is not finite if no item counts, and neither are its gradients."""
    x, task, labels = batch
    losses = F.cross_entropy(model(x, task), labels.clamp(min=0), reduction="none")
    mask = (labels >= 0).double()
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.accumulate(4), 1),
        (af.compose(af.wrap_ddp(find_unused_parameters=True), af.accumulate(2)), 2),
        (af.reproducible(2), 2),
    ],
)
def test_what_micro_batches_of_weight_0_reach_has_a_gradient_of_zeros(recipe, world_size):
    torch.manual_seed(0)
    model = TwoHeads()
    x, task = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    batches = [
        (x, task, torch.tensor([1, 2, 3, 4])),
        (x, task, torch.tensor([1, 2, -100, -100])),
        (x, task, torch.tensor([-100, 2, -100, -100])),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = af.Plan(masked_mean, model, optimizer, weight_fn=af.count_labels(2))
    assert_equivalent(plan, recipe(plan), batches, world_sizes=(1, world_size))


@pytest.mark.parametrize(("recipe", "world_size"), [(af.accumulate(2), 1), (af.wrap_ddp(), 2)])
def test_rows_of_a_sparse_table_that_weigh_nothing_are_updated(recipe, world_size):
    torch.manual_seed(0)
    model = nn.Embedding(6, 5, sparse=True, dtype=torch.float64)
    ids = torch.tensor([0, 1, 2, 3])
    batches = [(ids, torch.tensor([1, 2, 3, 4])), (ids, torch.tensor([1, 2, -100, -100]))]
    plan = af.Plan(
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        model,
        torch.optim.SparseAdam(model.parameters(), lr=0.1),
        weight_fn=af.count_labels(1),
    )
    assert_equivalent(plan, recipe(plan), batches, world_sizes=(1, world_size))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_over_shards_gradients_that_are_not_finite_do_not_come_from_micro_batches_of_weight_0(
    reduce_dtype,
):
    def run(state):
        model = TwoHeads().bfloat16() if reduce_dtype else TwoHeads()
        plan = af.Plan(
            masked_mean,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            weight_fn=af.count_labels(2),
        )
        own = af.wrap_fsdp(reduce_dtype=reduce_dtype)
        state, step = af.build(af.compose(own, af.accumulate(2))(plan), state)
        x = torch.ones(4, 3, dtype=model.a.weight.dtype)
        labels = [[-100, -100, 1, 2], [1, 2, -100, -100]][state.rank]
        state, report = step(state, (x, torch.tensor([0, 1, 0, 1]), torch.tensor(labels)))
        return report.loss.isfinite() and all(
            p.full_tensor().isfinite().all() for p in model.parameters()
        )

    assert all(simulate(run, world_size=2))


def test_a_fused_sgd_with_momentum_is_refused_by_what_thaws_parameters():
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(
        ValueError, match=r"freeze: optimizer must take parameters that come later, got SGD"
    ):
        af.freeze("0", until=2)(af.Plan(loss_fn, MODEL, optimizer))


class Experts(nn.Module):
    """Each row goes through one of two layers, by the sign of its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        masks = [x[:, 0] > 0, x[:, 0] <= 0]
        zeros = x.new_zeros(len(x), 1)
        return sum(
            zeros.masked_scatter(mask[:, None], expert(x[mask]))
            for expert, mask in zip(self.experts, masks, strict=True)
            if mask.any()
        )


ROWS = torch.tensor([[1.0], [-1.0], [1.0], [1.0]], dtype=torch.float64).expand(4, 4)


@pytest.mark.parametrize("finds_unused", [False, True])
def test_a_parameter_that_only_earlier_micro_batches_of_a_rank_reach_is_waited_for_or_refused(
    finds_unused,
):
    def run(state, size):
        torch.manual_seed(0)
        model = Experts().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap = af.wrap_ddp(find_unused_parameters=finds_unused)
        recipe = af.compose(wrap, af.accumulate(2)) if size > 1 else af.compose()
        state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
        mine = ROWS if state.is_main else ROWS[:0]
        for _ in range(2):
            state, _ = step(state, mine)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    def trained_by(size):
        return simulate(lambda state: run(state, size), world_size=size)

    if finds_unused:
        for found in trained_by(2):
            torch.testing.assert_close(found, trained_by(1)[0], rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(
            ValueError, match=r"no gradient for some in the last micro-batch.*find_unused"
        ):
            trained_by(2)


def test_a_parameter_that_only_micro_batches_of_weight_0_reach_is_waited_for_or_refused():
    def weighted(model, batch):
        x, weights = batch
        return (model(x) * weights).sum() / weights.sum()

    def run(state):
        model = Experts().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(weighted, model, optimizer, weight_fn=lambda batch: batch[1].sum())
        state, step = af.build(af.compose(af.wrap_ddp(), af.accumulate(2))(plan), state)
        weights = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
        mine = slice(None) if state.is_main else slice(0)
        step(state, (ROWS[mine], weights[mine]))

    with pytest.raises(
        ValueError, match=r"no gradient for some in the last micro-batch.*find_unused"
    ):
        simulate(run, world_size=2)


def test_a_gradient_penalty_under_wrap_fsdp_is_refused():
    def penalized(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss_fn(model, x) + slope.square().mean()

    def put_between(model):
        model.insert(1, nn.Tanh())

    with pytest.raises(ValueError, match=r"gradients of gradients.*use wrap_ddp"):
        trained(af.wrap_fsdp(), 2, put_between, loss=penalized)


def test_embeddings_with_sparse_gradients_are_refused_by_wrap_fsdp():
    def put_first(model):
        model.append(nn.Embedding(3, 1, sparse=True).double())

    with pytest.raises(
        ValueError, match=r"dense gradients.*got '?2'?; use sparse=False, or wrap_ddp"
    ):
        trained(af.wrap_fsdp(), 2, put_first)


def test_a_parameter_of_no_optimizer_that_is_frozen_after_build_is_named():
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"still do so, got 0\.weight"):
        step(state, X)


class Centres(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.weight * outputs - targets).square().mean()


OUTSIDE = (
    r"step: loss_fn should reach what is trained by the model given to it, got 1 other tensors that "
    r"require a gradient and get none, of shapes \[\[1\]\]; join the modules in one nn.ModuleDict"
)


@pytest.mark.parametrize(
    ("recipe", "world_size"), [(af.compose(), 1), *RECIPES[1:], (af.wrap_fsdp(), 2)]
)
def test_a_parameter_of_the_loss_itself_is_warned_of_once_on_one_rank(recipe, world_size):
    centres = Centres()

    def loss(model, x):
        return centres(model(x), x.sum(1, keepdim=True))

    with pytest.warns(UserWarning, match=OUTSIDE) as warned:
        trained(recipe, world_size, loss=loss)
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_a_tensor_outside_of_the_model_is_warned_of_where_a_second_graph_has_it_again():
    temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)
    num_calls = []

    def loss(model, x):
        num_calls.append(len(x))
        return loss_fn(lambda x: temperature * model(x), x)

    def run(num_steps):
        model = copy.deepcopy(MODEL)
        plan = af.Plan(loss, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(plan, af.DistState())
        for _ in range(num_steps):
            state, _ = step(state, X)

    run(1)  # one graph may have any leaf that the loss has made
    with pytest.warns(UserWarning, match=OUTSIDE):
        run(2)


def test_leaves_that_a_loss_makes_or_a_batch_holds_are_not_warned_of():
    """A penalty on gradients at points between real and made ones, and equations at points."""

    def loss(model, x):
        points = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        return loss_fn(model, x) + slope.square().mean()

    points = X.clone().requires_grad_()

    def equation(model, batch):
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope - 1).square().mean()

    for loss_of, batch in ((loss, X), (equation, points)):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        plan = af.Plan(loss_of, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(plan, af.DistState())
        for _ in range(3):
            state, _ = step(state, batch)


@pytest.mark.parametrize("first", [1, 4])
def test_a_loss_without_a_graph_is_refused_in_any_step(first):
    calls = []

    def loss(model, x):
        calls.append(x)
        found = loss_fn(model, x)
        return found.detach() if len(calls) >= first else found

    plan = af.Plan(loss, MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.0))
    state, step = af.build(plan, af.DistState())
    for _ in range(first - 1):
        state, _ = step(state, X)
    with pytest.raises(ValueError, match="must return a loss with a graph, got one that requires"):
        step(state, X)


@pytest.mark.parametrize("library", [af, torch], ids=["accel_fn", "torch"])
def test_a_program_beside_a_library_is_warned_at_its_own_line(library):
    file = f"{Path(library.__file__).parent}_demo.py"
    with pytest.warns(UserWarning, match="^the text$") as caught:
        exec(compile("warn_user('the text')", file, "exec"), {"warn_user": warn_user})
    assert [each.filename for each in caught] == [file]
