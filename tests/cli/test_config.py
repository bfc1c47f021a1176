"""`accel-fn config`: the file that it writes, the questions that it asks, the settings that it shows."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli import commands
from tests.cli.terminal import Terminal
from tests.support.launch_settings import written

WRITTEN = Path(__file__).parents[1] / "contrib" / "accelerate" / "files"


def config(place, *arguments, code=0, **variables):
    """Run the command where no accelerator is seen; return its output and its errors."""
    done = commands.command(place, "config", *arguments, CUDA_VISIBLE_DEVICES="", **variables)
    assert done.exit_code == code, done.stderr
    return done.stdout, done.stderr


def shown(place, *arguments, **variables):
    out, _ = config(place, "--show", "--json", *arguments, **variables)
    return json.loads(out)


def terminal(place, *arguments):
    command = [sys.executable, "-m", "accel_fn", "config", *arguments]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "COLUMNS": "200"}
    return Terminal(command, place, commands.surroundings(place, **variables))


# -- writing a file


def test_default_writes_settings_without_questions(tmp_path):
    file = tmp_path / "accel_fn.yaml"
    first, *lines, last = config(tmp_path, "--default")[0].splitlines()
    assert first.startswith("Wrote accel_fn.yaml.")
    assert last == "Next: accel-fn launch train.py"
    values = yaml.safe_load(file.read_text())
    assert yaml.safe_load("\n".join(lines)) == values
    found = shown(tmp_path)
    assert values["num_processes"] == 1
    assert {name: found[name]["value"] for name in values} == values
    assert {found[name]["source"] for name in values} == {str(file)}
    assert {found[name]["source"] for name in set(found) - set(values)} == {"default"}


def test_a_file_that_is_there_is_only_overwritten_by_force(tmp_path):
    file = written(tmp_path, "tee: true\n")
    _, errors = config(tmp_path, "--default", code=1)
    assert errors == (
        "Error: accel_fn.yaml exists; --force overwrites it, --output names another\n"
    )
    assert file.read_text() == "tee: true\n"
    config(tmp_path, "--default", "--force")
    assert "tee" not in yaml.safe_load(file.read_text())


def test_output_names_another_file(tmp_path):
    out, _ = config(tmp_path, "--default", "--output", "other.yaml")
    assert out.endswith("\nNext: accel-fn launch --config other.yaml train.py\n")
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["other.yaml"]
    _, errors = config(tmp_path, "--default", "--output", "no/such/file.yaml", code=1)
    assert "must be in a folder that is there and can be written" in errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "config asks questions and must run in a terminal; --default asks nothing"),
        (["--show", "--default"], "--default cannot be combined with --show"),
        (["--show", "--force"], "--force cannot be combined with --show"),
        (["--json"], "--json cannot be combined with writing a file"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, arguments, expected):
    assert config(tmp_path, *arguments, code=2)[1].endswith(f"Error: {expected}\n")
    assert list(tmp_path.glob("*.yaml")) == []


# -- questions


def test_the_answers_are_what_is_written(tmp_path):
    with terminal(tmp_path) as screen:
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
    assert yaml.safe_load((tmp_path / "accel_fn.yaml").read_text()) == {
        "num_processes": 6,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "wrap": "fsdp",
        "num_microbatches": 4,
    }


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("key", ["Ctrl-C", "Ctrl-D"])
def test_an_interrupt_ends_quietly_and_writes_nothing(tmp_path, key):
    with terminal(tmp_path) as screen:
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
    assert list(tmp_path.glob("*.yaml")) == []


# -- showing settings


def test_each_setting_is_shown_with_its_source(tmp_path):
    file = written(tmp_path, "num_microbatches: 2\ntimeout_s: 60\n")
    own = written(tmp_path / "home", "tee: true\ntimeout_s: 5\n", ".config/accel_fn/config.yaml")
    out, errors = config(tmp_path, "--show", ACCEL_FN_NUM_PROCESSES="2")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert errors == ""
    threads = rows.pop("threads_per_process")
    assert threads.split()[0].isdecimal()
    assert rows == {
        "setting": "value source",
        "num_processes": "2 ACCEL_FN_NUM_PROCESSES",
        "num_machines": "1 default",
        "machine_rank": "0 default",
        "main_process_ip": "127.0.0.1 default",
        "main_process_port": "a free one default",
        "cpu": "false default",
        "gpu_ids": "none default",
        "mixed_precision": "no default",
        "num_microbatches": f"2 {file}",
        "wrap": "ddp default",
        "max_restarts": "0 default",
        "rdzv_backend": "static default",
        "timeout_s": f"60.0 {file}",
        "mesh": "dp=-1 default",
        "log_dir": "none default",
        "tee": f"true {own}",
        "full_traceback": "false default",
    }


def test_a_mistake_is_one_line_and_an_exit_code(tmp_path):
    file = written(tmp_path, "num_proceses: 2\n")
    _, errors = config(tmp_path, "--show", code=1)
    assert errors == (
        f"Error: {file}:1: key must be a setting, got num_proceses: did you mean num_processes?\n"
    )


def test_a_home_that_cannot_be_read_is_no_error(tmp_path):
    for home in ("/no/such/home", "/dev/null", ""):
        assert shown(tmp_path, HOME=home)["num_processes"]["value"] == 1


def test_a_file_of_accelerate_is_read_with_one_line_of_warning(tmp_path):
    file = str(WRITTEN / "deepspeed.yaml")
    out, errors = config(tmp_path, "--show", "--json", "--config", file, ACCEL_FN_CPU="1")
    assert json.loads(out)["num_microbatches"]["value"] == 4
    assert errors.startswith("Warning: ")
    assert errors.count("\n") == 1
    assert "in the script, gradient_clipping is clip(1.0)" in errors
