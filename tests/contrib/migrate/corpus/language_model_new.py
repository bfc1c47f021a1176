"""language_model_old.py, moved by what `accel-fn migrate` prints."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import accel_fn as af
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
    state = af.init()
    torch.manual_seed(0)
    rows = [torch.randint(0, 30, (4 + 7 * (i % 5),)) for i in range(48)]
    model = TinyForCausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=4 * 2, collate_fn=collate)
    loader = af.shard_loader(loader, state, order="torch")

    def loss_fn(model, batch):
        outputs = model(**batch)
        return outputs.loss

    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(2))
    plan = recipe(af.Plan(loss_fn, model, optimizer, af.count_labels("labels", shift=1)))
    state, step = af.build(plan, state)
    for epoch in loader.epochs(2):
        for batch in epoch:
            state, report = step(state, batch)
        af.print_on_main(epoch.index, report.loss.item(), state=state)


if __name__ == "__main__":
    main()
