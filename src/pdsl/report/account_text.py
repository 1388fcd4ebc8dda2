"""The account of a run in words: each party's contribution, and which differences are decided."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

import numpy as np

from pdsl.report.metric import Metric
from pdsl.shapley.account import CONFIDENCE, Account
from pdsl.utils.format import MISSING, percent, plain

MAX_NAMED = 4  # parties named in a sentence
MAX_LISTED = 6  # parties named in a cell of the table
MAX_DECIMALS = 6
INTERVAL = f"{100 * CONFIDENCE:.0f} % interval"
MEANING = (
    "A party's contribution is the average gain when it joins a group of the others. All contributions add up to the"
    " gain of the run on the public set."
)


@dataclass(frozen=True)
class Unit:
    """How contributions are written: in points for a metric in percent, or else in units of the metric."""

    label: str  # for the heading of a column or the title of an axis
    scale: float
    word: str  # after a number in a sentence
    decimals: int | None  # None: three digits

    @classmethod
    def of(cls, account: Account) -> "Unit":
        """The unit of an account: points with one decimal, and three digits for the largest of smaller values."""
        metric = Metric.of(account.metric)
        scale, word = (100.0, " points") if metric.is_fraction else (1.0, "")
        largest = scale * float(np.abs(account.values).max())
        decimals = 1 if largest == 0 or (metric.is_fraction and largest >= 1) else max(0, 2 - floor(log10(largest)))
        written = decimals <= MAX_DECIMALS and largest < 1e9
        label = f"points of {metric.label}" if metric.is_fraction else metric.label
        return cls(label, scale, word, decimals if written else None)

    def form(self, value: float) -> str:
        value *= self.scale
        if self.decimals is None:
            return plain(value)
        return f"{round(value, self.decimals) + 0.0:,.{self.decimals}f}".replace("-", "−")  # + 0.0: no −0

    def interval(self, low: float, high: float) -> str:
        return f"{self.form(low)} to {self.form(high)}"


@dataclass(frozen=True)
class Party:
    """One row of the account's table."""

    name: str
    value: str
    interval: str
    part: str
    more_than: str  # parties that contributed less
    undecided: str  # parties whose order with this one is not decided


def describe_parties(account: Account) -> list[Party]:
    """All parties, the largest contribution first."""
    unit, more = Unit.of(account), _more(account)
    others = ~(more | more.T | np.eye(len(account.names), dtype=bool))
    ranked = [account.names.index(name) for name in account.by_agent()]
    rows = []
    for j, c in zip(ranked, account.by_agent().values(), strict=True):
        lists = [_list_names([account.names[k] for k in ranked if of[j, k]], account) for of in (more, others)]
        part = MISSING if c.part is None else percent(c.part)
        rows.append(Party(c.name, unit.form(c.value), unit.interval(c.low, c.high), part.replace("-", "−"), *lists))
    return rows


def _more(account: Account) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:  # [n, n]
    """Whether the first contributed more than the second, beyond the interval of their difference."""
    return np.asarray(account.values[:, None] - account.values[None, :] - account.pair_margins > 0)


def _list_names(names: Sequence[str], account: Account) -> str:
    """Names for a cell; of many, their number."""
    others = len(account.names) - 1
    if not names:
        return MISSING
    if len(names) == others > 1:
        return "all others"
    return ", ".join(names) if len(names) <= MAX_LISTED else f"{len(names)} of {others} others"


def describe_gain(account: Account) -> str:
    """One sentence: what the collaboration gained."""
    metric, unit = Metric.of(account.metric), Unit.of(account)
    start, end = metric.form(account.start), metric.form(account.end)
    if account.gain <= 0:
        return f"Training did not improve {metric.label} on the public set: {start} before, {end} after."
    verb = "lowered" if account.end < account.start else "raised"
    by = f"{unit.form(account.gain)}{unit.word}"
    return f"Together the parties {verb} {metric.label} on the public set from {start} to {end}, by {by}."


def conclude_account(account: Account) -> str:
    """Which party contributed most, which differences are decided, and which parties may have contributed nothing."""
    return " ".join([_describe_order(account), *_describe_least(account)])


def _describe_order(account: Account) -> str:
    unit, (first, *others) = Unit.of(account), account.by_agent().values()
    name, amount = full_name(first.name, account), f"{unit.form(first.value)}{unit.word}"
    if account.gain > 0 and others:
        amount = f"{unit.form(first.value)} of {unit.form(account.gain)}{unit.word}"
    if not others:
        return f"{_start(name)} is the only party: {amount}."
    more = _more(account)
    if not more.any():
        return f"{_start(name)} has the largest value, {amount}, but no order between two parties is decided."
    j = account.names.index(first.name)
    less = [c.name for c in others if more[j, account.names.index(c.name)]]
    rest = [c.name for c in others if c.name not in less]
    if not rest:
        every = "every other party" if len(others) > 1 else full_name(others[0].name, account)
        return f"{_start(name)} contributed most: {amount}. It contributed more than {every}."
    largest = f"{_start(name)} has the largest contribution: {amount}."
    open_order = f"between {name} and {_name(rest, account)} the order is not decided."
    if not less:
        return f"{largest} But {open_order}"
    return f"{largest} It contributed more than {_name(less, account)}; {open_order}"


def _describe_least(account: Account) -> list[str]:
    """Sentences on the parties that did harm, and on those whose interval includes zero."""
    parties = account.by_agent().values()
    harmful = [c.name for c in parties if c.high < 0]
    unclear = [c.name for c in parties if c.low <= 0 <= c.high]
    sentences = []
    if harmful:
        sentences.append(f"{_start(_name(harmful, account))} made the model worse.")
    if unclear and len(unclear) == len(account.names):
        sentences.append("All intervals include zero: no party's contribution is shown.")
    elif unclear:
        intervals = "interval includes" if len(unclear) == 1 else "intervals include"
        sentences.append(f"{_start(_name(unclear, account))} may have contributed nothing: the {intervals} zero.")
    return sentences


def full_name(name: str, account: Account) -> str:
    """The name of a party; the word agent before a number."""
    numbered = set(account.names) <= {str(j) for j in range(len(account.names))}
    return f"agent {name}" if numbered else name


def _name(names: Sequence[str], account: Account) -> str:
    shown = [full_name(name, account) for name in names]
    if len(shown) > MAX_NAMED:
        shown = [*shown[: MAX_NAMED - 1], f"{len(shown) - MAX_NAMED + 1} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _start(name: str) -> str:
    """The name of a party at the start of a sentence."""
    return f"Agent {name.removeprefix('agent ')}" if name.startswith("agent ") else name
