"""The command line. Each command is a module of this package and imports torch only when it runs."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from pdsl.cli import (
    algorithms,
    audit,
    compare,
    config,
    contributions,
    data,
    peer,
    privacy,
    report,
    reproduce,
    run,
    theory,
    value,
)
from pdsl.cli.common import INTERRUPTED, WithSettings, describe_mistake, fail, say
from pdsl.utils.errors import ContactError, PdslError, first_line, is_exhaustion

app = typer.Typer(
    help="Private, serverless, peer-to-peer machine learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=WithSettings)(run.run)
app.command(cls=WithSettings)(config.config)
app.command()(report.report)
app.command()(report.watch)
app.command()(contributions.contributions)
app.command(cls=WithSettings)(value.value)
app.command()(algorithms.algorithms)
app.command("privacy")(privacy.command)
app.command("theory")(theory.command)
app.command(cls=WithSettings)(compare.compare)
app.command()(reproduce.reproduce)
app.command()(audit.audit)
app.add_typer(data.app, name="data")
app.add_typer(peer.app, name="peer")


def _print_version(wanted: bool) -> None:
    if wanted:
        import pdsl

        print(f"pdsl {pdsl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Private, serverless, peer-to-peer machine learning."""


def main() -> NoReturn:
    """Run a command. A user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="pdsl", standalone_mode=False)
        sys.stdout.flush()
    except PdslError as e:
        fail(str(e))
    except ContactError as e:
        fail(f"{e}; the files on disk are complete: start again, or let torchrun restart (--max-restarts)", code=1)
    except typer.TyperException as e:  # a mistake in the command line itself
        fail(describe_mistake(e, sys.argv[1:]))
    except (MemoryError, RuntimeError, ImportError) as e:
        if not is_exhaustion(e):
            raise
        advice = "allow this process more (ulimit -v, ulimit -u), or use less"
        fail(f"out of memory or threads ({first_line(e)}); {advice}", code=1)  # a service manager starts it again
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries to write the rest again when it exits
        fail(
            f"cannot write to {e.filename or 'standard output'}: {e.strerror}; free some space or choose another place"
        )
    if code == INTERRUPTED:
        say("interrupted")
    raise SystemExit(code or 0)
