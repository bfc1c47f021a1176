"""Examples with data of the Hub's form in place of their stand-ins, from a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture

from tests.examples.test_programs import FIGURE, output_of


def pictures(*shape: int) -> list[Picture.Image]:
    draw = np.random.default_rng(0)
    return [Picture.fromarray(draw.integers(0, 255, shape, dtype=np.uint8)) for _ in range(20)]


def write_mnist(folder: Path) -> tuple[str, ...]:
    """The columns of ylecun/mnist."""
    columns = {"image": pictures(28, 28), "label": [i % 10 for i in range(20)]}
    data = Dataset.from_dict(columns, Features(image=Image(), label=ClassLabel(10)))
    for split in ("train", "test"):
        data.to_parquet(folder / f"{split}.parquet")
    return "--data", str(folder)


def write_mrpc(folder: Path) -> tuple[str, ...]:
    """The configuration and columns of nyu-mll/glue."""
    row = {"sentence1": "a king sees", "sentence2": "it is true that a king sees"}
    data = Dataset.from_list([{**row, "label": i % 2, "idx": i} for i in range(20)])
    splits = ("train", "validation")
    for split in splits:
        data.to_parquet(folder / f"{split}.parquet")
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in splits)
    header = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(header)
    return "--data", str(folder)


def write_pets(folder: Path) -> tuple[str, ...]:
    """The names of Oxford-IIIT Pet's images."""
    for i, picture in enumerate(pictures(90, 120, 3)):
        picture.save(folder / f"{('Abyssinian', 'basset_hound')[i % 2]}_{i}.jpg")
    return "--data-dir", str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write"), [("mnist", write_mnist), ("nlp", write_mrpc), ("vision", write_pets)]
)
def test_example_trains_on_data_of_a_folder(name, write, tmp_path):
    (tmp_path / "data").mkdir()
    arguments = write(tmp_path / "data")
    last = output_of(name, *arguments, "--epochs", "1", folder=tmp_path).splitlines()[-1]
    assert last.startswith("epoch 0 loss ")
    assert len(FIGURE.findall(last)) >= 2
