"""In the style of accelerate's NLP examples: settings in a dictionary, batches that are moved, a metric.

Accumulation is by hand, and the schedule is made below `prepare`, with a length in batches.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
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


def get_dataloaders(accelerator, batch_size):
    torch.manual_seed(3)
    with accelerator.main_process_first():
        points = torch.randn(48, 2)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_dataloader = DataLoader(data, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(data, collate_fn=collate_fn, batch_size=16)
    return train_dataloader, eval_dataloader


def training_function(config):
    accelerator = Accelerator()
    seed = int(config["seed"])
    batch_size = int(config["batch_size"])
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    set_seed(seed)
    model = Classifier()
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.02)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.1, total_iters=len(train_dataloader) * 3
    )
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right.append(predictions == references)
        accelerator.print(f"epoch {epoch}:", torch.cat(right).double().mean().item())


if __name__ == "__main__":
    training_function({"seed": 42, "batch_size": 12})
