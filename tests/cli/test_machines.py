"""accel-fn launch on several machines: two launchers meet on this one, as if on two."""

import json
import re
import signal

import pytest
import torch

from tests.cli.commands import ROOT, run_python
from tests.cli.launchers import gone, is_listening, until
from tests.support.processes import free_port

_DIGITS = [str(ROOT / "examples/digits.py"), "--device", "cpu", "--epochs", "2"]
_DIGITS += ["--batch-size", "512", "--precision", "no", "--out"]


def start_two(launchers, folder, *arguments, counts=(2, 2), hosts=("127.0.0.2",) * 2, **options):
    """Start two launchers that meet on this machine."""
    port = free_port()
    return [
        start_one(
            launchers,
            folder / "ab"[rank],
            rank,
            port,
            *arguments,
            count=counts[rank],
            host=hosts[rank],
            **options,
        )
        for rank in (0, 1)
    ]


def start_one(launchers, folder, rank, port, *arguments, count=2, host="127.0.0.2", **options):
    where = ["--num-machines", 2, "--machine-rank", rank]
    where += ["--main-process-ip", host, "--main-process-port", port]
    return launchers.start(folder, "-n", count, *where, *arguments, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the curves of the digits on one process."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run_python(folder, *_DIGITS, "out")
    assert ended.returncode == 0, ended.stderr
    return curves(folder)


def curves(folder):
    lines = map(json.loads, (folder / "out/log.jsonl").read_text().splitlines())
    values = ("loss", "learning_rate", "grad_norm", "test/accuracy")
    return [{name: line[name] for name in ("step", *values) if name in line} for line in lines]


def assert_same(ours, theirs):
    """Assert equality to float32's rounding: parts of other shapes take other kernels."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_machines_train_as_one_process_does(launchers, tmp_path, alone):
    machines = start_two(launchers, tmp_path, *_DIGITS, "out")
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [0, 0], ended
    assert_same(curves(tmp_path / "a"), alone)


@pytest.mark.slow
def test_machines_with_a_token_read_what_each_other_has_signed(launchers, tmp_path):
    script = """
        import accel_fn as af
        with af.distributed(device="cpu") as state:
            print(state.rank, af.reduce_sum(state.rank + 1, state), flush=True)
    """
    machines = start_two(launchers, tmp_path, "script.py", script=script, ACCEL_FN_TOKEN="a secret")
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [0, 0], ended
    assert [each.stdout for each in ended] == ["0 3\n", "1 3\n"]


@pytest.mark.slow
def test_machines_meet_by_the_given_backend(launchers, tmp_path):
    """Torch's own rendezvous numbers machines in its own order."""
    script = """
        import os, accel_fn as af
        state = af.init(device="cpu")
        print(state.rank, state.world_size, af.reduce_sum(state.rank + 1, state), flush=True)
        assert os.environ["TORCHELASTIC_RUN_ID"] == "accel_fn"  # by which torch's machines meet
    """
    hosts = ("127.0.0.3", "127.0.0.3")
    options = ["--rdzv-backend", "c10d", "script.py"]
    machines = start_two(launchers, tmp_path, *options, script=script, hosts=hosts)
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [0, 0], ended
    assert sorted(each.stdout for each in ended) == ["0 2 3\n", "1 2 3\n"]


@pytest.mark.slow
def test_a_killed_rank_brings_both_machines_back_with_a_store_of_their_own(launchers, tmp_path):
    """The script uses torch.distributed only; keys of the first attempt must not be in the
    store."""
    script = """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        assert not store.check([f"of rank {dist.get_rank()}"])
        store.set(f"of rank {dist.get_rank()}", "")
        if attempt == "0" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        print("rank", dist.get_rank(), "attempt", attempt, "total", total.item(), flush=True)
        dist.destroy_process_group()
    """
    machines = start_two(launchers, tmp_path, "--max-restarts", 2, "script.py", script=script)
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [0, 0], ended
    assert ended[0].stdout == "rank 0 attempt 1 total 4.0\n"
    assert ended[1].stdout == "rank 1 attempt 1 total 4.0\n"
    assert re.search(r"restart 1 of 2: rank 1 \(\S+, pid \d+\): SIGKILL", ended[1].stderr)
    assert "restart 1 of 2: " in ended[0].stderr


_WAITING = """
    import os, sys, time
    print("up", os.environ["RANK"], os.getpid(), flush=True)
    while not os.path.exists("fail"): time.sleep(0.02)
    raise ValueError("of rank " + os.environ["RANK"])
"""


@pytest.mark.slow
def test_every_machine_prints_the_first_failure_and_stops(launchers, tmp_path):
    machines = start_two(launchers, tmp_path, "script.py", script=_WAITING)
    pids = [pid for each in machines for _, pid in each.printed(r"up (\d) (\d+)")]
    (tmp_path / "b" / "fail").touch()
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [1, 1]
    for each in ended:
        assert re.fullmatch(r"rank 1 \(\S+, pid \d+\)", each.last_lines[-2])
        assert each.last_lines[-1] == "ValueError: of rank 1"
    gone(pids)


_ENDS_FIRST = """
    import os, sys, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open("pid", "w").write(str(os.getpid()))
    print("up", attempt, flush=True)
    if os.environ["RANK"] == "0" and attempt == "0":
        while not os.path.exists("fail"): time.sleep(0.02)
        sys.exit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "code"), [(0, 9), (1, 0)])
def test_a_machine_that_has_finished_goes_by_those_that_have_not(
    launchers, tmp_path, restarts, code
):
    """It starts again with a machine that fails later, or ends with that one's exit code."""
    options = ["--max-restarts", restarts, "script.py"]
    first, second = start_two(launchers, tmp_path, *options, script=_ENDS_FIRST)
    for each in (first, second):
        each.printed("up 0")
    gone([(tmp_path / "b" / "pid").read_text()])
    (tmp_path / "a" / "fail").touch()
    ended = [each.wait() for each in (first, second)]
    assert [each.exit_code for each in ended] == [code, code], ended
    assert [each.stdout for each in ended] == ["up 0\n" + "up 1\n" * restarts] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)]
)
def test_a_machine_does_not_wait_for_one_whose_launcher_has_ended(
    launchers, tmp_path, victim, number
):
    """Ranks that wait for peers would fail by themselves; these ranks would not notice."""
    machines = start_two(launchers, tmp_path, "script.py", script=_WAITING)
    pids = [pid for each in machines for _, pid in each.printed(r"up (\d) (\d+)")]
    machines[victim].kill(number).wait()
    silent = (victim, number) == (1, signal.SIGKILL)
    left = machines[1 - victim].wait()
    assert left.exit_code == 1
    assert left.last_lines[-1] == "accel-fn launch: stopped: another machine has ended"
    assert ("machine 1 has not answered for 30 s" in left.stderr) == silent
    gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_a_launcher_that_was_killed_is_replaced_though_the_others_did_not_notice(
    launchers, tmp_path, at_once
):
    script = """
        import os, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("up", attempt, flush=True)
        while attempt == 0: time.sleep(0.02)
    """
    options, port = ["--max-restarts", 1, "script.py"], free_port()
    first, second = (
        start_one(launchers, tmp_path / "ab"[rank], rank, port, *options, script=script)
        for rank in (0, 1)
    )
    for each in (first, second):
        each.printed("up 0")
    second.kill(signal.SIGKILL).wait()
    if not at_once:
        until(lambda: "not answered" in first.stderr or None, lambda: "a word of it")
    third = start_one(launchers, tmp_path / "c", 1, port, *options, script=script)
    assert [each.wait().exit_code for each in (first, third)] == [0, 0]


@pytest.mark.slow
def test_machines_with_different_worlds_all_raise_the_same_error(launchers, tmp_path):
    hosts = ("127.0.0.3", "127.0.0.3")
    machines = start_two(launchers, tmp_path, "script.py", script="", counts=(2, 4), hosts=hosts)
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [1, 1]
    for each in ended:
        assert "launch: all machines must be given one world, got 2 machines" in each.stderr
        assert "2 machines of 1 processes from machine 0" in each.stderr
        assert "2 machines of 2 processes from machine 1" in each.stderr


@pytest.mark.slow
def test_a_machine_that_is_there_already_is_refused(launchers, tmp_path):
    port, folders = free_port(), [tmp_path / name for name in "abc"]
    machines = [
        start_one(launchers, folders[rank], rank, port, "script.py", script=_WAITING)
        for rank in (0, 1)
    ]
    for each in machines:
        each.printed("up")
    third = start_one(launchers, folders[2], 1, port, "script.py", script="").wait()
    assert third.exit_code == 1
    assert "launch: machine_rank must be another on each machine, got 1 twice" in third.stderr
    first = machines[0].kill(signal.SIGTERM).wait()
    assert first.exit_code == 143
    assert machines[1].wait().exit_code == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_other_machines(launchers, tmp_path):
    port = free_port()
    machine = start_one(launchers, tmp_path, 0, port, "script.py", script="")
    until(lambda: is_listening("127.0.0.2", port) or None, lambda: "an open port")
    ended = machine.kill(signal.SIGINT).wait()
    assert (ended.exit_code, ended.stderr) == (130, "accel-fn launch: stopped by Ctrl-C\n")
