"""Keep the best checkpoint, and stop when the validation loss no longer falls.

    python examples/early_stopping.py
    accel-fn launch -n 2 --cpu examples/early_stopping.py

The data are scikit-learn's 569 breast tumours. The same command resumes a run that was killed.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel_fn as af


def loss_fn(model, batch):
    features, benign = batch
    logits = model(features).squeeze(1)
    accuracy = ((logits > 0) == (benign > 0.5)).float().mean()
    return F.binary_cross_entropy_with_logits(logits, benign), {"accuracy": accuracy}


def load_data():
    features, benign = map(torch.tensor, load_breast_cancer(return_X_y=True))
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    data = TensorDataset(features.float(), benign.float())
    return random_split(data, [369, 100, 100], torch.Generator().manual_seed(0))


def main(args):
    state = af.init()
    torch.manual_seed(0)
    train_data, valid_data, test_data = load_data()
    train_loader = af.shard_loader(DataLoader(train_data, 32, shuffle=True), state)
    valid_loader, test_loader = (
        af.shard_loader(DataLoader(data, 100), state) for data in (valid_data, test_data)
    )

    model = nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.log_to(args.out / "log.jsonl"))
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    best = {"loss": float("inf"), "epoch": -1}
    state = af.resume(step, state, args.out, extras={"best": best})
    for epoch in train_loader.epochs(args.max_epochs, since=state):
        if epoch.index - best["epoch"] > args.patience:  # at the top: also where a run resumes
            break
        for batch in epoch:
            state, report = step(state, batch)
        found = af.evaluate(step, state, valid_loader)  # equal on all ranks, so all stop together
        af.log_values(step, state, found, prefix="validation/")
        if state.is_main:
            print(f"epoch {epoch.index}  loss {report.loss:.4f}  validation {found['loss']:.4f}")
        if found["loss"] < best["loss"]:
            best.update(loss=found["loss"], epoch=epoch.index)
        # A score is higher for better runs. The newest checkpoint stays to resume from.
        score = -found["loss"]
        af.save(step, state, args.out, extras={"best": best}, score=score, keep=1, keep_best=1)

    kept = max(af.checkpoint.list_checkpoints(args.out), key=lambda checkpoint: checkpoint.score)
    state = af.load(step, state, args.out, extras={"best": best}, at=kept.step)
    found = af.evaluate(step, state, test_loader)
    if state.is_main:
        print(f"epoch {best['epoch']} was best: test accuracy {found['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stop early, and keep the best checkpoint.")
    parser.add_argument("--max-epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a lower loss")
    parser.add_argument("--out", type=Path, default=Path("runs/early_stopping"))
    main(parser.parse_args())
