"""Accounts made by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pdsl.shapley.account import Account, make_account

HOSPITALS = ("Aachen", "Bonn", "Charité", "Dresden", "Essen", "Freiburg")
POINTS = (0.213, 0.121, 0.155, 0.202, 0.149, 0.0)  # of accuracy; they add up to 0.84
MARGINS = (0.020, 0.018, 0.015, 0.025, 0.016, 0.010)


def hospital_account(
    names: Sequence[str] = HOSPITALS,
    values: Sequence[float] = POINTS,
    margins: Sequence[float] = MARGINS,
    metric: str = "accuracy",
    start: float = 0.1,
    end: float = 0.94,
    notes: Sequence[str] = ("Values are of this run's messages with their noise.",),
) -> Account:
    """An account whose values add up to `end` - `start`; errors of two parties are independent."""
    each = np.array(margins)
    together = np.sqrt(each[:, None] ** 2 + each[None, :] ** 2)
    np.fill_diagonal(together, 0.0)
    return make_account(
        names,
        np.array(values),
        each,
        together,
        metric=metric,
        start=start,
        end=end,
        gain=end - start,
        method="exact",
        coalitions=64,
        notes=notes,
    )


def write_account(run: Path, account: Account) -> Path:
    """Write contributions.json into a run directory, and return the directory."""
    (run / "contributions.json").write_text(account.to_json(), encoding="utf-8")
    return run
