"""Train on real digits, be killed in the middle, start again, and end with the same bits.

    python examples/resume.py --out runs/whole
    accel-fn launch -n 2 --cpu --max-restarts 2 examples/resume.py --kill-at 17,40

With `--kill-at` the last rank kills itself with SIGKILL before these updates, once each. The
launcher restarts the world, and the run resumes from its newest checkpoint. The last line is
the SHA-256 of the weights: on as many ranks, it is that of a run that was never killed.

After SIGTERM or SIGUSR1 to any rank, all ranks finish the update, save, and exit with code 75, at
which the launcher starts them again.
"""

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from digits import build_model, load_data, loss_fn
from torch import nn
from torch.utils.data import DataLoader

import accel_fn as af


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    with af.Preemption() as preemption:
        train(args, preemption)


def train(args: argparse.Namespace, preemption: af.Preemption) -> None:
    state = af.init(device=args.device)
    torch.manual_seed(0)
    model = nn.Sequential(build_model(), nn.Dropout(0.1))  # its draws continue, too
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), fused=True))
    recipe = af.compose(af.place(), af.wrap_ddp(), af.clip(1.0), preemption)
    state, step = af.build(recipe(plan), state)
    loader = af.shard_loader(DataLoader(load_data()[0], batch_size=128, shuffle=True), state)

    state = af.resume(step, state, args.out, extras={"data": loader})
    total = args.epochs * len(loader)
    for epoch in af.progress(loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            kill_once(state, args)
            state, report = step(state, batch)
            epoch.show(report)
            stop = report.extras["stop"]  # the same on every rank
            if state.step % args.save_every == 0 or state.step == total or stop:
                af.save(step, state, args.out, extras={"data": loader}, keep=2)
            if stop and state.step < total:
                preemption.leave()
    if state.is_main:
        print(f"{state.step} updates, weights {hash_of(model)}")


def kill_once(state: af.DistState, args: argparse.Namespace) -> None:
    """Kill this process, as the system does when memory runs out."""
    number = state.step + 1
    mark = args.out / f"killed_before_{number}"
    if number in args.kill_at and state.rank == state.world_size - 1 and not mark.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hash_of(model: nn.Module) -> str:
    """SHA-256 of all parameters, in their order."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--epochs", type=int, default=5, help=f"passes over the training digits {default}")
    add("--save-every", type=int, default=10, help=f"updates between checkpoints {default}")
    add("--kill-at", type=numbers, default=(), metavar="N,...", help="updates not to live to see")
    add("--device", help="such as cpu (default: an accelerator where there is one)")
    add("--out", type=Path, default=Path("runs/resume"), help=f"folder of checkpoints {default}")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers such as `17,40`."""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit("interrupted")
