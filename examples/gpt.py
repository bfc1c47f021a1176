"""Train a GPT on the bytes of a text.

    python examples/gpt.py
    accel-fn launch -n 2 --cpu examples/gpt.py --fsdp
    python examples/gpt.py --text shakespeare.txt --out runs/shakespeare

By default the text is the reference of the Python language, which comes with Python. A run that was
stopped resumes from its newest checkpoint, on any number of processes; remove its folder for a new
one.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af

LENGTH, WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 64, 4, 2


class GPT(nn.Module):
    """Without dropout, which draws by how a batch is split."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        size = WIDTH, NUM_HEADS, 4 * WIDTH, 0.0
        layer = partial(nn.TransformerEncoderLayer, activation="gelu", norm_first=True)
        self.blocks = nn.ModuleList(layer(*size, batch_first=True) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def get_batch(text, size, state, name="train"):
    """This rank's part of `size` windows, which are drawn for all ranks."""
    high = len(text) - LENGTH
    starts = af.draw(lambda g: torch.randint(high, (size,), generator=g), state, name)
    windows = torch.stack([text[i : i + LENGTH + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def rate(num_updates, warmup, decay):
    """A factor: it rises for `warmup` updates, and falls as a cosine to a tenth."""
    done = min(1.0, max(0, num_updates - warmup) / (decay - warmup))
    return min(1.0, (num_updates + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))


def main(args):
    state = af.init()
    torch.manual_seed(1337)
    source = args.text.read_bytes() if args.text else "\n".join(topics.values()).encode()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    train_text, test_text = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])

    model = GPT()
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    recipe = af.compose(
        af.place(),
        af.wrap_fsdp() if args.fsdp else af.wrap_ddp(),
        af.with_amp(),
        af.accumulate(args.accumulate),
        af.clip(1.0),
        af.schedule(partial(rate, warmup=args.warmup, decay=args.decay)),
        af.log_to(args.out / "log.jsonl"),
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    state = af.resume(step, state, args.out)

    for _ in (steps := af.progress(range(state.step, args.max_steps), state)):
        state, report = step(state, get_batch(train_text, args.batch_size, state))
        steps.show(report)
        if state.step % args.eval_every == 0:
            batches = [get_batch(test_text, 32, state, f"validation {i}") for i in range(4)]
            found = af.evaluate(step, state, batches)
            af.log_values(step, state, found, prefix="validation/")
            af.print_on_main(f"step {state.step}  loss {found['loss']:.4f}", state=state)
            af.save(step, state, args.out, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a GPT on the bytes of a text.")
    parser.add_argument("--text", type=Path, help="a file (default: Python's reference)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the processes")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--decay", type=int, default=60)
    main(parser.parse_args())
