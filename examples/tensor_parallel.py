"""Train a language model whose layers are split over two ranks, and its batches over the others.

    python examples/tensor_parallel.py
    accel-fn launch -n 4 --cpu --mesh dp=-1,tp=2 examples/tensor_parallel.py
    accel-fn launch -n 4 --cpu --mesh dp=-1,tp=2 examples/tensor_parallel.py --fsdp

It learns sums of two numbers, written as digits. Every mesh prints the same losses.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

WIDTH, HEAD_DIM, NUM_BLOCKS, NUM_CHARACTERS = 64, 16, 2, 12
STYLES = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Attention to earlier characters, then an MLP."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def attention(self, x):
        rows, length, _ = x.shape
        query, key, value = (
            # A rank has some of the heads, so their number comes from the tensor.
            layer(x).view(rows, length, -1, HEAD_DIM).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class LanguageModel(nn.Module):
    """The embedding, the norm and the head have no style: they are whole on every rank."""

    def __init__(self, length):
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_CHARACTERS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CHARACTERS)

    def forward(self, characters):
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.embed(characters) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    characters, labels = batch
    return F.cross_entropy(model(characters).flatten(0, 1), labels.flatten())


def sums():
    """All sums of two numbers below 40; the labels before the answer are ignored."""
    texts = [f"{a:02}+{b:02}={a + b:02}" for a in range(40) for b in range(40)]
    tokens = torch.tensor([["0123456789+=".index(each) for each in text] for text in texts])
    labels = tokens[:, 1:].clone()
    labels[:, :5] = -100
    return TensorDataset(tokens[:, :-1], labels)


def main(args):
    state = af.init(seed=0)
    torch.manual_seed(0)
    data = sums()
    model = LanguageModel(length=data.tensors[0].shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = af.shard_loader(DataLoader(data, batch_size=64, shuffle=True), state)
    recipe = af.compose(
        af.place(),
        af.wrap_fsdp() if args.fsdp else af.wrap_ddp(),
        af.wrap_tp(STYLES),
        af.clip(1.0),
    )
    plan = af.Plan(loss_fn, model, optimizer, weight_fn=af.count_labels(1))
    state, step = af.build(recipe(plan), state)
    for epoch in loader.epochs(args.epochs):
        for batch in epoch:
            state, report = step(state, batch)
        af.print_on_main(f"epoch {epoch.index}  loss {report.loss:.4f}", state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a language model on a mesh of ranks.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fsdp", action="store_true", help="shard what a rank holds over dp")
    main(parser.parse_args())
