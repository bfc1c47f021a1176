"""The watchdog: what it records, what it writes to the store log, when it reads, how it aborts."""

import copy
import faulthandler
import os
import pickle
import queue
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import accel_fn as af
from accel_fn.testing import internals, simulate
from accel_fn.testing.internals import Entry, Ranks, Stack, StoreLog, StoreWatchdog
from tests.support.processes import free_port

SQUARE = Ranks(4, {"dp": 2, "cp": 1, "tp": 2})
LIBRARIES = (f"{af.__path__[0]}/", f"{torch.__path__[0]}/")


class CountingStore:
    """A real store that counts calls."""

    def __init__(self):
        self.store, self.count = HashStore(), 0

    def clone(self):
        return self

    def __getattr__(self, name):
        self.count += 1
        return getattr(self.store, name)


def make_watchdog(log=None, *, rank=0, timeout_s=60.0, mesh=None, **options):
    log, world_size = log or StoreLog(HashStore(), None), 2 if mesh is None else SQUARE.world_size
    options |= {"rank": rank, "timeout_s": timeout_s, "mesh": mesh}
    return StoreWatchdog(log, world_size=world_size, libraries=LIBRARIES, **options)


def here():
    """Return the number of the line below the caller's."""
    frame = sys._getframe(1)
    return f"{__file__}:{frame.f_lineno + 1} in {frame.f_code.co_name}"


def left_by(watchdog, log):
    watchdog.start()
    watchdog.stop()
    return log.entries()[0].doing


def test_the_log_holds_the_latest_entry_of_every_rank():
    log = StoreLog(HashStore(), None)
    assert log.entries() == {}
    log.add(Entry(0, "first"))
    log.add(Entry(1, "of another\nrank"))
    log.add(Entry(0, "last", left=True))
    assert log.entries() == {0: Entry(0, "last", left=True), 1: Entry(1, "of another\nrank")}


def test_a_request_to_abort_is_seen_by_all_who_share_the_store():
    store = HashStore()
    mine, theirs = StoreLog(store, None), StoreLog(store, None)
    assert not theirs.is_abort_requested()
    mine.request_abort()
    assert theirs.is_abort_requested()
    assert (mine.count_reports(1), theirs.count_reports(1), mine.count_reports()) == (1, 2, 2)


def test_a_log_without_a_server_is_quiet_and_reports_that():
    port = free_port()
    log = StoreLog(HashStore(), ("127.0.0.1", port))
    log.add(Entry(0, "unread"))
    log.request_abort()
    assert (log.entries(), log.is_abort_requested(), log.count_reports(1)) == ({}, False, 0)
    assert log.missing_server().startswith(f"  no store answers at 127.0.0.1:{port}: rank 0, or")
    assert StoreLog(HashStore(), None).missing_server() == ""


def test_a_collective_is_noted_by_number_shapes_and_the_users_line():
    log = StoreLog(HashStore(), None)
    watchdog = make_watchdog(log)
    state = af.DistState(world_size=2, watchdog=watchdog)
    place = here()
    with internals.waiting(state, "gather", [torch.ones(3, 2), torch.arange(4), ["text"]]):
        pass
    left = f"has left; last collective 1, gather of float32 [3, 2], int64 [4], list, at {place}"
    assert left_by(watchdog, log) == left


def test_of_many_tensors_a_few_are_shown():
    log = StoreLog(HashStore(), None)
    watchdog = make_watchdog(log)
    watchdog.enter("gather", [torch.ones(1)] * 9)
    assert f"gather of {'float32 [1], ' * 4}..., at " in left_by(watchdog, log)


def test_messages_between_two_ranks_do_not_count():
    log = StoreLog(HashStore(), None)
    watchdog = make_watchdog(log)
    watchdog.enter("barrier", [])
    watchdog.enter("loader", [], counts=False)
    watchdog.enter("reduce_sum", [])
    watchdog.enter("loader", [], counts=False)
    assert "; last collective 2, reduce_sum, at " in left_by(watchdog, log)


def test_a_step_is_noted_by_number_and_the_users_line():
    log = StoreLog(HashStore(), None)
    watchdog = make_watchdog(log)
    place = here()
    watchdog.begin_step("7")
    assert left_by(watchdog, log) == f"has left; last step 7, at {place}; no collective"


@pytest.mark.parametrize(
    ("times_steps", "ended", "expected"),
    [
        (True, False, ["step has waited for longer than timeout_s=60"]),
        (True, True, []),
        (False, False, []),
    ],
)
def test_a_step_that_does_not_end_hangs_where_the_host_does_not_wait_for_collectives(
    times_steps, ended, expected
):
    watchdog = make_watchdog(times_steps=times_steps)
    watchdog.begin_step("7")
    if ended:
        watchdog.end_step()
    assert internals.reasons_to_end(watchdog, time.monotonic() + 59) == []
    ends = internals.reasons_to_end(watchdog, time.monotonic() + 61)
    assert [each for each in ends if each.startswith("step")] == expected


def test_a_step_that_compiles_may_take_longer_than_the_timeout():
    ends = []
    watchdog = make_watchdog(times_steps=True)
    watchdog.begin_step("7")

    def backend(graph, inputs):
        ends.extend(internals.reasons_to_end(watchdog, time.monotonic() + 61))
        return graph.forward

    torch.compile(lambda values: values + 1, backend=backend)(torch.ones(2))
    assert not ends


def test_a_rank_that_leaves_by_an_error_names_it():
    log = StoreLog(HashStore(), None)
    watchdog = make_watchdog(log)
    watchdog.start()
    try:
        raise ValueError("of mine\nwith more to say")
    except ValueError:
        watchdog.stop()
    expected = {0: Entry(0, "has left by ValueError: of mine; no collective", left=True)}
    assert log.entries() == expected


def test_a_watchdog_that_is_stopped_leaves_no_thread_and_no_handler():
    threads, handles_crashes = threading.enumerate(), faulthandler.is_enabled()
    faulthandler.disable()
    try:
        watchdog = make_watchdog()
        watchdog.start()
        assert len(threading.enumerate()) == len(threads) + 1
        assert faulthandler.is_enabled()
        watchdog.stop()
        watchdog.stop()
        assert threading.enumerate() == threads
        assert not faulthandler.is_enabled()
    finally:
        if handles_crashes:
            faulthandler.enable()


def test_a_watchdog_leaves_a_handler_that_was_there_alone():
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable()
    try:
        watchdog = make_watchdog()
        watchdog.start()
        watchdog.stop()
        assert faulthandler.is_enabled()
    finally:
        if not was_enabled:
            faulthandler.disable()


@pytest.mark.slow
def test_a_busy_rank_does_not_read_the_store_and_a_silent_one_does():
    store = CountingStore()
    watchdog = make_watchdog(StoreLog(store, None), timeout_s=2.0)
    calls = store.count
    watchdog.start()
    for _ in range(30):
        with watchdog.enter("barrier", []):
            time.sleep(0.05)
    assert store.count == calls
    time.sleep(2.0)  # no rank waits: the watchdog reads, and does nothing
    assert store.count > calls
    watchdog.stop()


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("gloo"), KeyboardInterrupt()]
)
def test_errors_of_other_kinds_are_nothing_to_a_watchdog(error):
    watchdog = make_watchdog()
    with pytest.raises(type(error)), watchdog.enter("gather", []):
        raise error
    watchdog.diagnose(error, "step")


def test_a_rank_that_has_reported_waits_until_the_others_have_and_no_longer():
    store = HashStore()
    watchdog = make_watchdog(StoreLog(store, None), rank=1)
    waiting = threading.Thread(target=internals.count_report_and_wait, args=(watchdog, 2))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert StoreLog(store, None).count_reports(1) == 2
    waiting.join(10)
    assert not waiting.is_alive()
    start = time.monotonic()
    internals.count_report_and_wait(make_watchdog(rank=1), 2)
    assert time.monotonic() - start < 5


def test_a_wait_in_the_standard_library_is_placed_at_the_users_line():
    items = queue.Queue()
    thread = threading.Thread(target=items.get)
    # it waits inside threading
    outer = threading.Thread(target=lambda: (thread.start(), thread.join()))
    outer.start()
    while not (frame := sys._current_frames().get(outer.ident)) or "join" not in str(
        Stack.of_thread(frame)
    ):
        time.sleep(0.01)
    place = Stack.of_thread(frame).place(LIBRARIES)
    items.put(None)
    outer.join()
    assert (place.code.co_filename, place.code.co_name) == (__file__, "<lambda>")


def test_a_stack_is_shown_from_the_users_first_call_on():
    def fail(tree, state):
        af.gather(tree, state)

    try:
        fail(torch.ones(2), af.DistState(world_size=2))
    except ValueError as error:
        stack = Stack.of_error(error)
    codes = [frame.f_code for frame, _ in stack.calls]
    frames = [code.co_name for code in codes if not code.co_filename.startswith(LIBRARIES[1])]
    start = frames.index("fail")
    # the call of `eager`
    assert frames[start : start + 3] == ["fail", "call", "gather"]
    place = stack.place(LIBRARIES)
    assert (place.code, place.line) == (fail.__code__, fail.__code__.co_firstlineno + 1)
    # files named "<frozen runpy>" or "<string>"
    under = stack.under((sys.prefix, sys.base_prefix, "<"))
    assert str(under).splitlines()[0].strip().startswith(f'File "{__file__}"')
    assert stack.under(("",)) is stack  # every frame belongs to a library


def test_the_phase_of_a_step_is_read_off_the_stack():
    phases = []

    def note(*_):
        phases.append(Stack.of_thread(sys._getframe()).phase())

    def loss_fn(model, batch):
        note()
        loss = model(batch).mean()
        if loss.requires_grad:
            loss.register_hook(note)
        return loss

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(note)
    state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    step(state, torch.ones(3, 2))
    assert phases == ["forward", "backward", "update"]
    phases.clear()
    af.evaluate(step, state, [torch.ones(3, 2)])
    af.predict(step, state, [torch.ones(3, 2)], lambda model, batch: [note(), model(batch)][1])
    assert phases == ["", ""]  # the forward of an evaluation is none of a step

    def evaluate():
        """A function of the user, as searches for hyperparameters call one, in which a run trains."""
        step(state, torch.ones(3, 2))

    phases.clear()
    evaluate()
    assert phases == ["forward", "backward", "update"]
    assert Stack.of_thread(sys._getframe()).phase() == ""
    assert Stack.of_thread(None).calls == ()


def test_ranks_that_do_the_same_share_a_line():
    entries = {rank: Entry(rank, "waits") for rank in (0, 1, 2, 5)} | {3: Entry(3, "computes")}
    assert Ranks(8, {}).list_work(entries, range(8)).splitlines() == [
        "  ranks 0-2, 5: waits",
        "  rank 3: computes",
        "  ranks 4, 6-7: no entry; killed, or not here yet",
    ]


def test_a_report_on_many_ranks_stays_short():
    entries = {rank: Entry(rank, f"at line {rank}") for rank in range(1000)}
    lines = Ranks(1000, {}).list_work(entries, range(1000)).splitlines()
    assert len(lines) == 13
    assert lines[-1] == "  ... and 988 lines more"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([3], "rank 3 (dp 1, tp 1)"),
        ([0, 1], "ranks 0-1 (dp 0)"),
        ([1, 3], "ranks 1, 3 (tp 1)"),
        ([0, 1, 3], "ranks 0-1, 3"),
    ],
)
def test_ranks_are_named_with_the_places_in_the_mesh_that_they_share(ranks, name):
    assert SQUARE.name(ranks) == name
    assert Ranks(4, {}).name(ranks) == name.partition(" (")[0]


def test_a_collective_along_an_axis_names_it_and_is_counted_for_itself():
    watchdog = make_watchdog(mesh=SQUARE.mesh)
    state = af.DistState(world_size=2, watchdog=watchdog)
    along = replace(state, axis="tp")
    for each in (state, along, state, along, along):
        internals.waiting(each, "barrier")
    assert internals.last_wait(watchdog).startswith("collective 3 along tp, barrier, at ")
    internals.waiting(state, "barrier")
    assert internals.last_wait(watchdog).startswith("collective 3, barrier, at ")


def test_a_wait_along_an_axis_names_the_ranks_of_that_axis():
    watchdog = make_watchdog(rank=2, mesh=SQUARE.mesh)
    with watchdog.enter("gather", [], axis="tp"):
        ends = internals.reasons_to_end(watchdog, time.monotonic() + 61.0)
    assert ends == [
        "gather along tp on ranks 2-3 (dp 1) has waited for longer than timeout_s=60",
        "another rank has waited for too long",
    ]


@pytest.mark.parametrize(
    ("axis", "shown"),
    [
        ("tp", ["rank 3 (dp 1, tp 1): has left"]),
        ("dp", ["rank 0 (dp 0, tp 0): no entry; killed, or not here yet"]),
        ("", ["rank 3 (dp 1, tp 1): has left", "ranks 0-1 (dp 0): no entry; killed, or not here"]),
    ],
)
def test_a_rank_that_is_gone_is_sought_along_the_axis_of_the_collective_alone(
    axis, shown, monkeypatch
):
    monkeypatch.setattr(*internals.SLACK_S, 0.1)  # it waits so long for another entry
    log = StoreLog(HashStore(), None)
    log.add(Entry(3, "has left", left=True))
    watchdog = make_watchdog(log, rank=2, mesh=SQUARE.mesh)
    along = f" along {axis}" if axis else ""
    rule = f"gather: every rank{along} must stay until all have finished, got one that is gone\n"
    with pytest.raises(RuntimeError, match=rule) as caught, watchdog.enter("gather", [], axis=axis):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    lines = str(caught.value).splitlines()[1:]
    own = f"  rank 2 (dp 1, tp 0): in collective 1{along}, gather, at "
    assert [line for line in lines if line.startswith(own)]
    others = [line for line in lines if not line.startswith(own)]
    assert len(others) == len(shown)
    assert all(line.startswith(f"  {text}") for line, text in zip(others, shown, strict=True))


def test_the_watchdog_is_neither_shown_nor_pickled_nor_compared():
    watchdog = make_watchdog()
    state = af.DistState(world_size=2, watchdog=watchdog)
    assert "watchdog" not in repr(state)
    assert state == af.DistState(world_size=2)
    assert copy.deepcopy(state).watchdog is watchdog
    assert pickle.loads(pickle.dumps(state)).watchdog is None
    assert state.advanced(None, 0, 0).watchdog is watchdog


@pytest.mark.parametrize(("along", "axis"), [("", None), (" along tp", "tp")])
def test_two_collectives_at_once_are_refused_on_all_ranks(along, axis):
    def run(state):
        state = state if axis is None else state.along(axis)
        with pytest.raises(RuntimeError) as caught:
            af.barrier(state) if state.rank else af.reduce_sum(1, state)
        return str(caught.value)

    ours = f"every rank{along} must be in the same collective, got"
    first = f"reduce_sum: {ours} barrier on rank 1 and reduce_sum on rank 0"
    other = f"barrier: {ours} reduce_sum on rank 0 and barrier on rank 1"
    mesh = {"dp": 1, "tp": 2} if axis else None
    assert simulate(run, world_size=2, mesh=mesh) == [first, other]


def test_a_total_is_the_sum_and_never_that_of_another_collective():
    def run(state):
        total = torch.tensor(0.1 * (state.rank + 1), dtype=torch.float64)
        internals.start_total(total, state, "step").wait()
        wrong = torch.tensor(1.0)
        try:
            if state.rank:
                af.barrier(state)
            else:
                internals.start_total(wrong, state, "step").wait()
        except RuntimeError as error:
            return float(total), float(wrong), "got" in str(error)

    assert simulate(run, world_size=3) == [(0.1 + 0.2 + 0.1 * 3, 1.0, True)] * 3


def test_a_timeout_that_is_given_comes_before_the_launch(monkeypatch):
    monkeypatch.setenv("ACCEL_FN_TIMEOUT_S", "never")
    with pytest.raises(ValueError, match="launch_options: ACCEL_FN_TIMEOUT_S must be"):
        af.init(device="cpu")
    assert af.init(device="cpu", timeout_s=5).world_size == 1  # the launch's variable is not read


def test_a_report_that_cannot_be_written_is_no_error(monkeypatch):
    """The parent has closed stdout and stderr."""

    def refuse(number, data):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(sys, "stdout", None)
    with monkeypatch.context() as closed:
        closed.setattr(os, "write", refuse)
        internals.write_report("the report")
