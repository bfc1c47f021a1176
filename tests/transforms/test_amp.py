"""with_amp: what `build` warns of."""

import warnings

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

WARNING = (
    r"^build: with_amp should have bf16 on a device with instructions for it, got a CPU without them, "
    r"which takes longer than in float32; take with_amp\('no'\)$"
)
NONE = {"avx2": True, "avx512_bf16": False}


def build(state, precision):
    return af.build(af.compose(af.with_amp(precision), af.wrap_ddp())(ours.plan()), state)


def warned(precision, world_size=1):
    """List the warnings of a build on every rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(lambda state: build(state, precision), world_size=world_size)
    return [str(each.message) for each in caught]


def test_bf16_on_a_cpu_without_instructions_is_warned_of_at_the_users_line(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: NONE)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        build(af.DistState(), "bf16")
    assert [each.filename for each in caught] == [__file__]


def test_the_main_rank_alone_warns(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: NONE)
    assert len(warned("bf16", world_size=2)) == 1


@pytest.mark.parametrize(
    ("precision", "known"),
    [("fp16", NONE), ("no", NONE), ("bf16", {"amx_bf16": True}), ("bf16", {"bf16": True})],
)
def test_other_precisions_and_cpus_are_not_warned_of(monkeypatch, precision, known):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert warned(precision) == []
