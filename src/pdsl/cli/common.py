"""Shared parts of the commands: consoles, the `--set` option, help with all settings."""

import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

INTERRUPTED = 130  # exit code: 128 + SIGINT
WIDE = 120  # columns of a wide table
MIN_SIMILARITY = 0.8  # of an option that is suggested for a typing error

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


@contextmanager
def shown_computations() -> Iterator[None]:
    """Show the progress of long computations on stderr: one changing line in a terminal, a line per half elsewhere."""
    from pdsl.utils.progress import show_progress

    out, last = console(stderr=True), ("", 0)

    def show(text: str, done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(1, total)
        if done and (text, tenth) != last:
            last = text, tenth
            if out.is_terminal:
                out.print(f"{text}: {10 * tenth} %", end="\r" if done < total else "\n", soft_wrap=True)
            elif done == total or tenth == 5:
                out.print(f"{text}: {10 * tenth} %", soft_wrap=True)

    with show_progress(show):
        yield


def describe_mistake(error: typer.TyperException, words: Sequence[str]) -> str:
    """Error line for a command line that cannot be parsed; for an unknown option, with the one that was meant."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or name is None or context is None:
        return f"{error.format_message().rstrip('.')}; try --help after the command"
    options = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    hint = _option_hint(name, _value_of(name, words), options) or "try --help after the command"
    return f"no option {name}; {hint}"


def _option_hint(name: str, value: str | None, options: list[str]) -> str | None:
    """The option or setting that an unknown option was meant to be."""
    from pdsl.config import find_setting, hint

    key = name.lstrip("-").replace("-", "_")
    setting = find_setting(key)
    head, _, last = (setting or key).rpartition(".")
    same = [option for part in (last, head) if (option := f"--{part.replace('_', '-')}") in options]
    similar = same or difflib.get_close_matches(name, options, n=1, cutoff=MIN_SIMILARITY)
    if similar:
        return f"did you mean {similar[0]}?"
    if "--set" not in options:
        return None
    if setting is not None:
        return f"it is a setting: --set {setting}={'…' if value is None else value}"
    return hint(key)


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value that follows an option on the command line, as `--option value` or `--option=value`."""
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        if word == option and not after.startswith("-"):
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
