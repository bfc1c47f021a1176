"""Classify handwritten digits by a small CNN, as in PyTorch's MNIST example.

    python examples/mnist.py
    accel-fn launch -n 2 --cpu examples/mnist.py
    python examples/mnist.py --data ylecun/mnist  # needs `pip install datasets`

By default, the 1,797 digits of 8x8 pixels that come with scikit-learn stand in for MNIST.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel_fn as af


class Net(nn.Module):
    """Smooth, so that a difference in rounding stays one; dropout draws by how a batch is split."""

    def __init__(self, size):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32 * ((size - 4) // 2) ** 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.gelu(self.conv2(F.gelu(self.conv1(x))))
        x = torch.flatten(F.avg_pool2d(x, 2), 1)
        return self.fc2(F.gelu(self.fc1(x)))


def loss_fn(model, batch):
    images, labels = batch
    outputs = model(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(outputs, labels), {"accuracy": accuracy}


def load_data(name):
    if name is None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images).float().view(-1, 1, 8, 8) / 16
        return random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2])
    from datasets import load_dataset

    splits = load_dataset(name).with_format("torch")
    return [
        TensorDataset(splits[split]["image"][:].float() / 255, splits[split]["label"][:])
        for split in ("train", "test")
    ]


def main(args):
    state = af.init()
    torch.manual_seed(args.seed)
    train_data, test_data = load_data(args.data)
    train_loader = af.shard_loader(DataLoader(train_data, args.batch_size, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, 1000), state)

    model = Net(size=train_data[0][0].shape[-1])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.schedule(decay, every=train_loader),
        af.log_to("runs/mnist/log.jsonl"),
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    for epoch in af.progress(train_loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        found = af.evaluate(step, state, test_loader)
        af.log_values(step, state, found, prefix="test/")
        figures = (f"{name} {value:.4f}" for name, value in found.items())
        af.print_on_main("epoch", epoch.index, *figures, state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--data", help="of the Hub: ylecun/mnist (default: scikit-learn's digits)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
