"""Files of settings: errors name file and line, and a written file reads back as the same
settings."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.launch_settings import (
    SETTINGS,
    made,
    read_yaml,
    refused,
    render,
    resolved,
    written,
)


@pytest.mark.parametrize(
    ("context", "where"),
    [
        ({"flags": {"num_proceses": 2}}, "flag --num-proceses"),
        ({"environment": {"ACCEL_FN_NUM_PROCESES": "2"}}, "ACCEL_FN_NUM_PROCESES"),
    ],
)
def test_flags_and_variables_are_held_to_the_names_too(context, where):
    text = refused(**context)
    assert text.startswith(f"{where}: ")
    assert "num_proceses: did you mean num_processes?" in text


def test_a_variable_that_is_near_no_setting_is_not_ours_to_judge():
    assert resolved(environment={"ACCEL_FN_DEMO": "x"}).settings.num_processes == 1


FILES = [
    ("# mine\nnum_proceses: 2\n", ":2: key must be a setting, got num_proceses: did you mean num_processes?"),
    ("num-processes: 2\n", "num-processes: did you mean num_processes?"),
    ("colour: red\n", "got colour; there are num_processes, num_machines, "),
    ("", "file must hold settings, got 'an empty file'"),
    ("  \n\n", "file must hold settings, got 'an empty file'"),
    ("num_processes: [1\n", ":2:1: file must be YAML, got: expected ',' or ']'"),
    ("tee: true\n\tcpu: true\n", ":2:1: file must be YAML, got: found character '\\t'"),
    ("- 1\n- 2\n", ":1: file must be lines of `name: value`, got a list"),
    ("only words\n", ":1: file must be lines of `name: value`, got 'only words'"),
    ("tee: true\n\ntee: false\n", ":3: tee must stand once, got it in line 1 too"),
    ("tee: true\nmax_restarts: many\n", ":2: max_restarts must be an integer >= 0, got 'many'"),
    ("max_restarts: yes\n", ":1: max_restarts must be an integer >= 0, got True"),
    ("cpu: null\n", ":1: cpu must be true or false, got None"),
    ("cpu: !!python/name:os.system\n", ":1:6: file must be YAML, got: could not determine"),
    (f"max_restarts: {'1' * 5000}\n", ": file must be YAML, got: Exceeds the limit"),
    ("tee: 2024-13-45\n", ": file must be YAML, got: month must be in 1..12"),
    (f"tee: {'[' * 5000}\n", ": file must be YAML, got: maximum recursion depth"),
    ("tee: [2024-02-01, {1: 2}]\n", ":1: tee must be true or false, got [datetime.date("),
    ("? [1, {2: 3}]\n: 4\n", ": key must be a setting, got "),
    ("a: 1\n---\nb: 2\n", ":2:1: file must be YAML, got: but found another document"),
]  # fmt: skip
PYPROJECTS = [
    ("[tool.accel_fn]\ntee = true\nnum_proceses = 2\n", ":3: key must be a setting, got num_"),
    ("[a]\ntee = 1\n[tool.accel_fn]\ntee = 7\n", ":4: tee must be true or false, got 7"),
    ("[tool.accel_fn]\ntee = \n", "file must be TOML, got: Invalid value (at line 2, column 7)"),
    ("[tool.accel-fn]\ntee = true\n", "section must be [tool.accel_fn], got [tool.accel-fn]"),
    ("tool = 1 # accel_fn\n", "tool must be a section, got 1"),
    (f"[tool.accel_fn]\nmax_restarts = {'1' * 5000}\n", "file must be TOML, got: Exceeds"),
    ("[tool.accel_fn]\ntee = 2024-13-45\n", "file must be TOML, got: "),
    (f"[tool.accel_fn]\ntee = {'[' * 5000}\n", "file must be TOML, got: maximum recursion"),
    ("[tool]\naccel_fn = 3\n", "tool.accel_fn must be a section, got 3"),
]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        *(("accel_fn.yaml", *each) for each in FILES),
        *(("pyproject.toml", *each) for each in PYPROJECTS),
    ],
)
def test_the_error_names_the_place_of_a_mistake_in_a_file(tmp_path, name, text, error):
    file = written(tmp_path, text, name)
    message = refused(folder=tmp_path)
    assert message.startswith(str(file))
    assert error in message


BOMB = "lol"
for name in "abcdef":  # each level has nine times the one below: half a million words
    BOMB = f"[&{name} {BOMB}{f', *{name}' * 8}]"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            f"num_processes: {BOMB}\n",
            "num_processes must be an integer >= 1, got [[[[[['lol', 'lol'",
        ),
        (f"? {BOMB}\n: 1\n", "key must be a setting, got [[[[[['lol', 'lol'"),
        (f"distributed_type: {BOMB}\n", "distributed_type must be one of NO, "),
        (f"num_processes: {'x' * 100_000}\n", "num_processes must be an integer >= 1, got 'xxx"),
        (f'"{"x" * 100_000}"\n', "file must be lines of `name: value`, got 'xxx"),
    ],
    ids=["nested aliases", "as a key", "in a file of accelerate", "a long text", "as a file"],
)
def test_an_error_shows_the_start_of_a_value_that_is_long(tmp_path, text, error):
    written(tmp_path, text)
    message = refused(folder=tmp_path)
    assert error in message
    assert "..." in message
    assert len(message) < 2000


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    missing = tmp_path / "no.yaml"
    assert refused(config=missing) == f"config: file must exist, got {str(missing)!r}"
    assert "file must be one to read, got: Is a directory" in refused(config=tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"tee: \xff\n")
    assert "file must be text in UTF-8" in refused(config=tmp_path / "bytes.yaml")


def test_a_file_of_comments_sets_nothing(tmp_path):
    written(tmp_path, "# nothing yet\n")
    assert not any(map(resolved(folder=tmp_path).is_given, SETTINGS))


def test_two_files_in_one_folder_are_refused(tmp_path):
    written(tmp_path, "tee: true\n")
    written(tmp_path, "[tool.accel_fn]\ntee = true\n", "pyproject.toml")
    assert "settings must stand in one place, got [tool.accel_fn] in" in refused(folder=tmp_path)


COUNTS = st.integers(1, 10**6)
PATHS = st.text(st.characters(exclude_characters="\0"), min_size=1).map(Path)
VALUES = {
    "num_microbatches": COUNTS,
    "max_restarts": st.integers(0, 10**6),
    "main_process_ip": st.sampled_from(["node0", "10.0.0.1", "::1", "0x10", "1e3", "no"]),
    "main_process_port": st.none() | st.integers(0, 65535),
    "mixed_precision": st.sampled_from([None, "no", "fp16", "bf16", "fp8"]),
    "wrap": st.sampled_from([None, "ddp", "fsdp", "deepspeed"]),
    "rdzv_backend": st.sampled_from([None, "static", "c10d", "etcd-v2"]),
    "timeout_s": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    "mesh": st.sampled_from([None, "dp=-1,tp=2", "tp=2"]),
    "log_dir": st.none() | PATHS,
    "tee": st.booleans(),
    "full_traceback": st.booleans(),
    "threads_per_process": st.none() | COUNTS,
}


@st.composite
def all_settings(draw):
    """Draw settings that do not conflict, each set or left open."""
    values = draw(st.fixed_dictionaries({}, optional=VALUES))
    num_machines = draw(st.integers(1, 50))
    values |= {"num_machines": num_machines} if draw(st.booleans()) or num_machines > 1 else {}
    if draw(st.booleans()):
        values["machine_rank"] = draw(st.integers(0, num_machines - 1))
    per_machine = draw(st.integers(1, 8))
    if draw(st.booleans()):
        values["num_processes"] = per_machine * num_machines
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, 99), min_size=per_machine, unique=True)
        values["gpu_ids"] = draw(ids.map(tuple))
    else:
        values["cpu"] = draw(st.booleans())
    return values


@given(all_settings())
@example({})
@example({"log_dir": Path("a\x85b\u2028c"), "gpu_ids": (3,)})
@example({"log_dir": Path("long " * 100), "timeout_s": 5e-324})
@example({"log_dir": Path("\udcff")})
def test_what_is_written_is_read_back(tmp_path_factory, values):
    file = written(tmp_path_factory.mktemp("written"), render(values))
    given = read_yaml(file).values
    assert made({name: each.value for name, each in given.items()}) == made(values)
    assert set(given) == set(values)


def test_every_setting_is_explained_in_the_file():
    text = render({"num_processes": 2})
    assert all(setting.about in text for setting in SETTINGS.values())
    assert "\nnum_processes: 2\n" in text
    assert "\n# num_machines: null\n" in text


def test_every_value_stands_in_one_line():
    folder = "a folder with a long name/" * 20 + "é"
    assert f"\nlog_dir: {folder}\n" in render({"log_dir": Path(folder)})


def test_values_in_a_file_are_read_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    written(tmp_path, "mixed_precision: no\nlog_dir: ~/logs\n")
    settings = resolved(folder=tmp_path).settings
    assert (settings.mixed_precision, settings.log_dir) == ("no", Path("/home/me/logs"))
    for line in ("mesh: dp=-1,tp=2\n", "mesh: {dp: -1, tp: 2}\n"):
        written(tmp_path, line)
        assert resolved(folder=tmp_path).settings.mesh == "dp=-1,tp=2"
