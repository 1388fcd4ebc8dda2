"""What a command asks for: which of the paper's settings, and the runs that takes."""

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pdsl.cells import best_rate, check_data
from pdsl.cells.many import Scores
from pdsl.config import Config
from pdsl.errors import PdslError
from pdsl.reproduce.paper import AGENTS, EPSILONS, FIGURES, GRAPHS, METHODS, TABLES, Setting, settings_of
from pdsl.reproduce.tasks import READINGS, Task, totals

TARGETS = (*TABLES, *FIGURES)
KEYS = ("agents", "graph", "epsilon", "method")
OWN = {  # what a cell is called by, and what chooses it
    "seed": "--seeds",
    "graph.kind": "--only graph=ring",
    "graph.agents": "--only agents=10",
    "algorithm.name": "--only method=pdsl",
    "algorithm.learning_rate": "--grid",
    "privacy.mode": "--reading",
    "privacy.target_epsilon": "--only epsilon=1",
    "privacy.epsilon_per_round": "--only epsilon=1",
    "privacy.sigma": "--reading",
    "privacy.noise_multiplier": "--reading",
}


class Cell(NamedTuple):
    """One run. The name says what it is and ends with a key of all that tasks.toml and the command set for it."""

    name: str
    config: Config


@cache
def cell_of(task: Task, setting: Setting, learning_rate: float, seed: int) -> Cell:
    config = task.config(setting, learning_rate, seed)
    given = [task.values(setting, learning_rate, seed), task.assignments]
    key = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
    epsilon = task.epsilon(setting)
    reading = task.reading if epsilon is None else f"{task.reading}{epsilon:g}"
    where = f"{config.data.name}-{setting.graph}{setting.agents}-{reading}"
    return Cell(f"{where}-{setting.method}-rate{learning_rate:g}-seed{seed}-{key}", config)


@dataclass(frozen=True)
class Plan:
    """Settings that are asked for. What a cell is does not depend on which others are asked for with it."""

    task: Task
    targets: tuple[str, ...]
    asked: tuple[Setting, ...]
    seeds: tuple[int, ...]
    command: str  # that asks for it

    @classmethod
    def of(cls, target: str, task: Task, only: str | None, seeds: int) -> "Plan":
        """A plan; whatever cannot be run is refused now."""
        if target != "all" and target not in TARGETS:
            raise PdslError(f"no table or figure '{target}'; there are: {', '.join(TARGETS)}, all")
        if task.reading not in READINGS:
            raise PdslError(f"--reading {task.reading}: there are: {', '.join(READINGS)}")
        if task.rates is not None and (not task.rates or min(task.rates) <= 0):
            raise PdslError("--grid: give learning rates above 0, like 0.5,1,2")
        for assignment in task.assignments:
            _check_label(assignment)
        targets = TARGETS if target == "all" else (target,)
        found = dict.fromkeys(s for name in targets for s in settings_of(name))
        asked = _filtered(found, only, task)
        names = {task.config(s, task.rates_of(s.table)[0], 0).data.name for s in asked}
        check_data(names)
        return cls(task, targets, tuple(asked), tuple(range(seeds)), _command(target, task, only, seeds))

    def trials(self, setting: Setting) -> dict[float, Cell]:
        """Runs that choose the learning rate of a method on a graph: fewest agents, middle ε, first seed."""
        spot = Setting(setting.table, EPSILONS[setting.table][1], setting.method, setting.graph, AGENTS[0])
        return {rate: cell_of(self.task, spot, rate, self.seeds[0]) for rate in self.task.rates_of(setting.table)}

    def rate(self, setting: Setting, scores: Scores) -> float | None:
        """The trials' choice; None if none of them is fit, or it cannot be known yet."""
        cells = self.trials(setting)
        found = {rate: scores[cell.name] for rate, cell in cells.items() if cell.name in scores}
        return best_rate(found) if len(found) == len(cells) else None

    def finals(self, setting: Setting, learning_rate: float) -> list[Cell]:
        """Runs that count."""
        return [cell_of(self.task, setting, learning_rate, seed) for seed in self.seeds]

    def wanted(self, scores: Scores) -> dict[str, Config]:
        """Trials first; finals as soon as their learning rate is chosen."""
        cells = [cell for setting in self.asked for cell in self.trials(setting).values()]
        for setting in self.asked:
            if (rate := self.rate(setting, scores)) is not None:
                cells += self.finals(setting, rate)
        return dict(cells)

    @property
    def total(self) -> int:
        """How many runs that will be; which learning rates are chosen does not matter."""
        trials = {c.name for setting in self.asked for c in self.trials(setting).values()}
        finals = {c.name for setting in self.asked for c in self.finals(setting, self.task.rates_of(setting.table)[0])}
        return len(trials | finals)


def _check_label(assignment: str) -> None:
    """Refuse to change what a table says of its cells."""
    key = assignment.partition("=")[0].strip()
    for name, option in OWN.items():
        if name == key or name.startswith(f"{key}."):
            raise PdslError(f"--set {assignment}: {name} is what the table calls its cells by; choose with {option}")


def _command(target: str, task: Task, only: str | None, seeds: int) -> str:
    words = ["pdsl", "reproduce", target, *(["--quick"] if task.quick else []), "--reading", task.reading]
    words += ["--seeds", f"{seeds}", *(["--only", only] if only else [])]
    words += [] if task.rounds is None else ["--rounds", f"{task.rounds}"]
    words += [] if task.rates is None else ["--grid", ",".join(f"{rate:g}" for rate in task.rates)]
    return shlex.join([*words, *(word for assignment in task.assignments for word in ("--set", assignment))])


def _filtered(settings: Iterable[Setting], only: str | None, task: Task) -> list[Setting]:
    chosen = _parsed(only) if only else {}
    if "agents" not in chosen:
        chosen["agents"] = [f"{agents}" for agents in task.agents]
    found = [s for s in settings if all(_has(s, key, values, task) for key, values in chosen.items())]
    if not found:
        raise PdslError(f"--only {only}: no cell is left; see the paper's ε and graphs of this table or figure")
    return found


def _parsed(only: str) -> dict[str, list[str]]:
    """key=value pairs with commas between; a key that comes twice means either."""
    chosen: dict[str, list[str]] = {}
    for pair in only.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in KEYS:
            raise PdslError(f"--only {pair}: not one of {', '.join(KEYS)} with a value, like graph=ring,agents=10")
        allowed = {
            "agents": [f"{agents}" for agents in AGENTS],
            "graph": list(GRAPHS),
            "method": list(METHODS),
            "epsilon": list(dict.fromkeys(f"{e:g}" for table in TABLES for e in (*EPSILONS[table], *totals(table)))),
        }[key]
        if key == "epsilon" and value.replace(".", "", 1).isdecimal():
            value = f"{float(value):g}"
        if value not in allowed:
            raise PdslError(f"--only {pair}: {key} is one of {', '.join(allowed)}")
        chosen.setdefault(key, []).append(value)
    return chosen


def _has(setting: Setting, key: str, values: list[str], task: Task) -> bool:
    if key != "epsilon":
        return str(getattr(setting, key)) in values
    ours = task.epsilon(setting)
    return f"{setting.epsilon:g}" in values or (ours is not None and f"{ours:g}" in values)
