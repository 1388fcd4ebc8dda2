"""Read files of a run directory: each problem is one line that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdsl.shapley.account import Account
from pdsl.utils.errors import PdslError

T = TypeVar("T")

CONTRIBUTIONS = "contributions.json"  # in a run directory: the account


def read_file(file: Path, parse: Callable[[str], T]) -> T:
    """Read and parse a file; PdslError if it is missing or invalid."""
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or "unreadable"
    except KeyError as error:
        problem = f"{error} is missing"
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        problem = " ".join(str(error).split())
    raise PdslError(f"cannot read {str(file)!r} ({problem}); repeat the run with: pdsl run config.toml")


def read_account(run: Path) -> Account | None:
    """The contributions of a run's parties; None if the run has none."""
    file = run / CONTRIBUTIONS
    return read_file(file, Account.from_json) if file.exists() else None
