"""The group of commands. A command's module is imported when it is asked for, torch only when it runs."""

from __future__ import annotations

import difflib
import importlib

import click

_COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("accel_fn.cli.launch", "Run a script on every process of a world."),
    "config": ("accel_fn.cli.config", "Write settings to a file, or show those in force."),
    "env": ("accel_fn.cli.env", "Print what a bug report needs."),
    "test": ("accel_fn.cli.test", "Check the library's promises on this machine."),
    "estimate": ("accel_fn.cli.estimate", "Say how much memory a training step takes."),
    "checkpoints": ("accel_fn.cli.checkpoints", "List the checkpoints of a folder."),
    "export": ("accel_fn.cli.export", "Write the weights of a checkpoint as safetensors."),
    "explain": ("accel_fn.cli.explain", "Say what one step of a plan does, phase by phase."),
}
"""Module and one line of help, by name: listing the commands imports none of them."""


class LazyGroup(click.Group):
    """A group whose commands are in modules of their own, `_NAME.py` with a command `NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None where there is none."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for; an error with the nearest name where there is none."""
        near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        if near and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and lines of help, out of the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="accel-fn")
def app() -> None:
    """Start training scripts on one process or many, and see what they would do.

    `accel-fn COMMAND --help` says more about each command.
    """
