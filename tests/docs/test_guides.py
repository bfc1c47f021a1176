"""Guides for programs of other libraries: the new side of each diff runs, and gives the losses of the old."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import run_command
from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]


def sides(page: str) -> tuple[str, str]:
    """Both programs of the first diff of a page."""
    text = (ROOT / "docs" / page).read_text()
    [whole] = re.findall(r"^```diff\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)[:1]
    lines = whole.splitlines()
    old, new = ([line[1:] for line in lines if line[:1] != sign] for sign in "+-")
    return "\n".join(old), "\n".join(new)


def printed(program: str, folder: Path, **env: str) -> str:
    """What a program prints, started in an empty folder."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[str]:
    """The lines of epochs; the Trainer prints others, with times."""
    return re.findall(r"^epoch \d  loss 0\.\d{4}$", printed, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        *("from-accelerate.md", "from-ddp.md", "from-fabric.md"),
        pytest.param("from-trainer.md", marks=pytest.mark.slow),
    ],
)
def test_the_new_program_of_a_guide_trains(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = sides(page)
    compile(old, page, "exec")
    monkeypatch.chdir(tmp_path)
    exec(compile(new, page, "exec"), {"__name__": "__main__"})
    assert len(losses(capsys.readouterr().out)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("page", ["from-accelerate.md", "from-ddp.md", "from-trainer.md"])
def test_the_moved_program_of_a_guide_prints_the_losses_of_the_old(
    page: str, tmp_path: Path
) -> None:
    old, new = sides(page)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**torchrun, "MASTER_PORT": str(free_port())} if page == "from-ddp.md" else {}
    moved = losses(printed(new, tmp_path / "new"))
    assert len(moved) == 4
    assert moved == losses(printed(old, tmp_path / "old", **env))


def test_the_page_of_migrate_shows_what_it_prints_for_the_guide(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs/migrate.md").read_text()
    [shown] = re.findall(
        r"^```console\n\$ accel-fn migrate train.py\n(.*?)^```$", page, re.S | re.M
    )
    old, _ = sides("from-accelerate.md")
    (tmp_path / "train.py").write_text(old)
    done = run_command(tmp_path, "migrate", "train.py")
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.M)]
    assert re.fullmatch("(.*\n)*?".join(parts), done.stdout)
