"""The ledger: who sent how many noisy messages to whom in which rounds, at which σ, and what that has cost.

A round is charged before its first message could leave. Charging a round again changes nothing, since a round that is
run again after a crash sends the same bytes; charging it with other noise is refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from pdsl.errors import PdslError
from pdsl.privacy.accounting import Mechanism, Spent, epsilon


@dataclass(frozen=True)
class Entry:
    """Rounds first..last of one agent, all alike."""

    first: int
    last: int
    mechanism: Mechanism


@dataclass(frozen=True)
class Ledger:
    """Every agent's account. Immutable: `charged` gives the next one."""

    delta: float
    budget: float | None  # total ε no agent may pass
    peers: tuple[tuple[int, ...], ...]  # per agent: the receivers of its messages, itself included
    accounts: tuple[tuple[Entry, ...], ...]  # per agent

    @classmethod
    def opened(cls, delta: float, budget: float | None, peers: Sequence[Sequence[int]]) -> Self:
        return cls(delta, budget, tuple(tuple(p) for p in peers), tuple(() for _ in peers))

    def charged(self, t: int, mechanisms: Sequence[Mechanism]) -> "Ledger":
        """The ledger with round t in it. Rounds come in order; one that is in it already stays as it is."""
        accounts = tuple(_charged(account, t, m) for account, m in zip(self.accounts, mechanisms, strict=True))
        return replace(self, accounts=accounts)

    def through(self, t: int) -> "Ledger":
        """The ledger as it was after round t: a run taken up again has rounds charged that it runs once more."""
        accounts = tuple(
            tuple(replace(e, last=min(e.last, t)) for e in account if e.first <= t) for account in self.accounts
        )
        return replace(self, accounts=accounts)

    @property
    def within_budget(self) -> bool:
        return self.budget is None or self.epsilon <= self.budget

    @property
    def epsilon(self) -> float:
        """Total ε of the agent that has spent most."""
        return max(self.epsilon_per_agent)

    @property
    def epsilon_per_agent(self) -> list[float]:
        return [epsilon(_spent(account), self.delta) for account in self.accounts]

    def to_json(self, costs: bool = False, besides: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What was sent; with `costs` also the ε of each agent.

        No ε is stated per edge: the models that cross it hold all of an agent's messages.

        What is to stand in the file `besides` is not read back by `from_json`.
        """
        agents = [self._as_dict(i, costs) for i in range(len(self.accounts))]
        return json.dumps({"delta": self.delta, "budget": self.budget, **besides, "agents": agents}, indent=1)

    def _as_dict(self, agent: int, costs: bool) -> dict[str, Any]:
        account, peers = self.accounts[agent], self.peers[agent]
        spent = _spent(account)
        edges: list[dict[str, Any]] = [{"to": j, "messages": sum(m.steps * n for m, n in spent)} for j in peers]
        record: dict[str, Any] = {"agent": agent}
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
        """What each agent released last; None where nothing was charged yet."""
        return [account[-1].mechanism for account in self.accounts] if self.rounds else None

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """The ledger as it was written; PdslError if it is damaged."""
        try:
            stored = json.loads(text)
            agents = stored["agents"]
            accounts = tuple(tuple(_entry(e) for e in agent["entries"]) for agent in agents)
            peers = tuple(tuple(int(edge["to"]) for edge in agent["edges"]) for agent in agents)
            budget = stored["budget"]
            ledger = cls(float(stored["delta"]), None if budget is None else float(budget), peers, accounts)
            if not all(accounts) and any(accounts):
                raise ValueError("an agent's account is empty")
            return ledger
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise PdslError(
                f"{where}: the ledger is damaged ({e}), so what was spent is not known; the run cannot go on"
            ) from e


def _entry(stored: dict[str, Any]) -> Entry:
    mechanism = {name: value for name, value in stored.items() if name not in ("first", "last")}
    return Entry(int(stored["first"]), int(stored["last"]), Mechanism(**mechanism))


def _charged(account: tuple[Entry, ...], t: int, mechanism: Mechanism) -> tuple[Entry, ...]:
    if account and t <= account[-1].last:
        (entry,) = (e for e in account if e.first <= t <= e.last)
        if entry.mechanism != mechanism:
            raise PdslError(f"round {t} was charged with σ = {entry.mechanism.sigma:g} and cannot be sent with another")
        return account
    if account and account[-1].mechanism == mechanism and account[-1].last == t - 1:
        return (*account[:-1], replace(account[-1], last=t))
    return (*account, Entry(t, t, mechanism))


def _spent(account: tuple[Entry, ...]) -> Spent:
    return tuple((e.mechanism, e.last - e.first + 1) for e in account)


def _finite(value: float) -> float | None:
    """JSON has no infinity: null says that no finite ε holds."""
    return value if math.isfinite(value) else None
