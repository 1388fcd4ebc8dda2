"""Names of agents and classes in charts: those that the data have, or else numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdsl.utils.format import span

MAX_LETTERS = 14  # of a name in a chart; its tip has the whole name


@dataclass(frozen=True)
class AgentNames:
    names: Sequence[str] = ()  # () for numbers
    attackers: Mapping[int, str] = field(default_factory=dict)  # agent to kind of attack

    def name(self, i: int) -> str:
        """The name or number of an agent."""
        return self.names[i] if self.names else str(i)

    def full(self, first: int, last: int | None = None) -> str:
        """The whole name of an agent or of consecutive agents, for tips."""
        last = first if last is None else last
        if not self.names:
            return f"agent {self.label_span(first, last)}"
        names = self.names[first] if first == last else f"{self.names[first]} to {self.names[last]}"
        return names + self._mark(first, last)

    def label(self, i: int, letters: int = MAX_LETTERS) -> str:
        """A short label, with an asterisk for an attacker."""
        return shorten(self.name(i), letters) + "*" * (i in self.attackers)

    def label_span(self, first: int, last: int) -> str:
        """A label for consecutive agents, with an asterisk if one of them is an attacker."""
        if first == last:
            return self.label(first)
        if not self.names:
            return span(first, last) + self._mark(first, last)
        return f"{shorten(self.names[first], 6)}–{shorten(self.names[last], 6)}{self._mark(first, last)}"

    def _mark(self, first: int, last: int) -> str:
        return "*" * any(i in self.attackers for i in range(first, last + 1))

    def longest(self, letters: int = MAX_LETTERS) -> int:
        """Letters of the longest label."""
        return max((len(self.label(i, letters)) for i in range(len(self.names))), default=0)


@dataclass(frozen=True)
class ClassNames:
    names: Sequence[str] = ()  # () for numbers

    def name(self, k: int) -> str:
        return self.names[k] if k < len(self.names) else str(k)

    def full(self, k: int) -> str:
        """The name, or the number after the word class."""
        return self.names[k] if k < len(self.names) else f"class {k}"

    def label(self, k: int, letters: int = MAX_LETTERS) -> str:
        return shorten(self.name(k), letters)


def shorten(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
