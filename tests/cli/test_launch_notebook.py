"""What the cell of a notebook shows of the ranks that it launches."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from accel_fn.launcher.notebook import shown_displays
from tests.cli.notebooks import run_cells

DRAW = """
import os
import matplotlib.pyplot as plt
from IPython.display import clear_output, display
import accel_fn as af

def draw(last):
    rank = int(os.environ["RANK"])
    print(f"printed by rank {rank}")
    plt.subplots(figsize=(1 + rank, 1))
    plt.show()
    shown = display({"rank": rank}, display_id=True)
    shown.update({"rank": rank, "updated": True})
    for _ in af.progress(range(3), af.init(device="cpu")):
        pass
    plt.subplots(figsize=(3 + rank, 1))
    if last == "clear":
        clear_output()
    if last == "fail":
        raise ValueError("after a picture")
    return rank
"""


def texts(outputs):
    """What the streams of a cell have."""
    return "".join(each.text for each in outputs if each.output_type == "stream")


def displays(outputs):
    return [each.data for each in outputs if each.output_type == "display_data"]


@pytest.mark.slow
def test_a_cell_shows_pictures_and_progress_of_rank_0_and_text_of_all(tmp_path):
    _, outputs, cleared, _, failed = run_cells(
        tmp_path,
        DRAW,
        "af.launch(draw, None)",
        "af.launch(draw, 'clear')",
        "import gc; gc.collect(); assert not plt.get_fignums()",
        "af.launch(draw, 'fail')",
        allow_errors=True,
    )
    first, shown, last = displays(outputs)
    assert "image/png" in first
    assert first["text/plain"] == "<Figure size 100x100 with 1 Axes>"
    assert shown["text/plain"] == "{'rank': 0, 'updated': True}"
    # At the end of a cell, the figures that are still open are shown.
    assert last["text/plain"] == "<Figure size 300x100 with 1 Axes>"
    assert outputs[-1].data["text/plain"] == "[0, 1]"
    assert texts(outputs).count("100%") == 1
    for rank in (0, 1):
        assert f"printed by rank {rank}\n" in texts(outputs)
    assert [each["text/plain"] for each in displays(cleared)] == [last["text/plain"]]
    assert failed[-1].evalue.startswith("after a picture")
    assert len(displays(failed)) == 2


@pytest.fixture
def shell():
    """The part of a notebook's shell that shows displays, and what it has shown."""
    shown = []
    return SimpleNamespace(display_pub=SimpleNamespace(publish=shown.append), shown=shown)


def test_a_process_that_outlives_rank_0_does_not_hold_the_cell(shell):
    with shown_displays(shell) as pipe:
        held = os.dup(pipe)
    with Connection(held, readable=False) as connection, pytest.raises(BrokenPipeError):
        connection.send(("publish", (1,), {}))
    assert shell.shown == []


def test_a_rank_that_is_killed_as_it_sends_does_not_hold_the_cell(shell):
    with shown_displays(shell) as pipe:
        with Connection(os.dup(pipe), readable=False) as connection:
            connection.send(("publish", (1,), {}))
        os.write(pipe, (1000).to_bytes(4, "big") + b"the begin")
    assert shell.shown == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_display_that_cannot_be_shown_ends_the_pipe_so_rank_0_does_not_wait(shell):
    del shell.display_pub.publish
    with shown_displays(shell) as pipe, Connection(os.dup(pipe), readable=False) as connection:
        connection.send(("publish", (1,), {}))
        with pytest.raises(BrokenPipeError):
            connection.send("more than a pipe holds" * 10_000)
