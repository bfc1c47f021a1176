"""A launch with a timeout prints the line of each rank, whatever keeps the ranks apart."""

import re
import textwrap

import pytest

_START = """
import os, time, torch
import accel_fn as af

state = af.init()
"""
_CASES = {
    "gather_on_one": """
        if state.is_main:
            af.gather(torch.ones(3, 2), state)  # of rank 0
        time.sleep(600)  # of rank 1
    """,
    "an_end_without_a_word": """
        if state.rank:
            os._exit(3)  # of rank 1
        af.barrier(state)  # of rank 0
    """,
}
_SCRIPTS = {name: _START + textwrap.dedent(script) for name, script in _CASES.items()}
_TIMEOUT_S = 20  # ranks of a busy machine may start seconds apart
_OPTIONS = ["-n", 2, "--cpu", "--timeout-s", _TIMEOUT_S, "script.py"]


@pytest.fixture(scope="module")
def ends(launchers, tmp_path_factory):
    """Run all launches at once; return how each ended."""
    folder = tmp_path_factory.mktemp("worlds")
    started = {
        name: launchers.start(folder / name, *_OPTIONS, script=script)
        for name, script in _SCRIPTS.items()
    }
    return {name: launcher.wait() for name, launcher in started.items()}, folder


@pytest.fixture
def ended(ends, request):
    """Return the launch that a test is named for, and patterns for each rank's line in its
    script."""
    found, folder = ends
    name = request.param
    lines = _SCRIPTS[name].splitlines()
    numbers = [
        next(
            number
            for number, line in enumerate(lines, start=1)
            if line.endswith(f"# of rank {rank}")
        )
        for rank in (0, 1)
    ]
    file = re.escape(str(folder / name / "script.py"))
    return found[name], [f"{file}:{number} in <module>" for number in numbers]


def of(name):
    return pytest.mark.parametrize("ended", [name], indirect=True)


def assert_says(ended, *patterns, exit_code):
    assert ended.exit_code == exit_code, ended.stderr
    missing = [each for each in patterns if not re.search(each, ended.stderr, re.MULTILINE)]
    assert missing == [], ended.stderr


@pytest.mark.slow
@of("gather_on_one")
def test_a_gather_on_one_rank_ends_with_a_report_of_every_rank(ended):
    end, (first, second) = ended
    waits = rf"  rank 0: in collective 1, gather of float32 \[3, 2\], at {first}\n"
    sleeps = rf"  rank 1: at {second}; no collective\n"
    assert_says(end, rf"timeout_s={_TIMEOUT_S}$", exit_code=124)
    assert sorted(re.findall(r"accel_fn: rank (\d) of 2 \(", end.stderr)) == ["0", "1"]
    assert len(re.findall(waits + sleeps, end.stderr)) == 2
    file, _, _ = first.rpartition(":")
    stack = rf'MainThread, innermost call last:\n  File "{file}", line \d+, in <module>\n'
    assert len(re.findall(stack, end.stderr)) == 2  # the stack holds no line of the launcher


@pytest.mark.slow
@of("an_end_without_a_word")
def test_a_stopped_rank_is_reported_with_the_line_that_it_waited_at(ended):
    end, (first, _) = ended
    assert_says(
        end,
        # on a busy machine the second rank may notice by itself
        r"^accel-fn launch: [12] of 2 ranks failed$",
        rf"rank 0\b.*, at {first}$",
        r"^rank 1 \(\S+, pid \d+\)\nexit code 3\n\Z",
        exit_code=3,
    )
