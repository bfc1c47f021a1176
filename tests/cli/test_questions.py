"""The questions of `accel-fn config`: which ones come, and the settings that their defaults
give."""

from hypothesis import given
from hypothesis import strategies as st

from accel_fn.cli.config import choose_settings
from accel_fn.launcher.machines.detect import Machine
from accel_fn.launcher.settings.write_yaml import render
from tests.settings import TWO_GPUS, resolved, written


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


def test_the_devices_that_are_named_are_as_many_processes():
    ask, asked = answering(gpu_ids=(1,))
    settings = choose_settings(ask, TWO_GPUS)
    assert (asked["gpu_ids"], asked["num_processes"]) == ("all", 1)
    assert (settings.gpu_ids, settings.num_processes) == ((1,), 1)


def test_on_the_cpu_there_is_no_question_about_devices():
    ask, asked = answering(cpu=True)
    assert choose_settings(ask, TWO_GPUS).cpu
    assert "gpu_ids" not in asked
    assert asked["num_processes"] == 1


def test_there_is_no_question_about_devices_that_cannot_be_named():
    ask, asked = answering()
    machine = Machine(num_cores=4, kind="XPU", num_installed=2, num_devices=2)
    assert choose_settings(ask, machine).num_processes == 2
    assert "gpu_ids" not in asked


def test_wrap_is_a_question_only_for_several_processes():
    ask, asked = answering(num_processes=2, wrap="fsdp")
    assert choose_settings(ask, TWO_GPUS).wrap == "fsdp"
    assert asked["wrap"] == "ddp"
    ask, asked = answering(num_processes=1)
    assert choose_settings(ask, TWO_GPUS).wrap is None
    assert "wrap" not in asked


def test_addresses_are_questions_only_for_several_machines():
    several = {"machine_rank", "main_process_ip", "main_process_port"}
    ask, asked = answering()
    choose_settings(ask, TWO_GPUS)
    assert not several & set(asked)
    ask, asked = answering(num_machines=2, main_process_ip="node0")
    settings = choose_settings(ask, TWO_GPUS)
    assert several <= set(asked)
    assert settings.num_processes == 4
