"""In the style of TRL: a causal language model on answers of unequal lengths, with accumulation."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)


class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 12), nn.Linear(12, 30)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def collate(rows):
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "labels": labels}


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    rows = [torch.randint(0, 30, (4 + 7 * (i % 5),)) for i in range(48)]
    model = TinyForCausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item())


if __name__ == "__main__":
    main()
