"""Train nanoGPT's character model, with the features of its train.py, and sample from the best one.

    python examples/nanogpt.py
    accel-fn launch -n 2 --cpu examples/nanogpt.py --fsdp
    python examples/nanogpt.py --text input.txt --dtype bf16 --out runs/shakespeare

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

BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, WIDTH = 64, 3, 4, 64


class Block(nn.Module):
    """Attention to earlier characters, then an MLP; without dropout, which draws by micro-batch."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attn_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = self.c_attn(self.ln_1(x)).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """The embedding is the head, too."""

    def __init__(self, num_characters):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(num_characters, WIDTH), nn.Embedding(BLOCK_SIZE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * NUM_LAYERS) ** -0.5 if "proj" in name else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return self.ln_f(self.blocks(x)) @ self.wte.weight.T


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def get_batch(data, size, state, name="train"):
    """This rank's part of `size` windows, which are drawn for all ranks."""
    high = len(data) - BLOCK_SIZE
    starts = af.draw(lambda g: torch.randint(high, (size,), generator=g), state, name)
    windows = torch.stack([data[i : i + BLOCK_SIZE + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def estimate_loss(step, state, splits, args):
    """The mean loss over windows of each split: the same on every rank."""
    found = {}
    for split, data in splits.items():
        names = (f"{split} {i}" for i in range(args.eval_iters))
        batches = [get_batch(data, args.batch_size, state, name) for name in names]
        found[split] = af.evaluate(step, state, batches, progress=False)["loss"]
    return found


def rate(num_updates, warmup, decay):
    """A factor: it rises for `warmup` updates, and falls as a cosine to a tenth."""
    done = min(1.0, max(0, num_updates - warmup) / (decay - warmup))
    return min(1.0, (num_updates + 1) / (warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * done))


def configure_optimizer(model, args):
    """Matrices decay; norms do not."""
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99), fused=True)


@torch.no_grad()
def sample(model, tokens, number, temperature=0.5):
    """Append characters, each drawn from the model's distribution."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        logits = model(tokens[:, -BLOCK_SIZE:])[:, -1]
        drawn = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


def main(args):
    state = af.init()
    torch.manual_seed(1337)
    text = args.text.read_text() if args.text else " ".join(" ".join(topics.values()).split())
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    data = torch.tensor([number_of[character] for character in text])
    splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}

    model = GPT(len(characters))
    recipe = af.compose(
        af.place(),
        af.wrap_fsdp() if args.fsdp else af.wrap_ddp(),
        af.with_amp(args.dtype),
        af.accumulate(args.accumulate),
        af.clip(1.0),
        af.schedule(partial(rate, warmup=args.warmup, decay=args.lr_decay_iters)),
        af.log_to(args.out / "log.jsonl", every=10),
    )
    plan = af.Plan(loss_fn, model, configure_optimizer(model, args))
    state, step = af.build(recipe(plan), state)
    state = af.resume(step, state, args.out)

    for _ in range(state.step, args.max_iters):
        state, _ = step(state, get_batch(splits["train"], args.batch_size, state))
        if state.step % args.eval_interval == 0:
            found = estimate_loss(step, state, splits, args)
            af.log_values(step, state, found, prefix="loss/")
            figures = f"train loss {found['train']:.4f}, val loss {found['val']:.4f}"
            af.print_on_main(f"step {state.step}: {figures}", state=state)
            # A score is higher for better runs. The newest checkpoint stays to resume from.
            af.save(step, state, args.out, score=-found["val"], keep=1, keep_best=1)

    best = max(af.checkpoint.list_checkpoints(args.out), key=lambda checkpoint: checkpoint.score)
    state = af.load(step, state, args.out, at=best.step)
    whole = af.checkpoint.whole_state_dict(model, state)  # also of shards
    if state.is_main:
        writer = GPT(len(characters))
        writer.load_state_dict(whole)
        start = torch.tensor([[number_of[" "]]])
        found = sample(writer, start, args.characters)[0].tolist()
        print("".join(characters[i] for i in found).strip())
    af.print_on_main(f"step {best.step} was best: val loss {-best.score:.4f}", state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train nanoGPT's character model.")
    parser.add_argument("--text", type=Path, help="a file (default: Python's reference)")
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"))
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the processes")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "no"), default="no", help="of autocast")
    parser.add_argument("--max-iters", type=int, default=400)
    parser.add_argument("--lr-decay-iters", type=int, default=400, help="updates of the cosine")
    parser.add_argument("--eval-interval", type=int, default=100)
    parser.add_argument("--eval-iters", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of one update")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a batch")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--characters", type=int, default=160, help="to write at the end")
    main(parser.parse_args())
