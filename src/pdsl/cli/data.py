"""`pdsl data`: list and download datasets."""

from typing import Annotated

import typer
from rich.table import Table

from pdsl.cli.common import console

app = typer.Typer(help="List and download datasets.")


@app.command("list")
def list_datasets() -> None:
    """List the datasets and whether they are on this machine."""
    from pdsl.data import data_root, status

    table = Table("dataset", "present", "folder", box=None, header_style="bold")
    for name, present, where in status(data_root()):
        table.add_row(name, "yes" if present else "no", str(where))
    console().print(table)


@app.command("fetch")
def fetch_dataset(name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10")]) -> None:
    """Download a dataset to PDSL_DATA, or to the user's cache, and verify it."""
    from pdsl.data import data_root, fetch

    for path in fetch(name, data_root()):
        print(path)
