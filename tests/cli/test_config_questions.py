"""The questions of `accel-fn config`: which ones come, and the settings that their defaults
give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.cli.config import _prompt, choose_settings
from accel_fn.launcher.machines.detect import Machine
from accel_fn.launcher.settings.files import render
from tests.support.launch_settings import TWO_GPUS, resolved, written


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
    settings = choose_settings(ask, machine)
    file = written(tmp_path_factory.mktemp("defaults"), render(settings))
    found = resolved(config=file, machine=machine).settings
    assert found == settings
    assert found.num_processes == resolved(machine=machine).settings.num_processes


def test_processes_come_first_and_machines_last():
    ask, asked = answering(num_machines=2, main_process_ip="node0")
    choose_settings(ask, TWO_GPUS)
    names = list(asked)
    assert names[0] == "num_processes"
    assert names[-4:] == ["num_machines", "machine_rank", "main_process_ip", "main_process_port"]


def test_devices_are_named_where_there_are_more_than_processes():
    ask, asked = answering(num_processes=1, gpu_ids=(1,))
    settings = choose_settings(ask, TWO_GPUS)
    assert (asked["gpu_ids"], asked["num_processes"]) == ("all", 2)
    assert (settings.gpu_ids, settings.num_processes) == ((1,), 1)
    ask, asked = answering()
    assert choose_settings(ask, TWO_GPUS).num_processes == 2
    assert "gpu_ids" not in asked


@pytest.mark.parametrize(("num_processes", "default"), [(2, False), (3, True)])
def test_more_processes_than_devices_are_for_the_cpu(num_processes, default):
    ask, asked = answering(num_processes=num_processes)
    assert choose_settings(ask, TWO_GPUS).cpu == asked["cpu"] == default


def test_on_the_cpu_there_is_no_question_about_devices():
    ask, asked = answering(num_processes=1, cpu=True)
    assert choose_settings(ask, TWO_GPUS).cpu
    assert "gpu_ids" not in asked


def test_without_accelerators_there_is_no_question_about_the_cpu():
    ask, asked = answering()
    machine = Machine(num_cores=4, kind="", num_installed=0, num_devices=0)
    assert choose_settings(ask, machine).num_processes == 1
    assert not {"cpu", "gpu_ids"} & set(asked)


def test_there_is_no_question_about_devices_that_cannot_be_named():
    ask, asked = answering(num_processes=1)
    machine = Machine(num_cores=4, kind="XPU", num_installed=2, num_devices=2)
    assert choose_settings(ask, machine).num_processes == 1
    assert asked["num_processes"] == 2
    assert "gpu_ids" not in asked


@pytest.mark.parametrize("num_machines", [1, 2])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_wrap_is_a_question_only_for_several_ranks(num_processes, num_machines):
    ask, asked = answering(
        num_processes=num_processes, num_machines=num_machines, main_process_ip="a", wrap="fsdp"
    )
    settings = choose_settings(ask, TWO_GPUS)
    several = num_processes * num_machines > 1
    assert settings.num_processes == num_processes * num_machines
    assert (asked.get("wrap"), settings.wrap) == (("ddp", "fsdp") if several else (None, None))


def test_addresses_are_questions_only_for_several_machines():
    several = {"machine_rank", "main_process_ip", "main_process_port"}
    ask, asked = answering()
    choose_settings(ask, TWO_GPUS)
    assert not several & set(asked)
    ask, asked = answering(num_machines=2, main_process_ip="node0")
    settings = choose_settings(ask, TWO_GPUS)
    assert several <= set(asked)
    assert settings.num_processes == 4


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
