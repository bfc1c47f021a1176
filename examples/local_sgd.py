"""Average parameters now and then instead of gradients in every step.

    python examples/local_sgd.py
    accel-fn launch -n 2 --cpu examples/local_sgd.py

It trains three times on the digits that come with scikit-learn. An average after every update gives
the result of `wrap_ddp`, and so of one process. An average after every eighth sends much less, and
its result depends on the number of ranks.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel_fn as af

STRATEGIES = {
    "wrap_ddp()": af.wrap_ddp(),
    "local_sgd(every=1)": af.local_sgd(every=1),
    "local_sgd(every=8)": af.local_sgd(every=8),
}


def loss_fn(model, batch):
    images, labels = batch
    outputs = model(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(outputs, labels), {"accuracy": accuracy}


def load_data():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    return random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def distance(model, state):
    """The largest difference of a parameter between this rank and rank 0, over all ranks."""
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    return float(af.reduce_max((own - af.broadcast(own, state)).abs().max(), state))


def train(strategy, state, num_epochs=8):
    """Return loss and accuracy on the test data, and how far apart the ranks were after each update."""
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = af.shard_loader(DataLoader(train_data, 60, shuffle=True), state)  # 24 an epoch
    test_loader = af.shard_loader(DataLoader(test_data, 180), state)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe = af.compose(af.place(), strategy)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    apart = []
    for epoch in loader.epochs(num_epochs):
        for batch in epoch:
            state, _ = step(state, batch)
            apart.append(distance(model, state))
    found = af.evaluate(step, state, test_loader, progress=False)  # all ranks are equal here
    return found["loss"], found["accuracy"], apart


def main():
    state = af.init(seed=0)
    for name, strategy in STRATEGIES.items():
        loss, accuracy, apart = train(strategy, state)
        figures = f"loss {loss:.4f}  accuracy {accuracy:.4f}  ranks apart by {max(apart):.4f}"
        af.print_on_main(f"{name:18}  {figures}", state=state)


if __name__ == "__main__":
    main()
