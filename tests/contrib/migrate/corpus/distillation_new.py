"""distillation_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main(max_train_steps=12):
    state = af.init()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    teacher.requires_grad_(False)
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_train_steps)
    dataloader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
    dataloader = af.shard_loader(dataloader, state, order="torch")

    def loss_fn(model, batch, *, frozen):
        batch, noise, scale = batch
        inputs = batch[0]
        noisy = inputs + 0.1 * scale * noise
        with torch.no_grad():
            target = frozen["teacher"](noisy).softmax(dim=-1)
        return F.cross_entropy(model(noisy), target)

    recipe = af.compose(af.place(), af.wrap_ddp(), af.schedule(lr_scheduler))
    plan = recipe(af.Plan(loss_fn, student, optimizer, frozen={"teacher": teacher}))
    state, step = af.build(plan, state)
    completed_steps = 0
    while completed_steps < max_train_steps:
        for batch in dataloader:
            inputs = batch[0]
            noise = af.draw(
                lambda generator, n: torch.randn(
                    n, *inputs.shape[1:], dtype=inputs.dtype, generator=generator
                ),
                state,
                "noise",
                rows=batch,
            )
            scale = af.draw(
                lambda generator, n: torch.rand(n, 1, generator=generator),
                state,
                "scale",
                rows=batch,
            )
            state, report = step(state, (batch, noise, scale))
            completed_steps += 1
            af.print_on_main(completed_steps, report.loss.item(), state=state)
            if completed_steps >= max_train_steps:
                break


if __name__ == "__main__":
    main()
