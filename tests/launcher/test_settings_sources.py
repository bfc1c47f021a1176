"""The precedence of settings from flags, variables and files, and the values of open ones."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.errors import SettingsError
from tests.support.launch_settings import (
    PLAIN,
    SETTINGS,
    TWO_GPUS,
    resolve,
    resolved,
    user_file,
    written,
)

NAMES = ("num_microbatches", "max_restarts", "timeout_s", "threads_per_process")
SOURCES = ("user", "file", "variable", "flag")


@given(st.fixed_dictionaries({source: st.sets(st.sampled_from(NAMES)) for source in SOURCES}))
def test_each_setting_is_that_of_the_strongest_source_that_gives_it(tmp_path_factory, says):
    folder = tmp_path_factory.mktemp("sources")
    values = {source: number for number, source in enumerate(SOURCES, start=2)}
    lines = {
        source: yaml.safe_dump(dict.fromkeys(says[source], values[source])) for source in SOURCES
    }
    written(folder, lines["user"], "home/.config/accel_fn/config.yaml")
    file = written(folder, lines["file"], "work/accel_fn.yaml")
    found = resolved(
        dict.fromkeys(says["flag"], values["flag"]),
        environment={
            "HOME": str(folder / "home"),
            **{f"ACCEL_FN_{name.upper()}": str(values["variable"]) for name in says["variable"]},
        },
        folder=file.parent,
    )
    words = {
        "user": lambda name: str(folder / "home/.config/accel_fn/config.yaml"),
        "file": lambda name: str(file),
        "variable": lambda name: f"ACCEL_FN_{name.upper()}",
        "flag": lambda name: f"flag --{name.replace('_', '-')}",
    }
    for name in NAMES:
        givers = [source for source in SOURCES if name in says[source]]
        value, source = getattr(found.settings, name), found.sources[name]
        if givers:
            assert (value, source) == (values[givers[-1]], words[givers[-1]](name))
        else:
            assert (value, source) == (SETTINGS[name].default, "default")
        assert found.is_given(name) == bool(givers)


def test_the_nearest_file_is_found_from_below_and_the_farther_one_is_not_read(tmp_path):
    written(tmp_path, "max_restarts: 1\ntee: true\n")
    near = written(tmp_path, "max_restarts: 2\n", "project/accel_fn.yaml")
    below = near.parent / "src/deep"
    below.mkdir(parents=True)
    found = resolved(folder=below)
    assert found.settings.max_restarts == 2
    assert found.settings.tee is False
    assert found.sources["max_restarts"] == str(near)


def test_a_file_that_is_named_stands_for_the_nearest_one(tmp_path):
    written(tmp_path, "max_restarts: 1\ntee: true\n")
    named = written(tmp_path, "max_restarts: 2\n", "other.yaml")
    found = resolved(config=named, folder=tmp_path)
    assert (found.settings.max_restarts, found.settings.tee) == (2, False)


def test_a_section_of_pyproject_is_a_file_too_and_one_without_it_is_passed_by(tmp_path):
    text = "[tool.accel_fn]\nmax_restarts = 3\ngpu_ids = [1, 0]\n"
    file = written(tmp_path, text, "pyproject.toml")
    written(tmp_path, "[tool.other\n", "a/pyproject.toml")
    written(tmp_path, '[project]\ndependencies = ["accel-fn"]\n', "a/b/pyproject.toml")
    found = resolved(folder=tmp_path / "a/b/.", machine=TWO_GPUS)
    assert (found.settings.max_restarts, found.settings.gpu_ids) == (3, (1, 0))
    assert found.sources["gpu_ids"] == str(file)


def test_the_users_file_follows_xdg_and_a_missing_home_is_no_error():
    assert user_file({"HOME": "/h"}) == Path("/h/.config/accel_fn/config.yaml")
    assert user_file({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/accel_fn/config.yaml")
    assert user_file({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}) == user_file({"HOME": "/h"})
    assert user_file({}) is None
    assert resolved(environment={"HOME": "/no/such/home"}).settings.num_processes == 1


@pytest.mark.parametrize(
    ("flag", "value", "line", "kept"),
    [
        ("cpu", True, "gpu_ids: [0, 1]", None),
        ("gpu_ids", "1", "cpu: true", False),
        ("cpu", False, "gpu_ids: [0, 1]", (0, 1)),
        ("gpu_ids", "all", "cpu: true", True),
    ],
)
def test_a_stronger_source_that_chooses_devices_overrides_a_weaker_one(
    tmp_path, flag, value, line, kept
):
    written(tmp_path, f"{line}\n")
    found = resolved({flag: value}, folder=tmp_path, machine=TWO_GPUS)
    other = line.split(":")[0]
    assert getattr(found.settings, other) == kept
    if not kept:
        assert found.sources[other] == f"default, because of flag --{flag.replace('_', '-')}"


@pytest.mark.parametrize(
    ("flags", "machine", "count", "source"),
    [
        ({}, PLAIN, 1, "detected: no accelerator"),
        ({}, TWO_GPUS, 2, "detected: 2 CUDA devices"),
        ({"cpu": True}, TWO_GPUS, 1, "default"),
        ({"gpu_ids": "1"}, TWO_GPUS, 1, "detected: one for each of gpu_ids"),
        ({"num_processes": 2}, PLAIN, 2, "flag --num-processes"),
        ({"num_processes": 5, "cpu": True}, TWO_GPUS, 5, "flag --num-processes"),
        (
            {"num_machines": 3, "main_process_ip": "node0"},
            TWO_GPUS,
            6,
            "detected: 2 CUDA devices on each machine",
        ),
    ],
)
def test_the_number_of_processes_is_given_or_detected(flags, machine, count, source):
    found = resolved(flags, machine=machine)
    assert (found.settings.num_processes, found.sources["num_processes"]) == (count, source)


def test_a_working_folder_that_was_removed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = "^config: working folder must be there, got one that was removed$"
    with pytest.raises(SettingsError, match=text):
        resolve({}, environment={}, machine=PLAIN)
