"""wrap_ddp: the options that DistributedDataParallel gets, and the gradients that its hooks
send."""

import copy
import json

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import ddp_of
from tests.support import strategies as ours
from tests.support.processes import launch

BATCH = (torch.arange(12.0).reshape(4, 3) / 10, torch.ones(4, 1))


def built(state, model=None, **options):
    model = ours.regression_model().float() if model is None else model
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    return af.build(af.wrap_ddp(**options)(plan), state)


def drawn(state, num_features, num_targets):
    """Draw a different batch for every rank."""
    generator = torch.Generator().manual_seed(state.rank)
    return tuple(torch.randn(9, size, generator=generator) for size in (num_features, num_targets))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (100, 1, 1)), ({"bucket_cap_mb": 25, "gradient_as_bucket_view": False}, (25, 0, 1))],
    ids=str,
)
def test_ddp_gets_what_the_docs_name_where_the_user_gives_nothing_else(options, expected):
    def run(state):
        _, step = built(state, **options)
        told = ddp_of(step)._get_ddp_logging_data()
        names = ("gradient_as_bucket_view", "broadcast_buffers")
        return told["bucket_cap_bytes"] / 2**20, *(told[name] for name in names)

    assert simulate(run, world_size=2) == [expected] * 2


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_replicas_stay_equal_and_near_what_is_sent_whole_under_communication_hooks(hook):
    model = ours.regression_model().float()
    _, expected = ours.trained_by_hand(model, [BATCH] * 3, optimizer=ours.sgd)
    results = ours.trained(
        model,
        ours.dealt([BATCH] * 3, [[1, 3]] * 3),
        af.wrap_ddp(comm_hook=hook),
        optimizer=ours.sgd,
    )
    # gradients travel with 8 bits in bfloat16, or 11 in float16: 2**-8 of updates of about 0.1
    ours.assert_close(results[0][1], expected, rtol=1e-2, atol=1e-2)
    ours.assert_identical(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("hook", "expected"), [(None, torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_gradients_are_rounded_to_what_a_hook_sends(hook, expected):
    def run(state):
        state, step = built(state, comm_hook=hook)
        _, grads, _ = step.grads(state, drawn(state, 3, 1))
        return next(  # the coarsest dtype comes first
            dtype
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
            if all(torch.equal(each, each.to(dtype).float()) for each in grads.tensors)
        )

    assert simulate(run, world_size=2) == [expected] * 2


def test_powersgd_sends_factors_of_rank_one_after_the_calls_that_torch_sends_whole():
    def run(state):
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(8, 8)
        with torch.no_grad():
            model.weight.copy_(torch.randn(8, 8, generator=generator))
        state, step = built(state, model, comm_hook="powersgd")
        ((_, memory),) = ddp_of(step)._comm_hooks
        found = []
        for calls in (0, memory.start_powerSGD_iter):
            memory.iter = calls
            _, grads, _ = step.grads(state, drawn(state, 8, 8))
            found.append(int(torch.linalg.matrix_rank(grads.tensors[0])))
        return found

    assert simulate(run, world_size=2) == [[8, 1]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL's gather")
def test_synchronised_batch_statistics_are_those_of_the_global_batch():
    said = launch(
        """
        import json, torch, accel_fn as af
        from tests.transforms.test_ddp import normalising, uneven_batches
        from tests.support import strategies as ours

        state, model = af.init(timeout_s=60), normalising()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        recipe = af.compose(af.place(), af.wrap_ddp(sync_batchnorm=True))
        state, step = af.build(recipe(plan), state)
        for part in ours.dealt(*uneven_batches())[state.rank]:
            state, _ = step(state, part)
        say(json.dumps({name: each.tolist() for name, each in model.state_dict().items()}))
        """
    )
    batches, _ = uneven_batches()
    _, expected = ours.trained_by_hand(normalising(), batches, optimizer=ours.sgd)
    for line in said.splitlines():
        actual = {name: torch.tensor(each) for name, each in json.loads(line).items()}
        ours.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # float32, on other kernels


def normalising():
    """Make the regression model with batch statistics before its non-linear layer."""
    first, bend, last = copy.deepcopy(ours.regression_model().float())
    return nn.Sequential(first, nn.BatchNorm1d(5), bend, last)


def uneven_batches():
    """Return global batches, and the parts of each of two ranks."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(7, 3, generator=generator), torch.randn(7, 1, generator=generator))
        for _ in range(3)
    ]
    return batches, [[2, 5]] * 3


class Heads(nn.Module):
    """A body and two heads; each task reaches one head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(5, 1)
        self.double()


TASKS = (
    lambda model, x: (model.first(model.body(x).tanh()) - x[:, :1]).square().mean(),
    lambda model, x: model.second(model.body(x).tanh()).abs().mean(),
)
ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3).sin()


def tasks_in_turn(state, recipe, order, again=()):
    """Train the tasks of `order`, each by a plan of its own; build those of `again` anew before."""
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    plans = [recipe(af.Plan(task, model, optimizer)) for task in TASKS]
    steps = [af.build(plan, state)[1] for plan in plans]
    for number, task in enumerate(order):
        if number in again:
            state, steps[task] = af.build(plans[task], state)
        state, _ = steps[task](state, af.shard_batch(ROWS, state))
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize(
    ("order", "again", "world_size", "num_microbatches"),
    [((0, 0, 1, 1, 0), (), 3, 1), ((0, 0, 1, 1), (2,), 2, 3), ((0, 1, 0, 1), (2, 3), 2, 1)],
    ids=str,
)
def test_plans_in_turn_over_one_model_reach_other_parts_of_it(
    order, again, world_size, num_microbatches
):
    (expected,) = simulate(
        lambda state: tasks_in_turn(state, af.compose(), order, again), world_size=1
    )
    wrap = af.wrap_ddp(find_unused_parameters=True)
    recipe = af.compose(wrap, af.accumulate(num_microbatches))
    found = simulate(
        lambda state: tasks_in_turn(state, recipe, order, again), world_size=world_size
    )
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)


class NCCLGroup:
    """Names NCCL for every device, as the group of a launch on CUDA does."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def _get_backend(self, device):
        return self

    def name(self):
        return "nccl"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_embeddings_with_sparse_gradients_are_refused_over_nccl_alone(device):
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=0.1))
    [slot] = af.wrap_ddp()(plan).strategy
    state = af.DistState(world_size=2, device=device, group=NCCLGroup())
    text = (
        "build: wrap_ddp's model must have dense gradients on NCCL, which sums no others, got '0'; "
        "use sparse=False"
    )
    if device == "cpu":
        slot.validate(state, plan)
    else:
        with pytest.raises(ValueError, match=text):
            slot.validate(state, plan)
