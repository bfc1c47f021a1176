"""init and distributed: the variables that they read, and the ones that they refuse."""

import contextlib
import copy
import pickle
import socket
import threading

import pytest
import torch

import accel_fn as af
from accel_fn.core.primitives import default_backend
from accel_fn.parallel.world import Launch, pick_device, read_launch
from accel_fn.testing import simulate
from tests.support.processes import free_port, launch

FULL = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def alone(monkeypatch):
    for name in FULL:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    """Set a launcher's variables, with some changed."""

    def set_variables(**changes):
        for name, value in {**FULL, **changes}.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_a_launcher_that_sets_all_variables_is_used():
    assert read_launch(FULL) == Launch(1, 4, 1, 2, "127.0.0.1", 29500, False)


def test_without_local_variables_it_is_one_process_a_machine():
    environment = {name: value for name, value in FULL.items() if not name.startswith("LOCAL")}
    assert read_launch(environment) == Launch(1, 4, 0, 1, "127.0.0.1", 29500, False)


def test_without_any_variable_there_is_no_launch():
    assert read_launch({"PATH": "/bin", "RANK": ""}) is None


@pytest.mark.parametrize("missing", FULL)
def test_a_half_set_environment_names_what_is_missing(missing):
    environment = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(RuntimeError, match=rf"init: the launcher must set {missing} too.*torchrun"):
        read_launch(environment)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "4"}, "RANK must be >= 0 and below WORLD_SIZE=4, got 4"),
        ({"RANK": "-1"}, "RANK must be >= 0"),
        ({"RANK": "one"}, "RANK must be an integer, got 'one'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be >= 0 and below LOCAL_WORLD_SIZE=2, got 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, r"LOCAL_WORLD_SIZE must be in 1 \.\. WORLD_SIZE=4, got 5"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT must be in 1 \.\. 65535, got 70000"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK must be >= 0 and below WORLD_SIZE=0"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(change, text):
    with pytest.raises(RuntimeError, match=f"init: {text}"):
        read_launch({**FULL, **change})


def test_alone_it_is_one_process_on_one_device(alone):
    state = af.init(device="cpu", seed=5)
    assert (state.rank, state.world_size, state.seed, state.group) == (0, 1, 5, None)
    assert state.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"device": "gpu"}, "device must be a torch.device or the name of one, .* got 'gpu'"),
        ({"device": ["cpu"]}, r"device must be a torch.device .* got \['cpu'\]"),
        ({"backend": "glue"}, r"backend must be None or of those .*gloo.*, got 'glue'"),
        ({"backend": "cpu:gloo,cuda:glue"}, "backend must be .*, got 'cpu:gloo,cuda:glue'"),
        ({"backend": "undefined"}, "backend must be .*, got 'undefined'"),
        ({"backend": 1}, "backend must be .*, got 1"),
    ],
    ids=str,
)
def test_what_torch_does_not_have_is_refused(alone, argument, text):
    with pytest.raises(ValueError, match=f"init: {text}"):
        af.init(**argument)


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", None])
def test_a_backend_may_be_given_as_torch_takes_it(alone, backend):
    assert af.init(device="cpu", backend=backend).world_size == 1


def test_a_state_is_of_a_device_that_there_is():
    with pytest.raises(ValueError, match=r"DistState: device must be .* got 'gpu'"):
        af.DistState(device="gpu")


def test_a_world_of_one_needs_no_group(launched):
    launched(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert af.init(device="cpu").group is None


def test_the_default_device_is_the_accelerator_or_the_cpu(alone):
    expected = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert af.init().device.type == (expected.type if expected else "cpu")


@pytest.fixture
def machine(monkeypatch):
    """Make torch report some accelerators of a kind; record the indices that become current."""

    def with_accelerators(kind, count):
        current = []
        for name, value in (
            ("is_available", lambda: True),
            ("current_accelerator", lambda: torch.device(kind)),
            ("device_count", lambda: count),
            ("set_device_index", current.append),
            ("current_device_index", lambda: 1),
        ):
            monkeypatch.setattr(torch.accelerator, name, value)
        return current

    return with_accelerators


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, "cuda:2"), ("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("meta", "meta")],
)
def test_a_rank_takes_the_device_of_its_local_rank_unless_it_is_given_another(
    machine, asked, expected
):
    current = machine("cuda", 4)
    device = pick_device(asked, 2, 4, 8)
    assert device == torch.device(expected)
    assert current == ([] if device.index is None else [device.index])


def test_the_only_visible_device_is_taken_whatever_the_local_rank(machine):
    current = machine("cuda", 1)
    assert pick_device(None, 2, 4, 8) == torch.device("cuda:0")
    assert current == [0]


@pytest.mark.parametrize(("asked", "expected"), [("cuda", 1), ("cuda:3", 3)])
def test_a_script_that_joined_its_world_keeps_its_current_device(machine, asked, expected):
    current = machine("cuda", 4)
    assert pick_device(asked, None, 1, 4) == torch.device("cuda", expected)
    assert current == [expected]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (None, "LOCAL_WORLD_SIZE must be at most the 2 cuda devices of this machine, got 3; start"),
        ("cuda:2", "device must have an index below 2, got 'cuda:2'"),
        ("xpu", "device must be one that this machine has, got 'xpu' and cuda here"),
    ],
)
def test_a_device_beyond_those_of_the_machine_is_refused(machine, asked, text):
    current = machine("cuda", 2)
    with pytest.raises(RuntimeError, match=f"init: {text}"):
        pick_device(asked, 2, 3, 3)
    assert current == []


@pytest.mark.parametrize(("world_size", "expected"), [(1, "mps:0"), (2, "cpu")])
def test_devices_without_a_backend_are_left_out_of_a_world_of_several(
    machine, world_size, expected
):
    """Torch's table names Gloo for MPS, but Gloo supports only CPU and CUDA."""
    machine("mps", 1)
    assert pick_device(None, 0, world_size, world_size) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cpu", None, "gloo"),
        ("cpu", "mpi", "mpi"),
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("xpu", None, "cpu:gloo,xpu:xccl"),
        ("cuda", "gloo", "cpu:gloo,cuda:gloo"),
        ("cuda", "cpu:gloo,cuda:ucc", "cpu:gloo,cuda:ucc"),
    ],
)
def test_a_backend_fits_the_device_and_gloo_is_beside_it(device, asked, expected):
    assert default_backend(torch.device(device), asked) == expected


def test_a_device_by_name_without_a_backend_is_refused_unless_a_backend_is_given():
    with pytest.raises(
        RuntimeError,
        match=r"init: device must be one that has a backend for several ranks, got 'mps'",
    ):
        default_backend(torch.device("mps"), None)
    assert default_backend(torch.device("mps"), "mine") == "cpu:gloo,mps:mine"


def test_a_device_that_the_machine_lacks_is_refused():
    present = torch.accelerator.current_accelerator()
    absent = "xpu" if present is not None and present.type == "cuda" else "cuda"
    with pytest.raises(
        RuntimeError, match=f"init: device must be one that this machine has, got '{absent}'"
    ):
        pick_device(absent, 0, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"timeout_s": 0}, "timeout_s must be a finite number > 0"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"seed": 1.5}, "seed must be an integer >= 0"),
    ],
)
def test_arguments_are_checked(alone, arguments, text):
    with pytest.raises(ValueError, match=f"init: {text}"):
        af.init(**arguments)


def test_a_host_that_does_not_resolve_is_an_error(launched):
    launched(MASTER_ADDR="no-such-host.invalid")
    with pytest.raises(
        RuntimeError, match=r"MASTER_ADDR must be a host that resolves, got 'no-such-host"
    ):
        af.init(device="cpu", timeout_s=2)


@pytest.mark.parametrize(
    ("backlog", "num_waiting", "why"),
    [
        (None, 0, "Connection refused"),
        (0, 4, "(timed out|no store answers)"),  # kernels differ in how many connections may wait
        (9, 0, "no store answers"),
    ],
    ids=["bound alone", "full", "silent"],
)
def test_an_address_that_takes_no_rank_is_an_error_in_time(
    launched, capfd, backlog, num_waiting, why
):
    """torch's own attempts print pages, last longer than the time-out, and wait forever for a
    silent server."""
    with contextlib.ExitStack() as sockets:
        there = sockets.enter_context(socket.socket())
        there.bind(("127.0.0.1", 0))
        if backlog is not None:
            there.listen(backlog)
        for _ in range(num_waiting):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(there.getsockname())
        port = there.getsockname()[1]
        launched(MASTER_PORT=str(port))
        with pytest.raises(
            TimeoutError,
            match=rf"could not reach MASTER_ADDR=127\.0\.0\.1 MASTER_PORT={port} .*{why}",
        ):
            af.init(device="cpu", timeout_s=0.5)
        assert capfd.readouterr().err == ""
    for thread in threading.enumerate():
        # the thread was left with the silent server, which is closed now
        if thread.name == "accel_fn store":
            thread.join(60)


def test_a_port_that_is_taken_is_an_error(launched):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launched(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(taken.getsockname()[1]))
        with pytest.raises(
            TimeoutError, match=r"rank 0 of 4 could not serve MASTER_ADDR=127\.0\.0\.1"
        ):
            af.init(device="cpu", timeout_s=2)


def test_ranks_that_do_not_come_are_named_and_the_port_is_free_while_the_error_is_kept(launched):
    port = free_port()
    launched(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(port))
    with pytest.raises(
        TimeoutError,
        match=rf"^init: all 4 ranks must come to 127\.0\.0\.1:{port} within 1 s, rank 0 did not see "
        r"ranks 1, 2, 3; is WORLD_SIZE right, and did they start\?$",
    ) as kept:
        af.init(device="cpu", timeout_s=1)
    with socket.socket() as next_server:
        next_server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_server.bind(("127.0.0.1", port))
    assert kept.value is not None


@pytest.mark.slow
def test_two_states_and_worlds_one_after_the_other_are_usable():
    launch(
        """
        import accel_fn as af, torch.distributed as dist

        first, second = af.init(device="cpu", timeout_s=30), af.init(device="cpu", timeout_s=30)
        assert first.group is not second.group
        assert af.reduce_sum(first.rank, first) == 1
        assert af.reduce_sum(second.rank + 1, second) == 3
        say("both", first.rank)
        """,
        expect=["both 0", "both 1"],
    )


@pytest.mark.slow
def test_a_state_whose_world_was_left_is_refused():
    launch(
        """
        import accel_fn as af, torch

        def build(state):
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            plan = af.Plan(lambda model, batch: model(batch).mean(), model, optimizer)
            return af.build(af.wrap_ddp()(plan), state)

        with af.distributed(device="cpu", timeout_s=30) as state:
            state, step = build(state)
            other = af.init(device="cpu", timeout_s=30)
        for call in (
            lambda: af.barrier(state),
            lambda: af.gather(torch.ones(1), other),
            lambda: step(state, torch.ones(3, 2)),
            lambda: build(state),
        ):
            try:
                call()
            except ValueError as error:
                say(error)
        """,
        expect=[
            f"{function}: state must be of a world that is not over, got one whose group was left; "
            "a state is of use until the end of af.distributed(), or of the process after af.init()"
            for function in ("barrier", "gather", "step", "build")
        ]
        * 2,
    )


@pytest.mark.slow
def test_a_world_that_the_script_has_joined_itself_is_taken_over():
    launch(
        """
        import os, torch.distributed as dist, accel_fn as af

        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        state = af.init(device="cpu", timeout_s=30)
        assert (state.rank, state.world_size) == (dist.get_rank(), 2)
        say("taken", af.reduce_sum(state.rank, state))
        dist.destroy_process_group()
        """,
        expect=["taken 1", "taken 1"],
    )


NCCL = """
import torch, torch.distributed as dist, accel_fn as af
from accel_fn.testing import internals
from tests.support import strategies as ours

class NCCL:
    '''NCCL as far as a rendezvous uses it.'''

    def _set_default_timeout(self, timeout):
        say("a time-out of", timeout.total_seconds())

internals.use_device_backend(lambda group: NCCL())
for place, name in ((dist.distributed_c10d, "_abort_process_group"), (dist, "destroy_process_group")):
    leave = getattr(place, name)
    setattr(place, name, lambda group, leave=leave: (say(leave.__name__), leave(group)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "call"), [("pass", "destroy_process_group"), ("raise OSError", "_abort_process_group")]
)
def test_nccl_has_a_later_timeout_and_is_left_by_abort_after_an_error(end, call):
    """Where NCCL runs, destroying a group waits for kernels that a failed peer never joins."""
    launch(
        NCCL
        + f"""
try:
    with af.distributed(device="cpu", timeout_s=30) as state:
        model = ours.regression_model()
        state, step = af.build(af.wrap_ddp()(af.Plan(ours.mse, model, ours.sgd(model.parameters()))), state)
        batch = torch.ones(4, 3).double(), torch.ones(4, 1).double()
        state, _ = step(state, batch)
        step.grads(state, batch)
        assert not internals.is_timed(state)
        {end}
except OSError:
    pass
""",
        expect=["a time-out of 90.0", call] * 2,
    )


def test_a_state_is_a_value():
    state = af.DistState(rank=1, world_size=2, seed=3, step=7)
    assert state == af.DistState(rank=1, world_size=2, seed=3, step=7)
    assert len({state, af.DistState(rank=1, world_size=2, seed=3, step=7)}) == 1
    with pytest.raises(AttributeError):
        state.step = 8
    assert not hasattr(state, "__dict__")
    with pytest.raises(TypeError, match="positional"):
        af.DistState(1, 2)


def test_the_group_is_neither_shown_nor_pickled_nor_compared():
    def run(state):
        assert state.group is not None
        assert "group" not in repr(state)
        assert copy.deepcopy(state).group is state.group
        restored = pickle.loads(pickle.dumps(state))
        assert restored == state
        return restored.group

    assert simulate(run, world_size=2) == [None, None]


def test_a_collective_needs_a_group():
    with pytest.raises(ValueError, match="gather: state must carry a process group for 2 ranks"):
        af.gather(torch.ones(2), af.DistState(rank=1, world_size=2))
