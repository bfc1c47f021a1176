"""Hypothesis profiles and one thread for torch: ranks are threads and processes here."""

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

# torch's store looks up the name of every address that it talks to. A nameserver that lets a
# question fall costs 5 s each time, unless the resolver is told to ask again sooner.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=10, **_COMMON)
settings.register_profile("ci", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile(  # that a planted bug is seen is enough
    "mutants", max_examples=10, derandomize=True, phases=[Phase.explicit, Phase.generate], **_COMMON
)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_collection_finish():
    """What was imported stays: no look for garbage goes through it, least of all in workers that fork."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_setup():
    """What a test draws without a seed of its own is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def forgetful():
    """torch remembers which shapes have varied, by where the code stands."""
    torch._dynamo.reset()


@pytest.fixture
def ctrl_c():
    """Programs that a test starts get Ctrl-C, also where the tests run with it ignored, as under nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_their_module():
    """Torch waits up to 5 s for each worker of a forgotten iterator: here, not in a simulated rank."""
    yield
    gc.collect()
