"""The group of commands. It imports the module of a command only when the command is called.

Some commands belong to plug-ins. If a plug-in is missing, its command prints which extra to
install.
"""

from __future__ import annotations

import difflib
import importlib

import click

from accel_fn.cli.output import one_line_errors
from accel_fn.plug_ins import plug_in

_COMMANDS = {
    "launch": ("cli.launch", "Run a script on every process of a world."),
    "new": ("cli.new", "Write a training program to start from."),
    "config": ("cli.config", "Write settings to a file, or show those in force."),
    "env": ("cli.env", "Print versions, devices and variables for a bug report."),
    "test": ("cli.test", "Check the library's promises on this machine."),
    "estimate": ("estimate.command", "Print how much memory a training step takes."),
    "report": ("runs.report", "Print where the time of a run went, or compare runs."),
    "plot": ("runs.plot", "Draw the curves of runs as a picture and as a page."),
    "watch": ("runs.watch", "Draw the curves of runs in a terminal while they train."),
    "checkpoints": ("cli.checkpoints", "List the checkpoints of a folder."),
    "export": ("cli.checkpoints", "Write the weights of a checkpoint as safetensors."),
    "migrate": ("migrate.command", "Print what takes the place of accelerate in a script."),
    "explain": ("cli.explain", "Print what one step of a plan does, phase by phase."),
}
"""For each command, its module (`cli.` or one of a plug-in) and a line of help."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called, and none to list commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name; return None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        name, _ = _COMMANDS[cmd_name]
        if name.startswith("cli."):
            module = importlib.import_module(f"accel_fn.{name}")
        else:
            with one_line_errors():
                module = plug_in(name, cmd_name)
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, fail with the most similar known name."""
        near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        if near and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and lines of help from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="accel-fn")
def app() -> None:
    """Start training scripts on one process or many, and inspect them.

    `accel-fn COMMAND --help` explains each command.
    """
