"""examples/digits.py, run as its docstring says: on one process and on two."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import digits
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import accel_fn as af
from tests.examples.running import Run, run_forked, run_once
from tests.reference import train

on_one = run_once("digits", num_processes=1, timeout_s=1200)
on_two = run_once("digits", num_processes=2, timeout_s=1200)


def logged(folder: Path, name: str) -> list[float]:
    """The values of one name in the log of a run."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_accuracy_on_the_held_out_digits_is_at_least_97_percent(any_run: Run) -> None:
    accuracy = logged(any_run.out, "test/accuracy")[-1]
    assert accuracy >= 0.97
    assert f"test accuracy {accuracy:.4f}" in any_run.stdout[0]


def test_written_weights_load_into_the_plain_model_and_give_that_accuracy(any_run: Run) -> None:
    weights = load_file(any_run.out / "model.safetensors")
    model = digits.build_model()
    assert list(weights) == sorted(model.state_dict())
    model.load_state_dict(weights)
    images, labels = digits.load_data()[1].tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    # A rank's part of a batch may use other kernels, so one digit may be classified differently.
    assert accuracy == pytest.approx(
        logged(any_run.out, "test/accuracy")[-1], abs=1.01 / len(labels)
    )


@pytest.mark.slow
def test_main_rank_alone_prints(on_two: Run) -> None:
    assert "test accuracy" in on_two.stdout[0]
    assert on_two.stdout[1] == ""


@pytest.mark.slow
def test_loss_curve_is_the_same_on_two_processes_to_bf16_rounding(on_one: Run, on_two: Run) -> None:
    one, two = logged(on_one.out, "loss"), logged(on_two.out, "loss")
    assert len(one) == 240
    # The model is smooth, so the effect of one bf16 rounding, 2**-8, on a loss stays of that size.
    assert one == pytest.approx(two, rel=0, abs=4 * 2**-8)


@pytest.mark.slow
def test_float32_losses_of_two_processes_are_those_of_the_loop_by_hand(tmp_path: Path) -> None:
    arguments = ("digits", "--precision", "no", "--epochs", "2")
    two = run_forked(*arguments, folder=tmp_path, num_processes=2)
    torch.manual_seed(0)
    model = digits.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(digits.load_data()[0], batch_size=128, shuffle=True)
    epochs = af.shard_loader(loader, af.DistState()).epochs(2)
    losses = train(model, digits.loss_fn, optimizer, chain.from_iterable(epochs), max_norm=1.0)
    assert len(losses) == 24
    # Losses start at 2.4; sums of 1e5 terms in another order differ by some units in the last
    # place.
    eps = torch.finfo(torch.float32).eps
    assert logged(two.out, "loss") == pytest.approx(losses, rel=0, abs=20 * eps)


@pytest.mark.parametrize(
    ("instructions", "device", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False}, "cpu", "no"),
        ({"avx512_bf16": True}, "cpu", "bf16"),
        ({"bf16": True}, "cpu", "bf16"),
        ({}, "cuda", "bf16"),
    ],
)
def test_precision_is_bf16_where_there_are_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, instructions: dict[str, bool], device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert digits.fast_precision(torch.device(device)) == expected


def test_default_step_averages_accumulates_autocasts_and_clips(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class ToldError(Exception):
        pass

    def tell(plan: af.Plan, state: af.DistState) -> None:
        raise ToldError(af.explain(plan, af.DistState(world_size=2)))

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(af, "build", tell)
    monkeypatch.setattr(sys, "argv", ["digits.py", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(ToldError) as told:
        digits.main(digits.parse_arguments())
    assert [" ".join(line.split()) for line in str(told.value).splitlines()] == [
        "one step on 2 ranks, cpu",
        "model place()",
        "split accumulate(2)",
        "weigh count_samples, summed over 2 ranks",
        "place place()",
        "forward loss_fn(Sequential, batch) under with_amp('bf16')",
        "backward the mean over the global batch, by wrap_ddp()",
        "gradients clip(1.0)",
        "update AdamW(lr=0.001), 14 parameter tensors, 98,250 numbers",
        f"watched log_to(every=1), to {tmp_path / 'log.jsonl'}",
    ]


def test_optimizer_that_needs_a_closure_is_refused_by_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--optimizer", "lbfgs", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["digits.py", *arguments])
    with pytest.raises(ValueError, match=r"build: optimizer must .* got LBFGS"):
        digits.main(digits.parse_arguments())
