"""What is compared: algorithms, step sizes to try, seeds; and the runs that takes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdsl.algorithms import ALGORITHMS
from pdsl.config import Config, validated
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

    @classmethod
    def of(cls, config: Config, algorithms: Sequence[str], grid: Sequence[float], seeds: int) -> "Plan":
        """A plan for the task of `config`; whatever cannot be run is refused now."""
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
        plan = cls(base, tuple(algorithms), tuple(sorted(set(grid))), tuple(range(first, first + seeds)))
        for name in algorithms:
            plan.config(Cell(name, plan.grid[0], plan.seeds[0]))
        return plan

    def config(self, cell: Cell) -> Config:
        algorithm = {"name": cell.algorithm, "learning_rate": cell.learning_rate}
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
        return {"base": self.base, "algorithms": self.algorithms, "grid": self.grid, "seeds": self.seeds}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Plan":
        return cls(stored["base"], tuple(stored["algorithms"]), tuple(stored["grid"]), tuple(stored["seeds"]))

    @property
    def key(self) -> str:
        """Eight letters that tell plans apart, so that the same command finds its own folder again."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:8]
