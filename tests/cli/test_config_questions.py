"""The questions of `accel-fn config`: which ones come, and the settings that their defaults
give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.cli.config import _prompt, choose_settings
from tests.support.launch_settings import TWO_GPUS, Machine, made, render, resolved, written


def answering(**answers):
    """Answer questions with these values, else with the default; record what was asked."""
    asked = {}

    def ask(answers_before, name, question, default):
        asked[name] = default
        return answers.get(name, default)

    return ask, asked


@st.composite
def machines(draw):
    installed = draw(st.integers(0, 8))
    visible = draw(st.integers(0, installed))
    return Machine(draw(st.integers(1, 64)), "CUDA" if installed else "", installed, visible)


@given(machines())
def test_the_defaults_are_what_a_launch_would_do_without_a_file(tmp_path_factory, machine):
    ask, _ = answering()
    answers = choose_settings(ask, machine)
    file = written(tmp_path_factory.mktemp("defaults"), render(answers))
    found = resolved(config=file, machine=machine).settings
    assert found == made(answers)
    assert found.num_processes == resolved(machine=machine).settings.num_processes


@pytest.mark.parametrize(("num_processes", "default"), [(2, False), (3, True)])
def test_more_processes_than_devices_are_for_the_cpu(num_processes, default):
    ask, asked = answering(num_processes=num_processes)
    assert choose_settings(ask, TWO_GPUS)["cpu"] == asked["cpu"] == default


LOCAL = ["mixed_precision", "num_microbatches"]
AMONG_MACHINES = ["num_machines", "machine_rank", "main_process_ip", "main_process_port"]
SEVERAL = {"num_machines": 2, "main_process_ip": "a"}
NONE = Machine(num_cores=4, kind="", num_installed=0, num_devices=0)
XPUS = Machine(num_cores=4, kind="XPU", num_installed=2, num_devices=2)


@pytest.mark.parametrize(
    ("machine", "answers", "questions"),
    [
        (TWO_GPUS, {}, ["cpu", *LOCAL, "wrap", "num_machines"]),
        (
            TWO_GPUS,
            {"num_processes": 1, "gpu_ids": (1,)},
            ["cpu", "gpu_ids", *LOCAL, "num_machines"],
        ),
        (TWO_GPUS, {"num_processes": 1, "cpu": True}, ["cpu", *LOCAL, "num_machines"]),
        (TWO_GPUS, SEVERAL, ["cpu", *LOCAL, "wrap", *AMONG_MACHINES]),
        (NONE, {}, [*LOCAL, "num_machines"]),
        (NONE, SEVERAL, [*LOCAL, *AMONG_MACHINES, "wrap"]),
        (XPUS, {"num_processes": 1}, ["cpu", *LOCAL, "num_machines"]),
    ],
)
def test_only_questions_that_are_open_are_asked(machine, answers, questions):
    ask, asked = answering(**answers)
    settings = made(choose_settings(ask, machine))
    assert list(asked) == ["num_processes", *questions]
    assert asked["num_processes"] == max(machine.num_devices, 1)
    assert asked.get("gpu_ids", "all") == "all"
    num_local = answers.get("num_processes", asked["num_processes"])
    assert settings.num_processes == num_local * answers.get("num_machines", 1)
    assert settings.gpu_ids == answers.get("gpu_ids")
    assert (settings.wrap, settings.cpu) == (asked.get("wrap"), answers.get("cpu", False))


def prompted(monkeypatch, capsys, machine, name, before, *typed):
    """Answer one question with these lines; return the answer and the errors."""
    lines = iter(typed)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: next(lines))
    answer = _prompt(machine, before, name, "Question", False)
    return answer, [line for line in capsys.readouterr().out.splitlines() if line]


@pytest.mark.parametrize(
    ("name", "before", "typed", "answer", "error"),
    [
        ("cpu", {"num_processes": 2}, ["maybe", "no"], False,
         "Error: config: cpu must be true or false, got 'maybe'"),
        ("cpu", {"num_processes": 3}, ["no", "yes"], True,
         "Error: config: num_processes must be at most one for each of the 2 CUDA devices of this "
         "machine, got 3; launch with --cpu to train on the CPU"),
        ("gpu_ids", {"num_processes": 1, "cpu": False}, ["7", "1"], (1,),
         "Error: config: gpu_ids must be devices of this machine, which has 2, got (7,); "
         "indices start at 0"),
    ],
)  # fmt: skip
def test_an_answer_that_is_refused_comes_with_the_rule_that_it_breaks(
    monkeypatch, capsys, name, before, typed, answer, error
):
    found = prompted(monkeypatch, capsys, TWO_GPUS, name, before, *typed)
    assert found == (answer, [error])
