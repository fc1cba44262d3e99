"""The `headway` command. Each subcommand is one file here, imported only when it is used."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from headway import __version__


def _without_interrupts(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ctrl-C where nobody can catch it yet, among the imports, is no crash."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _without_interrupts

import click  # noqa: E402

# name -> (module, what the command does)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "Run a job from its start to its end, and show it live."),
    "plan": ("plan", "Show what a job would do and need; change nothing."),
    "up": ("up", "Start a fleet on this machine."),
    "down": ("down", "End the fleet on this machine."),
    "submit": ("submit", "Hand a job to a running fleet."),
    "jobs": ("jobs", "List jobs, or show one."),
    "events": ("events", "Show what happened in a job."),
    "serve": ("serve", "Serve a model to OpenAI-compatible clients."),
    "doctor": ("doctor", "Say who waits for whom in a job."),
    "cancel": ("cancel", "Cancel a job."),
    "token": ("token", "Make, list and revoke tokens."),
    "replay": ("replay", "Train a run again from its recorded groups."),
    "export": ("export", "Write a run's checkpoint as a Hugging Face folder."),
    "eval": ("eval", "Evaluate a model or a run on data sets."),
    "compare": ("compare", "Compare two evaluations prompt by prompt."),
    "report": ("report", "Write the report of a run folder again."),
    "version": ("version", "Show the version."),
}


class _Commands(click.Group):
    """Finds a subcommand by its file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order people need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command's file; None when there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"headway.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command where there is none of that name."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=0.6)
        if near and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r} (did you mean {near[0]}?).")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="headway %(version)s")
def group() -> None:
    """Reinforcement learning for language models on two asynchronous pools.

    Exit codes: 0 succeeded, 1 the job failed, 2 bad usage or job, 3 a service is
    unreachable, 130 cancelled.
    """


def main() -> None:
    """Entry point: runs a command and turns what it raised into an exit code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: list[str]) -> int:
    """Runs one command line; returns its exit code. Errors go to stderr, one message each."""
    try:
        return group.main(argv, prog_name="headway", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader left; nothing more can be said
        return 0
    except OSError as error:
        with suppress(OSError):
            click.echo(f"error: {_refusal(error)}", err=True)
        return 2
    except Exception as error:
        from headway.cli.exits import exit_code_of

        code = exit_code_of(error)
        if code is None:
            raise
        if str(error):
            click.echo(f"error: {error}", err=True)
        return code


def _refusal(error: OSError) -> str:
    """What the system refused, and on which file: a name, a right or a disk that is wrong."""
    why = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {why}"
    try:
        os.getcwd()
    except OSError:
        return "the folder that the command runs in is not there any more: cd into another"
    return why
