"""Shared parts of the commands: consoles, the `--set` option, help with all settings."""

import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

INTERRUPTED = 130  # exit code: 128 + SIGINT
WIDE = 120  # columns of a wide table

Assignments = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, for example --set batch.size=64; an empty value restores the default.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def console(stderr: bool = False) -> Console:
    """A console without markup, because users' own names may contain brackets and colons."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class WithSettings(TyperCommand):
    """A command whose help ends with a table of all settings."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        super().format_help(ctx, formatter)
        console().print(_settings_table())


def _settings_table() -> Table:
    from pdsl.config import describe

    table = Table(
        "setting", "default", "meaning", box=None, header_style="bold", title="Settings", title_justify="left"
    )
    for name, default, text in describe():
        table.add_row(name, "" if default is None else str(default), text)
    return table


def say(message: str) -> None:
    """Print one line on stderr, on the first rank only."""
    from pdsl.engine.launch import place

    if (here := place()) is None or here.rank == 0:
        print(f"pdsl: {message}", file=sys.stderr)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error as one line and exit."""
    say(" ".join(message.split()))
    raise SystemExit(code) from None
