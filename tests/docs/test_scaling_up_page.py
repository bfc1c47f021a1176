"""docs/scaling-up.md: each diff applies to the program before it, and no step changes what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_command
from tests.docs.test_examples import side

PAGE = (ROOT / "docs" / "scaling-up.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
[PROGRAM] = [text for language, text in BLOCKS if language == "python"]
*CHANGES, EXPERTS = [text for language, text in BLOCKS if language == "diff"]
COMMANDS = [line for _, text in BLOCKS for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE)]
[PRINTED] = {line for _, text in BLOCKS for line in re.findall(r"^loss .*$", text, re.MULTILINE)}


def programs() -> list[str]:
    """Return the program of the page, and what it becomes by each diff."""
    found = [PROGRAM]
    for change in CHANGES:
        assert found[-1].count(side(change, "-")) == 1
        found.append(found[-1].replace(side(change, "-"), side(change, "+")))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the weights that a program loads."""
    made = PROGRAM.partition("model = make()")[0]
    exec(f"{made}af.save_model(make(), {str(tmp_path / 'weights')!r})", {})
    return tmp_path


def test_every_program_of_the_page_prints_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for program in programs():
        exec(program, {})
        assert capsys.readouterr().out == f"{PRINTED}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"), [(COMMANDS[1], 1), (COMMANDS[1], 4), (COMMANDS[2], 5), (COMMANDS[3], 6)]
)
def test_a_program_of_the_page_prints_the_same_on_several_processes(
    command: str, number: int, folder: Path
) -> None:
    (folder / "train.py").write_text(programs()[number], encoding="utf-8")
    done = run_command(folder, *command.split()[1:], timeout_s=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{PRINTED}\n"


def test_the_lines_for_experts_stand_in_the_program_of_their_page() -> None:
    text = (ROOT / "docs" / "mixture-of-experts.md").read_text(encoding="utf-8")
    assert side(EXPERTS, "+") in text
