"""In the style of diffusers: accumulation, lengths of a schedule in updates, a rate by batch size."""

import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0)
    text_encoder = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 4))
    if args.scale_lr:
        args.learning_rate = (
            args.learning_rate
            * args.gradient_accumulation_steps
            * args.train_batch_size
            * accelerator.num_processes
        )
    optimizer = torch.optim.AdamW(text_encoder.parameters(), lr=args.learning_rate)
    train_dataset = TensorDataset(torch.randint(0, 20, (72, 4)), torch.randn(72, 4))
    train_dataloader = DataLoader(train_dataset, batch_size=args.train_batch_size)

    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True
    warmup, total = (
        args.lr_warmup_steps * accelerator.num_processes,
        args.max_train_steps * accelerator.num_processes,
    )

    def rate(n):
        return (n + 1) / warmup if n < warmup else max(0.0, (total - n) / (total - warmup))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    text_encoder.train()
    text_encoder, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        text_encoder, optimizer, train_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    total_batch_size = (
        args.train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    )
    accelerator.print(f"total batch size {total_batch_size}, {args.max_train_steps} steps")
    global_step = 0
    for epoch in range(args.num_train_epochs):
        for step, (tokens, targets) in enumerate(train_dataloader):
            with accelerator.accumulate(text_encoder):
                loss = F.mse_loss(text_encoder(tokens), targets)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
            logs = {"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
            accelerator.print(global_step, logs)
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
