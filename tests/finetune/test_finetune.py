"""examples/finetune.py on real weights: any split is one process; transformers opens the result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.examples.test_programs import output_of

EPOCH = re.compile(r"epoch (\d+): loss (\S+)  held-out accuracy (\S+)")
BEFORE = re.compile(r"before: held-out accuracy (\S+)")
SPLITS = {
    "fsdp": (2, (), ()),
    "tp": (2, ("--mesh", "dp=1,tp=2"), ("--tp",)),
    "both": (4, ("--mesh", "dp=2,tp=2"), ("--tp",)),
}


def epochs(printed: str) -> dict[int, tuple[float, float]]:
    """Losses and accuracies by epoch."""
    return {int(n): (float(loss), float(right)) for n, loss, right in EPOCH.findall(printed)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on one process, and what it printed."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, output_of("finetune", folder=folder)


def test_it_learns_the_topics(alone: tuple[Path, str]) -> None:
    _, printed = alone
    [before] = map(float, BEFORE.findall(printed))
    (_, after) = epochs(printed)[2]
    assert before < 0.5
    assert after > 0.85


def test_transformers_opens_the_result_with_the_same_predictions(alone: tuple[Path, str]) -> None:
    folder, printed = alone
    assert accuracy_of(folder / "runs/finetune/model") == pytest.approx(
        epochs(printed)[2][1], abs=1e-3
    )


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_prints_what_one_process_prints(
    split: str, alone: tuple[Path, str], tmp_path: Path
) -> None:
    size, options, arguments = SPLITS[split]
    printed = output_of("finetune", *arguments, folder=tmp_path, size=size, options=options)
    expected, found = epochs(alone[1]), epochs(printed)
    assert found.keys() == expected.keys()
    for epoch, (loss, accuracy) in expected.items():
        assert found[epoch][0] == pytest.approx(loss, abs=1e-5)
        assert found[epoch][1] == accuracy
    model = tmp_path / "runs/finetune/model"
    assert accuracy_of(model) == pytest.approx(expected[2][1], abs=1e-3)


def test_a_run_of_two_processes_goes_on_on_one(alone: tuple[Path, str], tmp_path: Path) -> None:
    output_of("finetune", "--epochs", "1", folder=tmp_path, size=2)
    printed = output_of("finetune", folder=tmp_path)
    found = epochs(printed)
    assert [*found] == [1, 2]
    assert found[2][0] == pytest.approx(epochs(alone[1])[2][0], abs=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_train_and_are_merged_into_what_transformers_opens(
    size: int, tmp_path: Path
) -> None:
    printed = output_of("finetune", "--lora", folder=tmp_path, size=size)
    (_, after) = epochs(printed)[2]
    assert after > 0.6
    assert accuracy_of(tmp_path / "runs/finetune/model") == pytest.approx(after, abs=1e-3)


def test_bfloat16_trains_too(tmp_path: Path) -> None:
    printed = output_of("finetune", "--bf16", "--epochs", "1", folder=tmp_path, size=2)
    assert epochs(printed)[0][1] > 0.5


def accuracy_of(folder: Path) -> float:
    """The held-out accuracy of a saved model, computed by transformers alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from examples import finetune

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    data = finetune.installed("chatterbot_corpus", "data/english")
    _, held_out = finetune.load_data(data, tokenizer)
    input_ids, attention_mask, labels = held_out.tensors
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    return float((logits.argmax(dim=-1) == labels).double().mean())
