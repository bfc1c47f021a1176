"""by_hand_old.py, moved by what `accel-fn migrate` prints."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
MAX_BATCH_SIZE = 4


class Batch(dict):
    """Tensors by name, which move in place."""

    def to(self, device):
        for name in self:
            self[name] = self[name].to(device)
        return self


def collate_fn(samples):
    points, labels = map(torch.stack, zip(*samples, strict=True))
    return Batch(points=points, labels=labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, points, labels):
        logits = self.layers(points)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits, labels))


def get_dataloaders(state, batch_size):
    torch.manual_seed(3)
    with af.main_first(state):
        points = torch.randn(48, 2)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_dataloader = DataLoader(data, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(data, collate_fn=collate_fn, batch_size=16)
    return train_dataloader, eval_dataloader


def training_function(config):
    state = af.init(seed=int(config["seed"]))
    seed = int(config["seed"])
    batch_size = int(config["batch_size"])
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    train_dataloader, eval_dataloader = get_dataloaders(state, batch_size)
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.02)
    train_dataloader = af.group_batches(
        af.shard_loader(train_dataloader, state, order="torch"), gradient_accumulation_steps
    )
    eval_dataloader = af.group_batches(af.shard_loader(eval_dataloader, state), 1)
    # By hand: the length in batches, as before.
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer,
        start_factor=1.0,
        end_factor=0.1,
        total_iters=len(train_dataloader) * gradient_accumulation_steps * 3,
    )

    def loss_fn(model, batch):
        outputs = model(**batch)
        return outputs.loss

    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.accumulate(gradient_accumulation_steps, split=None),
        af.schedule(lr_scheduler),
    )
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, train_step = af.build(plan, state)
    for epoch in train_dataloader.epochs(3):
        for step, batch in enumerate(epoch):
            state, report = train_step(state, batch)
        right = []

        def predict_fn(model, batch):
            outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            return predictions, batch["labels"]

        predictions, references = af.predict(train_step, state, eval_dataloader, predict_fn)
        right.append(predictions == references)
        af.print_on_main(
            f"epoch {epoch.index}:", torch.cat(right).double().mean().item(), state=state
        )


if __name__ == "__main__":
    training_function({"seed": 42, "batch_size": 12})
