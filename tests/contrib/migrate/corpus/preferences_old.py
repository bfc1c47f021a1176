"""In the style of TRL: a policy and a reference that is prepared alone."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    ref_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        TensorDataset(torch.randn(64, 6), torch.randn(64, 6)), batch_size=16, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ref_model = accelerator.prepare_model(ref_model, evaluation_mode=True)
    beta = 0.3
    for epoch in range(3):
        for chosen, rejected in loader:
            with torch.no_grad():
                ref_margin = ref_model(chosen) - ref_model(rejected)
            margin = model(chosen) - model(rejected)
            losses = -F.logsigmoid(beta * (margin - ref_margin))
            loss = losses.mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(accelerator.gather(loss).mean().item())


if __name__ == "__main__":
    main()
