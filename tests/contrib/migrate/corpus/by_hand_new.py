"""by_hand_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
MAX_BATCH_SIZE = 4


def get_dataloaders(state, batch_size):
    torch.manual_seed(3)
    with af.main_first(state):
        points = torch.randn(48, 2)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_dataloader = DataLoader(data, batch_size=batch_size)
    eval_dataloader = DataLoader(data, batch_size=16)
    return train_dataloader, eval_dataloader


def training_function(batch_size=12):
    state = af.init()
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    train_dataloader, eval_dataloader = get_dataloaders(state, batch_size)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.02)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer,
        start_factor=1.0,
        end_factor=0.1,
        total_iters=(len(train_dataloader) * 3) // gradient_accumulation_steps,
    )
    train_dataloader = af.group_batches(
        af.shard_loader(train_dataloader, state, order="torch"), gradient_accumulation_steps
    )
    eval_dataloader = af.group_batches(af.shard_loader(eval_dataloader, state), 1)

    def loss_fn(model, batch):
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def metric_fn(model, batch):
        predictions = model(batch[0]).argmax(dim=-1)
        return {"accuracy": predictions == batch[1]}

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
        metrics = af.evaluate(train_step, state, eval_dataloader, metric_fn)
        af.print_on_main(f"epoch {epoch.index}:", metrics["accuracy"], state=state)


if __name__ == "__main__":
    training_function()
