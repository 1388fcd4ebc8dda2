"""`pdsl algorithms`: list the algorithms."""

import json
from typing import Annotated

import typer
from rich.text import Text

from pdsl.cli.common import console


def algorithms(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object per algorithm.")] = False,
) -> None:
    """List every algorithm: source, update rule, traffic, privacy cost and settings."""
    from pdsl.algorithms.catalogue import EXAMPLE, catalogue

    entries = catalogue()
    if as_json:
        print(json.dumps(entries, ensure_ascii=False))
        return
    for entry in entries:
        k = "|M_i|" if entry["k_is_neighbourhood"] else f"{entry['k']}"
        times = "once a round" if entry["releases_per_round"] == 1 else f"{entry['releases_per_round']} times a round"
        vectors = "1 vector" if entry["messages_per_round"] == 1 else f"{entry['messages_per_round']} vectors"
        settings = ", ".join(f"{s['name'].removeprefix('algorithm.')}={s['default']}" for s in entry["settings"])
        console().print(Text.assemble((entry["name"], "bold"), f"  {entry['what']} ({entry['paper']})"))
        for label, text in (
            ("rule", entry["rule"]),
            ("sends", f"{vectors} a round to each neighbour"),
            ("privacy", f"k = {k} noisy vectors on one batch, {times}"),
            ("settings", settings.replace("=None", "=auto")),
        ):
            console().print(f"  {label:9} {text}")
    print(f"Numbers that depend on the graph are for {EXAMPLE.describe()}. Choose with --set algorithm.name=NAME.")
