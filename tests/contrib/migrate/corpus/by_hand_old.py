"""In the style of accelerate's NLP example: a function of loaders, accumulation by hand, a metric."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
MAX_BATCH_SIZE = 4


def get_dataloaders(accelerator, batch_size):
    torch.manual_seed(3)
    with accelerator.main_process_first():
        points = torch.randn(48, 2)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_dataloader = DataLoader(data, batch_size=batch_size)
    eval_dataloader = DataLoader(data, batch_size=16)
    return train_dataloader, eval_dataloader


def training_function(batch_size=12):
    accelerator = Accelerator()
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.02)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer,
        start_factor=1.0,
        end_factor=0.1,
        total_iters=(len(train_dataloader) * 3) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            points, labels = batch
            points = points.to(accelerator.device)
            loss = F.cross_entropy(model(points), labels)
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                predictions = model(batch[0]).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch[1]))
            right.append(predictions == references)
        accelerator.print(f"epoch {epoch}:", torch.cat(right).double().mean().item())


if __name__ == "__main__":
    training_function()
