"""An average of parameters, with the names of the package ema_pytorch."""

import copy

from torch import nn


class EMA(nn.Module):
    def __init__(self, model, beta=0.9999):
        super().__init__()
        self.online, self.beta = [model], beta
        self.ema_model = copy.deepcopy(model)

    def update(self):
        for mean, new in zip(self.ema_model.parameters(), self.online[0].parameters(), strict=True):
            mean.data.lerp_(new.detach(), 1 - self.beta)
