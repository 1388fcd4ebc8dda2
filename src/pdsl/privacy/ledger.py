"""Privacy ledger: the noisy messages of every agent, by round, receiver and σ, and the ε they have spent.

A round is charged before its first message can be sent. Charging a round again changes nothing, because a round that
is repeated after a crash sends the same bytes. Charging it with different noise is refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from pdsl.privacy.accounting import Mechanism, Spent, epsilon
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict


@dataclass(frozen=True)
class Entry:
    """Consecutive rounds of one agent with the same mechanism."""

    first: int
    last: int
    mechanism: Mechanism


@dataclass(frozen=True)
class Calendar:
    """The rounds in which agents are neighbours, for a graph that changes from round to round."""

    period: int  # rounds until it repeats
    rounds: tuple[tuple[tuple[int, ...], ...], ...]  # per agent and receiver: rounds of the period, from 1

    def count(self, agent: int, peer: int, entry: Entry) -> int:
        """Number of the entry's rounds in which the agent sends to the receiver at this position."""

        def up_to(t: int, first: int) -> int:
            return max(0, t - first) // self.period + 1 if t >= first else 0

        own = self.rounds[agent][peer]
        return sum(up_to(entry.last, first) - up_to(entry.first - 1, first) for first in own)

    @property
    def varies(self) -> bool:
        """Whether an agent has more neighbours in some rounds than in others."""
        sizes = [[sum(t in own for own in of_agent) for t in range(1, self.period + 1)] for of_agent in self.rounds]
        return any(len(set(of_agent)) > 1 for of_agent in sizes)


@dataclass(frozen=True)
class Ledger:
    """Accounts of all agents. Immutable: `charge` returns a new ledger."""

    delta: float
    budget: float | None  # maximum total ε of an agent
    peers: tuple[tuple[int, ...], ...]  # per agent: the receivers of its messages, itself included
    accounts: tuple[tuple[Entry, ...], ...]  # per agent
    calendar: Calendar | None = None  # None: an agent sends to all its peers in every round

    @classmethod
    def empty(
        cls, delta: float, budget: float | None, peers: Sequence[Sequence[int]], calendar: Calendar | None = None
    ) -> Self:
        return cls(delta, budget, tuple(tuple(p) for p in peers), tuple(() for _ in peers), calendar)

    def charge(self, t: int, mechanisms: Sequence[Mechanism]) -> "Ledger":
        """Return the ledger with round t charged. Rounds come in order; a charged round is not charged again."""
        accounts = tuple(_charge(account, t, m) for account, m in zip(self.accounts, mechanisms, strict=True))
        return replace(self, accounts=accounts)

    def up_to(self, t: int) -> "Ledger":
        """Return the ledger as of round t. A resumed run may already have charged rounds that it repeats."""
        accounts = tuple(
            tuple(replace(e, last=min(e.last, t)) for e in account if e.first <= t) for account in self.accounts
        )
        return replace(self, accounts=accounts)

    @property
    def within_budget(self) -> bool:
        return self.budget is None or self.epsilon <= self.budget

    @property
    def epsilon(self) -> float:
        """Largest total ε of any agent."""
        return max(self.epsilon_per_agent)

    @property
    def epsilon_per_agent(self) -> list[float]:
        return [epsilon(_spent(account), self.delta) for account in self.accounts]

    def to_json(self, costs: bool = False, extra: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Serialise the messages sent; with `costs` also the ε of each agent.

        No ε is stated per edge, because the models that cross an edge depend on all messages of an agent. `from_json`
        ignores the fields in `extra`.
        """
        agents = [self._as_dict(i, costs) for i in range(len(self.accounts))]
        period = {} if self.calendar is None else {"period": self.calendar.period}
        return json.dumps({"delta": self.delta, "budget": self.budget, **period, **extra, "agents": agents}, indent=1)

    def _as_dict(self, agent: int, costs: bool) -> JsonDict:
        account, peers = self.accounts[agent], self.peers[agent]
        spent = _spent(account)
        edges: list[JsonDict] = [{"to": j, "messages": sum(m.steps * n for m, n in spent)} for j in peers]
        if (calendar := self.calendar) is not None:
            for n, edge in enumerate(edges):
                edge["messages"] = sum(e.mechanism.steps * calendar.count(agent, n, e) for e in account)
                edge["rounds"] = list(calendar.rounds[agent][n])
        record: JsonDict = {"agent": agent}
        if costs:
            record["epsilon"] = _finite(epsilon(spent, self.delta))
        record["entries"] = [{"first": e.first, "last": e.last, **asdict(e.mechanism)} for e in account]
        record["edges"] = edges
        return record

    @property
    def rounds(self) -> int:
        """Rounds charged so far."""
        return max((account[-1].last for account in self.accounts if account), default=0)

    @property
    def mechanisms(self) -> list[Mechanism] | None:
        """Latest mechanism of each agent; None before the first charge."""
        return [account[-1].mechanism for account in self.accounts] if self.rounds else None

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read a ledger; PdslError if it is damaged."""
        try:
            stored = json.loads(text)
            agents = stored["agents"]
            accounts = tuple(tuple(_entry(e) for e in agent["entries"]) for agent in agents)
            peers = tuple(tuple(int(edge["to"]) for edge in agent["edges"]) for agent in agents)
            budget = stored["budget"]
            calendar = _calendar(stored)
            ledger = cls(float(stored["delta"]), None if budget is None else float(budget), peers, accounts, calendar)
            if not all(accounts) and any(accounts):
                raise ValueError("an agent's account is empty")
            return ledger
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise PdslError(
                f"{where}: the ledger is damaged ({e}), so the privacy spent is unknown; restore it, or start a new run"
            ) from e


def _calendar(stored: JsonDict) -> Calendar | None:
    if "period" not in stored:
        return None
    rounds = tuple(tuple(tuple(map(int, edge["rounds"])) for edge in agent["edges"]) for agent in stored["agents"])
    return Calendar(int(stored["period"]), rounds)


def _entry(stored: JsonDict) -> Entry:
    mechanism = {name: value for name, value in stored.items() if name not in ("first", "last")}
    return Entry(int(stored["first"]), int(stored["last"]), Mechanism(**mechanism))


def _charge(account: tuple[Entry, ...], t: int, mechanism: Mechanism) -> tuple[Entry, ...]:
    if account and t <= account[-1].last:
        (entry,) = (e for e in account if e.first <= t <= e.last)
        if entry.mechanism != mechanism:
            raise PdslError(
                f"round {t} was charged with σ = {entry.mechanism.sigma:g} and cannot be sent with another mechanism;"
                " start a new run"
            )
        return account
    if account and account[-1].mechanism == mechanism and account[-1].last == t - 1:
        return (*account[:-1], replace(account[-1], last=t))
    return (*account, Entry(t, t, mechanism))


def _spent(account: tuple[Entry, ...]) -> Spent:
    return tuple((e.mechanism, e.last - e.first + 1) for e in account)


def _finite(value: float) -> float | None:
    """JSON has no infinity; null means that no finite ε holds."""
    return value if math.isfinite(value) else None
