"""`accel-fn new` writes a program that trains, resumes and evaluates as it is."""

import re

import pytest

from tests.cli.commands import command


def new(folder, name="train.py", num_epochs=2):
    """Write the program into a folder; let it train for so many epochs."""
    done = command(folder, "new", name)
    assert done.exit_code == 0, done.stderr
    lines = f"Wrote {name}.\nNext: accel-fn launch {name}\n"
    assert done.stdout == lines
    set_epochs(folder / name, num_epochs)


def set_epochs(file, number):
    constants = "NUM_EPOCHS, BATCH_SIZE ="
    text, count = re.subn(rf"{constants} \d+", f"{constants} {number}", file.read_text())
    assert count == 1
    file.write_text(text)


def trained(launchers, folder, *options):
    """Launch the program on the CPU; return step, loss and accuracy of each epoch, and its log."""
    ended = launchers.run(folder, *options, "--cpu", "train.py")
    assert ended.exit_code == 0, ended.stderr
    found = re.findall(r"^step (\d+): loss (\S+), accuracy (\S+)$", ended.stdout, re.M)
    return [
        (int(step), float(loss), float(accuracy)) for step, loss, accuracy in found
    ], ended.stderr


@pytest.mark.slow
def test_it_trains_on_one_process_and_on_two_and_resumes(launchers, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, num_epochs in ((one, 2), (two, 1)):
        folder.mkdir()
        new(folder, num_epochs=num_epochs)
    expected, log = trained(launchers, one)
    assert log == ""
    assert [step for step, *_ in expected] == [100, 200]
    assert expected[-1][2] > 0.95
    first, log = trained(launchers, two, "-n", 2)
    assert log == ""
    set_epochs(two / "train.py", 2)
    second, log = trained(launchers, two, "-n", 2)
    assert log == "the run resumes at step 100, from checkpoints/step_00000100\n"
    for found, line in zip([*first, *second], expected, strict=True):
        # printed with three digits; float32 sums differ in the seventh
        assert max(abs(a - b) for a, b in zip(found, line, strict=True)) < 0.0015


def test_it_is_short_and_names_itself(tmp_path):
    new(tmp_path, "my_train.py")
    lines = (tmp_path / "my_train.py").read_text().splitlines()
    assert len(lines) < 60
    assert "accel-fn launch -n 2 --cpu my_train.py" in lines


def test_its_plan_can_be_explained(tmp_path):
    new(tmp_path)
    ended = command(tmp_path, "explain", "train.py:make_plan", "-n", 2, "--device", "cpu")
    assert ended.stdout.startswith("one step on 2 ranks, cpu\n"), ended.stderr


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "train.py").write_text("mine\n")
    done = command(tmp_path, "new", "train.py")
    assert (done.exit_code, done.stderr) == (1, "Error: train.py exists; name another file\n")
    assert (tmp_path / "train.py").read_text() == "mine\n"
    done = command(tmp_path, "new", "no/train.py")
    error = "Error: no/train.py cannot be written: No such file or directory\n"
    assert (done.exit_code, done.stderr) == (1, error)
