"""Rows 12 and 17 to 20: launched processes, wrapped models, and checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn

from tests.field.accelerate import checkpoint, everywhere, fresh, linear, rank, row, shared_folder


@row(12)
def inside_a_window() -> str:
    """Save after one micro-batch of two, then continue with the other."""
    with shared_folder() as folder:
        accelerator, model = _half_a_window()
        assert not accelerator.sync_gradients
        accelerator.save_state(folder)
        accelerator, model = _half_a_window(folder)
    assert accelerator.sync_gradients
    other = linear()
    other(torch.ones(1, 3).double()).sum().backward()
    assert torch.equal(model.weight.grad, other.weight.grad / 2)
    return "counter restored, gradients not"


def _half_a_window(folder: str | None = None) -> tuple[Accelerator, nn.Module]:
    accelerator, model = fresh(gradient_accumulation_steps=2), linear()
    wrapped = accelerator.prepare(model)
    if folder is not None:
        accelerator.load_state(folder)
    with accelerator.accumulate(wrapped):
        accelerator.backward(wrapped(torch.ones(1, 3).double()).sum())
    return accelerator, model


@row(17)
def worlds() -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    sizes = everywhere(Accelerator().num_processes)
    joined = fresh().num_processes
    count = everywhere(_launched() if rank() == 0 else 0)[0]
    told = f"`launch --cpu --num_processes 2` is {count} process; under torchrun, `Accelerator()` makes"
    return (
        f"{told} worlds of {sizes[0]} and {sizes[1]}, `Accelerator(cpu=True)` a world of {joined}"
    )


def _launched() -> int:
    """Return how many processes accelerate starts if it is asked for two."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("print('started')\n")
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        worlds = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
        kept = {name: each for name, each in os.environ.items() if not name.startswith(worlds)}
        done = subprocess.run(
            [*launcher, "--cpu", "--num_processes", "2", script],
            env={**kept, "HF_HOME": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout.count("started")


@row(18)
def prepared() -> str:
    inner, outer, patched = _dtypes("bf16")
    assert patched
    assert (inner, outer) == (torch.bfloat16, torch.float32)
    assert _dtypes("fp16")[0] == torch.float32
    return "patches `model.forward`, upcasts outputs; fp16 on the CPU trains in float32"


def _dtypes(precision: str) -> tuple[torch.dtype, torch.dtype, bool]:
    """Return the dtypes in a layer and of the output, and whether the model's forward was
    replaced."""
    accelerator, model = fresh(mixed_precision=precision), nn.Sequential(linear().float())
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    given = accelerator.prepare(model)(torch.ones(2, 3))
    return seen[0].dtype, given.dtype, "forward" in vars(model)


@row(19, num_ranks=1)
def names() -> str:
    with tempfile.TemporaryDirectory() as folder:
        _saved(folder, [0.0])
        accelerator, _ = _project(folder)
        assert _error(accelerator.save_state) == "ValueError"
        assert _error(lambda: setattr(accelerator, "save_iteration", 1)) == "AttributeError"
    with tempfile.TemporaryDirectory() as folder:
        _saved(folder, [0.0, 1.0, 2.0, 3.0], total_limit=3)
        _saved(folder, [4.0, 5.0], total_limit=3)  # the run is started again
        accelerator, model = _project(folder, total_limit=3)
        accelerator.load_state()
        assert not checkpoint(folder, 0).exists()
        assert float(model.bias) == 3.0
    told = "an error with advice that cannot be followed"
    return f"{told}; with a limit, new ones are deleted and a stale one is loaded"


@row(20, num_ranks=1)
def incomplete() -> str:
    with tempfile.TemporaryDirectory() as folder:
        _saved(folder, [0.0])
        checkpoint(folder, 1).mkdir()
        accelerator, _ = _project(folder)
        return f"loaded, then {_error(accelerator.load_state)}"


def _saved(folder: str, values: list[float], **options: int) -> None:
    """Save the model with each of these values in turn."""
    accelerator, model = _project(folder, **options)
    for value in values:
        with torch.no_grad():
            model.bias.fill_(value)
        accelerator.save_state()


def _project(folder: str, **options: int) -> tuple[Accelerator, nn.Module]:
    automatic = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    accelerator = fresh(project_config=automatic)
    return accelerator, accelerator.prepare(linear())


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"
