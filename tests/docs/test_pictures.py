"""Pictures of the documentation are what the library does now."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_of_an_epoch_is_what_the_loader_gives():
    module = runpy.run_path(str(DOCS / "draw_epoch.py"))
    assert module["PICTURE"].read_text() == module["draw"](), "run python docs/draw_epoch.py"
