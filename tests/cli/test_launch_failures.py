"""accel-fn launch: if ranks fail, the last lines on the screen are the error that caused the
failure."""

import os
import re
import signal

import pytest

from tests.cli.commands import run_python
from tests.cli.launchers import gone, is_running, until

_SCRIPT = """
import os, signal, sys, time

def deep():
    raise ValueError("boom")

def fail(how):
    if how == "raise":
        deep()
    if how == "chain":
        try:
            deep()
        except ValueError as error:
            raise RuntimeError("two\\n" + "long" * 250) from error
    if how == "words":
        sys.exit("no such data")
    if how == "_exit":
        os._exit(7)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if how == "syntax":
        exec("a b")

if int(os.environ["RANK"]) == 1:
    fail(sys.argv[1])
time.sleep(600)
"""
_WHO = r"rank 1 \(\S+, pid \d+\)"
_BOOM = [r"Traceback.*", r"  File .*", "    .*", r"  File .*", r"    deep\(\)",
         r"  File .*, in deep", r'    raise ValueError\("boom"\)', _WHO, "ValueError: boom"]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "exit_code", "lines"),
    [
        ("raise", 1, _BOOM),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("syntax", 1, ["Traceback.*", "(  .*\n){3}.*", _WHO, "(  .*\n).*", "SyntaxError: .*"]),
                ("words", 1, [_WHO, "no such data"]),
                ("_exit", 7, [_WHO, "exit code 7"]),
                ("SIGKILL", 137, [_WHO, "SIGKILL: often out of memory"]),
                ("KeyboardInterrupt", 130, ["Traceback.*", "(  .*\n){3}.*", _WHO, "KeyboardInterrupt"]),
            )
        ),
    ],
)  # fmt: skip
def test_only_the_error_is_printed_and_the_exit_code_is_the_ranks(
    launchers, tmp_path, how, exit_code, lines
):
    ended = launchers.run(tmp_path, "-n", 2, "--log-dir", "logs", "script.py", how, script=_SCRIPT)
    assert ended.exit_code == exit_code
    # the marks below a line depend on the version of Python
    said = re.sub(r"\n +[\^~]+(?=\n)", "", ended.stderr)
    assert re.fullmatch("\n".join(lines) + "\n", said), ended.stderr
    assert ended.seconds < 100  # the other rank sleeps for 600 s
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert log.read_text().endswith("ValueError: boom\n") == (how == "raise")
    assert "processes/worker.py" not in log.read_text()


def test_a_crash_of_native_code_shows_which_line_called_it(launchers, tmp_path):
    ended = launchers.run(tmp_path, "-n", 2, "script.py", "SIGSEGV", script=_SCRIPT)
    assert ended.exit_code == 139
    assert "processes/worker.py" not in ended.stderr
    *_, above, rank, last = ended.last_lines
    assert re.match(r'  File ".*/script.py", line \d+ in <module>', above)
    assert (re.match(_WHO, rank) is not None, last) == (True, "SIGSEGV: a crash in native code")


def test_ranks_that_lost_their_peer_are_not_the_cause_even_if_they_end_first(launchers, tmp_path):
    script = """
        import os, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("failing"): time.sleep(0.01)
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        try:
            raise ValueError("the cause")
        finally:
            open("failing", "w").close()
            time.sleep(0.1)
    """
    ended = launchers.run(tmp_path, "-n", 2, "script.py", script=script)
    assert ended.exit_code == 1
    assert "2 of 2 ranks failed" in ended.stderr
    assert re.search(r"rank 0 \(\S+, pid \d+\): RuntimeError: Connection closed", ended.stderr)
    assert ended.last_lines[-1] == "ValueError: the cause"


@pytest.mark.parametrize(
    ("code", "status"), [(-1, 255), pytest.param(256 + 3, 3, marks=pytest.mark.slow)]
)
def test_an_exit_code_is_the_one_that_the_system_sees(launchers, tmp_path, code, status):
    ended = launchers.run(tmp_path, "script.py", script=f"raise SystemExit({code})")
    assert (ended.exit_code, ended.last_lines[-1]) == (status, f"exit code {status}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "last"),
    [("raise ValueError('boom')", 1, "ValueError: boom"), ("sys.exit(3)", 3, "exit code 3")],
)
@pytest.mark.parametrize("first", ["os.environ.clear()", "atexit.register(os._exit, 0)"])
def test_a_rank_that_spoils_its_end_keeps_its_error_and_exit_code(
    launchers, tmp_path, first, end, code, last
):
    """It has emptied its environment, or an exit handler of its own leaves with 0."""
    script = f"import atexit, os, sys; {first}; {end}"
    ended = launchers.run(tmp_path, "script.py", script=script)
    assert (ended.exit_code, ended.last_lines[-1]) == (code, last)


@pytest.mark.slow
def test_a_failure_is_seen_also_if_the_parent_ignores_sigchld(tmp_path):
    """The system then drops the exit codes of children, unless the launcher sets it back."""
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        "os.execv(sys.executable, [sys.executable, '-m', 'accel_fn.cli', 'launch', 'script.py'])"
    )
    done = run_python(tmp_path, "-c", code)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "exit code 3")


@pytest.mark.slow
def test_a_child_with_a_group_of_its_own_ends_with_a_launch_and_one_with_a_session_stays(
    launchers, tmp_path
):
    script = """
        import os, subprocess
        grouped = subprocess.Popen(["sleep", "600"], process_group=0)
        apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("pids", grouped.pid, apart.pid, flush=True)
        raise ValueError("boom")
    """
    ended = launchers.run(tmp_path, "script.py", script=script)
    grouped, apart = map(int, ended.stdout.split()[1:])
    gone([grouped])
    assert is_running(apart)
    os.kill(apart, signal.SIGKILL)


@pytest.mark.slow
def test_a_launch_does_not_disarm_the_reaper_of_another_in_the_same_log_folder(launchers, tmp_path):
    script = """
        import os, subprocess, sys, time
        if "--wait" in sys.argv:
            child = subprocess.Popen(["sleep", "100"])
            open("new", "w").write(str(child.pid))
            os.rename("new", "child")
            time.sleep(100)
    """
    options = ["--log-dir", "logs", "script.py"]
    first = launchers.start(tmp_path / "a", *options, "--wait", script=script)
    path = tmp_path / "a/child"
    child = until(lambda: path.read_text() if path.exists() else None, lambda: "a child")
    logs = ["--log-dir", tmp_path / "a/logs", "script.py"]
    assert launchers.run(tmp_path / "b", *logs, script=script).exit_code == 0
    first.kill(signal.SIGKILL).wait()
    gone([child])


def test_a_script_may_print_its_own_errors(launchers, tmp_path):
    script = """
        import sys
        try:
            1 / 0
        except ZeroDivisionError:
            sys.excepthook(*sys.exc_info())
        sys.excepthook = lambda kind, *_: print("mine:", kind.__name__, flush=True)
        raise KeyError("gone")
    """
    ended = launchers.run(tmp_path, "script.py", script=script)
    assert ended.stdout == "mine: KeyError\n"
    assert ended.stderr.count("ZeroDivisionError: division by zero\n") == 1
    assert ended.last_lines[-1] == "KeyError: 'gone'"


def test_a_program_gives_its_exit_code(launchers, tmp_path):
    ended = launchers.run(
        tmp_path, "-n", 2, "--no-python", "sh", "-c", "test $RANK = 0 || { echo why >&2; exit 9; }"
    )
    assert (ended.exit_code, ended.last_lines[0], ended.last_lines[-1]) == (9, "why", "exit code 9")


# -- frames of accel_fn and torch

_TRAIN = """
import sys
import torch
import accel_fn as af

def hook(kind, error, frames):
    count = 0
    while frames is not None:
        frames, count = frames.tb_next, count + 1
    print("hook", kind.__name__, count)

if "hook" in sys.argv:
    sys.excepthook = hook

def loss_fn(model, batch):
    inputs = batch[:, :3] if state.rank == 1 or state.world_size == 1 else batch
    return model(inputs).mean()

state = af.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state, step = af.build(af.wrap_ddp()(af.Plan(loss_fn, model, optimizer)), state)
step(state, torch.rand(2, 4) + state.rank)
"""
_FOLDED = [
    r"Traceback \(most recent call last\):",
    r'  File ".*/script.py", line \d+, in <module>',
    r"  \[\d\d? frames of accel_fn and torch; --full-traceback shows them\]",
    r'  File ".*/script.py", line \d+, in loss_fn',
    r"  \[2 frames of torch; --full-traceback shows them\]",
    r'  File ".*/torch/nn/modules/linear.py", line \d+, in forward',
    r"rank \d \(\S+, pid \d+\)",
    r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x1\)",
]


def last_frames(text):
    """The report of the cause without lines of code."""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith("    ")]
    return lines[lines.index("Traceback (most recent call last):") :]


def matches(lines, patterns):
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


@pytest.mark.slow
def test_an_error_in_the_loss_shows_the_users_frames_and_the_innermost(launchers, tmp_path):
    """The other rank, which lost its peer, stands above if it fails before it is ended."""
    ended = launchers.run(tmp_path, "-n", 2, "--cpu", "script.py", script=_TRAIN)
    assert ended.exit_code == 1
    assert matches(last_frames(ended.stderr), _FOLDED), ended.stderr
    assert "rank 1" in ended.last_lines[-2]
    above = ended.stderr.partition("Traceback (most recent call last):")[0]
    lost_its_peer = r"accel-fn launch: 2 of 2 ranks failed\nrank 0 \(.*\): "
    assert not above or re.match(lost_its_peer, above)


@pytest.mark.slow
@pytest.mark.parametrize("requested", ["by a flag", "by a variable"])
def test_every_frame_is_shown_on_request(launchers, tmp_path, requested):
    is_flag = requested == "by a flag"
    flags = ["--full-traceback"] if is_flag else []
    variables = {} if is_flag else {"ACCEL_FN_FULL_TRACEBACK": "1"}
    ended = launchers.run(tmp_path, *flags, "--cpu", "script.py", script=_TRAIN, **variables)
    assert ended.stderr.count('\n  File "') > 10
    assert "frames of" not in ended.stderr
