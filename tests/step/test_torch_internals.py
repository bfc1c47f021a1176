"""The parts inside torch that accel_fn uses: a test here fails if torch changes one."""

import contextlib
import functools
import inspect
from pkgutil import resolve_name

import pytest
import torch
import torch.distributed
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.optimizers import batches
from tests.support.strategies import mse, regression_model


def one_step(optimizer_of, before=lambda optimizer: None):
    """Return a model and its optimizer after one step; `before` sees the optimizer that was
    built."""
    model = regression_model()
    optimizer = optimizer_of(model.parameters())
    state, step = af.build(af.DistState(), af.Plan(mse, model, optimizer))
    before(optimizer)
    step(state, batches(torch.float64)[0])
    return model, optimizer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "multiprocessing.queues:Queue._on_queue_feeder_error",
        "torch._C._autograd:_profiler_enabled",
        "torch._C._autograd:_get_sequence_nr",
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "torch._C._distributed_c10d:HashStore",
        "torch._C._distributed_c10d:PrefixStore",
        "torch._C._distributed_c10d:TCPStore",
        "torch._C._distributed_c10d:_register_process_group",
        "torch._C._distributed_c10d:Backend._get_sequence_number_for_group",
        "torch._C._distributed_c10d:ProcessGroup._get_sequence_number_for_group",
        "torch:Tensor._is_view",
        "torch:_foreach_mul_",
        "torch:_foreach_norm",
        "torch._dynamo.exc:TorchDynamoException",
        "torch._utils:ExceptionWrapper.reraise",
        "torch._dynamo:mark_static_address",
        "torch._inductor:list_mode_options",
        "torch.autograd.graph:_engine_run_backward",
        "torch.distributed:ProcessGroup._register_backend",
        "torch.distributed:ProcessGroup._set_default_backend",
        "torch.distributed:ProcessGroup._set_group_name",
        "torch.distributed:ProcessGroup.get_group_store",
        "torch.distributed.distributed_c10d:_world.pg_map",
        "torch.nn:Module._call_impl",
        "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module",
        "torch.nn.parallel:DistributedDataParallel._post_forward",
        "torch.nn.parallel:DistributedDataParallel._pre_forward",
        "torch.nn.parallel:DistributedDataParallel._remove_autograd_hooks",
        "torch.optim:Optimizer.profile_hook_step",
        "torch.optim.optimizer:_global_optimizer_post_hooks",
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        "torch.utils.data._utils.signal_handling:_remove_worker_pids",
        "torch.utils.data._utils.worker:ManagerWatchdog",
        "torch.utils.data._utils.worker:WorkerInfo",
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
        "torch.utils._pytree:tree_leaves",
        "torch.utils._pytree:tree_map_only",
        "torch.utils._pytree:tree_flatten",
        "torch.utils._pytree:tree_unflatten",
    ],
)
def test_private_name_is_where_we_look_for_it(name):
    assert resolve_name(name) is not None


def step_of(loss_of):
    """Take a step of this loss."""
    plan = af.Plan(loss_of, model := regression_model(), sgd(model.parameters()))
    state, step = af.build(af.DistState(), plan, check_loss=False)
    step(state, batches(torch.float64)[0])


def test_backward_frees_the_graph():
    losses = []

    def kept(model, batch):
        losses.append(mse(model, batch))
        return losses[0]

    step_of(kept)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


def test_tensor_subclass_sees_the_public_backward():
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    step_of(lambda model, batch: mse(model, batch).as_subclass(Watching))
    assert torch.autograd.backward in seen


def test_wrapper_is_left_out_where_nothing_listens():
    files = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            files.append({each.filename for each in inspect.stack()})

    wrapper = inspect.getfile(torch.optim.Optimizer)
    _, optimizer = one_step(lambda parameters: Looking(parameters, lr=0.1))
    optimizer.step()
    assert [wrapper in each for each in files] == [False, True]


def test_step_of_a_subclass_is_run():
    class Halving(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
            return super().step(closure)

    halved, _ = one_step(lambda parameters: Halving(parameters, lr=0.2))
    plain, _ = one_step(sgd)
    for actual, expected in zip(halved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_step_that_somebody_wrapped_on_the_class_is_run():
    class Watched(torch.optim.SGD):
        pass

    seen = []
    sgd([nn.Parameter(torch.ones(1))])  # making one lets torch wrap its step
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def watching(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    Watched.step = watching
    _, optimizer = one_step(lambda parameters: Watched(parameters, lr=0.1))
    assert seen == [optimizer]


def test_step_that_somebody_replaced_on_the_instance_is_run():
    seen = []

    def replace(optimizer):
        optimizer.step = lambda: seen.append(optimizer)

    _, optimizer = one_step(sgd, replace)
    assert seen == [optimizer]


@pytest.mark.parametrize(
    "register",
    [
        torch.optim.Optimizer.register_step_pre_hook,
        torch.optim.Optimizer.register_step_post_hook,
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ],
    ids=["pre", "post", "pre of all", "post of all"],
)
def test_hook_of_an_optimizer_or_of_all_runs_once_in_a_step(register):
    seen, handles = [], []

    def listen(optimizer):
        handles.append(register(optimizer, lambda optimizer, args, kwargs: seen.append(optimizer)))

    _, optimizer = one_step(sgd, listen)
    handles[0].remove()
    assert seen == [optimizer]


def test_scheduler_sees_the_step():
    schedulers = []

    def schedule(optimizer):
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))

    _, optimizer = one_step(sgd, schedule)
    schedulers[
        0
    ].step()  # torch's warning that it came before the optimizer's step is an error in these tests
    assert optimizer.param_groups[0]["lr"] == 0.05


def steps_of_replicas(loss_fn, around=contextlib.nullcontext):
    """Return the first rank's state after three steps: losses, parameters, and recorded calls."""

    def rank(state):
        model = regression_model()
        plan = af.Plan(loss_fn, model, sgd(model.parameters()))
        state, step = af.build(state, af.wrap_ddp()(plan))
        losses = []
        with around() if state.is_main else contextlib.nullcontext() as seen:
            for batch in batches(torch.float64)[:3]:
                state, report = step(state, batch)
                losses.append(float(report.loss))
        return losses, model.state_dict(), seen

    return simulate(rank, world_size=2)[0]


def test_profiler_records_the_forward_of_replicas():
    """With a profiler, DDP's own forward is called; the steps are the same."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    losses, _, profile = steps_of_replicas(
        mse, lambda: torch.profiler.profile(activities=activities)
    )
    assert losses == steps_of_replicas(mse)[0]
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["DistributedDataParallel.forward"] == 3


def test_profiler_records_the_step():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(sgd)
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#SGD.step" in names
