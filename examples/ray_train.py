"""Train on workers that Ray starts. If one is killed, Ray starts them again, and the run resumes.

    python examples/ray_train.py
    python examples/ray_train.py --num-workers 2

Needs `pip install "ray[train]"`. The losses are the same for any number of workers. On several
machines, `--out` is a folder that all of them see.
"""

import argparse
from pathlib import Path

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel_fn as af


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def train(config):
    """Run on every worker: Ray has set the variables that `af.init` reads."""
    state = af.init()
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train_data, test_data = random_split(TensorDataset(images.float() / 16, labels), [0.8, 0.2])
    train_loader = af.shard_loader(DataLoader(train_data, batch_size=64, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, batch_size=120), state)

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = af.log_to(config["out"] / "log.jsonl", every=1)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.clip(1.0), log)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    extras = {"data": train_loader}
    state = af.resume(step, state, config["out"], extras=extras)
    for epoch in train_loader.epochs(config["epochs"], since=state):
        for batch in epoch:
            state, _ = step(state, batch)
            if state.step % 10 == 0:
                af.save(step, state, config["out"], extras=extras, keep=2)
        found = af.evaluate(step, state, test_loader)
        figures = (f"{name} {value:.4f}" for name, value in found.items())
        af.print_on_main("epoch", epoch.index, *figures, state=state)
        ray.train.report(found)  # on every worker: Ray waits for all


def main(args):
    out = args.out.resolve()  # workers run in other folders
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": out / "checkpoints", "epochs": args.epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(out),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on workers that Ray starts.")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    main(parser.parse_args())
