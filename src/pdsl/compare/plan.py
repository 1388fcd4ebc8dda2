"""What is compared: algorithms, step sizes to try, seeds; and the runs that takes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdsl.algorithms import ALGORITHMS
from pdsl.cells import check_data
from pdsl.config import Config, load, validated
from pdsl.errors import PdslError

REFERENCE = ("pdsl", "dp-dpsgd", "muffliato", "dp-cga", "dp-net-fleet")  # the paper's five
GRID = (0.25, 0.5, 1.0, 2.0)  # learning rates that every algorithm tries


@dataclass(frozen=True)
class Cell:
    """One run."""

    algorithm: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.learning_rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """One task for all: settings without the algorithm's. Everyone tries the same learning rates on the first seed."""

    base: dict[str, Any]
    algorithms: tuple[str, ...]
    grid: tuple[float, ...]
    seeds: tuple[int, ...]
    own: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of each algorithm, where there are any

    @classmethod
    def of(
        cls,
        config: Config,
        algorithms: Sequence[str],
        grid: Sequence[float],
        seeds: int,
        assignments: Sequence[str] = (),
    ) -> "Plan":
        """A plan for the task of `config`; whatever cannot be run is refused now.

        The assignments are those to algorithm.*: each goes to all algorithms that have such a setting.
        """
        base = config.as_dict()
        first = base.pop("seed")
        base.pop("algorithm")
        base["engine"] = {**base["engine"], "workers": 1}  # cells run side by side, a core each
        for name in algorithms:
            if name not in ALGORITHMS:
                raise PdslError(f"--algorithms: no algorithm '{name}'; 'pdsl algorithms' lists them")
        if len(set(algorithms)) < len(algorithms) or not algorithms:
            raise PdslError("--algorithms: give each algorithm once, like pdsl,dp-dpsgd")
        if not grid or min(grid) <= 0:
            raise PdslError("--grid: give learning rates above 0, like 0.5,1,2")
        check_data([config.data.name])
        own = _own(config, algorithms, assignments)
        plan = cls(base, tuple(algorithms), tuple(sorted(set(grid))), tuple(range(first, first + seeds)), own)
        for name in algorithms:
            plan.config(Cell(name, plan.grid[0], plan.seeds[0]))
        return plan

    def config(self, cell: Cell) -> Config:
        given = self.own.get(cell.algorithm, {})
        algorithm = {**given, "name": cell.algorithm, "learning_rate": cell.learning_rate}
        return validated({**self.base, "seed": cell.seed, "algorithm": algorithm}, "compare")

    def trials(self, algorithm: str) -> list[Cell]:
        """Runs by which a learning rate is chosen."""
        return [Cell(algorithm, rate, self.seeds[0]) for rate in self.grid]

    def finals(self, algorithm: str, learning_rate: float) -> list[Cell]:
        """Runs that count; the first of them was a trial."""
        return [Cell(algorithm, learning_rate, seed) for seed in self.seeds]

    @property
    def total(self) -> int:
        return len(self.algorithms) * (len(self.grid) + len(self.seeds) - 1)

    def as_dict(self) -> dict[str, Any]:
        plain = {"base": self.base, "algorithms": self.algorithms, "grid": self.grid, "seeds": self.seeds}
        return plain | ({"own": self.own} if self.own else {})

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Plan":
        algorithms, grid, seeds = (tuple(stored[name]) for name in ("algorithms", "grid", "seeds"))
        return cls(stored["base"], algorithms, grid, seeds, stored.get("own", {}))

    @property
    def key(self) -> str:
        """Eight letters that tell plans apart, so that the same command finds its own folder again."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:8]


def _own(config: Config, algorithms: Sequence[str], assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the task's file and the command say of algorithm.*, to each algorithm that has such a setting.

    A file may be that of a run: which algorithm it names, and with which learning rate, is not asked here.
    """
    own: dict[str, dict[str, Any]] = {}
    values = config.as_dict()["algorithm"]
    for key in sorted(config.algorithm.model_fields_set & values.keys() - {"learning_rate"}):
        for name in _having(key, algorithms):
            own.setdefault(name, {})[key] = values[key]
    for assignment in assignments:
        key = assignment.partition("=")[0].strip().removeprefix("algorithm.")
        for name in _having(key, algorithms):
            values = load(None, [f"algorithm.name={name}", assignment]).as_dict()["algorithm"]
            if key in values:
                own.setdefault(name, {})[key] = values[key]
    return own


def _having(key: str, algorithms: Sequence[str]) -> list[str]:
    """The algorithms that have this setting."""
    if key in ("name", "learning_rate"):
        option = "--algorithms" if key == "name" else "--grid"
        raise PdslError(f"compare: algorithm.{key} is given by {option}; leave it out of the settings")
    if key == "algorithm":
        raise PdslError("compare: give each algorithm.* setting by itself, like --set algorithm.momentum=0.3")
    found = [name for name in algorithms if key in ALGORITHMS[name].model_fields]
    if not found:
        raise PdslError(
            f"compare: none of {', '.join(algorithms)} has a setting algorithm.{key}; 'pdsl algorithms' lists them"
        )
    return found
