"""Set Hypothesis profiles and one thread for torch, since ranks are threads and processes here."""

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

# torch's store looks up the name of every address that it connects to. If a nameserver does not
# answer, each look-up costs 5 s, unless the resolver is told to retry sooner.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=6, **_COMMON)
settings.register_profile("ci", max_examples=6, derandomize=True, **_COMMON)
settings.register_profile(  # one failing example is enough for a planted bug
    "mutants", max_examples=10, derandomize=True, phases=[Phase.explicit, Phase.generate], **_COMMON
)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_collection_finish():
    """Exclude what was imported from garbage collection, above all in workers that fork."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_runtest_setup(item):
    """Seed the global generators, so that every run draws the same numbers. Keep the simulated ranks of
    a parallel run on one core, where threads that take turns need half the time."""
    torch.manual_seed(0)
    if _CORES and _WORKER:
        one = _CORES[int(_WORKER.removeprefix("gw")) % len(_CORES)]
        os.sched_setaffinity(0, _CORES if item.get_closest_marker("slow") else [one])


@pytest.fixture
def forgetful():
    """Clear what torch remembers about varying shapes: it keys that by place in the code."""
    torch._dynamo.reset()


@pytest.fixture
def ctrl_c():
    """Let programs of a test receive Ctrl-C, even if the tests run with it ignored, as under
    nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_their_module():
    """Collect forgotten iterators here: torch waits up to 5 s for each worker, which a simulated
    rank cannot."""
    yield
    gc.collect()
    gc.freeze()  # what is left, the compiler above all, would be visited again after every module
