"""Backwards of shares of the batch add up to the backward of one rank, or the step refuses the
loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.testing import assert_equivalent, simulate

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
        state, step = af.build(state, recipe(af.Plan(loss, model, optimizer)))
        after(model)
        for _ in range(3):
            state, _ = step(state, X.tensor_split(state.world_size)[state.rank])
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    first, *others = simulate(run, world_size=world_size)
    assert all(torch.equal(first, each) for each in others)
    return first


def by_hand(change):
    model = copy.deepcopy(MODEL)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_fn(model, X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("recipe", "world_size"), RECIPES)
def test_a_hook_of_a_parameter_sees_the_gradient_of_the_global_batch(recipe, world_size, is_late):
    def clipping(model):
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.2, 0.1))
        model[1].bias.register_hook(lambda grad: grad / grad.norm())

    given = {"after" if is_late else "change": clipping}
    found = trained(recipe, world_size, **given)
    torch.testing.assert_close(found, by_hand(clipping), rtol=0, atol=1e-12)
    assert not torch.allclose(found, by_hand(lambda model: None))


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        *RECIPES,
        pytest.param(af.compose(af.wrap_ddp(), af.accumulate("auto")), 2, id="retries"),
        pytest.param(af.wrap_ddp(find_unused_parameters=True), 2, id="unused parameters"),
    ],
)
def test_a_hook_with_memory_runs_once_a_step_and_not_in_build(recipe, world_size):
    def momentum(model):
        past = []

        def hook(grad):
            past.append(grad.clone())
            return sum(past) / len(past)

        model[0].weight.register_hook(hook)

    found = trained(recipe, world_size, momentum)
    torch.testing.assert_close(found, by_hand(momentum), rtol=0, atol=1e-12)


def test_hooks_do_not_run_where_ddp_begins_again_after_a_step_that_failed():
    def run(state):
        seen = []
        model = copy.deepcopy(MODEL)
        model[0].weight.register_hook(lambda grad: seen.append(float(grad.norm())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, step = af.build(state, af.wrap_ddp()(af.Plan(loss_fn, model, optimizer)))
        part = X.tensor_split(state.world_size)[state.rank]
        state, _ = step(state, part)
        with pytest.raises(RuntimeError):
            step(state, part[:, :3])
        step(state, part)
        return seen

    for seen in simulate(run, world_size=2):
        assert len(seen) == 2
        assert all(seen)


def test_hooks_are_in_place_again_after_a_step_that_failed():
    seen = []

    def failing(model, x):
        if len(seen) == 1:
            raise ZeroDivisionError
        return loss_fn(model, x)

    model = nn.Linear(4, 1).double()
    model.weight.register_hook(lambda grad: seen.append(grad.norm()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, step = af.build(af.DistState(), af.accumulate(2)(af.Plan(failing, model, optimizer)))
    state, _ = step(state, X)
    with pytest.raises(ZeroDivisionError):
        step(state, X)
    seen.clear()
    step(state, X)
    assert len(seen) == 1


@pytest.mark.parametrize(("recipe", "world_size"), RECIPES)
def test_hooks_that_step_in_the_backward_are_refused(recipe, world_size):
    def stepping(model):
        model[1].weight.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))

    with pytest.raises(
        ValueError, match=r"build: model must have no post-accumulate-grad hooks .* got one on 1.w"
    ):
        trained(recipe, world_size, stepping)
    with pytest.raises(
        ValueError, match=r"step: model must have no post-accumulate-grad hooks .* got one on 1.w"
    ):
        trained(recipe, world_size, after=stepping)


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


def test_fsdp_refuses_hooks_that_its_shards_would_drop():
    def hooked(model):
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.2, 0.1))

    with pytest.raises(
        ValueError, match=r"wrap_fsdp's model must have no hooks on parameters.*0.weight"
    ):
        trained(af.wrap_fsdp(), 2, hooked)


@pytest.mark.parametrize(
    ("recipe", "world_size"), [(af.compose(), 1), (af.wrap_ddp(), 2), (af.accumulate(2), 1)]
)
def test_parameters_that_are_replaced_after_build_are_named_as_such(recipe, world_size):
    def replacing(model):
        copies = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)

    words = r"step: model must hold the parameters that build found, got another 0.weight; write"
    with pytest.raises(ValueError, match=words):
        trained(recipe, world_size, after=replacing)


class AddGradient(torch.autograd.Function):
    """A Function that adds an auxiliary gradient, as mixtures of experts do."""

    @staticmethod
    def forward(ctx, x, aux):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(("recipe", "world_size"), RECIPES)
def test_a_function_that_adds_a_gradient_of_its_own_is_refused(recipe, world_size):
    def adding(model, x):
        y = model(x)
        return loss_fn(lambda x: AddGradient.apply(y, y.square().mean()), x)

    with pytest.raises(
        ValueError, match=r"backward that is linear in the loss, .* add what it adds"
    ):
        trained(recipe, world_size, loss=adding)
    trained(af.wrap_ddp(), 1, loss=adding)  # this case is the loop by hand


@pytest.mark.parametrize(("recipe", "world_size"), RECIPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_linear_function_is_not_refused(recipe, world_size, dtype):
    def linear(model, x):
        return loss_fn(lambda x: Twice.apply(model(x).to(dtype)).to(x.dtype), x)

    trained(recipe, world_size, loss=linear)


class Inner(torch.autograd.Function):
    """A Function that runs a backward inside, as reversible blocks and offloading do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(3)])
def test_a_function_whose_own_backward_is_left_out_is_refused(recipe, penalty):
    """With a penalty every parameter has a gradient nevertheless, that of the penalty."""

    def hiding(model, x):
        x = x.clone().requires_grad_()
        outputs = model[1](Inner.apply(x, model[0]))
        loss = F.mse_loss(outputs, x.detach().sum(1, keepdim=True))
        squares = sum(each.square().sum() for each in model.parameters())
        return loss + penalty * squares if penalty else loss

    with pytest.raises(
        ValueError, match=r"custom autograd.Functions as tensors, got Inner, .* detach"
    ):
        trained(recipe, 1, loss=hiding)


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


@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(2), af.reproducible(1)])
def test_a_reentrant_checkpoint_of_a_later_step_is_refused(recipe):
    """The penalty gives every parameter a gradient, so none is missed."""
    calls = []

    def later(model, x):
        calls.append(x)
        inner = (
            model[0](x)
            if len(calls) <= 4
            else checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=True)
        )
        squares = sum(each.square().sum() for each in model.parameters())
        return F.mse_loss(model[1](inner), x.sum(1, keepdim=True)) + squares

    model = copy.deepcopy(MODEL)
    plan = af.Plan(later, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.DistState(), recipe(plan), check_loss=False)
    while len(calls) < 4:
        state, _ = step(state, X)
    with pytest.raises(ValueError, match="use_reentrant"):
        step(state, X)


@pytest.mark.parametrize("recipe", [af.wrap_ddp(), af.wrap_fsdp()], ids=str)
def test_a_reentrant_checkpoint_is_found_in_a_graph_of_as_many_nodes(recipe):
    """It is one node in place of two, a product and a transposition."""

    def run(state):
        calls = []

        def later(model, x):
            calls.append(x)
            inner = (
                2 * checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=True)
                if len(calls) == 3
                else model[0](x)
            )
            return F.mse_loss(model[1](inner), x.sum(1, keepdim=True))

        model = copy.deepcopy(MODEL)
        plan = af.Plan(later, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(state, af.compose(recipe, af.accumulate(2))(plan), check_loss=False)
        state, _ = step(state, X)
        with pytest.raises(ValueError, match="use_reentrant"):
            step(state, X)

    simulate(run, world_size=2)


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_function_that_adds_a_gradient_is_found_behind_micro_batches_of_weight_0(is_nan):
    def adding(model, batch):
        x, weights = batch
        y = model(x)
        outputs = AddGradient.apply(y, y.square().mean())
        total = weights.sum() if is_nan else weights.sum().clamp(min=1)
        return (outputs.square() * weights).sum() / total

    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = af.Plan(adding, model, optimizer, weight_fn=lambda batch: batch[1].sum())
    state, step = af.build(af.DistState(), af.accumulate(3)(plan))
    weights = torch.ones_like(X[:, :1])
    weights[:4] = 0
    with pytest.raises(ValueError, match="backward that is linear in the loss"):
        step(state, (X, weights))


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
    "make", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)]
)
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.accumulate(2), 1),
        (af.accumulate(4), 1),
        (af.wrap_ddp(find_unused_parameters=True), 2),
        (af.compose(af.wrap_ddp(find_unused_parameters=True), af.accumulate(2)), 2),
        (af.reproducible(2), 2),
    ],
)
def test_what_micro_batches_of_weight_0_reach_has_a_gradient_of_zeros(recipe, world_size, make):
    torch.manual_seed(0)
    model = TwoHeads()
    x, task = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    batches = [
        (x, task, torch.tensor([1, 2, 3, 4])),
        (x, task, torch.tensor([1, 2, -100, -100])),
        (x, task, torch.tensor([-100, 2, -100, -100])),
    ]
    plan = af.Plan(masked_mean, model, make(model.parameters(), lr=0.1), weight_fn=af.num_labels(2))
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
        weight_fn=af.num_labels(1),
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
            weight_fn=af.num_labels(2),
        )
        own = af.wrap_fsdp(reduce_dtype=reduce_dtype)
        state, step = af.build(state, af.compose(own, af.accumulate(2))(plan))
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
        state, step = af.build(state, recipe(af.Plan(loss_fn, model, optimizer)))
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
        with pytest.raises(ValueError, match=r"last micro-batch of each rank.*experts\.1\.weight"):
            trained_by(2)


def test_a_parameter_that_only_micro_batches_of_weight_0_reach_is_waited_for_or_refused():
    def weighted(model, batch):
        x, weights = batch
        return (model(x) * weights).sum() / weights.sum()

    def run(state):
        model = Experts().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(weighted, model, optimizer, weight_fn=lambda batch: batch[1].sum())
        state, step = af.build(state, af.compose(af.wrap_ddp(), af.accumulate(2))(plan))
        weights = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
        mine = slice(None) if state.is_main else slice(0)
        step(state, (ROWS[mine], weights[mine]))

    with pytest.raises(ValueError, match=r"last micro-batch of each rank.*experts\.1\.weight"):
        simulate(run, world_size=2)


def test_a_rank_without_rows_has_a_sparse_gradient_where_unused_parameters_are_found():
    def run(state):
        torch.manual_seed(0)
        model = nn.Embedding(6, 1, sparse=True).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = af.wrap_ddp(find_unused_parameters=True) if state.world_size > 1 else af.compose()
        loss = lambda model, rows: model(rows).square().mean()
        state, step = af.build(state, recipe(af.Plan(loss, model, optimizer)))
        rows = torch.tensor([0, 2, 2, 5])
        for _ in range(2):
            state, _ = step(state, rows if state.is_main else rows[:0])
        return model.weight.detach()

    (expected,) = simulate(run, world_size=1)
    for found in simulate(run, world_size=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_sparse_table_that_is_replaced_is_named_where_a_rank_has_no_rows():
    def run(state):
        model = nn.Embedding(6, 1, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(lambda model, rows: model(rows).square().mean(), model, optimizer)
        state, step = af.build(state, af.wrap_ddp(find_unused_parameters=True)(plan))
        model.weight = nn.Parameter(model.weight.detach().clone())
        step(state, torch.tensor([0, 2, 5][: 3 * state.is_main]))

    with pytest.raises(ValueError, match="build found, got another weight"):
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
    state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"still do so, got 0\.weight"):
        step(state, X)
