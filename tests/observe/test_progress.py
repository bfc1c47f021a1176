"""progress: the same batches with a bar and without, and what the bar shows, to whom, until when."""

import io
import signal
import sys
from functools import partialmethod
from itertools import islice
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm.auto import tqdm

import accel_fn as af
from accel_fn.testing import simulate
from tests.cli.commands import surroundings
from tests.cli.terminal import Terminal
from tests.support.operations import HOST_READ, OperationsNamed
from tests.support.screen import Screen, last_line, on_screen

HERE = af.DistState(seed=5)
REPORT = af.Report(loss=torch.tensor(0.25), weight=1.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def of(num_samples, state=HERE, **options):
    data = TensorDataset(torch.arange(num_samples))
    return af.shard_loader(DataLoader(data, batch_size=2, **options), state)


WAYS = {  # the loop's batches, from a loader: with `shown` for `progress`, or without
    "epochs": lambda loader, shown, run: [
        (epoch.index, len(epoch), *epoch.enumerate()) for epoch in shown(loader.epochs(3, **run))
    ],
    "prefetched": lambda loader, shown, run: [
        list(epoch) for epoch in shown(af.prefetch(loader, HERE).epochs(3, **run))
    ],
    "prefetched later": lambda loader, shown, run: [
        list(af.prefetch(epoch, HERE)) for epoch in shown(loader.epochs(3, **run))
    ],
    "windows": lambda loader, shown, run: [
        list(epoch) for epoch in shown(af.group_batches(loader, 2).epochs(3, **run))
    ],
    "windows later": lambda loader, shown, run: [
        list(af.group_batches(epoch, 2)) for epoch in shown(loader.epochs(3, **run))
    ],
    "each epoch": lambda loader, shown, run: [
        (epoch.index, *shown(epoch)) for epoch in loader.epochs(3, **run)
    ],
    "a loader": lambda loader, shown, run: [*shown(loader), len(shown(loader))],
    "a list": lambda loader, shown, run: [*shown(list(loader)), len(shown(list(loader)))],
    "left early": lambda loader, shown, run: [
        [*islice(epoch, 2)] for epoch in shown(loader.epochs(3, **run))
    ],
}


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@given(
    way=st.sampled_from([*WAYS]),
    num_samples=st.integers(1, 9),
    step=st.integers(0, 3),
    max_steps=st.none() | st.integers(3, 9),
    shuffle=st.booleans(),
    is_seen=st.booleans(),
)
def test_the_batches_are_the_same_with_a_bar_and_without(
    way, num_samples, step, max_steps, shuffle, is_seen
):
    run = {"since": af.DistState(seed=5, step=step), "max_steps": max_steps}
    loader = of(num_samples, shuffle=shuffle)
    expected = plain(WAYS[way](loader, lambda loader: loader, run))
    loader.set_epoch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Screen() if is_seen else io.StringIO())
        found = plain(WAYS[way](loader, lambda loader: af.progress(loader, HERE), run))
        assert ("\r" in sys.stderr.getvalue()) <= is_seen  # not where no epoch is left
    assert found == expected


class Taught(torch.utils.data.Sampler):
    """Its next sample is what the loop has taught it."""

    next = 0

    def __len__(self):
        return 8

    def __iter__(self):
        return (self.next for _ in range(8))


@pytest.mark.parametrize(
    "around", [lambda loader: loader, lambda loader: af.group_batches(loader, 1)]
)
def test_a_taught_sampler_is_read_as_far_ahead_as_without_a_bar(around):
    with on_screen():

        def taught(shown):
            sampler, found = Taught(), []
            data = TensorDataset(torch.arange(100))
            loader = af.shard_loader(DataLoader(data, batch_size=1, sampler=sampler), HERE)
            for epoch in loader.epochs(1):
                for batch in af.prefetch(around(shown(epoch)), HERE):
                    found.append(plain(batch))
                    sampler.next += 1
            return found

        assert taught(lambda epoch: af.progress(epoch, HERE)) == taught(lambda epoch: epoch)


def test_a_bar_of_the_run_shows_epoch_position_and_loss():
    with on_screen() as screen:
        for epoch in af.progress(of(8).epochs(3), HERE):
            for number, _ in epoch.enumerate():
                epoch.show(af.Report(loss=torch.tensor(float(number)), weight=1.0))
        first, *_ = screen.getvalue().lstrip("\r").split("\r")
        assert first.startswith("epoch 0:   0%|")
        assert "| 0/12 [" in first
        assert "epoch 1:  50%|" in screen.getvalue()
        assert last_line(screen).startswith("epoch 2: 100%|")
        assert "| 12/12 [" in last_line(screen)
        assert last_line(screen).endswith("batch/s, loss=3]")
        assert screen.getvalue().endswith("\n")


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "epoch 1:  50%|█████     | 6/12"),
        ({"max_steps": 9}, "epoch 1:  67%|██████▋   | 6/9"),
        ({"max_steps": 8}, "epoch 1:  75%|███████▌  | 6/8"),
        ({"max_steps": 90}, "epoch 1:  50%|█████     | 6/12"),
        ({"num_epochs": None, "max_steps": 24}, "epoch 1:  25%|██▌       | 6/24"),
    ],
)
def test_the_bar_of_a_resumed_run_starts_where_it_does(options, place):
    with on_screen() as screen:
        epochs = of(8).epochs(**{"num_epochs": 3, **options}, since=af.DistState(step=6))
        for epoch in af.progress(epochs, HERE):
            list(epoch)
        assert screen.getvalue().startswith(f"\r{place} [")
        total = place.rpartition("/")[2]
        assert f"| {total}/{total} [" in last_line(screen)


def test_a_stream_is_left_where_the_run_ends():
    """`max_steps` counts batches that were read of data whose length is not known."""
    loader = af.shard_loader(DataLoader(Stream(), batch_size=5), HERE)
    with on_screen() as screen:
        epochs = af.progress(loader.epochs(None, max_steps=5), HERE)
        assert [len(list(epoch)) for epoch in epochs] == [2, 2, 1]
        assert "epoch 2: 100%|██████████| 5/5 [" in last_line(screen)


@pytest.mark.parametrize(
    ("shown", "end"), [("epochs", "error"), ("epoch", "interrupt"), ("loader", "break")]
)
def test_a_bar_ends_with_the_loop(shown, end):
    with on_screen() as screen:
        loader = of(8)
        epochs = {"epochs": loader.epochs(2), "epoch": next(loader.epochs(1)), "loader": loader}[
            shown
        ]
        errors = {"error": ValueError, "interrupt": KeyboardInterrupt}

        def loop():
            for _ in shown_of(epochs):
                if end == "break":
                    break
                raise errors[end]

        def shown_of(epochs):
            bar = af.progress(epochs, HERE)
            return (batch for epoch in bar for batch in epoch) if shown == "epochs" else bar

        if end == "break":
            loop()
        else:
            with pytest.raises(errors[end]):
                loop()
        assert "| 0/" in last_line(screen)
        assert screen.getvalue().endswith("\n")


def test_values_of_the_loop_stand_beside_the_bar_until_they_are_shown_again():
    with on_screen() as screen:
        bar = af.progress(range(3), HERE)
        for number in bar:
            bar.show(REPORT, rate=torch.tensor([2.0 * number], requires_grad=True))
            if number == 0:
                bar.show(accuracy=0.123456)
        assert last_line(screen).endswith(", loss=0.25, rate=4, accuracy=0.1235]")


@pytest.mark.parametrize(
    ("show", "text"),
    [
        (lambda each: each.show(0.5), "show: report must be a Report, got 'float'; give other val"),
        (lambda each: each.show(loss="low"), "show: loss must be a number, or a tensor of one ele"),
        (lambda each: each.show(loss=torch.ones(2)), "show: loss must be a number, or a tensor"),
    ],
)
def test_only_reports_and_numbers_are_shown(show, text):
    for each in (af.progress([], HERE), af.progress(next(of(8).epochs(1)), HERE)):
        with pytest.raises(TypeError, match=text):
            show(each)


def test_only_what_can_be_iterated_has_progress():
    with pytest.raises(
        TypeError, match=r"progress: loader must be a loader, its epochs, or .* 'int"
    ):
        af.progress(3, HERE)
    with pytest.raises(TypeError, match="progress: state must be a DistState"):
        af.progress([3], None)


def test_other_ranks_and_files_show_nothing(capfd):
    with on_screen() as screen:

        def run(state):
            return [
                plain(batch) for epoch in af.progress(of(8).epochs(1), state) for batch in epoch
            ]

        simulate(lambda state: run(state) if state.rank else None, world_size=2)
        assert screen.getvalue() == ""
        sys.stderr = sys.__stderr__
        run(HERE)
        assert capfd.readouterr().err == ""


def test_a_notebook_shows_the_bar_that_tqdm_chooses(monkeypatch):
    with on_screen() as screen:
        opened = []

        class Chosen(tqdm):
            def __init__(self, *arguments, **options):
                opened.append(options["total"])
                super().__init__(*arguments, **options, file=io.StringIO())

        monkeypatch.setattr(screen, "isatty", lambda: False)
        monkeypatch.setattr("tqdm.auto.tqdm", Chosen)
        list(af.progress(range(3), HERE))
        assert opened == []
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
        list(af.progress(range(3), HERE))
        assert opened == [3]


def test_values_are_read_when_a_line_was_drawn_and_not_in_each_step(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setattr(tqdm, "__init__", partialmethod(tqdm.__init__, mininterval=1000))
    with OperationsNamed(HOST_READ) as reads:
        bar = af.progress(range(1000), HERE)
        for _ in bar:
            bar.show(REPORT)
    assert len(reads.seen) == 1
    assert last_line(sys.stderr).endswith("loss=0.25]")


LOOP = """
import sys, time, torch
import accel_fn as af

with af.distributed(device="cpu") as state:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = af.shard_loader(torch.utils.data.DataLoader(data, batch_size=2), state)
    for epoch in af.progress(loader.epochs(2), state):
        for batch in epoch:
            time.sleep(0.15)
            epoch.show(loss=epoch.index)
            if "endless" in sys.argv:
                print("inside", flush=True)
                time.sleep(600)
        af.print_on_main("end of epoch", epoch.index, state=state)
"""


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)

    def run(*command):
        return Terminal([sys.executable, *command], tmp_path, surroundings(tmp_path))

    return run


@pytest.mark.slow
def test_a_terminal_shows_one_bar_below_what_is_printed(loop):
    with loop("loop.py") as terminal:
        assert terminal.end() == 0
        *lines, last, end = [line for line in terminal.lines() if line] + [""]
    assert lines == ["end of epoch 0", "end of epoch 1"]
    assert last.startswith("epoch 1: 100%|")
    assert last.endswith("batch/s, loss=1]")
    assert len(last) <= 80
    assert "loss=0]" in terminal.raw
    assert end == ""


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_clean(loop):
    with loop("loop.py", "endless") as terminal:
        terminal.read_until("inside")
        assert terminal.interrupt() in (1, 130, -signal.SIGINT)
        terminal.end()
        lines = terminal.lines()
    before, _, after = "\n".join(lines).partition("\nTraceback")
    assert before.splitlines()[-1].startswith("epoch 0:   0%|")
    assert "KeyboardInterrupt" in after
    assert "batch/s" not in after
