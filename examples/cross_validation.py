"""Estimate an accuracy by five folds: five trainings in one process, each with a fresh state.

python examples/cross_validation.py
accel-fn launch -n 2 --cpu examples/cross_validation.py

The data are the 1,797 handwritten digits that come with scikit-learn.
"""

from statistics import mean, stdev

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import accel_fn as af


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def train_fold(fresh, train_data, valid_data, fold):
    torch.manual_seed(fold)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.log_to(f"runs/cross_validation/{fold}.jsonl"))
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), fresh)
    loader = af.shard_loader(DataLoader(train_data, 64, shuffle=True), state)
    for epoch in loader.epochs(5, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
    return af.evaluate(step, state, af.shard_loader(DataLoader(valid_data, 256), state))


def main():
    fresh = af.init()  # at step 0: every fold begins with it, and none changes it
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    folds = StratifiedKFold(n_splits=5, shuffle=True, random_state=0).split(images, labels)
    accuracies = []
    for fold, (train_rows, valid_rows) in enumerate(folds):
        found = train_fold(fresh, Subset(data, train_rows), Subset(data, valid_rows), fold)
        accuracies.append(found["accuracy"])
        if fresh.is_main:
            print(f"fold {fold}  loss {found['loss']:.4f}  accuracy {found['accuracy']:.4f}")
    if fresh.is_main:
        print(f"accuracy {mean(accuracies):.4f}, standard deviation {stdev(accuracies):.4f}")


if __name__ == "__main__":
    main()
