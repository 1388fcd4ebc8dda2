"""The account of a run: each party's contribution in points of the headline metric, with intervals."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from pdsl.shapley.account_fields import (
    MAX_NAME,
    MAX_TEXT,
    TOLERANCE,
    agree,
    read_count,
    read_list,
    read_margin,
    read_names,
    read_number,
    read_objects,
    read_pair_margins,
    read_text,
)
from pdsl.shapley.coalitions import Values
from pdsl.utils.errors import PdslError

if TYPE_CHECKING:
    from pydvl.valuation.result import ValuationResult

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
    """Contributions of all parties. They add up to the gain over the start, on the public set.

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

    @classmethod
    def from_json(cls, text: str) -> "Account":
        """Inverse of `to_json`; ValueError if the text is not an account. It may come from anybody."""
        return cls.from_record(json.loads(text))

    @classmethod
    def from_record(cls, record: object) -> "Account":
        """Inverse of `to_record`, with the parties in the order of the record; ValueError if it is not an account."""
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"not an account of format {FORMAT}")
        parties = read_objects(record, "parties")
        names = read_names(parties)
        account = cls(
            names=names,
            values=np.array([read_number(party, "value") for party in parties]),
            margins=np.array([read_margin(party) for party in parties]),
            pair_margins=read_pair_margins(read_objects(record, "pairs"), names),
            metric=read_text(record.get("metric"), "metric", MAX_NAME),
            start=read_number(record, "start"),
            end=read_number(record, "end"),
            method=read_text(record.get("method"), "method", MAX_TEXT),
            coalitions=read_count(record, "coalitions"),
            notes=tuple(read_text(note, "a note", MAX_TEXT) for note in read_list(record, "notes")),
        )
        largest = max(np.abs(account.values).max(), account.margins.max(), account.pair_margins.max(), 1.0)
        if not agree(account.to_record(), record, TOLERANCE * float(largest)):
            raise ValueError("values, intervals, order and pairs contradict each other")
        return account

    def to_pydvl(self) -> "ValuationResult":
        """The account as a result of pyDVL, in the order of `names`.

        Its standard errors are those of normal distributions with the same intervals.
        """
        try:
            from pydvl.utils.status import Status
            from pydvl.valuation.result import ValuationResult
        except ImportError as e:
            raise PdslError("an account as a result of pyDVL needs that package; run: pip install pydvl") from e
        errors = self.margins / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        return ValuationResult(
            values=self.values,
            variances=errors**2,
            counts=np.ones(len(self.names), dtype=np.int64),  # so that pyDVL divides the variances by 1
            data_names=list(self.names),
            algorithm=self.method,
            status=Status.Converged,
        )


def make_account(
    names: Sequence[str],
    values: Values,
    margins: Values,
    pair_margins: Values,
    *,
    metric: str,
    start: float,
    end: float,
    gain: float,
    method: str,
    coalitions: int,
    notes: Sequence[str] = (),
) -> Account:
    """An account whose values add up to the gain, which is start - end for errors and end - start otherwise.

    The difference between the gain and the sum of the values is split equally, which keeps all differences.
    """
    missing = gain - math.fsum(values)
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
