"""From a setting of the paper to the configuration of a run: tasks.toml, and the reading of ε."""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pdsl.config import Config, load
from pdsl.reproduce.paper import AGENTS, EPSILONS, Setting

READINGS = {
    "total": "one total ε for all rounds, accounted for what is sent",
    "per-round": "the paper's ε for each round by itself, accounted for what is sent",
    "paper": "the paper's ε in the paper's formula (Theorem 1), a claim that is not made here",
    "none": "noise off",
}


@cache
def _tasks() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Task:
    """What all cells of a command have in common."""

    reading: str = "total"
    quick: bool = False
    rounds: int | None = None  # instead of those in tasks.toml
    rates: tuple[float, ...] | None = None  # likewise
    assignments: tuple[str, ...] = ()  # settings of every cell that are changed, as key=value

    def rates_of(self, table: str) -> tuple[float, ...]:
        """Learning rates that every method tries, smallest first."""
        return tuple(sorted(set(self.rates or self._of(table)["rates"])))

    @property
    def agents(self) -> tuple[int, ...]:
        """Numbers of agents that are run where nobody asks for others."""
        return tuple(_tasks()["quick"]["agents"]) if self.quick else AGENTS

    def epsilon(self, setting: Setting) -> float | None:
        """The ε of the setting in this reading; None where there is none."""
        if self.reading == "none":
            return None
        return totals(setting.table)[setting.slot] if self.reading == "total" else setting.epsilon

    def config(self, setting: Setting, learning_rate: float, seed: int) -> Config:
        return load(None, self.assignments, base=self.values(setting, learning_rate, seed))

    def values(self, setting: Setting, learning_rate: float, seed: int) -> dict[str, Any]:
        """Settings that are not left to the program's defaults, before the command's own changes."""
        task = self._of(setting.table)
        values: dict[str, Any] = copy.deepcopy(task["all"])
        for layer in (
            task.get("graph", {}).get(setting.graph, {}),
            task.get("total", {}).get(f"{self.epsilon(setting):g}", {}) if self.reading == "total" else {},
            task.get("method", {}).get(setting.method, {}),
            _tasks()["reading"].get(self.reading, {}),
            {"privacy": self._privacy(setting)},
            {
                "seed": seed,
                "graph": {"kind": setting.graph, "agents": setting.agents},
                "algorithm": {"name": setting.method, "learning_rate": learning_rate},
                "engine": {"workers": 1},  # cells run side by side, a core each
            },
            {} if self.rounds is None else {"rounds": self.rounds},
        ):
            _merge(values, layer)
        return values

    def _of(self, table: str) -> dict[str, Any]:
        found: dict[str, Any] = _tasks()["quick" if self.quick else table]
        return found

    def _privacy(self, setting: Setting) -> dict[str, Any]:
        epsilon = self.epsilon(setting)
        if self.reading == "none":
            return {"mode": "none"}
        if self.reading == "total":
            return {"mode": "sound", "target_epsilon": epsilon}
        return {"mode": self.reading, "epsilon_per_round": epsilon}


def totals(table: str) -> Sequence[float]:
    """Total ε in the place of the paper's three values."""
    found: Sequence[float] = _tasks()[table]["totals"]
    assert len(found) == len(EPSILONS[table])
    return found


def _merge(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lay settings over others, section by section."""
    for key, value in layer.items():
        if isinstance(value, Mapping):
            _merge(values.setdefault(key, {}), value)
        else:
            values[key] = value
