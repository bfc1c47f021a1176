"""accel-fn launch: a world of processes, in each of which a script runs as under plain python; if ranks
fail, the last lines on the screen are the error that caused the failure."""

import json
import os
import re
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, command, run_python, surroundings
from tests.cli.launchers import gone, is_running, until

_SEES = """
import json, os, pickle, re, sys, threading, __main__

class Local:
    pass

assert type(pickle.loads(pickle.dumps(Local()))) is Local
seen = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in vars(__main__).items()
        if name.startswith("__")}
seen |= {"argv": sys.argv, "path": sys.path, "own": __main__.Local is Local, "flags": repr(sys.flags)}
print(json.dumps(seen), flush=True)
# A thread that runs on when the last line is done still has its names.
threading.Timer(0.1, lambda: print(Local.__name__, flush=True)).start()
"""
_ARGUMENTS = ["-n", "3", "--help", "--", "a b", "", "$HOME", "$$", "${local_rank}", "--module"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "how"),
    [("folder/see.py", []), ("link.py", []), ("package.see", ["-m"]), ("package", ["-m"])],
)
def test_a_script_sees_what_it_sees_under_python(launchers, tmp_path, target, how):
    for name in ("folder/see.py", "package/see.py", "package/__main__.py", "package/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "init" in name else _SEES)
    (tmp_path / "link.py").symlink_to("folder/see.py")
    plain = run_python(tmp_path, "-u", *how, target, *_ARGUMENTS)
    ended = launchers.run(tmp_path, *how, target, *_ARGUMENTS)
    names = f"accel-fn launch: -n after {target} goes to the script; options of the launch stand before it"
    assert (ended.exit_code, ended.stderr) == (0, f"{names}\n")
    (ours, after), (theirs, _) = ended.stdout.splitlines(), plain.stdout.splitlines()
    assert json.loads(ours) == json.loads(theirs)
    assert after == "Local"


def test_options_of_the_launch_that_stand_after_the_script_are_named(launchers, tmp_path):
    arguments = ["script.py", "--num_processes=2", "--lr", "-1", "--mesh", "tp=2"]
    ended = launchers.run(tmp_path, *arguments, script="import sys; print(sys.argv[1:])")
    assert ended.stdout == f"{arguments[1:]}\n"
    assert ended.stderr == (
        "accel-fn launch: --num_processes and --mesh after script.py goes to the script; options of the "
        "launch stand before it\n"
    )
    ended = launchers.run(tmp_path, "script.py", "--lr", "3", "-x", script="")
    assert ended.stderr == ""


def test_an_option_on_both_sides_of_the_script_is_not_named_and_a_separator_is(launchers, tmp_path):
    both = ["--cpu", "-n", "1", "script.py", "--cpu", "-n", "3", "--num-processes=3", "--", "x"]
    ended = launchers.run(tmp_path, *both, script="")
    assert (ended.exit_code, ended.stderr) == (0, "")
    ended = launchers.run(tmp_path, "-n", "1", "script.py", "--", "--cpu", script="")
    assert "accel-fn launch: -- and --cpu after script.py goes to the script" in ended.stderr


def test_a_mesh_that_the_processes_cannot_form_is_refused_before_they_start(launchers, tmp_path):
    options = ["-n", 4, "--cpu", "--mesh", "dp=2,tp=3"]
    ended = launchers.run(tmp_path, *options, "script.py", script="print('started')")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == (
        "Error: launch: mesh must have sizes that multiply to the number of ranks, 4, got "
        "{'dp': 2, 'tp': 3}; an axis of -1 takes all ranks that the others leave\n"
    )


def test_python_m_of_the_package_is_the_command(tmp_path):
    done = run_python(tmp_path, "-m", "accel_fn", "--version")
    assert done.stdout.startswith("accel-fn, version ")


def test_two_processes_on_a_cpu_are_one_world_of_two(launchers, tmp_path):
    """The options of training that the launch sets arrive too."""
    script = """
        import os, accel_fn as af
        state, options = af.init(timeout_s=100), af.launcher.launch_options()
        total = af.reduce_sum(state.rank + 1, state)
        words = [state.rank, state.local_rank, state.world_size, state.device, total]
        words += [options.mixed_precision, options.num_microbatches, options.wrap, options.timeout_s]
        words += [*options.mesh.items(), state.data.world_size]
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    """
    options = ["--cpu", "--mixed-precision", "bf16", "--num-microbatches", 3, "--timeout-s", 20]
    options += ["--wrap", "fsdp", "--mesh", "tp=2"]
    ended = launchers.run(tmp_path, "-n", 2, *options, "script.py", script=script)
    assert ended.exit_code == 0, ended
    assert sorted(ended.stdout.splitlines()) == [
        "0 0 2 cpu 1 bf16 3 fsdp 20.0 ('tp', 2) 1",
        "1 1 2 cpu 2 bf16 3 fsdp 20.0 ('tp', 2) 1",
    ]


def test_a_dry_run_shows_what_each_rank_then_gets_and_starts_nothing(launchers, tmp_path):
    script = """
        import json, os
        print(json.dumps(dict(os.environ)), flush=True)
    """
    arguments = ["-n", 2, "--cpu", "--num-microbatches", 2, "--max-restarts", 1, "script.py"]
    own = surroundings(tmp_path)
    planned = launchers.run(tmp_path, "--dry-run", "--json", *arguments, script=script)
    ranks = json.loads(planned.stdout)["ranks"]
    assert "RANK" not in planned.stderr
    ended = launchers.run(tmp_path, *arguments)
    got = [json.loads(line) for line in ended.stdout.splitlines()]
    for variables in sorted(got, key=lambda each: each["RANK"]):
        added = {name for name, value in variables.items() if own.get(name) != value}
        shown = ranks[int(variables["RANK"])]["variables"]
        assert added <= shown.keys()
        known = {name: value for name, value in shown.items() if value is not None}
        assert known == {name: variables[name] for name in known}
        later = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        later |= {"ACCEL_FN_STORE", "ACCEL_FN_TOKEN"}
        assert shown.keys() - known.keys() == later


def test_a_dry_run_prints_the_source_of_each_variable(launchers, tmp_path):
    planned = launchers.run(
        tmp_path, "--dry-run", "-n", 2, "--threads-per-process", 5, "script.py", "a b", script=""
    )
    lines = [re.split(r"  +", line) for line in planned.stdout.splitlines()]
    assert lines[0] == ["python script.py 'a b'"]
    assert lines[1] == ["on machine 0 of 1, as 2 of 2 processes"]
    assert ["RANK", "0, 1", "this process, among all"] in lines
    assert ["WORLD_SIZE", "2", "flag --num-processes"] in lines
    assert ["OMP_NUM_THREADS", "5", "threads_per_process"] in lines


@pytest.mark.slow
def test_a_given_port_is_taken_or_refused(launchers, tmp_path):
    script = "import os; print(os.environ['MASTER_PORT'], flush=True)"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = launchers.run(tmp_path, "--main-process-port", port, "script.py", script=script)
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"Error: launch: main_process_port must be one that this machine can open, got {port} "
        "(Address already in use); choose another, or leave it out for a free one\n"
    )
    ended = launchers.run(tmp_path, "--main-process-port", port, "script.py")
    assert (ended.exit_code, ended.stdout) == (0, f"{port}\n")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["scrpt.py"], 1, r"launch: script must be a file, got 'scrpt.py'; did you mean script.py\?"),
        (["-m", "no_such.module"], 1, "launch: module must be one that is found, got 'no_such.module'"),
        (["-m", "scrpt"], 1, r"got 'scrpt'; did you mean script\?"),
        (["--no-python", "no-such"], 1, "launch: program must be one that is found and may be run"),
        (["--num-proceses", 2, "script.py"], 2, "No such option '--num-proceses'.*--num-processes"),
        (["-n", "two", "script.py"], 2, "'two' is not a valid integer"),
        (["-n", 0, "script.py"], 1, "num_processes must be an integer >= 1, got 0"),
        (["--cpu", "--gpu-ids", 0, "script.py"], 1, "cpu must be false with gpu_ids=0"),
        (["-m", "--no-python", "json"], 2, "--module cannot be combined with --no-python"),
        (["--json", "script.py"], 2, "--json needs --dry-run"),
        (["--main-process-ip", "no-such.invalid", "script.py"], 1,
         "launch: main_process_ip must be a host that resolves, got 'no-such.invalid'"),
        (["--num-machines", 2, "--main-process-ip", "127.0.0.1", "script.py"], 1,
         "launch: machine_rank must be given with num_machines=2"),
        (["--num-machines", 2, "-n", 3, "--machine-rank", 0, "script.py"], 1,
         "num_processes must be a multiple of num_machines=2, got 3"),
        ([], 2, "Missing argument 'SCRIPT'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, arguments, exit_code, text):
    (tmp_path / "script.py").write_text("print('started', flush=True)")
    ended = command(tmp_path, "launch", *arguments)
    assert ended.exit_code == exit_code
    assert re.search(text, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--main-process-ip", "192.0.2.1"], "main_process_ip must be an address of this machine"),
        (["--log-dir", "script.py/logs"], "log_dir must be a folder that can be written to"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(launchers, tmp_path, arguments, text):
    ended = launchers.run(tmp_path, *arguments, "script.py", script="print('started', flush=True)")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"Error: launch: {text}, got ")


_MODULES = {
    "here.py": "",
    "package/__init__.py": "raise SystemExit('a package was imported by the launcher')",
    "space/inner/train.py": "",
    "lib/elsewhere/__init__.py": "",
}


_DRY_RUNS = """
import sys
from accel_fn.cli import main

for target in ("here", "package.train", "space.inner.train", "elsewhere.train", "os.path", "this"):
    sys.argv = ["accel-fn", "launch", "--dry-run", "-m", target]
    try:
        main()
    except SystemExit as end:
        assert not end.code, target
"""


def test_a_module_that_is_there_is_found_and_not_imported(tmp_path):
    """The module is in this folder, in a namespace package, on PYTHONPATH, or in the standard
    library."""
    for name, text in _MODULES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ended = run_python(tmp_path, "-c", _DRY_RUNS, PYTHONPATH=f"{tmp_path / 'lib'}:{ROOT}")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_logs_hold_the_output_of_each_rank_and_tee_prints_it(launchers, tmp_path):
    script = """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
    """
    quiet = launchers.run(tmp_path, "-n", 2, "--log-dir", "quiet", "script.py", script=script)
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
    logs = {
        (path.parent.name, path.name): path.read_text()
        for path in tmp_path.glob("quiet/*/attempt_0/*/*")
    }
    assert logs == {
        ("0", "stdout.log"): "out of 0\n",
        ("0", "stderr.log"): "err of 0\n",
        ("1", "stdout.log"): "out of 1\n",
        ("1", "stderr.log"): "err of 1\n",
    }
    loud = launchers.run(tmp_path, "-n", 2, "--tee", "script.py")
    assert sorted(loud.stdout.splitlines()) == ["[rank 0]: out of 0", "[rank 1]: out of 1"]
    assert sorted(loud.stderr.splitlines()) == ["[rank 0]: err of 0", "[rank 1]: err of 1"]


def test_a_restart_is_printed_and_has_a_new_store(launchers, tmp_path):
    script = """
        import os, sys, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"{attempt} {os.environ['MASTER_PORT']}\\n".encode())  # in one piece
        if attempt == "0":
            if os.environ["RANK"] == "1": raise ValueError("once")
            time.sleep(600)
    """
    ended = launchers.run(tmp_path, "-n", 2, "--max-restarts", 3, "script.py", script=script)
    assert ended.exit_code == 0
    assert re.fullmatch(
        r"accel-fn launch: restart 1 of 3: rank 1 \(\S+, pid \d+\): ValueError: once, "
        r"at \S+script.py:6 in <module>\n",
        ended.stderr,
    )
    ports = {tuple(line.split()) for line in ended.stdout.splitlines()}
    assert [attempt for attempt, _ in sorted(ports)] == ["0", "1"]
    assert len({port for _, port in ports}) == 2


@pytest.mark.parametrize(
    ("variable", "kill"),
    [("XDG_RUNTIME_DIR", True), pytest.param("TMPDIR", False, marks=pytest.mark.slow)],
)
def test_the_folder_of_the_store_is_of_this_user_alone_and_is_removed(
    launchers, tmp_path, variable, kill
):
    own = tmp_path / "own"
    own.mkdir()
    script = """
        import os, time
        print("store", os.environ["ACCEL_FN_STORE"], flush=True)
        while not os.path.exists("go on"): time.sleep(0.01)
    """
    launch = launchers.start(tmp_path, "--cpu", "script.py", script=script, **{variable: str(own)})
    store = Path(launch.printed(r"store (\S+)\n")[0])
    assert store.parents[1] == own
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    if kill:
        launch.kill(signal.SIGKILL)
    else:
        (tmp_path / "go on").touch()
        assert launch.wait().exit_code == 0
    until(lambda: not store.parent.exists() or None, lambda: "the end of the folder")


# -- ranks that fail

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
