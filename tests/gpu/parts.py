"""What the programs are made of: the device, transforms, small models, data, clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accel_fn as af

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = "cpu" if ACCELERATOR is None else ACCELERATOR.type
IS_REHEARSAL = DEVICE == "cpu"
"""Without an accelerator the programs run small, to see that they run."""


TRANSFORMS: dict[str, Callable[[], af.Transform]] = {
    "fp16": lambda: af.with_amp("fp16", init_scale=2.0**10),
    "bf16": lambda: af.with_amp("bf16"),
    "accumulate(2)": lambda: af.accumulate(2),
    "accumulate(auto)": lambda: af.accumulate("auto"),
    "clip": lambda: af.clip(0.1),
    "clip_value": lambda: af.clip_value(0.05),
    "skip_nonfinite": lambda: af.skip_nonfinite(),
    "skip_spikes": lambda: af.skip_spikes(),
    "schedule": lambda: af.schedule(lambda num_updates: 0.9**num_updates),
    "average": lambda: af.ema(0.9),
    "checkpoint": lambda: af.checkpoint_activations(),
    "checkpoint(offload)": lambda: af.checkpoint_activations(offload=True),
    "fsdp": lambda: af.wrap_fsdp(param_dtype=torch.float32),
    "fsdp(offload)": lambda: af.wrap_fsdp(offload=True),
    "reproducible": lambda: af.reproducible(2),
}
GUARDS = {"fp16", "skip_nonfinite", "skip_spikes"}
"""Those that may skip an update."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks of one class, and a head."""

    def __init__(self, depth: int = 3, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def mse_and_mae(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    outputs = model(inputs)
    return F.mse_loss(outputs, targets), {"mae": (outputs - targets).abs().mean()}


def batches(number: int, size: int = 8, width: int = 64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, width, generator=generator),
            torch.randn(size, 1, generator=generator),
        )
        for _ in range(number)
    ]


def pinned(tensor: Tensor) -> Tensor:
    return tensor if IS_REHEARSAL else tensor.pin_memory()


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters on the host, gathered where they are sharded."""
    values = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return [each.detach().float().cpu().clone() for each in values]


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def synchronize() -> None:
    if not IS_REHEARSAL:
        torch.accelerator.synchronize()


def peak_gib() -> float:
    return 0.0 if IS_REHEARSAL else torch.accelerator.max_memory_allocated() / 2**30


def keep_busy() -> None:
    """Give a CUDA device work for tens of milliseconds, so that what does not wait for it is seen."""
    if DEVICE == "cuda":
        torch.cuda._sleep(50_000_000)


def gpt2() -> nn.Module:
    """GPT-2 with 124 million parameters; a tiny one in a rehearsal."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # its warnings are of the size of the vocabulary
    torch.manual_seed(0)
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512} if IS_REHEARSAL else {}
    return GPT2LMHeadModel(GPT2Config(**tiny))


def lm_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def num_targets(tokens: Tensor) -> int:
    return tokens[:, 1:].numel()


def lm_batches(number: int, seed: int = 0) -> list[Tensor]:
    size, length = (2, 32) if IS_REHEARSAL else (16, 1024)
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randint(512, (size, length), generator=generator) for _ in range(number))
    return [pinned(each) for each in drawn]


def by_hand(
    forward: Callable[..., Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    device: Any,
    num_microbatches: int = 1,
) -> Callable[[Any], Tensor]:
    """Return a step of torch alone: bf16, clipping, and `forward`, which may be a wrapped `model`."""
    device = torch.device(device)

    def step(tokens):
        for part in tokens.to(device, non_blocking=True).chunk(num_microbatches):
            with torch.autocast(device.type, torch.bfloat16):
                loss = lm_loss(forward, part)
            (loss / num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def stepping(plan: af.Plan, state: af.DistState, recipe: af.Transform) -> Callable[[Any], Tensor]:
    """Build a step; return a function from a batch to its loss."""
    state, step = af.build(recipe(plan), state)

    def run(batch: Any) -> Tensor:
        nonlocal state
        state, report = step(state, batch)
        return report.loss

    return run


def measured(run: Callable[[Any], Tensor], data: list[Any]) -> str:
    """Time steps after ten that warm up: of the whole, and of the host alone."""
    number = 6 if IS_REHEARSAL else 40
    for index in range(10):
        run(data[index % len(data)])
    synchronize()
    if not IS_REHEARSAL:
        torch.accelerator.reset_peak_memory_stats()
    start = time.perf_counter()
    for index in range(number):
        loss = run(data[index % len(data)])
    synchronize()
    step_ms = (time.perf_counter() - start) / number * 1e3
    host_ms = statistics.median(host_times_ms(run, data))
    rate = data[0].numel() / step_ms * 1e3
    idle = f"idle {idle_share(run, data):4.0%}  " if DEVICE == "cuda" else ""
    return (
        f"{rate:9.0f} tokens/s a rank  step {step_ms:8.2f} ms  host {host_ms:8.2f} ms  {idle}"
        f"peak {peak_gib():6.2f} GiB  loss {float(loss):.4f}"
    )


def idle_share(run: Callable[[Any], Tensor], data: list[Any]) -> float:
    """Return the share of three steps in which a CUDA device runs no kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for batch in data[:3]:
            run(batch)
        synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    spans = [each.time_range for each in profiled.events() if each.device_type == kinds]
    spans.sort(key=lambda each: each.start)
    busy, end = 0.0, spans[0].start
    for each in spans:
        busy += max(0.0, each.end - max(end, each.start))
        end = max(end, each.end)
    return 1 - busy / (end - spans[0].start)


def host_times_ms(run: Callable[[Any], Tensor], data: list[Any]) -> Iterator[float]:
    """Time how long the host takes to queue a step on an idle device: a full queue would stop it."""
    for batch in data:
        synchronize()
        start = time.perf_counter()
        run(batch)
        yield (time.perf_counter() - start) * 1e3


def reason(error: Exception) -> str:
    """One line of an error: what `build` refuses is expected, all else is not."""
    kind = "refused" if str(error).startswith("build:") else "FAILED"
    return f"{kind} {type(error).__name__}: {str(error).splitlines()[0][:140]}"
