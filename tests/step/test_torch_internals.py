"""The parts inside torch that accel_fn uses: a test here fails if torch changes one."""

import contextlib
import functools
import inspect
import re
import time
from pkgutil import resolve_name

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

import accel_fn as af
from accel_fn.base.torch_compile import MODES, without_clock
from accel_fn.comm.mesh import make_mesh
from accel_fn.comm.primitives import gather_shards
from accel_fn.data.streams.read_stream import shown
from accel_fn.data.workers import lost_workers, make_loader, start_workers
from accel_fn.step import torch_internals
from accel_fn.step.torch_internals import (
    checkpoint_hook,
    run_backward,
    run_optimizer,
)
from accel_fn.testing import simulate
from accel_fn.transforms.compile.optimizer_in_graph import methods_of
from tests.support.optimizers import ROWS, batches, kinds
from tests.support.strategies import mse, regression_model

FUSED = {
    "adam": functools.partial(torch.optim.Adam, lr=0.5),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
    "sgd": functools.partial(torch.optim.SGD, lr=0.5),
}
fused_optimizers = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


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


def test_a_module_calls_what_stands_for_it_compiled():
    assert nn.Module._compiled_call_impl is None
    module = nn.Linear(1, 1)
    module._compiled_call_impl = lambda *inputs: inputs
    assert module(2) == (2,)


def test_modes_of_the_compiler_are_those_that_we_know():
    assert set(MODES) == set(torch._inductor.list_mode_options())


def test_compiler_can_leave_its_clock_out():
    assert torch._dynamo.config.record_runtime_overhead
    with without_clock():
        assert not torch._dynamo.config.record_runtime_overhead


def test_every_optimizer_of_torch_checks_for_cuda_graphs_by_a_name_that_we_know():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    methods = vars(methods_of(optimizer))
    checks = [name for name in methods if name.endswith("_graph_capture_health_check")]
    assert checks
    assert "_graph_capture_health_check()" in inspect.getsource(torch.optim.AdamW.step)
    # all are the same method of ours, which does nothing
    assert len({methods[name] for name in checks}) == 1


@pytest.mark.parametrize("seed", [None, 0.25], ids=["from one", "from a seed"])
def test_engine_is_called_as_the_public_backward_calls_it(monkeypatch, seed):
    calls = []
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *a, **k: calls.append((a, k))
    )
    monkeypatch.setattr(
        torch_internals, "_engine_run_backward", lambda *a, **k: calls.append((a, k))
    )
    weight = nn.Parameter(torch.ones(3))
    loss = weight.sum()
    seed = None if seed is None else torch.tensor(seed)
    torch.autograd.backward(loss, seed, inputs=[weight])
    run_backward(loss, seed, [weight])
    (public, public_options), (ours, our_options) = calls
    assert public_options == our_options
    assert public[0] == ours[0]
    assert torch.equal(public[1][0], ours[1][0])
    assert public[2:] == ours[2:]


def test_backward_leaves_parameters_alone_that_the_loss_does_not_reach():
    reached, unreached = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    run_backward(reached.sum(), None, [reached, unreached])
    assert unreached.grad is None


def test_backward_frees_the_graph():
    weight = nn.Parameter(torch.ones(2))
    loss = weight.square().sum()
    run_backward(loss, None, [weight])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_backward(loss, None, [weight])


def test_tensor_subclass_sees_the_public_backward():
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    weight = torch.ones(2).as_subclass(Watching).requires_grad_()
    run_backward(weight.sum(), None, [weight])
    assert torch.autograd.backward in seen


@pytest.mark.parametrize(
    "kind", sorted(kinds(torch.optim), key=str), ids=lambda kind: kind.__name__
)
def test_step_of_every_optimizer_of_torch_can_be_called_without_its_wrapper(kind):
    # making one wraps its step
    next(row for row in ROWS.values() if row.kind is kind).start(torch.float64)
    bare = torch_internals._unwrapped_step(kind)
    if getattr(kind.step, "_torchdynamo_disable", False):
        # Once imported, torch's compiler wraps the step of two of them, outside of the wrapper or
        # inside.
        assert bare is None or bare._torchdynamo_disable
        return
    assert bare is not None
    assert bare is not kind.step
    assert not hasattr(bare, "hooked")


@pytest.mark.parametrize(
    ("run", "wrapped"), [(run_optimizer, False), (lambda optimizer: optimizer.step(), True)]
)
def test_wrapper_is_left_out_where_nothing_listens(run, wrapped):
    frames = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            frames.extend(each.frame.f_code for each in inspect.stack())

    run(Looking([nn.Parameter(torch.ones(1))]))
    assert (torch_internals._WRAPPER in frames) == wrapped


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


def test_scheduler_still_warns_where_there_was_no_step():
    scheduler = torch.optim.lr_scheduler.StepLR(sgd([nn.Parameter(torch.ones(1))]), 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)"):
        scheduler.step()


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


def test_a_checkpoint_packs_tensors_by_a_hook_that_is_seen_in_its_forward_and_when_that_runs_again():
    seen = []

    def run(inputs):
        seen.append((checkpoint_hook(), checkpoint_hook()))
        with torch.autograd.graph.save_on_cpu():
            assert checkpoint_hook() is None
        return inputs.exp()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    forward, recomputation = seen
    assert all(one is other is not None for one, other in seen)
    assert forward[0] is not recomputation[0]
    assert checkpoint_hook() is None


@fused_optimizers
def test_fused_optimizer_takes_a_factor(make):
    weight = nn.Parameter(torch.ones(1))
    assert make([weight], fused=True)._step_supports_amp_scaling
    assert not getattr(make([weight]), "_step_supports_amp_scaling", False)


def test_fused_sgd_still_leaves_a_momentum_unset_that_its_first_update_skipped():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    # if this fails, the guard in _updating can go
    assert "momentum_buffer" in optimizer.state[weight]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_foreach_norm_sums_half_precision_in_the_given_dtype(dtype):
    (norm,) = torch._foreach_norm([torch.full((4,), 6e4, dtype=dtype)], 2.0, torch.float32)
    assert norm.dtype == torch.float32
    assert norm == 2 * torch.tensor(6e4, dtype=dtype).float()


def test_foreach_mul_does_not_round_a_factor_to_half_precision():
    tensor = torch.full((3,), 6e4, dtype=torch.float16)
    torch._foreach_mul_([tensor], torch.tensor(2.0**-28))
    assert torch.equal(tensor, torch.full((3,), 6e4 * 2.0**-28, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_foreach_add_rounds_as_add_does_in_place(dtype):
    lefts, rights = ([torch.randn(size).to(dtype) for size in (1, 7, 1000)] for _ in range(2))
    expected = [left + right for left, right in zip(lefts, rights, strict=True)]
    homes = [each.data_ptr() for each in lefts]
    torch._foreach_add_(lefts, rights)
    assert all(torch.equal(*pair) for pair in zip(lefts, expected, strict=True))
    assert [each.data_ptr() for each in lefts] == homes


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("_set_default_backend", r"\(self: .*ProcessGroup, backend_type: .*BackendType\) -> None"),
        (
            "_register_backend",
            r"\(self: .*ProcessGroup, device: torch\.device, backend_type: .*BackendType, "
            r"backend: .*Backend \| None = None\) -> None",
        ),
    ],
)
def test_process_group_takes_a_backend_as_we_give_it(method, signature):
    assert re.search(signature, getattr(torch.distributed.ProcessGroup, method).__doc__)


def in_shards(state, replicate=1):
    """Make a layer, and the class that FSDP gives it."""
    layer = nn.Linear(2, 3)
    nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=make_mesh(state, replicate))
    return layer


def test_fsdp_works_by_its_hooks_also_where_a_module_has_its_own_class_again():
    def run(state):
        layer = in_shards(state)
        made, layer.__class__ = type(layer), nn.Linear
        assert issubclass(made, FSDPModule)
        assert issubclass(made, nn.Linear)
        layer(torch.full((1, 2), float(state.rank))).sum().backward()
        return layer.weight.grad.full_tensor().tolist()

    assert simulate(run, world_size=2) == [[[0.5, 0.5]] * 3] * 2


def test_a_parameter_that_fsdp_gathers_is_the_same_object_each_time():
    def run(state):
        layer = in_shards(state)
        found = []
        for _ in range(2):
            layer.unshard()
            found.append(id(layer.weight))
            layer.reshard()
        layer(torch.ones(1, 2))
        return found == [id(layer.weight)] * 2

    assert simulate(run, world_size=2) == [True, True]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp_gathers_the_padded_shards_that_its_records_hold(dtype):
    """By a function that can be given; a rank that stands in for itself must send the same."""

    def run(state):
        layer = nn.Linear(2, 3)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        fully_shard(layer, mesh=make_mesh(state, 1), mp_policy=policy)
        records = layer._get_fsdp_state()._fsdp_param_group.fsdp_params
        seen = []

        class Gather:
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                seen.append(input_tensor.clone())
                return gather_shards(output_tensor, input_tensor, group, async_op)

        layer.set_custom_all_gather(Gather())
        layer(torch.ones(1, 2))
        return seen, [torch.cat([each._sharded_param_data.to(seen[0].dtype) for each in records])]

    for sent, held in simulate(run, world_size=2):
        assert [each.tolist() for each in sent] == [each.tolist() for each in held]


def test_get_worker_info_gives_what_its_module_holds():
    info = WorkerInfo(id=3, num_workers=5, seed=7, dataset=None)
    assert get_worker_info() is None
    with shown(info):
        assert get_worker_info() is info
    assert get_worker_info() is None


class WhoReads(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        with shown(None):
            alone = get_worker_info()
        yield info.id, info.num_workers, info.dataset is self, alone


def test_worker_knows_itself_by_the_data_set_that_its_loader_reads():
    found = list(DataLoader(WhoReads(), batch_size=None, num_workers=2))
    assert found == [[0, 2, True, None], [1, 2, True, None]]


class Waiting(IterableDataset):
    def __iter__(self):
        yield 0
        time.sleep(600)


def test_death_of_a_worker_is_raised_by_next_alone():
    running = start_workers(make_loader(Waiting(), num_workers=1))
    assert not running._worker_pids_set
    assert next(running) == 0
    assert lost_workers(running) == ""
    running._workers[0].kill()
    running._workers[0].join()  # torch's handler would raise here
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        running._try_get_data(0.1)
    assert re.fullmatch(r"worker 0 \(process \d+\) killed by SIGKILL", lost_workers(running))
    running._shutdown_workers()
    assert lost_workers(running) == ""


class Sizes(IterableDataset):
    def __iter__(self):
        for size in (0, 1, 20_000, 3_000_000):
            yield "x" * size


def test_messages_of_workers_are_read_by_a_function_that_can_be_given():
    running = start_workers(make_loader(Sizes(), num_workers=1))
    reader = running._worker_result_queue._reader
    receive, sizes = reader._recv, []
    reader._recv = lambda size: sizes.append(size) or receive(size)
    assert [len(item) for item in running] == [0, 1, 20_000, 3_000_000]
    assert max(sizes) > 3_000_000
