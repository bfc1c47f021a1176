"""examples/digits.py, run as its docstring says: on one process and on two."""

from __future__ import annotations

import sys

import digits
import pytest
import torch
import torch_optimizer
from PIL import Image
from safetensors.torch import load_file

from tests.examples.running import Run, finished, run_example


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def any_run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue({1: "on_one", 2: "on_two"}[request.param])


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(run_example("digits", folder=tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("two")
    return finished(run_example("digits", folder=folder, num_processes=2))


def test_accuracy_on_the_held_out_digits_is_at_least_97_percent(any_run: Run) -> None:
    accuracy = any_run.curves()["test_accuracy"][-1]
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
    # A rank's part of a batch may take other kernels: one digit may change sides.
    assert accuracy == pytest.approx(any_run.curves()["test_accuracy"][-1], abs=1.01 / len(labels))


def test_picture_of_the_curves_opens(any_run: Run) -> None:
    with Image.open(any_run.out / "curves.png") as picture:
        assert picture.width > picture.height > 400


def test_main_rank_alone_shows_a_progress_bar_and_prints(on_two: Run) -> None:
    assert "360/360" in on_two.stderr[0]
    assert "batch/s" not in on_two.stderr[1]
    assert on_two.stdout[1] == ""


def test_loss_curve_is_the_same_on_two_processes_to_bf16_rounding(on_one: Run, on_two: Run) -> None:
    one, two = torch.tensor([on_one.curves()["loss"], on_two.curves()["loss"]])
    assert len(one) == 360
    # At first no more than the rounding of a single bf16 number, 2**-8. What rounding changes in the
    # weights then grows from update to update, as it does where one process takes more micro-batches.
    torch.testing.assert_close(one[:20], two[:20], rtol=2**-8, atol=0)
    torch.testing.assert_close(one, two, rtol=0, atol=0.1)


def test_accuracy_is_the_same_on_two_processes(on_one: Run, on_two: Run) -> None:
    one, two = (run.curves()["test_accuracy"][-1] for run in (on_one, on_two))
    assert one == pytest.approx(two, abs=0.01)  # by bf16 rounding, the last three digits of 360


def test_float32_losses_are_the_same_on_two_processes_to_rounding(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    one, two = (
        finished(
            run_example(
                *("digits", "--precision", "no", "--epochs", "2"),
                folder=tmp_path_factory.mktemp("float32"),
                num_processes=num_processes,
            )
        ).curves()
        for num_processes in (1, 2)
    )
    # Twelve updates, each a sum of 1e5 terms in another order: some units in the last place.
    assert one["loss"][:12] == pytest.approx(two["loss"][:12], rel=20 * torch.finfo().eps)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    assert one["test_accuracy"] == pytest.approx(two["test_accuracy"], abs=1.01 / 360)


def test_unknown_optimizer_is_refused_with_the_nearest_name(
    tmp_path: pytest.TempPathFactory,
) -> None:
    run = run_example("digits", "--optimizer", "AdamWW", folder=tmp_path)
    assert run.exit_code == 2, str(run)
    assert (
        "must be in torch.optim or torch_optimizer, got 'AdamWW'; the nearest is AdamW"
        in run.stderr[0]
    )


def test_optimizer_that_needs_a_closure_is_refused_by_build(tmp_path) -> None:
    run = run_example("digits", "--optimizer", "lbfgs", folder=tmp_path)
    assert run.exit_code == 1, str(run)
    assert "build: optimizer must update from gradients alone, got LBFGS" in run.stderr[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamW", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("RADAM", torch.optim.RAdam),
        ("Yogi", torch_optimizer.Yogi),
        ("sgdp", torch_optimizer.SGDP),
    ],
)
def test_optimizer_is_found_by_its_name_in_any_case(name: str, expected: type) -> None:
    assert digits.find_optimizer(name) is expected


def test_optimizers_of_torch_need_no_other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_optimizer", None)  # any import of it raises
    assert digits.find_optimizer("adam") is torch.optim.Adam


@pytest.mark.parametrize(
    ("kind", "lr", "expected"),
    [
        (torch.optim.AdamW, None, 2e-3),
        (torch.optim.AdamW, 0.5, 0.5),
        (torch.optim.Rprop, None, 1e-2),
        (torch_optimizer.Yogi, None, 1e-2),
        (torch_optimizer.Yogi, 0.5, 0.5),
    ],
)
def test_learning_rate_is_ours_for_adamw_alone_or_what_was_asked_for(
    kind: type, lr: float | None, expected: float
) -> None:
    optimizer = digits.build_optimizer(kind, digits.build_model(), lr)
    assert optimizer.param_groups[0]["lr"] == expected
