"""images_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def training_function(num_epochs=2, batch_size=8):
    state = af.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(44, 3, 4, 4), torch.randint(0, 3, (44,)))
    train_dataloader = DataLoader(data, shuffle=True, batch_size=batch_size)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    for param in model[0].parameters():
        param.requires_grad = False
    mean = torch.tensor([0.4, 0.5, 0.6])[None, :, None, None].to(state.device)
    std = torch.tensor([0.2, 0.2, 0.3])[None, :, None, None].to(state.device)
    optimizer = torch.optim.Adam(params=model[3].parameters(), lr=0.04 / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=0.04,
        epochs=num_epochs,
        steps_per_epoch=len(train_dataloader),
    )
    train_dataloader = af.shard_loader(train_dataloader, state, order="torch")

    def loss_fn(model, batch):
        batch = [each.to(state.device) for each in batch]
        inputs = (batch[0] - mean) / std
        outputs = model(inputs)
        return F.cross_entropy(outputs, batch[1])

    recipe = af.compose(af.place(), af.wrap_ddp(), af.schedule(lr_scheduler))
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, train_step = af.build(plan, state)
    overall_step = 0
    for epoch in train_dataloader.epochs(num_epochs):
        total_loss = 0
        for step, batch in enumerate(epoch):
            state, report = train_step(state, batch)
            total_loss += report.loss.detach().float()
            overall_step += 1
        af.print_on_main(epoch.index, total_loss.item() / len(train_dataloader), state=state)


if __name__ == "__main__":
    training_function()
