"""The simulated device makes wrong what a real one could make wrong, and counts waits."""

import gc
import time

import pytest
import torch
import torch.nn.functional as F

from tests.sim.device import native, recorded

SIM = torch.device("sim:0")


def waits(seen):
    return [each.what for each in seen if each.kind in ("sync", "copy")]


def test_kernels_are_those_of_the_cpu():
    torch.manual_seed(0)
    on_cpu = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    on_sim = on_cpu.detach().to(SIM).requires_grad_()
    for tensor in (on_cpu, on_sim):
        (tensor[1:] @ tensor[0]).tanh().sum().backward()
    assert on_sim.grad.device == SIM
    assert torch.equal(on_sim.grad.cpu(), on_cpu.grad)


def test_a_view_shares_memory_and_a_resized_result_is_kept():
    tensor = torch.zeros(4, device=SIM)
    tensor.view(2, 2)[1].add_(1)
    assert tensor.tolist() == [0, 0, 1, 1]
    found = torch.empty(0, device=SIM)
    torch.cat([tensor, tensor], out=found)
    assert found.tolist() == [0, 0, 1, 1] * 2


def test_a_copy_to_the_host_is_wrong_until_the_host_waits():
    held = torch.empty(3, pin_memory=True)
    held.copy_(torch.ones(3, device=SIM), non_blocking=True)
    assert held.isnan().all()
    event = torch.Event(SIM)
    event.record()
    assert held.isnan().all()
    event.synchronize()
    assert held.tolist() == [1, 1, 1]


def test_a_copy_to_the_host_keeps_the_value_of_its_turn():
    value = torch.ones(3, device=SIM)
    held = value.to("cpu", non_blocking=True)
    value.zero_()
    torch.accelerator.synchronize()
    assert held.tolist() == [1, 1, 1]


def test_an_event_recorded_before_a_copy_does_not_bring_it():
    event = torch.Event(SIM)
    event.record()
    held = torch.ones(3, device=SIM).to("cpu", non_blocking=True)
    event.synchronize()
    assert held.isnan().all()


def test_a_copy_to_the_device_is_wrong_for_streams_that_have_not_waited():
    side = torch.Stream(SIM)
    with side:
        moved = torch.ones(3).pin_memory().to(SIM, non_blocking=True)
        event = side.record_event()
    assert (moved * 1).isnan().all()
    torch.accelerator.current_stream().wait_event(event)
    assert (moved * 1).tolist() == [1, 1, 1]


def test_a_copy_to_the_device_is_there_for_kernels_behind_it():
    assert (torch.ones(3).pin_memory().to(SIM, non_blocking=True) * 2).tolist() == [2, 2, 2]


def test_a_stream_that_waits_does_not_bring_copies_to_the_host():
    side = torch.Stream(SIM)
    with side:
        held = torch.ones(3, device=SIM).to("cpu", non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    assert held.isnan().all()


@pytest.mark.parametrize("protect", [None, "record_stream", "wait"])
def test_memory_that_another_stream_still_uses_is_not_reused_unnoticed(protect):
    side, main = torch.Stream(SIM), torch.accelerator.current_stream()
    with recorded() as seen:
        with side:
            tensor = torch.ones(3, device=SIM)
        main.wait_stream(side)
        tensor * 2
        if protect == "record_stream":
            tensor.record_stream(main)
        if protect == "wait":
            side.wait_stream(main)
        del tensor
        with side:
            torch.ones(3, device=SIM)
    hazards = [each.what for each in seen if each.kind == "hazard"]
    assert len(hazards) == (protect is None)
    assert all("record_stream is missing" in each for each in hazards)


@pytest.mark.parametrize(
    ("wait", "number"),
    [
        (lambda tensor: float(tensor.sum()), 1),
        (lambda tensor: bool(tensor[0]), 1),
        (lambda tensor: tensor.cpu(), 1),
        (lambda tensor: torch.tensor(1.0, device=SIM), 1),
        (lambda tensor: tensor.nonzero(), 1),
        (lambda tensor: tensor[tensor > 0], 1),
        (lambda tensor: torch.accelerator.synchronize(), 1),
        (lambda tensor: torch.ones(2).to(SIM), 1),
        (lambda tensor: torch.ones(0).to(SIM), 0),
        (lambda tensor: torch.where(torch.tensor(True), tensor, 0.0), 1),
        (lambda tensor: torch.where(tensor > 0, tensor, 0.0), 0),
        (lambda tensor: torch.ones(2).to(SIM, non_blocking=True), 0),
        (lambda tensor: tensor * 2 + torch.tensor(1.0), 0),
        (lambda tensor: torch.full((2,), 3.0, device=SIM), 0),
        (lambda tensor: tensor.to("cpu", non_blocking=True), 0),
    ],
)
def test_waits_of_the_host_are_counted(wait, number):
    tensor = torch.ones(3, device=SIM)
    with recorded() as seen:
        wait(tensor)
    assert (len(waits(seen)) > 0) == number


def test_waits_are_errors_in_the_debug_mode_as_on_cuda():
    tensor = torch.ones(3, device=SIM)
    torch.sim.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="the host waits for the device"):
            tensor.tolist()
    finally:
        torch.sim.set_sync_debug_mode("default")
    assert tensor.tolist() == [1, 1, 1]


def test_tensors_of_two_devices_do_not_mix():
    for other in ("cpu", "sim:1"):
        with pytest.raises(RuntimeError, match="tensors"):
            torch.ones(3, device=SIM) + torch.ones(3, device=other)


def test_numbers_are_drawn_from_the_generator_of_the_device():
    torch.manual_seed(3)
    of_the_host = torch.get_rng_state()
    first = F.dropout(torch.ones(64, device=SIM))
    second = torch.rand(4, device=SIM)
    assert torch.equal(torch.get_rng_state(), of_the_host)
    assert not torch.equal(first, F.dropout(torch.ones(64, device=SIM)))
    torch.manual_seed(3)
    assert torch.equal(first, F.dropout(torch.ones(64, device=SIM)))
    assert torch.equal(second, torch.rand(4, device=SIM))


def test_the_host_waits_for_a_kernel_that_takes_long_where_it_waits_for_its_stream():
    side, before, after = torch.Stream(SIM), torch.Event(SIM), torch.Event(SIM)
    before.record()
    torch.sim._sleep(10**15)  # eleven days
    after.record()
    side.synchronize()
    before.synchronize()
    assert before.query()
    assert not after.query()
    native.wake()
    assert after.query()
    start = time.monotonic()
    torch.sim._sleep(50_000_000)
    torch.accelerator.synchronize()
    assert time.monotonic() - start >= 0.05


def test_memory_beyond_a_limit_is_refused():
    gc.collect()  # else what other tests have left could make more room later
    torch.sim.set_per_process_memory_fraction(
        (torch.accelerator.memory_allocated() + 1000) / native.memory
    )
    try:
        held = torch.empty(900, dtype=torch.uint8, device=SIM)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^sim out of memory. Tried to allocate 9"
        ):
            held + 1
        assert torch.ones(200, dtype=torch.uint8, device="sim:1").sum() == 200
        del held
        torch.empty(900, dtype=torch.uint8, device=SIM)
    finally:
        torch.sim.set_per_process_memory_fraction(1.0)


def test_memory_is_counted_and_freed():
    before, blocks = torch.accelerator.memory_allocated(), native.num_blocks()
    tensor = torch.ones(1000, device=SIM)
    assert torch.accelerator.memory_allocated() - before == 4000
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert native.num_blocks() == blocks
