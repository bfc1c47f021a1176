"""textual_inversion_old.py, moved by what `accel-fn migrate` prints."""

import argparse
import math

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main(args):
    state = af.init()
    torch.manual_seed(0)
    text_encoder = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 4))
    if args.scale_lr:
        args.learning_rate = (
            args.learning_rate * args.gradient_accumulation_steps * args.train_batch_size
        )
    optimizer = torch.optim.AdamW(text_encoder.parameters(), lr=args.learning_rate)
    train_dataset = TensorDataset(torch.randint(0, 20, (72, 4)), torch.randn(72, 4))
    train_dataloader = DataLoader(
        train_dataset, batch_size=args.train_batch_size * args.gradient_accumulation_steps
    )

    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader))
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True
    warmup, total = (args.lr_warmup_steps, args.max_train_steps)

    def rate(n):
        return (n + 1) / warmup if n < warmup else max(0.0, (total - n) / (total - warmup))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    train_dataloader = af.shard_loader(train_dataloader, state, order="torch")

    def loss_fn(model, batch):
        tokens, targets = batch
        return F.mse_loss(model(tokens), targets)

    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.accumulate(args.gradient_accumulation_steps),
        af.schedule(lr_scheduler),
    )
    plan = recipe(af.Plan(loss_fn, text_encoder, optimizer))
    state, train_step = af.build(plan, state)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader))
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    total_batch_size = args.train_batch_size * args.gradient_accumulation_steps
    af.print_on_main(
        f"total batch size {total_batch_size}, {args.max_train_steps} steps", state=state
    )
    global_step = 0
    for epoch in train_dataloader.epochs(args.num_train_epochs):
        for step, batch in enumerate(epoch):
            state, report = train_step(state, batch)
            global_step += 1
            logs = {"loss": report.loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
            af.print_on_main(global_step, logs, state=state)
            if global_step >= args.max_train_steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int)
    parser.add_argument("--lr_warmup_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=0.001)
    parser.add_argument("--scale_lr", action="store_true")
    main(parser.parse_args())
