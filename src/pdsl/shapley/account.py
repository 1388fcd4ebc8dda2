"""The account of a run: each party's contribution in points of the headline metric, with intervals."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from pdsl.shapley.coalitions import Values
from pdsl.utils.errors import PdslError

FORMAT = 1
CONFIDENCE = 0.95  # of all intervals
COLUMNS = ("name", "value", "low", "high", "part")  # of the CSV file


class PartyRecord(TypedDict):
    name: str
    value: float  # contribution, in units of the metric
    low: float
    high: float
    part: float | None  # of the whole gain; None if there was no gain


class PairRecord(TypedDict):
    first: str
    second: str
    difference: float  # value of `first` minus that of `second`
    low: float
    high: float
    decided: bool  # whether the interval excludes zero


class AccountRecord(TypedDict):
    """`contributions.json`."""

    format: int
    metric: str  # headline metric on the public set
    start: float  # its value before round 1
    end: float  # and of the final mean model
    confidence: float
    method: str
    coalitions: int
    notes: list[str]
    parties: list[PartyRecord]  # largest contribution first
    pairs: list[PairRecord]


@dataclass(frozen=True)
class Contribution:
    """Contribution of one party: its data Shapley value over the whole run."""

    name: str
    value: float  # in units of the metric; positive: the party helped
    low: float
    high: float
    part: float | None = None  # of the whole gain; None if there was no gain


@dataclass(frozen=True)
class Comparison:
    """Difference between the contributions of two parties."""

    first: str
    second: str
    difference: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Account:
    """Contributions of all parties. They add up to the gain over the start, `end - start`, on the public set.

    A value is positive if the party helped: for errors such as rmse, by how much it lowered them. Intervals are
    value ± margin: `margins` for one party, `pair_margins` for the difference of two.
    """

    names: tuple[str, ...]
    values: Values  # [n]
    margins: Values  # [n] half-widths of the intervals
    pair_margins: Values  # [n, n]
    metric: str
    start: float
    end: float
    method: str
    coalitions: int  # number of coalitions evaluated
    notes: tuple[str, ...] = field(default=())

    @property
    def gain(self) -> float:
        """Sum of all values."""
        return math.fsum(self.values)

    def by_agent(self) -> dict[str, Contribution]:
        """Contribution of each party by name, largest first."""
        order = np.argsort(-self.values, kind="stable")
        return {self.names[j]: self._contribution(int(j)) for j in order}

    def _contribution(self, j: int) -> Contribution:
        value, margin = float(self.values[j]), float(self.margins[j])
        part = value / self.gain if self.gain > 0 else None
        return Contribution(self.names[j], value, value - margin, value + margin, part)

    def compare(self, first: str, second: str) -> Comparison:
        """Difference of two parties' contributions."""
        i, j = self._index(first), self._index(second)
        difference, margin = float(self.values[i] - self.values[j]), float(self.pair_margins[i, j])
        return Comparison(first, second, difference, difference - margin, difference + margin)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise PdslError(f"no party is named {name!r}; choose one of {', '.join(self.names)}")
        return self.names.index(name)

    def pairs(self) -> list[Comparison]:
        """All pairs, the larger contribution first."""
        order = list(self.by_agent())
        return [self.compare(a, b) for n, a in enumerate(order) for b in order[n + 1 :]]

    def to_record(self) -> AccountRecord:
        """The account as plain values."""
        parties: list[PartyRecord] = [
            {"name": c.name, "value": c.value, "low": c.low, "high": c.high, "part": c.part}
            for c in self.by_agent().values()
        ]
        pairs: list[PairRecord] = [
            {
                "first": p.first,
                "second": p.second,
                "difference": p.difference,
                "low": p.low,
                "high": p.high,
                "decided": p.decided,
            }
            for p in self.pairs()
        ]
        return {
            "format": FORMAT,
            "metric": self.metric,
            "start": self.start,
            "end": self.end,
            "confidence": CONFIDENCE,
            "method": self.method,
            "coalitions": self.coalitions,
            "notes": list(self.notes),
            "parties": parties,
            "pairs": pairs,
        }

    def to_json(self) -> str:
        """`contributions.json`."""
        return json.dumps(self.to_record(), indent=2, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        """One line per party, largest contribution first."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for c in self.by_agent().values():
            writer.writerow([c.name, c.value, c.low, c.high, "" if c.part is None else c.part])
        return text.getvalue()


def make_account(
    names: Sequence[str],
    values: Values,
    margins: Values,
    pair_margins: Values,
    *,
    metric: str,
    start: float,
    end: float,
    method: str,
    coalitions: int,
    notes: Sequence[str] = (),
) -> Account:
    """An account whose values are scaled to add up to the gain.

    The difference between the gain and the sum of the values is split equally, which keeps all differences.
    """
    missing = (end - start) - math.fsum(values)
    return Account(
        tuple(names),
        values + missing / len(values),
        margins,
        pair_margins,
        metric,
        start,
        end,
        method,
        coalitions,
        tuple(notes),
    )
