"""The rendezvous: however often each rank has tried, all meet, or learn which ranks are missing."""

import re
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from accel_fn.errors import WorldTimeoutError
from accel_fn.testing import internals
from accel_fn.testing.internals import JoiningRank, meet
from tests.support.processes import free_port, launch
from tests.support.strategies import share

TRY = """
from pathlib import Path
import accel_fn as af

folder, rank = Path(__file__).parent, int(os.environ["RANK"])

def attempt(timeout_s):
    try:
        af.init(device="cpu", timeout_s=timeout_s)
    except af.errors.WorldTimeoutError as error:
        return str(error)
    raise AssertionError("the other rank came")

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def meet(timeout_s=30):
    state = af.init(device="cpu", timeout_s=timeout_s)
    say("met", af.reduce_sum(state.rank + 1, state))
"""


@pytest.mark.slow
def test_a_rank_that_dies_in_the_meeting_is_named_and_meets_when_it_is_started_again():
    launch(
        TRY
        + """
import signal
import torch.distributed as dist

if rank == 0:
    assert "but rank 1 did not answer (DistStoreError: wait timeout" in attempt(2)
    (folder / "failed").touch()
elif os.fork() == 0:
    dist.init_process_group = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    af.init(device="cpu", timeout_s=30)
else:
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL
    wait_for("failed")
meet()
""",
        expect=["met 3", "met 3"],
        timeout_s=60,
    )


@pytest.mark.slow
def test_a_rank_that_cannot_connect_keeps_its_error_and_its_peers_name_it():
    launch(
        TRY
        + """
os.environ["GLOO_SOCKET_IFNAME"] = "nowhere" if rank else "lo"
try:
    af.init(device="cpu", timeout_s=2)
except RuntimeError as error:
    known = isinstance(error, af.errors.WorldTimeoutError)
    say(rank, known, str(error).partition("(")[0] if known else "address for: nowhere" in str(error))
""",
        expect=[
            "0 True init: all 2 ranks must connect to each other within 2 s, but rank 1 did not answer ",
            "1 False True",
        ],
        timeout_s=60,
    )


LIVES_ON = float("inf")


class Killed(BaseException):
    """A rank ends here, without a word to anybody."""


class Mortal(PrefixStore):
    """The store of a rank that dies at its n-th use, or never."""

    def __init__(self, store, uses_left):
        super().__init__("", store)
        self.uses_left = uses_left

    def use(self):
        self.uses_left -= 1
        if self.uses_left < 0:
            raise Killed

    def set(self, *args):
        self.use()
        super().set(*args)

    def get(self, *args):
        self.use()
        return super().get(*args)

    def multi_get(self, *args):
        self.use()
        return super().multi_get(*args)

    def check(self, *args):
        self.use()
        return super().check(*args)

    def wait(self, *args):
        self.use()
        super().wait(*args)

    def delete_key(self, *args):
        self.use()
        return super().delete_key(*args)


@dataclass
class Rank:
    """A rank that tries until it meets the others."""

    place: JoiningRank
    tries: list[tuple[float, float]]
    """The time-out of each, and the uses of the store that it lives for."""
    num_groups: int
    port: int
    serves: bool
    errors: list[str]
    sum_of_ranks: float = 0.0
    group: ProcessGroupGloo | None = None

    def run(self):
        for timeout_s, uses in [*self.tries, *((0.5 * 2**n, LIVES_ON) for n in range(6))]:
            try:
                self.attempt(timeout_s, uses)
                return
            except WorldTimeoutError as error:
                self.errors.append(str(error))
            except Killed:
                self.num_groups = 0  # as in a new process

    def attempt(self, timeout_s, uses):
        place = replace(self.place, timeout_s=timeout_s, deadline=time.monotonic() + timeout_s)
        try:
            store = self.reach(timeout_s, uses)
            met = meet(store, place, self.num_groups, partial(self.make, place, store))
        except BaseException as error:
            for each in (error, error.__cause__):
                traceback.clear_frames(each and each.__traceback__)  # the store ends here
            raise
        self.group, self.num_groups = met
        value = torch.tensor([self.place.rank + 1.0])
        try:
            self.group.allreduce(value).wait()
        except RuntimeError as error:
            raise Killed from error  # a peer has not connected: the process ends by this error
        self.sum_of_ranks = value.item()

    def reach(self, timeout_s, uses):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                store = TCPStore(
                    "127.0.0.1",
                    self.port,
                    is_master=self.serves,
                    wait_for_workers=False,
                    multi_tenant=True,
                    timeout=timedelta(seconds=timeout_s),
                )
                return Mortal(store, uses)
            except dist.DistError as error:
                if time.monotonic() > deadline:
                    raise WorldTimeoutError("could not reach rank 0") from error

    def make(self, place, mortal, store, num_groups):
        self.num_groups = num_groups + 1  # as torch counts, also if it fails
        mortal.use()
        assert store.add(f"rank {place.rank}", 1) == 1, "the store is of this world alone"
        group = ProcessGroupGloo(
            store, place.rank, place.world_size, timedelta(seconds=place.timeout_s)
        )
        return group, self.num_groups


TRIES = st.lists(
    st.tuples(st.sampled_from([0.01, 0.1, 0.3]), st.sampled_from([*range(16), LIVES_ON])),
    max_size=2,
)


@share(0.5)
@given(
    ranks=st.lists(st.tuples(TRIES, st.integers(0, 3)), min_size=2, max_size=3),
    serves=st.booleans(),
)
def test_ranks_meet_in_any_order_of_arrivals_departures_and_deaths(ranks, serves):
    agent = None if serves else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if agent is None else agent.port
    place = JoiningRank(0, len(ranks), 0.0, 0.0, "come")
    running = [
        Rank(replace(place, rank=rank), tries, num_groups, port, serves and rank == 0, [])
        for rank, (tries, num_groups) in enumerate(ranks)
    ]
    threads = [threading.Thread(target=rank.run) for rank in running]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*internals.LINGER_S, 0.2)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total = sum(range(len(ranks) + 1))
    assert [rank.sum_of_ranks for rank in running] == [total] * len(ranks), running
    assert len({rank.num_groups for rank in running}) == 1
    texts = [text for rank in running for text in rank.errors]
    assert all(re.search("(did not see|did not answer|could not)", text) for text in texts), texts


def place(rank, world_size, timeout_s):
    return JoiningRank(rank, world_size, timeout_s, time.monotonic() + timeout_s, "come")


def in_threads(*calls):
    """Return the error of each call, as text; all run at once."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [str(future.exception(30)) for future in [threads.submit(call) for call in calls]]


def test_ranks_that_wait_learn_from_rank_0_who_was_missing_before_its_store_ends():
    port = free_port()
    ranks = [Rank(place(rank, 3, 0.0), [], 0, port, rank == 0, []) for rank in range(2)]
    errors = in_threads(
        partial(ranks[0].attempt, 1, LIVES_ON), partial(ranks[1].attempt, 2, LIVES_ON)
    )
    assert errors == [
        "init: all 3 ranks must come within 1 s, rank 0 did not see rank 2; "
        "is WORLD_SIZE right, and did they start?"
    ] * 2  # fmt: skip


def test_a_rank_whose_store_ends_learns_that_rank_0_is_gone():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank(place(1, 2, 0.0), [], 0, server.port, False, [])
    note = PrefixStore("", server)
    note.set("accel_fn/leader", "try")
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(rank.attempt, 1, LIVES_ON)
        note.wait(["try/note/1"], timedelta(seconds=10))
        del note, server
        assert str(future.exception(30)) == (
            "init: all 2 ranks must come within 1 s, rank 1 did not see rank 0 any more; did it end?"
        )


@pytest.fixture
def come():
    """Return a function by which a rank meets the others in one store, with a number as its group."""
    store = HashStore()

    def meet_them(rank, world_size=2, timeout_s=10, uses=LIVES_ON):
        here = place(rank, world_size, timeout_s)
        return meet(Mortal(store, uses), here, 0, number)

    def number(own, num_groups):
        return own.add("ranks", 1)

    meet_them.store = PrefixStore("", store)  # as in `Mortal`
    return meet_them


def test_a_rank_that_died_and_is_started_again_joins_the_try_that_waits_for_it(come):
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(come, 0, world_size=3)
        come.store.wait(["accel_fn/leader"], timedelta(seconds=10))
        with pytest.raises(Killed):
            come(1, world_size=3, uses=3)  # it has left a note
        world = come.store.get("accel_fn/leader").decode()
        old = come.store.get(f"{world}/note/1")
        again = threads.submit(come, 1, world_size=3)
        while come.store.get(f"{world}/note/1") == old:
            time.sleep(0.01)
        third = come(2, world_size=3)
        assert sorted([first.result(30), again.result(30), third]) == [1, 2, 3]


def test_the_try_of_a_rank_0_that_died_begins_for_no_other(come):
    come.store.set("accel_fn/leader", "died")
    come.store.set("died/begin", '["", ["of an earlier try", "of another"]]')
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(come, range(2))) == [1, 2]


@pytest.mark.parametrize(("alone", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_neither_ranks_that_gave_up_nor_those_of_an_earlier_world_are_taken_for_present(
    come, alone, missing
):
    with ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(partial(come, world_size=3), range(3))) == [1, 2, 3]
    for rank, text in ((2, "rank 0"), (alone, missing)):
        with pytest.raises(WorldTimeoutError, match=f"rank {rank} did not see {text};"):
            come(rank, world_size=3, timeout_s=0.05)


def test_a_rank_0_that_does_not_go_on_is_named(come):
    with pytest.raises(Killed):
        come(0, uses=1)
    with pytest.raises(WorldTimeoutError, match="rank 1 did not see rank 0;"):
        come(1, timeout_s=0.05)


def test_a_rank_0_that_has_named_a_try_does_not_hide_the_missing(come):
    with pytest.raises(Killed):
        come(0, uses=2)
    with pytest.raises(WorldTimeoutError, match="rank 1 did not see rank 2;"):
        come(1, world_size=3, timeout_s=0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_are_refused(come, rank):
    """The third rank comes when both have, and makes a world with one of them."""
    with ThreadPoolExecutor(4) as threads:
        ranks = (0, 1, rank)
        tries = [threads.submit(come, each, world_size=3, timeout_s=2) for each in ranks]
        time.sleep(0.3)
        tries.append(threads.submit(come, 2, world_size=3, timeout_s=2))
        texts = [str(each.exception(30)) for each in tries]
    assert texts.count(
        f"init: all 3 ranks must come within 2 s, another process came as rank {rank}; "
        "is RANK another one on each?"
    ) == 1  # fmt: skip
    assert texts.count("None") == 3
