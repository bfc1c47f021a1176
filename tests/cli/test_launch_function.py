"""`af.launch`: a function on every rank, from scripts, notebooks and tests."""

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import cloudpickle
import pytest

import accel_fn as af
from accel_fn.errors import WorldError
from accel_fn.launcher.child import dumps
from tests.cli.commands import run_python, surroundings
from tests.cli.launchers import gone, is_running, until

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_folder_is_left(tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert list(place.iterdir()) == []


def test_results_come_in_the_order_of_ranks():
    def describe(*words, end):
        return f"{os.environ['RANK']}: {' '.join(words)}{end}"

    found = af.launch(describe, "a", "b", num_processes=3, kwargs={"end": "!"})
    assert found == ["0: a b!", "1: a b!", "2: a b!"]


def test_ranks_have_what_a_launch_sets():
    def look():
        return dict(os.environ), af.launcher.launch_options()

    found = af.launch(
        look,
        cpu=True,
        mixed_precision="bf16",
        num_microbatches=3,
        wrap="fsdp",
        threads_per_process=1,
        timeout_s=20,
    )
    for number, (variables, options) in enumerate(found):
        assert options == af.launcher.LaunchOptions(
            mixed_precision="bf16", num_microbatches=3, wrap="fsdp", timeout_s=20.0
        )
        expected = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "ACCEL_FN_DEVICE": "cpu",
        }
        assert expected.items() <= variables.items()
        assert 0 < int(variables["MASTER_PORT"]) < 2**16


def test_ranks_inherit_variables_and_no_file_of_settings(monkeypatch, tmp_path):
    (tmp_path / "accel_fn.yaml").write_text("mixed_precision: bf16\nwrap: fsdp\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_FN_NUM_MICROBATCHES", "3")
    expected = af.launcher.LaunchOptions(num_microbatches=3)
    assert af.launch(af.launcher.launch_options, num_processes=1) == [expected]


class TwoPartsError(Exception):
    """Its `__init__` takes two arguments; pickle would pass one."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.line = line
        self.raised_at = time.time()


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise TwoPartsError("train.py", 7)
    time.sleep(600)


def test_what_a_rank_raises_is_raised_here_and_the_others_are_stopped():
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(TwoPartsError, match=r"^train\.py:7") as caught:
        af.launch(fail_on_one)
    assert time.time() - caught.value.raised_at < 100  # the other rank sleeps for 600 s
    assert caught.value.line == 7
    [note] = caught.value.__notes__
    assert re.fullmatch(r"on rank 1 of 2 \(\S+, pid \d+\)", note)
    shown = str(caught.value.__cause__)
    assert f'{__file__}", line' in shown
    assert 'raise TwoPartsError("train.py", 7)' in shown
    assert "child.py" not in shown
    assert handlers == {each: signal.getsignal(each) for each in handlers}


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path):
    """The other rank ignores SIGTERM, and is stopped all the same."""

    def kill_one():
        if os.environ["RANK"] == "1":
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    with pytest.raises(af.AccelError) as caught:
        af.launch(kill_one)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 100
    assert re.fullmatch(
        r"launch: rank 1 of 2 \(\S+, pid \d+\) was killed by SIGKILL: often out of memory",
        str(caught.value),
    )
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.slow
def test_a_rank_that_has_failed_and_does_not_end_is_ended():
    def work():
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise OSError(5, "a thread of it goes on")

    start = time.monotonic()
    with pytest.raises(OSError, match="a thread of it goes on") as caught:
        af.launch(work, num_processes=1)
    assert caught.value.errno == 5
    assert time.monotonic() - start < 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda: os._exit(0), r"rank 0 of 1 \(.*\) ended before fn returned, with exit code 0"),
        (lambda: os._exit(5), r"rank 0 of 1 \(.*\) ended before fn returned, with exit code 5"),
        (lambda: sys.exit(3), "fn must return or raise an Exception, got 'SystemExit: 3'"),
        (lambda: threading.Lock(), "fn must return what can be pickled .*, got <unlocked"),
    ],
)
def test_the_error_of_a_rank_without_a_result_names_its_end(fn, text):
    with pytest.raises(af.AccelError, match=f"launch: {text}"):
        af.launch(fn, num_processes=1)


@pytest.mark.slow
def test_values_are_kept_where_a_rank_ends_badly_after_the_function():
    def work():
        atexit.register(os._exit, 9)
        return "kept"

    text = "rank 0 ended with exit code 9 after fn had returned"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        assert af.launch(work, num_processes=1) == ["kept"]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"fn": lambda: LOCK}, "fn's LOCK must be something that can be pickled .*_thread.lock"),
        ({"args": (1, threading.Lock())}, r"args\[1\] must be something that can be pickled"),
        ({"kwargs": {"a": threading.Lock()}}, r"kwargs\['a'\] must be something that can be"),
        ({"fn": 3}, "fn must be a function, got 3"),
        (
            {"lr": 0.05},
            r"lr must be an argument of launch, got 0.05; for fn, write kwargs={'lr': ...}",
        ),
        ({"num_processes": 0}, "num_processes must be an integer >= 1, got 0"),
        ({"num_processes": True}, "num_processes must be an integer >= 1, got True"),
        ({"timeout_s": -1}, "timeout_s must be a finite number > 0, got -1"),
        (
            {"mixed_precision": "fp4"},
            "mixed_precision must be one of no, fp16, bf16, fp8, got 'fp4'",
        ),
        ({"cpu": True, "gpu_ids": [0]}, "cpu must be false with gpu_ids=0, got True"),
        ({"gpu_ids": [900]}, "gpu_ids must be devices of this machine"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(call, text, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    call = {"fn": int, "args": (), **call}
    if "LOCK" in text:  # a function of this file would be imported by its name
        call["fn"] = type(call["fn"])(
            call["fn"].__code__, {"LOCK": LOCK, "__name__": "__main__"}, "<lambda>"
        )
    fn, args = call.pop("fn"), call.pop("args")
    with pytest.raises(ValueError, match=f"launch: {text}"):
        af.launch(fn, *args, **call)


def test_a_temporary_folder_that_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    text = r"^launch: temporary folder must be one to write to, got: .*missing.*; set TMPDIR$"
    with pytest.raises(WorldError, match=text):
        af.launch(os.getpid, cpu=True)


def test_a_rank_does_not_launch():
    def work():
        return af.launch(int)

    with pytest.raises(RuntimeError, match="launch: caller must not be a rank of a world itself"):
        af.launch(work)


SCRIPT = """
import os, pathlib, sys
import accel_fn as af

sys.path[:0] = [str(pathlib.Path("library").absolute()), pathlib.Path("paths")]
import factors

class Found:
    def __init__(self, rank):
        self.rank = rank

class Lost(Exception):
    pass

FACTOR = factors.THREE

def work(fails):
    if fails:
        raise Lost(os.environ["RANK"])
    return Found(factors.three() * int(os.environ["RANK"]))

print("top level, once")
first, second = af.launch(work, False)
assert type(second) is Found, type(second)
print("ranks", first.rank, second.rank)
print("again", af.launch(lambda: FACTOR))
try:
    af.launch(work, True)
except Lost as error:
    print("lost", error)
"""
PRINTED = ["top level, once", "ranks 0 3", "again [3, 3]"]


@pytest.fixture
def library(tmp_path):
    """Make a folder that a program adds to its own path."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "factors.py").write_text("THREE = 3\ndef three():\n    return THREE\n")


@pytest.mark.slow
@pytest.mark.parametrize("start", [["script.py"], ["-c", SCRIPT]], ids=["script", "no file"])
def test_a_program_without_a_guard_launches_its_own_functions(tmp_path, library, start):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(tmp_path, *start)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == PRINTED
    assert last in ("lost 0", "lost 1")


def test_pickled_code_keeps_its_file_and_its_lines():
    """cloudpickle 3.1.3 names every file `<dynamic-code>`."""

    def codes(code):
        yield code.co_filename, code.co_firstlineno, [*code.co_lines()]
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from codes(inner)

    place = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        return lambda: 7\n    return inner()()\n"
    exec(compile(source, "<cell 1>", "exec"), place)
    again = cloudpickle.loads(dumps(place["outer"]))
    found = [*codes(again.__code__)]
    assert found == [*codes(place["outer"].__code__)]
    assert [(file, line) for file, line, _ in found] == [
        ("<cell 1>", 1),
        ("<cell 1>", 2),
        ("<cell 1>", 3),
    ]
    assert again() == 7


WAITING = """
import os, pathlib, signal, subprocess, sys, tempfile, time
import accel_fn as af

tempfile.tempdir = os.getcwd()

def save(number, frame):
    pathlib.Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(1)

def work():
    signal.signal(signal.SIGTERM, save)
    child = subprocess.Popen(["sleep", "600"])
    with open(f"pids-{os.environ['RANK']}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}\\n")
    os.rename(file.name, file.name + ".whole")
    time.sleep(600)

af.launch(work)
"""


@pytest.fixture
def waiting(tmp_path, ctrl_c):
    """Start a caller that waits for two ranks, each with a child; return the ids of all
    processes."""
    (tmp_path / "waiting.py").write_text(WAITING)
    caller = subprocess.Popen(
        [sys.executable, "waiting.py"],
        cwd=tmp_path,
        env=surroundings(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    files = [tmp_path / f"pids-{number}.whole" for number in range(2)]
    until(lambda: all(map(Path.exists, files)) or None, lambda: "two ranks", 120)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert all(map(is_running, pids))
    yield caller, pids, tmp_path
    caller.kill()
    caller.communicate()


def test_an_interrupt_stops_the_ranks_at_once_and_continues_as_an_interrupt(waiting):
    """The signal goes to the caller's whole process group, as a terminal sends it."""
    caller, pids, folder = waiting
    os.killpg(caller.pid, signal.SIGINT)
    _, errors = caller.communicate(timeout=10)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1  # the caller's own: ranks print nothing
    assert not any(map(is_running, pids))
    assert len(list(folder.glob("saved-*"))) == 2  # ranks get SIGTERM before they are killed
    assert list(folder.glob("accel_fn_*")) == []


@pytest.mark.slow
def test_no_process_outlives_its_caller(waiting):
    caller, pids, folder = waiting
    caller.kill()
    gone(pids)
    until(lambda: not list(folder.glob("accel_fn_*")) or None, lambda: "an empty folder", 5)
