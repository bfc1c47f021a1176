"""`python -m tests.gpu`: run ten programs on this machine's accelerator and write a report to send."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.gpu.parts import ACCELERATOR, IS_REHEARSAL

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
CLI = (PYTHON, "-m", "accel_fn")
_PATIENCE_S = 10


@dataclass(frozen=True)
class Program:
    """Commands that run one after another, and what a reader of their output looks at."""

    name: str
    look_at: str
    commands: tuple[tuple[str, ...], ...]
    num_devices: int = 1
    limit_s: int = 1800


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return PYTHON, "-m", f"tests.gpu.{name}", *arguments


def on_two(name: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    cpu = ("--cpu",) if IS_REHEARSAL else ()
    return *CLI, "launch", "-n", "2", *cpu, *options, "-m", f"tests.gpu.{name}", *arguments


def programs(folder: Path) -> list[Program]:
    """The programs in the order in which they are of use."""
    reference = str(folder / "one_device.pt")
    return [
        Program(
            "tests",
            "failures and errors; tests that are skipped though the machine has what they need",
            ((*CLI, "env"), (*PYTEST, "tests"), (*CLI, "test", "-n", "1")),
        ),
        Program(
            "equal",
            "DIFFERS and FAILED; `refused` is right for plans that build refuses on a CPU, too, and for "
            "foreach with compiled(step), which counts on the host",
            (module("equal"),),
            limit_s=3600,
        ),
        Program(
            "waits",
            "waits per step by line: none with a fused optimizer but those that the name states or a "
            "docstring's Cost does; one with foreach where updates may be skipped",
            (module("waits"),),
        ),
        Program(
            "offload", "DIFFERS: a value of the device was read too early", (module("offload"),)
        ),
        Program(
            "compiling",
            "DIFFERS and FAILED; CUDA graphs with micro-batches are refused, but in scope step; times",
            (module("compiling"),),
            limit_s=3600,
        ),
        Program(
            "resuming",
            "`same bits: True` twice; seconds of a save; num_microbatches that settles",
            (module("resuming"),),
        ),
        Program(
            "speed",
            "accel_fn within 1% of torch, compiled as compiled; host ms far below step ms",
            (module("speed"),),
        ),
        Program(
            "two_equal",
            "DIFFERS; each rank's on_main tensor on its own device, the host tensor reduced on cpu; "
            "sparse tables refused over NCCL",
            (module("two_equal", reference), on_two("two_equal", reference)),
            num_devices=2,
        ),
        Program(
            "two_ends",
            "exit code and seconds: ok 0; raise 1 and kill 137 within 10 s; skip and sleep 124 after 20 to "
            "25 s, with a report that names the line; no process that is left",
            tuple(
                on_two("two_ends", case, options=("--timeout-s", "20"))
                for case in ("ok", "raise", "skip", "sleep", "kill")
            ),
            num_devices=2,
        ),
        Program(
            "two_speed",
            "accel_fn within 1% of torch",
            tuple(on_two("two_speed", name) for name in ("torch-ddp", "ddp", "torch-fsdp", "fsdp")),
            num_devices=2,
        ),
    ]


def lines_of(command: tuple[str, ...], limit_s: int) -> Iterator[str]:
    """Run a command; yield the lines that it prints, then how it ended."""
    shown = " ".join(part.replace(PYTHON, "python") for part in command)
    yield f"$ {shown}\n"
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a program that hangs ends with all that it has started
    )
    alarm = _ending_later(process.pid, limit_s)
    try:
        assert process.stdout is not None
        yield from process.stdout
        code = process.wait()
    finally:
        alarm.terminate()
        alarm.wait()
    yield f"exit code {code} after {time.monotonic() - start:.1f} s\n\n"


def _ending_later(group: int, limit_s: int) -> subprocess.Popen[bytes]:
    """Start a process that ends a process group when the time is up."""
    code = f"import os, time; time.sleep({limit_s}); os.killpg({group}, {int(signal.SIGTERM)}); "
    code += f"time.sleep({_PATIENCE_S}); os.killpg({group}, {int(signal.SIGKILL)})"
    return subprocess.Popen([PYTHON, "-c", code], stderr=subprocess.DEVNULL)


def in_short(name: str, output: str) -> str:
    """One line about a program that has run, for a reader of many reports."""
    codes = ", ".join(re.findall(r"^exit code (\S+) after", output, re.MULTILINE))
    wrong = len(
        re.findall(r"^.*(?:DIFFERS|FAILED|ERROR |same bits: False).*$", output, re.MULTILINE)
    )
    return f"{name:10} exit codes {codes}; {wrong} lines that differ or failed\n"


def head() -> str:
    """The date, the versions and the devices that figures belong to."""
    names = []
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    lines = [
        f"accel_fn on an accelerator, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}, "
        f"Python {platform.python_version()}, {platform.platform()}",
        f"accelerator {ACCELERATOR}, {torch.accelerator.device_count()} of them: {names}",
    ]
    if IS_REHEARSAL:
        lines.append(
            "A REHEARSAL on the CPU: programs run a few small plans, tests marked gpu are skipped, and no "
            "figure is of an accelerator"
        )
    return "\n".join([*lines, "", ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", action="append", help="the name of a program; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    every = programs(given.folder)
    unknown = {*(given.only or ())} - {each.name for each in every}
    if unknown:
        names = ", ".join(each.name for each in every)
        parser.error(f"--only must be of {names}, got {', '.join(sorted(unknown))}")
    report = given.folder / "report.txt"
    with report.open("w") as file:

        def show(text: str) -> None:
            print(text, end="", flush=True)
            file.write(text)
            file.flush()

        show(head())
        summary = ""
        for number, each in enumerate(every, start=1):
            if given.only and each.name not in given.only:
                continue
            show(f"== {number}. {each.name}\nLook at: {each.look_at}.\n")
            if not IS_REHEARSAL and torch.accelerator.device_count() < each.num_devices:
                show(f"left out: it needs {each.num_devices} devices\n\n")
                continue
            output = ""
            for command in each.commands:
                for line in lines_of(command, each.limit_s):
                    show(line)
                    output += line
            summary += in_short(each.name, output)
        show(f"== In short\n{summary}")
    print(f"The report is in {os.path.relpath(report)}; send it with an issue.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
