"""The diffs of the page on seeing a run fit its program; the session `trackers` runs what they give."""

import pytest

from tests.support.recipes import recipe


@pytest.mark.parametrize("tracker", ["wandb", "SummaryWriter"])
def test_a_diff_of_the_page_fits_its_program(tracker):
    compile(recipe(tracker), tracker, "exec")
