"""In the style of diffusers and accelerate: a teacher, drawn inputs of a known shape, a loop by steps."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main(max_train_steps=12):
    accelerator = Accelerator()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    teacher.requires_grad_(False)
    teacher.eval()
    teacher.to(accelerator.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max_train_steps * accelerator.num_processes
    )
    dataloader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
    student, optimizer, dataloader, lr_scheduler = accelerator.prepare(
        student, optimizer, dataloader, lr_scheduler
    )
    completed_steps = 0
    while completed_steps < max_train_steps:
        for batch in dataloader:
            inputs = batch[0]
            noise = torch.randn_like(inputs)
            scale = torch.rand((inputs.shape[0], 1), device=accelerator.device)
            noisy = inputs + 0.1 * scale * noise
            with torch.no_grad():
                target = teacher(noisy).softmax(dim=-1)
            loss = F.cross_entropy(student(noisy), target)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
            accelerator.print(completed_steps, loss.item())
            if completed_steps >= max_train_steps:
                break


if __name__ == "__main__":
    main()
