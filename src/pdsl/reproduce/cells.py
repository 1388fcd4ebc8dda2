"""From the paper's settings to jobs: settings of cells in tasks.toml, readings of ε, and the plan of a command."""

import copy
import hashlib
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pdsl.algorithms.schedule import AUTO
from pdsl.config import Config, load
from pdsl.reproduce.paper import AGENTS, EPSILONS, FIGURES, GRAPHS, METHODS, TABLES, Setting, settings_of
from pdsl.sweep.job import Job, check_data
from pdsl.sweep.tuning import Tuning, show_rate
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

VARIANTS = {
    "features": "a linear model on features of the public set, started from its labels",
    "scratch": "a network of the paper's form, with random weights",
}
READINGS = {
    "total": "one total ε for the whole run, computed from the messages sent",
    "per-round": "the paper's ε for each round by itself, computed from the messages sent",
    "paper": "the paper's ε in the paper's formula (Theorem 1), which is not a guarantee of this program",
    "none": "noise off",
}
TARGETS = (*TABLES, *FIGURES)
ONLY_KEYS = ("agents", "graph", "epsilon", "method")
SET_BY_OPTION = {  # settings that identify a cell, and the option that chooses each
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


@cache
def _tasks() -> JsonDict:
    return tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Task:
    """Options that all cells of a command share."""

    reading: str = "total"
    quick: bool = False
    variant: str = "features"
    rounds: int | None = None  # overrides tasks.toml
    rates: tuple[float, ...] | None = None  # overrides tasks.toml
    assignments: tuple[str, ...] = ()  # settings changed in every cell, as key=value

    def rates_of(self, table: str) -> tuple[float, ...]:
        """Learning rates that every method tries, in ascending order."""
        return tuple(sorted(set(self.rates or self._of(table)["rates"])))

    @property
    def agents(self) -> tuple[int, ...]:
        """Numbers of agents that are run by default."""
        return tuple(_tasks()["quick"]["agents"]) if self.quick else AGENTS

    def epsilon(self, setting: Setting) -> float | None:
        """ε of a setting in this reading; None without noise."""
        if self.reading == "none":
            return None
        return totals(setting.table)[setting.slot] if self.reading == "total" else setting.epsilon

    def config(self, setting: Setting, learning_rate: float, seed: int) -> Config:
        return load(None, self.assignments, base=self.values(setting, learning_rate, seed))

    def values(self, setting: Setting, learning_rate: float, seed: int) -> JsonDict:
        """Settings of a cell that are not the program's defaults, before `assignments`."""
        task, reading = self._of(setting.table), _tasks()["reading"].get(self.reading, {})
        values: JsonDict = copy.deepcopy(task["all"])
        for layer in (
            task.get("graph", {}).get(setting.graph, {}),
            task.get("total", {}).get(f"{self.epsilon(setting):g}", {}) if self.reading == "total" else {},
            task.get("method", {}).get(setting.method, {}),
            reading.get("all", {}),
            reading.get("method", {}).get(setting.method, {}),
            {"privacy": self._privacy(setting)},
            {
                "seed": seed,
                "graph": {"kind": setting.graph, "agents": setting.agents},
                "algorithm": {"name": setting.method, "learning_rate": learning_rate or AUTO},
                "engine": {"workers": 1},  # jobs run in parallel, one core each
            },
            {} if self.rounds is None else {"rounds": self.rounds},
        ):
            _merge(values, layer)
        return values

    def _of(self, table: str) -> JsonDict:
        found: JsonDict = _tasks()["quick"] if self.quick else _tasks()[table][self.variant]
        return found

    @property
    def folder(self) -> Path:
        """Folder of the results, below that of all results."""
        return Path(self.reading) if self.quick else Path(self.variant) / self.reading

    def _privacy(self, setting: Setting) -> JsonDict:
        epsilon = self.epsilon(setting)
        if self.reading == "none":
            return {"mode": "none"}
        if self.reading == "total":
            return {"mode": "total", "target_epsilon": epsilon}
        return {"mode": self.reading, "epsilon_per_round": epsilon}


def totals(table: str) -> Sequence[float]:
    """Total ε for each of the paper's three values."""
    found: Sequence[float] = _tasks()[table]["totals"]
    assert len(found) == len(EPSILONS[table])
    return found


def _merge(values: JsonDict, layer: Mapping[str, Any]) -> None:
    """Overwrite settings by those of a layer, section by section."""
    for key, value in layer.items():
        if isinstance(value, Mapping):
            _merge(values.setdefault(key, {}), value)
        else:
            values[key] = value


@cache
def job_of(task: Task, setting: Setting, learning_rate: float, seed: int) -> Job:
    """The run of a cell. Its name ends with a hash of all settings from tasks.toml and the command."""
    config = task.config(setting, learning_rate, seed)
    given = [task.values(setting, learning_rate, seed), task.assignments]
    key = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
    epsilon = task.epsilon(setting)
    reading = task.reading if epsilon is None else f"{task.reading}{epsilon:g}"
    where = f"{config.data.name}-{setting.graph}{setting.agents}-{reading}"
    return Job(f"{where}-{setting.method}-rate{show_rate(learning_rate)}-seed{seed}-{key}", config)


def cell_and_seed(name: str) -> tuple[str, int]:
    """The name of a job without its seed and hash, and the seed."""
    cell, _, rest = name.rpartition("-seed")
    return cell, int(rest.partition("-")[0])


@dataclass(frozen=True)
class SweepPlan:
    """Settings of the paper that a command runs. A cell does not depend on the other cells of the command."""

    task: Task
    targets: tuple[str, ...]
    asked: tuple[Setting, ...]
    seeds: tuple[int, ...]
    command: str

    @classmethod
    def of(cls, target: str, task: Task, only: str | None, seeds: int, needs_data: bool = True) -> "SweepPlan":
        """The plan of a command; invalid options and, if it `needs_data`, missing data sets are refused now."""
        if target != "all" and target not in TARGETS:
            raise PdslError(f"no table or figure '{target}'; choose one of {', '.join(TARGETS)}, all")
        if task.variant not in VARIANTS:
            raise PdslError(f"--variant {task.variant}: choose one of {', '.join(VARIANTS)}")
        if task.reading not in READINGS:
            raise PdslError(f"--reading {task.reading}: choose one of {', '.join(READINGS)}")
        if task.rates is not None and (not task.rates or min(task.rates) <= 0):
            raise PdslError("--grid: give learning rates above 0, like 0.5,1,2")
        for assignment in task.assignments:
            _check_assignment(assignment)
        targets = TARGETS if target == "all" else (target,)
        found = dict.fromkeys(s for name in targets for s in settings_of(name))
        asked = _filter(found, only, task)
        if needs_data:
            check_data({task.config(s, task.rates_of(s.table)[0], 0).data.name for s in asked})
        return cls(task, targets, tuple(asked), tuple(range(seeds)), _command(target, task, only, seeds))

    def tuning(self, setting: Setting) -> Tuning:
        """Trials of a method on a graph (fewest agents, middle ε, first seed), and the final jobs of a setting."""
        trial = Setting(setting.table, EPSILONS[setting.table][1], setting.method, setting.graph, AGENTS[0])
        rates = self.task.rates_of(setting.table)
        return Tuning(
            {rate: job_of(self.task, trial, rate, self.seeds[0]) for rate in rates},
            lambda rate: [job_of(self.task, setting, rate, seed) for seed in self.seeds],
        )

    @property
    def tunings(self) -> list[Tuning]:
        return [self.tuning(setting) for setting in self.asked]


def _check_assignment(assignment: str) -> None:
    """Refuse to change a setting that identifies a cell of the table."""
    key = assignment.partition("=")[0].strip()
    for name, option in SET_BY_OPTION.items():
        if name == key or name.startswith(f"{key}."):
            raise PdslError(f"--set {assignment}: {name} identifies a cell of the table; choose with {option}")


def cell_command(task: Task, setting: Setting, seeds: int) -> str:
    """The command that runs one cell."""
    epsilon = "" if task.reading == "none" else f",epsilon={task.epsilon(setting):g}"
    only = f"agents={setting.agents},graph={setting.graph}{epsilon},method={setting.method}"
    return _command(setting.table, task, only, seeds)


def _command(target: str, task: Task, only: str | None, seeds: int) -> str:
    words = ["pdsl", "reproduce", target, *(["--quick"] if task.quick else []), "--reading", task.reading]
    words += [] if task.quick or task.variant == Task().variant else ["--variant", task.variant]
    words += ["--seeds", f"{seeds}", *(["--only", only] if only else [])]
    words += [] if task.rounds is None else ["--rounds", f"{task.rounds}"]
    words += [] if task.rates is None else ["--grid", ",".join(f"{rate:g}" for rate in task.rates)]
    return shlex.join([*words, *(word for assignment in task.assignments for word in ("--set", assignment))])


def _filter(settings: Iterable[Setting], only: str | None, task: Task) -> list[Setting]:
    chosen = _parse_only(only) if only else {}
    if "agents" not in chosen:
        chosen["agents"] = [f"{agents}" for agents in task.agents]
    found = [s for s in settings if all(_matches(s, key, values, task) for key, values in chosen.items())]
    if not found:
        raise PdslError(f"--only {only}: no cell is left; see the paper's ε and graphs of this table or figure")
    return found


def _parse_only(only: str) -> dict[str, list[str]]:
    """Parse key=value pairs separated by commas; a key given twice allows either value."""
    chosen: dict[str, list[str]] = {}
    for pair in only.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in ONLY_KEYS:
            raise PdslError(f"--only {pair}: not one of {', '.join(ONLY_KEYS)} with a value, like graph=ring,agents=10")
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


def _matches(setting: Setting, key: str, values: list[str], task: Task) -> bool:
    if key != "epsilon":
        return str(getattr(setting, key)) in values
    ours = task.epsilon(setting)
    return f"{setting.epsilon:g}" in values or (ours is not None and f"{ours:g}" in values)
