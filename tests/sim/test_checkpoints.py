"""What is saved from the device is what was there, also while the device goes on."""

import pytest
import torch

import accel_fn as af
from accel_fn.checkpoint import background, tensors
from accel_fn.checkpoint.tensors import Part
from tests.sim.device import recorded
from tests.sim.programs import OPTIMIZERS, loss_fn, make_batches, make_model, whole


def make(device="sim"):
    model = make_model()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    recipe = af.compose(
        af.place(), af.skip_nonfinite(), af.schedule(lambda number: 0.9**number), af.ema(0.9)
    )
    return af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.init(device=device))


def advance(state, step, number):
    for batch in make_batches(number):
        state, _ = step(state, batch)
    return state


def parameters(step):
    return {name: whole(each) for name, each in step.plan.model.named_parameters()}


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_from_a_checkpoint_of_the_device_to_the_same_bits(wait, tmp_path):
    state, step = make()
    state = advance(state, step, 3)
    af.save(step, state, tmp_path, wait=wait)
    advance(state, step, 4)
    expected = parameters(step)
    for start, each in ((state, step), make()):  # the first waits for what it writes
        advance(af.load(each, start, tmp_path), each, 4)
        found = parameters(each)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("devices", [("sim", "cpu"), ("cpu", "sim")])
def test_a_checkpoint_moves_between_the_device_and_the_cpu(devices, tmp_path):
    state, step = make(devices[0])
    state = advance(state, step, 3)
    af.save(step, state, tmp_path)
    other_state, other = make(devices[1])
    other_state = af.load(other, other_state, tmp_path)
    for each, position in ((step, state), (other, other_state)):
        advance(position, each, 2)
    torch.testing.assert_close(parameters(other), parameters(step), rtol=0, atol=1e-7)


@pytest.mark.parametrize("devices", [("sim", "cpu"), ("cpu", "sim")])
def test_adapters_move_between_the_device_and_the_cpu(devices, tmp_path):
    def adapted(device):
        model = make_model()
        next(model.parameters()).requires_grad_(False)
        plan = af.place()(af.Plan(loss_fn, model, OPTIMIZERS["fused"](model.parameters())))
        return af.build(plan, af.init(device=device))

    state, step = adapted(devices[0])
    state = advance(state, step, 3)
    af.save(step, state, tmp_path, only="trained")
    other_state, other = adapted(devices[1])
    advance(other_state, other, 1)
    af.load(other, other_state, tmp_path)
    found, expected = parameters(other), parameters(step)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with torch.no_grad():
        next(other.plan.model.parameters())[0] += 1
    with pytest.raises(RuntimeError, match="leaves out frozen parameters"):
        af.load(other, other_state, tmp_path)


@pytest.mark.parametrize("every", [None, 2])
def test_a_longer_schedule_is_followed_on_the_device_as_on_the_cpu(every, tmp_path):
    found = {}
    for device in ("cpu", "sim"):
        for length in (6, 12):
            model = make_model()
            optimizer = OPTIMIZERS["fused"](model.parameters())
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
            recipe = af.compose(af.place(), af.skip_nonfinite(), af.schedule(cosine, every=every))
            plan = recipe(af.Plan(loss_fn, model, optimizer))
            state, step = af.build(plan, af.init(device=device))
            folder = tmp_path / device
            state = advance(af.resume(step, state, folder, schedule="program"), step, 4)
            af.save(step, state, folder)
        found[device] = {
            **parameters(step),
            "rate": torch.tensor(float(optimizer.param_groups[0]["lr"])),
        }
    torch.testing.assert_close(found["sim"], found["cpu"], rtol=0, atol=1e-7)


def test_saving_in_the_background_does_not_wait_for_the_parameters(tmp_path):
    state, step = make()
    state = advance(state, step, 3)
    af.save(step, state, tmp_path, wait=False)
    state = advance(state, step, 1)
    with recorded() as seen:
        af.save(step, state, tmp_path, wait=False)
    places = [each.place for each in seen if each.kind in ("sync", "copy")]
    assert "background.py" not in places  # where a thread waits, by an event


def test_a_save_that_did_not_wait_for_its_copies_would_hold_what_is_not_there(
    tmp_path, monkeypatch
):
    copied = background._copied

    def without_events(*args):
        return copied(*args)[0], []

    monkeypatch.setattr(background, "_copied", without_events)
    state, step = make()
    state = advance(state, step, 3)
    af.save(step, state, tmp_path, wait=False)
    af.load(step, state, tmp_path)
    assert any(each.isnan().any() for each in parameters(step).values())


@pytest.mark.parametrize("block_bytes", [1, 2**28])
def test_a_save_waits_for_a_block_of_tensors_at_once(block_bytes, monkeypatch):
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", block_bytes)
    parts = [Part(str(number), (0,), torch.full((4,), number, device="sim")) for number in range(8)]
    with recorded() as seen:
        found = [tensor.tolist() for _, tensor in tensors.copied_to_host(parts)]
    assert found == [[number] * 4 for number in range(8)]
    assert len([each for each in seen if each.kind in ("sync", "copy")]) == (
        8 if block_bytes == 1 else 1
    )
