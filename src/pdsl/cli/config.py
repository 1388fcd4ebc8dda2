"""`pdsl config`: print all settings."""

from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import Assignments


def config(
    file: Annotated[Path | None, typer.Argument(help="Settings as TOML to start from.")] = None,
    assignments: Assignments = [],  # noqa: B006
) -> None:
    """Print every setting as TOML with one line of help: a config file to save and edit."""
    from pdsl.config import commented_toml, load

    print(commented_toml(load(file, assignments)), end="")
