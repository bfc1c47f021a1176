"""What would go wrong on an accelerator first, each found here before it was mended."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel_fn as af
from accel_fn.parallel.same_on_all_ranks import fingerprints
from tests.sim.device import native, recorded
from tests.sim.programs import assert_equal, loss_fn, make_batches, make_model, train, waits_in
from tests.support.forked_ranks import run_worlds
from tests.support.processes import launch


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
@pytest.mark.parametrize(
    "transforms",
    [
        [lambda: af.skip_nonfinite(), lambda: af.schedule(lambda number: 0.9**number)],
        [lambda: af.skip_nonfinite(), lambda: af.ema(0.9), lambda: af.clip(0.1)],
        [lambda: af.skip_spikes(), lambda: af.accumulate(2)],
    ],
)
def test_an_offloaded_update_does_not_read_verdict_and_rate_before_they_are_there(
    transforms, optimizer
):
    found, expected = (
        train(
            device,
            [*wrap, *(make() for make in transforms)],
            optimizer=optimizer,
            overflows=True,
        )
        for device, wrap in (("sim", [af.wrap_fsdp(offload=True)]), ("cpu", []))
    )
    assert_equal(found, expected, atol=1e-7)  # the rate may be in float32


def on_the_other_device():
    """Make a state whose device is not the current one."""
    assert torch.accelerator.current_device_index() == 0
    return af.DistState(device=torch.device("sim:1"))


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_values_are_read_from_the_stream_of_a_device_that_is_not_the_current_one(optimizer):
    transforms = [af.skip_nonfinite(), af.schedule(lambda number: 0.5**number), af.ema(0.9)]
    found, expected = (
        train(device, transforms, optimizer=optimizer, overflows=True)
        for device in (on_the_other_device(), "cpu")
    )
    assert_equal(found, expected, atol=1e-7)


def test_random_numbers_are_those_of_a_device_that_is_not_the_current_one():
    def losses(state, seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), model, optimizer)
        state, step = af.build(af.compose(af.place(), af.reproducible(4))(plan), state)
        native.default_generator(1).manual_seed(seed)  # virtual ranks have seeds of their own
        found = []
        for batch in make_batches():
            state, report = step(state, batch)
            found.append(float(report.loss))
        return found

    assert losses(on_the_other_device(), 1) == losses(on_the_other_device(), 2)


def test_a_model_that_nobody_places_is_refused():
    model = make_model()
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"place\(\)"):
        af.build(plan, af.init())


def test_ranks_that_the_script_started_keep_their_device_and_tensors_come_back_to_theirs():
    said = launch(
        """
        import json, os
        import torch, torch.distributed as dist
        import tests.sim.device
        import accel_fn as af

        rank, size = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        torch.accelerator.set_device_index(rank)
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        place = {"init_method": address, "rank": rank, "world_size": size}
        dist.init_process_group("cpu:gloo,sim:simccl", **place)
        state = af.init()
        here = torch.full((2,), float(rank), device=state.device)
        say(json.dumps({
            "device": [str(state.device), rank],
            "of host": [
                str(reduce(torch.ones(2), state).device) for reduce in (af.reduce_sum, af.reduce_max)
            ],
            "sum of device": [str(af.reduce_sum(here, state).device), rank],
            "on main": [str(af.on_main(lambda: {"a": here}, state)["a"].device), rank],
            "gathered": [str(af.gather(here, state).device), rank],
        }))
        """
    )
    for line in said.splitlines():
        found = json.loads(line)
        rank = found["device"][1]
        assert found.pop("of host") == ["cpu", "cpu"]
        assert found == {name: [f"sim:{rank}", rank] for name in found}


def test_the_only_visible_device_of_a_process_is_taken_whatever_its_local_rank():
    said = launch(
        """
        import json, os
        os.environ["SIM_VISIBLE_DEVICES"] = "1"
        import torch
        from tests.sim import worlds
        import accel_fn as af

        state = af.init(timeout_s=60)
        device = str(af.reduce_sum(torch.ones(2, device=state.device), state).device)
        say(json.dumps([state.local_rank, str(state.device), device]))
        """
    )
    ranks = sorted(map(json.loads, said.splitlines()))
    assert ranks == [[0, "sim:0", "sim:0"], [1, "sim:0", "sim:0"]]


DEVICE_SLEEPS = """
    import torch
    import tests.sim.device
    import accel_fn as af
    from tests.sim.programs import OPTIMIZERS, loss_fn, make_batches, make_model

    state = af.init(timeout_s={timeout_s})

    def sleeping(model, batch):
        if state.step == 2 and state.rank in {ranks}:
            if {fails}:
                raise OSError("disk full")
            torch.sim._sleep(10**12)  # as the kernel of a collective that a peer never joins
        return loss_fn(model, batch)

    model = make_model()
    plan = af.Plan(sleeping, model, OPTIMIZERS["foreach"](model.parameters()))
    state, step = af.build(af.compose(af.place(), af.wrap_ddp(), af.skip_nonfinite())(plan), state)
    for batch in make_batches():
        mark()
        state, _ = step(state, batch)
"""


def test_a_hang_of_the_devices_alone_is_seen_by_the_watchdog(tmp_path):
    script = DEVICE_SLEEPS.format(timeout_s=3, ranks=[0, 1], fails=False)
    ranks = run_worlds({"script": script}, tmp_path, timeout_s=60)["script"]
    for rank in ranks:
        assert rank.exit_code == 124, rank.stderr
        assert "step has waited for longer than timeout_s=3" in ranks[0].stderr + ranks[1].stderr


def test_an_error_ends_ranks_whose_devices_wait_for_work_that_nobody_joins(tmp_path):
    script = DEVICE_SLEEPS.format(timeout_s=60, ranks=[0, 1], fails="state.rank == 1")
    ranks = run_worlds({"script": script}, tmp_path, timeout_s=30)["script"]
    for rank, text in zip(ranks, ("rank 1", "OSError: disk full"), strict=True):
        assert rank.exit_code == 1, rank.stderr
        assert text in rank.stderr


def test_embeddings_with_sparse_gradients_are_refused_where_the_device_sums_none():
    launch(
        """
        import torch
        import tests.sim.device
        import accel_fn as af

        state = af.init(timeout_s=60)
        model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(lambda model, batch: model(batch).mean(), model, optimizer)
        try:
            af.build(af.compose(af.place(), af.wrap_ddp())(plan), state)
        except ValueError as error:
            say(error)
        """,
        expect=[
            "build: wrap_ddp's model must have dense gradients on SIMCCL, which sums no others, "
            "got '0'; use sparse=False"
        ]
        * 2,
    )


def waits_of_labels(recipe):
    """Train on labels that prefetch moved; return the waits of the last steps."""
    torch.manual_seed(0)
    model = nn.Embedding(5, 5)
    batches = [
        {"labels": torch.randint(0, 5, (8, 3)).masked_fill(torch.rand(8, 3) < 0.3, -100)}
        for _ in range(6)
    ]

    def of_labels(model, batch):
        scores = model(batch["labels"].clamp(min=0))
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    plan = af.Plan(of_labels, model, optimizer, weight_fn=af.count_labels("labels"))
    state, step = af.build(af.compose(af.place(), recipe)(plan), af.init())
    waits = []
    for batch in af.prefetch(batches, state):
        before = native.num_kernels()
        with recorded() as seen:
            state, _ = step(state, batch)
        waits += [*waits_in(seen, since=before)] if state.step > 2 else []
    return waits


@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(4)])
def test_labels_that_prefetch_moved_are_counted_without_a_wait(recipe):
    assert waits_of_labels(recipe) == []


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_a_verdict_is_read_once_however_many_functions_follow_it(optimizer):
    transforms = [
        af.skip_nonfinite(),
        af.schedule(lambda number: 0.9**number),
        af.ema(0.9),
        af.freeze("first", until=2),
    ]
    found = train("sim", transforms, optimizer=optimizer, overflows=True)
    assert {*found.waits} <= ({"update.py"} if optimizer == "foreach" else set())


class Operations(TorchDispatchMode):
    """Counts operations but for views: on a real device each is a kernel, or a few."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


def operations_of(transforms, num_parameters):
    """Count the operations of a late step."""
    model = nn.ParameterList([torch.full((3,), 1.0) for _ in range(num_parameters)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def loss_fn(model, batch):
        return torch.cat([*model]).sum() * batch.mean()

    plan = af.Plan(loss_fn, model, optimizer)
    state, step = af.build(af.compose(af.place(), *transforms)(plan), af.init(), check_loss=False)
    for _ in range(3):
        with Operations() as seen:
            state, _ = step(state, torch.ones(2))
    return seen.number


@pytest.mark.parametrize(
    "transform", [af.clip(0.1), af.clip_value(0.1), af.ema(0.9), af.with_amp("fp16")], ids=str
)
@pytest.mark.parametrize("together", [[], [af.skip_nonfinite()]], ids=["alone", "where_skipped"])
def test_no_operation_of_a_transform_is_repeated_for_each_parameter(transform, together):
    few, many = (
        operations_of([*together, transform], number) - operations_of([], number)
        for number in (2, 20)
    )
    assert many == few


def test_fingerprints_of_many_tensors_are_read_at_once():
    tensors = [None, *(torch.full((4,), number, device="sim") for number in range(1, 6))]
    with recorded() as seen:
        found = fingerprints(tensors)
    assert len({*found}) == 6
    assert len([each for each in seen if each.kind in ("sync", "copy")]) == 1


def test_gradients_are_scaled_by_a_number_without_a_wait():
    def halve(plan):
        return replace(plan, gradients=(*plan.gradients, lambda state, grads: grads.scaled(0.5)))

    assert not train("sim", [halve]).waits


def test_a_save_in_the_background_pins_its_share_once(tmp_path, monkeypatch):
    pinned, empty = [], torch.empty

    def counted(*args, **options):
        made = empty(*args, **options)
        pinned.append(made.nbytes if options.get("pin_memory") else 0)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    model = make_model()
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.place()(plan), af.init())
    af.save(step, state, tmp_path, wait=False)
    af.load(step, state, tmp_path)
    share = sum(each.nbytes for each in model.parameters())
    assert max(pinned) >= share
    assert sum(pinned) < 1.5 * share
