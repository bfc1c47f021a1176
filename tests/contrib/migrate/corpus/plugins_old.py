"""In the style of diffusers and TRL: a script that asks which plugin its launch has chosen."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    accelerator = Accelerator()
    set_seed(5)
    is_deepspeed = getattr(accelerator.state, "deepspeed_plugin", None) is not None
    is_fsdp = getattr(accelerator.state, "fsdp_plugin", None) is not None
    if accelerator.is_main_process:
        print("plugins:", is_deepspeed, is_fsdp)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    dataloader = DataLoader(data, batch_size=8)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for epoch in range(2):
        for inputs, targets in dataloader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
