"""A detector whose loss has three terms, and its training by hand."""

import torch
import torch.nn.functional as F
from torch import nn

NUM_PLACES = 3

WEIGHTS = {"cls": lambda batch: batch[1].sum(), "box": lambda batch: batch[2].sum()}


class Detector(nn.Module):
    """A body and two heads, of which each term reaches one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.to(dtype)

    def forward(self, inputs):
        hidden = self.body(inputs).tanh()
        return [head(hidden).squeeze(-1) for head in self.heads]


def sums(model, batch):
    """Return the sum of each term over the places that are marked in its mask."""
    inputs, is_labelled, has_box = batch
    logits, boxes = model(inputs)
    entropy = F.binary_cross_entropy_with_logits(
        logits, (inputs[..., 0] > 0).to(logits), reduction="none"
    )
    return (entropy * is_labelled).sum(), 2 * ((boxes - inputs[..., 1]).square() * has_box).sum()


def terms(model, batch):
    """Return the mean of each term; 0 / 0 where none of its places is marked."""
    of_cls, of_box = sums(model, batch)
    return {"cls": of_cls / batch[1].sum(), "box": of_box / batch[2].sum()}


def by_hand(model, batch):
    """Return the loss of one process: a term without items is 0, and so are its gradients."""
    of_cls, of_box = sums(model, batch)
    return of_cls / batch[1].sum().clamp(min=1) + of_box / batch[2].sum().clamp(min=1)


def a_batch(cls, box):
    """Return a batch whose samples have these numbers of items of each term."""
    inputs = torch.randn(len(cls), NUM_PLACES, 2, generator=torch.Generator().manual_seed(1))
    place = torch.arange(NUM_PLACES)
    return inputs.double(), *[place < torch.tensor(each)[:, None] for each in (cls, box)]


FIXED = [a_batch([0, 2, 1, 0], [3, 0, 0, 0]), a_batch([0, 0, 3, 1], [0, 0, 0, 0])]
