"""`accel-fn config`, started as a user would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli import commands
from tests.cli.terminal import Terminal
from tests.support.launch_settings import written

WRITTEN = Path(__file__).parent / "accelerate"
COMMAND = [sys.executable, "-m", "accel_fn.cli", "config"]


@pytest.fixture
def place(tmp_path):
    """Make an empty folder to work in, beside an empty home."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def surroundings(place, **variables):
    """Show no accelerator, and set only the given variables."""
    return commands.surroundings(place.parent, CUDA_VISIBLE_DEVICES="", **variables)


def config(place, *arguments, code=0, **variables):
    """Run the command without a terminal; return its output and its errors."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=place,
        env=surroundings(place, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def shown(place, *arguments, **variables):
    out, _ = config(place, "--show", "--json", *arguments, **variables)
    return json.loads(out)


def terminal(place, *arguments):
    environment = surroundings(place, TERM="xterm", COLUMNS="200")
    return Terminal([*COMMAND, *arguments], place, environment)


# -- writing a file


def test_default_writes_settings_without_questions(place):
    out, _ = config(place, "--default")
    first, *lines, last = out.splitlines()
    assert first.startswith("Wrote accel_fn.yaml.")
    assert last == "Next: accel-fn launch train.py"
    values = yaml.safe_load((place / "accel_fn.yaml").read_text())
    assert yaml.safe_load("\n".join(lines)) == values
    found = shown(place)
    assert values["num_processes"] == 1
    assert {name: found[name]["value"] for name in values} == values
    assert {found[name]["source"] for name in values} == {str(place / "accel_fn.yaml")}
    assert {found[name]["source"] for name in set(found) - set(values)} == {"default"}


def test_a_file_that_is_there_is_only_overwritten_by_force(place):
    file = written(place, "tee: true\n")
    _, errors = config(place, "--default", code=1)
    assert errors == (
        "Error: accel_fn.yaml exists; --force overwrites it, --output names another\n"
    )
    assert file.read_text() == "tee: true\n"
    config(place, "--default", "--force")
    assert "tee" not in yaml.safe_load(file.read_text())


def test_output_names_another_file(place):
    out, _ = config(place, "--default", "--output", "other.yaml")
    assert out.endswith("\nNext: accel-fn launch --config other.yaml train.py\n")
    assert [path.name for path in place.iterdir()] == ["other.yaml"]
    _, errors = config(place, "--default", "--output", "no/such/file.yaml", code=1)
    assert "must be in a folder that is there and can be written" in errors


def test_without_a_terminal_questions_are_refused(place):
    _, errors = config(place, code=2)
    assert errors.endswith(
        "Error: config asks questions and must run in a terminal; --default asks nothing\n"
    )
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--show", "--default"], "--default cannot be combined with --show"),
        (["--show", "--force"], "--force cannot be combined with --show"),
        (["--json"], "--json cannot be combined with writing a file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(place, arguments, expected):
    assert expected in config(place, *arguments, code=2)[1]


# -- questions


def test_the_answers_are_what_is_written(place):
    with terminal(place) as screen:
        screen.read_until("Questions follow on processes, devices, mixed precision,")
        for question, answer in (
            ("How many processes [1]: ", "many"),
            ("Error: config: num_processes must be an integer >= 1, got 'many'\n", None),
            ("How many processes [1]: ", "3"),
            ("Mixed precision (no, fp16, bf16, fp8) [no]: ", "bf16"),
            ("In how many micro-batches each rank computes its part [1]: ", "4"),
            (
                "Replicas of the model on all ranks, or shards (ddp, fsdp, deepspeed) [ddp]: ",
                "fsdp",
            ),
            ("How many machines, each with as many processes [1]: ", "2"),
            ("Which of them is this one, from 0 [0]: ", "2"),
            ("Error: config: machine_rank must be below num_machines=2, got 2\n", None),
            ("Which of them is this one, from 0 [0]: ", "1"),
            ("Address of machine 0: ", "10.0.0.1"),
            ("A free port on machine 0 [29500]: ", ""),
            ("Next: accel-fn launch train.py\n", None),
        ):
            screen.read_until(question)
            if answer is not None:
                screen.type(f"{answer}\n")
        assert screen.end() == 0, screen.text
    assert yaml.safe_load((place / "accel_fn.yaml").read_text()) == {
        "num_processes": 6,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "wrap": "fsdp",
        "num_microbatches": 4,
    }


def test_enter_all_the_way_is_default(place):
    with terminal(place, "--output", "asked.yaml") as screen:
        for words in ("processes [", "precision (", "rank computes", "machines, each"):
            screen.read_until(words).type("\n")
        assert screen.end() == 0, screen.text
    config(place, "--default", "--output", "default.yaml")
    assert (place / "asked.yaml").read_text() == (place / "default.yaml").read_text()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("key", ["Ctrl-C", "Ctrl-D"])
def test_an_interrupt_ends_quietly_and_writes_nothing(place, key):
    with terminal(place) as screen:
        screen.read_until("How many processes [1]: ").type("1\n")
        screen.read_until("Mixed precision (no, fp16, bf16, fp8) [no]: ")
        if key == "Ctrl-C":
            screen.interrupt()
        else:
            screen.type("\x04")
        assert screen.end() == 130
        after = screen.text[screen.seen :]
    for echo in ("^C", "^D", "\b"):
        after = after.replace(echo, "")
    assert after.strip() == ""
    assert list(place.iterdir()) == []


# -- showing settings


def test_each_setting_is_shown_with_its_source(place):
    written(place, "num_microbatches: 2\ntimeout_s: 60\n")
    written(place.parent / "home", "tee: true\ntimeout_s: 5\n", ".config/accel_fn/config.yaml")
    out, errors = config(place, "--show", ACCEL_FN_NUM_PROCESSES="2")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert errors == ""
    assert rows["setting"] == "value source"
    assert rows["num_processes"] == "2 ACCEL_FN_NUM_PROCESSES"
    assert rows["timeout_s"] == f"60.0 {place / 'accel_fn.yaml'}"
    assert rows["tee"] == f"true {place.parent / 'home/.config/accel_fn/config.yaml'}"
    assert rows["max_restarts"] == "0 default"
    assert rows["machine_rank"] == "0 default"
    assert rows["main_process_port"] == "a free one default"
    assert rows["wrap"] == "ddp default"
    assert rows["threads_per_process"].split()[0].isdecimal()
    assert " - " not in out


def test_in_a_terminal_it_is_a_table(place):
    with terminal(place, "--show") as screen:
        assert screen.end() == 0
        assert "\x1b[2mnum_processes" in screen.text
        assert "detected: no accelerator" in screen.text


def test_a_mistake_is_one_line_and_an_exit_code(place):
    file = written(place, "num_proceses: 2\n")
    _, errors = config(place, "--show", code=1)
    assert errors == (
        f"Error: {file}:1: key must be a setting, got num_proceses: did you mean num_processes?\n"
    )


@pytest.mark.slow
def test_a_home_that_cannot_be_read_is_no_error(place):
    for home in ("/no/such/home", "/dev/null", ""):
        assert shown(place, HOME=home)["num_processes"]["value"] == 1


def test_the_multi_cpu_file_of_accelerate_is_two_processes(place):
    found = shown(place, "--config", str(WRITTEN / "multi_cpu.yaml"))
    assert found["num_processes"]["value"] == 2
    assert found["cpu"]["value"] is True


def test_a_file_of_accelerate_gets_one_line_of_warning(place):
    out, errors = config(
        place, "--show", "--json", "--config", str(WRITTEN / "deepspeed.yaml"), ACCEL_FN_CPU="1"
    )
    assert json.loads(out)["num_microbatches"]["value"] == 4
    assert errors.startswith("Warning: ")
    assert errors.count("\n") == 1
    assert "in the script, gradient_clipping is clip(1.0)" in errors
