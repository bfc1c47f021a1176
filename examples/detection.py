"""Find handwritten digits in pictures of several sizes: lists of images, and two terms of a loss.

    python examples/detection.py
    accel-fn launch -n 2 --cpu examples/detection.py

The class term is a mean over the cells of pictures, the box term a mean over boxes. The program
makes the pictures: each has one to four of scikit-learn's digits, enlarged and scattered.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import accel_fn as af

CELL, NOTHING = 8, 3  # pixels of a cell's side; the class of a cell without the centre of a digit


def make_scenes(count, seed):
    """Pictures [1, height, width], and for each cell a class and a box: centre, height, width."""
    images, labels = map(torch.tensor, load_digits(n_class=3, return_X_y=True))
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    scenes = []
    for _ in range(count):
        rows, columns = pick(2, 5), pick(2, 5)
        picture = torch.zeros(1, rows * CELL, columns * CELL)
        classes, boxes = torch.full((rows, columns), NOTHING), torch.zeros(rows, columns, 4)
        for _ in range(pick(1, 3)):
            digit, height, width = pick(0, len(labels) - 1), pick(8, 14), pick(8, 14)
            top, left = pick(0, rows * CELL - height), pick(0, columns * CELL - width)
            drawn = F.interpolate(images[digit].float().view(1, 1, 8, 8) / 16, (height, width))[0]
            picture[:, top : top + height, left : left + width] += drawn
            y, x = (top + height / 2) / CELL, (left + width / 2) / CELL
            classes[int(y), int(x)] = labels[digit]
            boxes[int(y), int(x)] = torch.tensor([y % 1, x % 1, height / CELL, width / CELL])
        scenes.append((picture, classes.flatten(), boxes.flatten(0, 1)))
    return scenes


def collate(scenes):
    return tuple(map(af.samples, zip(*scenes, strict=True)))  # lists of one item a sample


def num_cells(batch):
    return sum(len(classes) for classes in batch[1])


def num_boxes(batch):
    return sum(int((classes != NOTHING).sum()) for classes in batch[1])


def loss_fn(model, batch):
    pictures, classes, boxes = batch
    outputs = torch.cat([model(picture.unsqueeze(0))[0].flatten(1).T for picture in pictures])
    logits, found = outputs.split([NOTHING + 1, 4], dim=1)
    classes, boxes = torch.cat(classes), torch.cat(boxes)
    has_box = classes != NOTHING
    terms = {
        "class": F.cross_entropy(logits, classes),
        "box": F.mse_loss(found[has_box], boxes[has_box]),
    }
    right = (logits.argmax(dim=1) == classes)[has_box]
    return terms, {"recognised": (right.sum(), len(right))}


def block(num_inputs, num_outputs):
    convolution = nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(8, num_outputs), nn.GELU())


def main():
    state = af.init()
    torch.manual_seed(0)
    train_data, test_data = make_scenes(1024, seed=0), make_scenes(128, seed=1)
    loader = DataLoader(train_data, 16, shuffle=True, collate_fn=collate)
    train_loader = af.shard_loader(loader, state)
    test_loader = af.shard_loader(DataLoader(test_data, 64, collate_fn=collate), state)

    model = nn.Sequential(block(1, 32), block(32, 64), block(64, 128))
    model += nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.GELU())
    model += nn.Sequential(nn.Conv2d(128, NOTHING + 1 + 4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    weights = {"class": num_cells, "box": num_boxes}
    recipe = af.compose(
        af.place(), af.wrap_ddp(), af.accumulate(2), af.log_to("runs/detection/log.jsonl")
    )
    plan = recipe(af.Plan(loss_fn, model, optimizer, weight_fn=weights))
    state, step = af.build(plan, state)
    for epoch in train_loader.epochs(5, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
        found = af.evaluate(step, state, test_loader)
        if state.is_main:
            figures = "  ".join(f"{name} {found[name]:.4f}" for name in sorted(found))
            print(f"epoch {epoch.index}  {figures}")


if __name__ == "__main__":
    main()
